"""PostgreSQL fails under a server at work, again and again: every row has one outcome, and the right one."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.postgres_server import PostgresServer
from openai import OpenAI
from story.openai_story import ended, result_lines, row, submit, texts, until, write_project
from story.running_server import RunningServer
from story.test_take_over import CONFIG, STEADY, verify

SEED, FAULTS, ROWS = 20, 12, 1200


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    """A server of its own, whose commits survive a crash of it."""
    server = PostgresServer("fsync=on", "shared_buffers=32MB", "autovacuum=off")
    server.create_database("faults")
    yield server
    server.close()


def break_something(postgres: PostgresServer, chance: random.Random) -> str:
    """One fault; what it was."""
    fault = chance.choice(["end some", "end some", "end all", "crash", "stop"])
    if fault == "crash":
        postgres.stop(signal.SIGQUIT)
        postgres.start()
    elif fault == "stop":
        postgres.stop()
        postgres.start()
    else:
        found = postgres.execute("SELECT pid FROM pg_stat_activity WHERE datname = 'faults'")
        pids = [pid for (pid,) in found]
        for pid in pids if fault == "end all" else chance.sample(pids, min(2, len(pids))):
            postgres.execute(f"SELECT pg_terminate_backend({pid})")
    return fault


def test_a_database_that_fails_loses_and_doubles_nothing(postgres: PostgresServer, tmp_path: Path):
    """Sessions are ended at random, and the database crashes and restarts, while a batch runs."""
    write_project(tmp_path, CONFIG.format(url=postgres.url("faults")))
    (tmp_path / "app.py").write_text("import time\n" + (tmp_path / "app.py").read_text() + STEADY)
    chance = random.Random(SEED)
    faults = []
    with RunningServer(tmp_path) as server, OpenAI(api_key="x", base_url=f"{server.url}/v1", max_retries=9) as client:
        batch = submit(client, [row(f"r{n}", f"text {n}", "steady") for n in range(ROWS)])
        for number in range(FAULTS):
            goal = ROWS * (number + 1) // (FAULTS + 2)
            until(lambda: client.batches.retrieve(batch.id), lambda seen: seen.request_counts.completed >= goal)  # noqa: B023
            faults.append(break_something(postgres, chance))
        done = ended(client, batch)
        results = result_lines(client, done.output_file_id)
        assert [each["custom_id"] for each in results] == [f"r{n}" for n in range(ROWS)], faults
        assert texts(results) == {f"r{n}": f"TEXT {n}" for n in range(ROWS)}
        assert done.request_counts.model_dump() == {"total": ROWS, "completed": ROWS, "failed": 0}
        assert verify(tmp_path, batch.id)["rows_done"] == ROWS
    assert set(faults) == {"end some", "end all", "crash", "stop"}
