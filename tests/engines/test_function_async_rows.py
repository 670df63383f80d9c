"""Rows of an async function end in any order: each leaves the process when it has ended, not after those before it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from contract.engine_suite import PATIENCE_S, ListSink, OpenFeed
from function_process_support import deployed, running
from test_function_blocks import LEASE, BlockCollector, BlockSource, lines_of

from batchmill.types import Row
from batchmill.wire.rows.forms import TableForm

ROWS = 12
SLOW = frozenset([0, 3, 7, 8])
CODE = """
import asyncio, os
from pathlib import Path

async def f(n):
    with open("FOLDER/calls", "a") as calls:
        calls.write(f"{n}\\n")
    if n in SLOW:
        Path(f"FOLDER/process-{os.getpid()}").touch()
        while not Path("FOLDER/go").exists():
            await asyncio.sleep(0.005)
    if n == 5:
        raise KeyError(n)
    return n
"""
LINES = [json.dumps({"n": n}).encode() for n in range(ROWS)]


def code(folder: Path) -> str:
    return CODE.replace("FOLDER", str(folder)).replace("SLOW", repr(set(SLOW)))


def feed_of(kind: str) -> tuple[BlockCollector, OpenFeed]:
    sink = BlockCollector()
    if kind == "blocks":
        return sink, BlockSource(sink, LINES, TableForm())
    rows = [Row(n, n, line, TableForm(), LEASE) for n, line in enumerate(LINES)]
    return sink, OpenFeed(sink, rows, ended=True)


async def come(sink: ListSink, wanted: frozenset[int]) -> None:
    """Wait until just these rows have a result."""
    async with asyncio.timeout(PATIENCE_S):
        while lines_of(sink, TableForm()).keys() < wanted:
            await asyncio.sleep(0.005)
    assert lines_of(sink, TableForm()).keys() == wanted


@pytest.mark.parametrize("kind", ["blocks", "rows"])
@pytest.mark.parametrize("is_killed", [False, True])
async def test_ended_rows_do_not_wait_for_others(tmp_path: Path, kind: str, is_killed: bool) -> None:
    """Also if the process dies then: only rows that had not ended are called again."""
    sink, feed = feed_of(kind)
    async with running(deployed(tmp_path, code(tmp_path)), tmp_path / "home") as engine:
        run = asyncio.create_task(engine.run(feed, sink))
        await come(sink, frozenset(range(ROWS)) - SLOW)
        if is_killed:
            [process] = tmp_path.glob("process-*")
            os.kill(int(process.name.partition("-")[2]), signal.SIGKILL)
        (tmp_path / "go").touch()
        async with asyncio.timeout(PATIENCE_S):
            await run
    lines = lines_of(sink, TableForm())
    assert {n: line["output"] for n, line in lines.items() if n != 5} == {n: n for n in range(ROWS) if n != 5}
    assert "KeyError" in lines[5]["error"]
    calls = Counter(map(int, (tmp_path / "calls").read_text().split()))
    assert calls == {n: 2 if is_killed and n in SLOW else 1 for n in range(ROWS)}
