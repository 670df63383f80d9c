"""Short jobs of a server whose files are in an object store, or whose database comes from a backup."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fakes.held_clock import HeldClock
from fakes.lost_machine import DATABASE, lose
from fakes.s3_server import bucket_client, s3_environment, s3_server
from openai import APIStatusError, NotFoundError, OpenAI
from openai_story import ended, result_lines, row, submit, texts, until, write_project
from running_server import RunningServer

from batchmill.config import BackupsEntry
from batchmill.services.data_dirs.backups import Backups

BUCKET = "short-jobs"
CLIENTS, JOBS = 3, 8  # of each client: every other one waits for a file


def text_of(client: int, job: int, number: int) -> str:
    return "go" if job % 2 and number == 1 else f"{client} {job} {number}"


def submitted(server: RunningServer, client: int) -> dict[str, list[str]]:
    """The batches of a client: id -> the texts of its rows."""
    batches = {}
    with OpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=0) as api:
        for job in range(JOBS):
            asked = [text_of(client, job, number) for number in range(3)]
            rows = [row(f"r{n}", text, "gated" if text == "go" else "chat") for n, text in enumerate(asked)]
            batches[submit(api, rows).id] = asked
    return batches


def fill(server: RunningServer) -> dict[str, list[str]]:
    """Submit jobs of several clients at a time, and wait for the end of those that do not wait for a file."""
    with ThreadPoolExecutor(CLIENTS) as clients:
        found = clients.map(lambda client: submitted(server, client), range(CLIENTS))
        batches = {batch_id: asked for some in found for batch_id, asked in some.items()}
    with OpenAI(api_key="none", base_url=f"{server.url}/v1") as api:
        for batch_id, asked in batches.items():
            expected = 3 - asked.count("go")
            until(
                lambda each=batch_id: api.batches.retrieve(each).request_counts.completed,
                lambda n, of=expected: n == of,
            )
    return batches


def check(server: RunningServer, batches: dict[str, list[str]]) -> None:
    """Every batch comes to its end with one result for each row."""
    with OpenAI(api_key="none", base_url=f"{server.url}/v1") as api:
        for batch_id, asked in batches.items():
            done = ended(api, api.batches.retrieve(batch_id))
            assert done.status == "completed" and done.request_counts.completed == 3, done
            assert texts(result_lines(api, done.output_file_id)) == {
                f"r{n}": text.upper() for n, text in enumerate(asked)
            }


def test_a_lost_machine(tmp_path: Path) -> None:
    """Killed, and without its data directory but for the database, a server ends every job. Deleted results go."""
    with s3_server() as s3, bucket_client(s3, BUCKET) as bucket:
        objects = f'[storage]\nobjects = "s3://{BUCKET}/x"\n[secrets]\nkey_file = "{tmp_path / "keys"}"\n'
        write_project(tmp_path, objects)
        server = RunningServer(tmp_path, env=s3_environment(s3)).start()
        batches = fill(server)
        server.kill()
        lose(tmp_path / "data")
        (tmp_path / "go").touch()
        with server:
            check(server, batches)
            with OpenAI(api_key="none", base_url=f"{server.url}/v1") as api:
                before = bucket.list_objects_v2(Bucket=BUCKET)["KeyCount"]
                outputs = [api.batches.retrieve(batch_id).output_file_id or "" for batch_id in batches]
                for output in outputs:
                    api.files.delete(output)
                    with pytest.raises(APIStatusError, match="was deleted"):
                        api.files.content(output)
                until(lambda: bucket.list_objects_v2(Bucket=BUCKET)["KeyCount"], lambda n: n == before - len(outputs))


def test_a_backup_of_a_running_server(tmp_path: Path) -> None:
    """With a backup as its database, and the files, a server has the results of jobs that had ended and ends others."""
    write_project(tmp_path)
    data, kept = tmp_path / "data", tmp_path / "kept"
    server = RunningServer(tmp_path).start()
    batches = fill(server)
    backup = Backups(data, HeldClock(), BackupsEntry())._sweep()
    assert backup is not None
    shutil.copytree(data, kept, ignore=shutil.ignore_patterns(f"{DATABASE}*", "*.sock", "workers"))
    later = submitted(server, 0)
    server.kill()
    lose(data)
    for path in data.glob(f"{DATABASE}*"):
        path.unlink()
    shutil.copytree(kept, data, dirs_exist_ok=True)  # to the same place: jobs name their files by it
    shutil.copyfile(kept / "backups" / backup.name, data / DATABASE)
    (tmp_path / "go").touch()
    with server:
        check(server, batches)
        with OpenAI(api_key="none", base_url=f"{server.url}/v1") as api:
            for batch_id in later:
                with pytest.raises(NotFoundError):
                    api.batches.retrieve(batch_id)
