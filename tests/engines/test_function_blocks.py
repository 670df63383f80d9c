"""Blocks of rows: the same results as rows one by one, whatever the rows are and whatever the function does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from contract.engine_suite import PATIENCE_S, ListSink, OpenFeed
from function_process_support import deployed, running

from batchmill.engines.function.engine import FunctionEngine
from batchmill.engines.function.process import INVALID_FRAME
from batchmill.engines.function.row_batches import RowBatch
from batchmill.engines.function.row_results import read_results
from batchmill.types import ResultBlock, Row, RowBlock, Usage
from batchmill.wire.calls import CallError
from batchmill.wire.rows.forms import Form, OpenAIForm, TableForm

BLOCK_ROWS = 7


class LeaseStub:
    project, job_id, takes_blocks = "default", "job_1", True


LEASE = LeaseStub()


class BlockSource(OpenFeed):
    """A feed of blocks of at most BLOCK_ROWS rows. `numbers` are not consecutive in every third block."""

    def __init__(self, sink: ListSink, lines: Sequence[bytes], form: Form) -> None:
        super().__init__(sink, ended=True)
        self._lines, self._form, self._next = lines, form, 0

    async def take_block(self, n: int, columns: object = None) -> RowBlock | None:
        first = self._next
        last = self._next = min(first + min(n, BLOCK_ROWS), len(self._lines))
        if first == last:
            return None
        numbers: Sequence[int] = range(first, last)
        if first % 3 == 0:
            numbers = list(reversed(numbers))
        lines = b"".join([self._lines[number] + b"\n" for number in numbers])
        return RowBlock(lines, range(first, last), numbers, self._form, LEASE)


class BlockCollector(ListSink):
    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[ResultBlock] = []

    def put_block(self, block: ResultBlock) -> None:
        self.blocks.append(block)


def lines_of(sink: ListSink, form: Form) -> dict[int, Any]:
    """The line of each row in the output or error file as JSON, by its number."""
    found = dict(zip([o.row.number for o in sink.outcomes], form.write_all(sink.outcomes), strict=True))
    for block in sink.blocks if isinstance(sink, BlockCollector) else []:
        found |= dict(zip(block.numbers, block.lines[:-1].split(b"\n"), strict=True))
    return {number: json.loads(line) for number, line in found.items()}


async def run_rows(engine: FunctionEngine, lines: Sequence[bytes], form: Form) -> dict[int, Any]:
    sink = ListSink()
    rows = [Row(n, n, line.strip(), form, LEASE) for n, line in enumerate(lines)]
    async with asyncio.timeout(PATIENCE_S):
        await engine.run(OpenFeed(sink, rows, ended=True), sink)
    return lines_of(sink, form)


async def run_blocks(engine: FunctionEngine, lines: Sequence[bytes], form: Form) -> BlockCollector:
    sink = BlockCollector()
    async with asyncio.timeout(PATIENCE_S):
        await engine.run(BlockSource(sink, lines, form), sink)
    return sink


ANYTHING = """
import math, os

def f(kind="echo", value=None, **more):
    if kind == "raise": raise ValueError(f"no {value}")
    if kind == "nan": return {"x": math.nan, "y": [math.inf]}
    if kind == "object": return object()
    if kind == "deep":
        for _ in range(200): value = [value]
    if kind == "usage": return {"usage": {"prompt_tokens": 2, "completion_tokens": 3}}
    if kind == "bytes": return {1: (1, 2), "s": {3}, "b": b"ab"}
    return {"value": value, "more": sorted(more)}
"""
VALUES: list[dict[str, Any]] = [
    {"value": 1},
    {"kind": "raise", "value": "ü"},
    {"kind": "nan"},
    {"kind": "object"},
    {"kind": "deep"},
    {"kind": "usage"},
    {"kind": "bytes"},
    {"value": 'line\nend \u2028 \u0000 ü 🙂 \\ "', "odd": None},
    {"value": [1.5, -0.0, 1e300, True, None, {"a": {}}], "model": "T", "stream": False},
    {},
    {"value": 12345678901234567890123},
]


def openai_lines() -> list[bytes]:
    lines = []
    for n, body in enumerate(VALUES * 3):
        line = {"custom_id": f"r\u00fc-{n}\n", "method": "POST", "url": "/v1/chat/completions", "body": body}
        lines.append(json.dumps(line, ensure_ascii=n % 2 == 0).encode("utf-8", "surrogatepass"))
    lines[4] = b"  " + lines[4] + b" \r"
    lines += [
        b'{"custom_id":"x","method":"POST","url":"/v1/chat/completions","body":{"value":1,"value":2}}',
        b'{"body": {"value": 3}, "url": "/v1/embeddings", "custom_id": "last", "method": "POST"}',
        b'{"custom_id":"t","method":"POST","url":"/v1/chat/completions","body":{"data":[["id",{"value":4}]]}}',
        b'{"custom_id":"i","method":"POST","url":"/v2/models/f/infer","body":{"value":5}}',
    ]
    return lines


def table_lines() -> list[bytes]:
    lines = [json.dumps(row).encode() for row in VALUES * 3]
    lines[4] = b"  " + lines[4][:-1] + b" } \r"
    return [*lines, b"{ }", b'{"value":1,"value":2}', b'{"output":1,"error":2}']


@pytest.mark.parametrize(
    ("form", "lines"), [(OpenAIForm(), openai_lines()), (TableForm(), table_lines())], ids=["openai", "table"]
)
@pytest.mark.parametrize("how", ["def f(", "async def f("])
async def test_blocks_give_what_rows_give(tmp_path: Path, form: Form, lines: list[bytes], how: str) -> None:
    """Every row has the same line, result or error, whether it travelled alone or in a block."""
    async with running(deployed(tmp_path, ANYTHING.replace("def f(", how)), tmp_path / "home") as engine:
        expected = await run_rows(engine, lines, form)
        sink = await run_blocks(engine, lines, form)
    assert sorted(expected) == list(range(len(lines)))
    assert sum(map(len, [block.numbers for block in sink.blocks])) > len(lines) // 2, "most rows leave as lines"
    assert lines_of(sink, form) == expected
    tokens = sum(block.usage.input_tokens for block in sink.blocks)
    assert tokens == 2 * 3


async def test_strings_of_a_csv_are_read_in_the_worker(tmp_path: Path) -> None:
    """Rows whose strings become the function's types take the way of single rows."""
    code, form = "def f(a: int): return a + 1", TableForm(is_text=True)
    async with running(deployed(tmp_path, code), tmp_path / "home") as engine:
        sink = await run_blocks(engine, [b'{"a":"1"}', b'{"a":"x"}'], form)
    assert not sink.blocks and sorted(o.row.number for o in sink.outcomes) == [0, 1]


DEADLY = """
import os, time

def f(n, die=False):
    if die: os._exit(3)
    return n
"""


async def test_a_row_that_kills_the_process_costs_no_other_row(tmp_path: Path) -> None:
    """After a death the rows of its block run again as single rows, and the one at fault is found."""
    lines = [json.dumps({"n": n, "die": n in (10, 11)}).encode() for n in range(30)]
    async with running(deployed(tmp_path, DEADLY), tmp_path / "home") as engine:
        sink = await run_blocks(engine, lines, TableForm())
    found = lines_of(sink, TableForm())
    assert sorted(found) == list(range(30))
    failed = {o.row.number: o.error.code for o in sink.outcomes if o.error is not None}
    assert failed == {10: "worker_crashed", 11: "worker_crashed"}
    assert all(found[n]["output"] == n for n in range(30) if n not in failed)


async def test_a_death_beside_rows_in_other_forms(tmp_path: Path) -> None:
    """Rows of a block that are in the form of a live call, or cannot be read, have their outcome after a death too."""
    bodies = [{"n": n, "die": n == 9} for n in range(12)]
    bodies[5] = {"data": [["id", 5]]}
    line = {"method": "POST", "url": "/v1/chat/completions"}
    lines = [json.dumps(line | {"custom_id": str(n), "body": body}).encode() for n, body in enumerate(bodies)]
    lines[7] = lines[7].replace(b'"n"', b'"\\ud800"')
    async with running(deployed(tmp_path, DEADLY), tmp_path / "home") as engine:
        sink = await run_blocks(engine, lines, OpenAIForm())
    found = lines_of(sink, OpenAIForm())
    assert sorted(found) == list(range(12))
    failed = {o.row.number: o.error.code for o in sink.outcomes if o.error is not None}
    assert failed.pop(9) == "worker_crashed" and failed.keys() == {7}
    assert found[5]["response"]["body"] == {"data": [["id", 5]]}


FORGING = """
import os, sys
from pathlib import Path

def f(n):
    if n == 3 and not Path("forged").exists():
        Path("forged").touch()
        links = {int(fd): os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
        fd = next(fd for fd, link in links.items() if "socket:" in link)
        frames = next(m for name, m in sys.modules.items() if name == "_batchmill_function_runtime.frames")
        for id_ in range(1 << 48, (1 << 48) + 20):
            meta = {"kind": "results", "id": id_, "first": 0, "rows": 1, "layout": "lines", "errors": {}, "ran": [],
                    "queue_ns": 0}
            changes = CHANGES
            if isinstance(changes, dict):
                pieces = frames.pack(meta | changes, [b"{}"])
            else:
                pieces = frames.pack_text(changes, [b"{}"])
            for piece in pieces:
                os.write(fd, bytes(piece))
    return n
"""


@pytest.mark.parametrize(
    "changes",
    [
        {"first": 500},
        {"rows": 0},
        {"first": "x"},
        {"rows": 9},
        {"rows": None},
        {"rows": 2, "places": [0, 0]},
        {"rows": 1, "places": [6]},
        {"rows": 1, "places": [True]},
        {"rows": 0, "places": []},
        {"rows": 3, "places": [1, 2]},
        {"errors": {"77": ["a", "b", ""]}},
        {"errors": [1]},
        {"errors": None},
        {"ran": [1]},
        {"queue_ns": "x"},
        {"kind": ["results"], "id": {}},
        b"[]",
        b"{}",
        b"{",
        b"[" * 100_000,
    ],
)
async def test_invalid_frames_cost_the_process_and_no_row(tmp_path: Path, changes: dict[str, Any] | bytes) -> None:
    """A function that writes results of rows that are not there loses its process, and the job ends all the same."""
    lines = [json.dumps({"n": n}).encode() for n in range(6)]
    spec = deployed(tmp_path, FORGING.replace("CHANGES", repr(changes)))
    async with running(spec, tmp_path / "home") as engine:
        sink = await run_blocks(engine, lines, TableForm())
    assert list(tmp_path.rglob("forged"))
    assert {n: line["output"] for n, line in lines_of(sink, TableForm()).items()} == {n: n for n in range(6)}


class BatcherStub:
    """A batcher that gets nothing."""

    def next_id(self) -> int:
        return 1


@pytest.mark.parametrize("values", [b"[" * 100_000, b"[" * 100_000 + b"]" * 100_000, b"{", b"[1", b"\xff"])
def test_results_of_single_rows_that_cannot_be_read(values: bytes) -> None:
    """They are invalid frames, which cost the process, and no error that the worker does not expect."""
    rows = [Row(n, n, b"{}", TableForm(), LEASE) for n in range(3)]
    batch = RowBatch(BatcherStub(), rows, [b"{}"] * 3)
    meta = {"first": 0, "rows": 3, "layout": "rows", "errors": {}}
    with pytest.raises(INVALID_FRAME):
        batch.take(meta, [values])


def block(form: Form, rows: int = 4) -> RowBlock:
    if isinstance(form, OpenAIForm):
        line = b'{"custom_id":"c%d","method":"POST","url":"/v1/x","body":{}}\n'
        lines = b"".join([line % n for n in range(rows)])
    else:
        lines = b"".join([b'{"n":%d}\n' % n for n in range(rows)])
    return RowBlock(lines, range(10, 10 + rows), range(20, 20 + rows), form, LEASE)


def result(number: int, text: bytes = b"1", form: Form = OpenAIForm()) -> bytes:
    if isinstance(form, OpenAIForm):
        head = b'{"id":"%b%d","custom_id":"c%d"' % (form.id_prefix.encode(), number, number - 20)
        return head + b',"response":{"status_code":200,"request_id":"req_%d","body":%b},"error":null}\n' % (
            number,
            text,
        )
    return b'{"n":%d,"output":%b,"error":null}\n' % (number - 20, text)


@pytest.mark.parametrize("form", [OpenAIForm(), TableForm()], ids=["openai", "table"])
def test_result_lines_are_checked(form: Form) -> None:
    """Lines that do not belong to the rows, or are no whole lines, fail their rows and no others."""
    good = [result(20 + n, form=form) for n in range(4)]
    whole = read_results(block(form), range(4), b"".join(good), {})
    assert ([done.lines for done in whole.ok], whole.failed) == ([b"".join(good)], [])
    assert (list(whole.ok[0].positions), list(whole.ok[0].numbers)) == ([10, 11, 12, 13], [20, 21, 22, 23])
    forged = {
        "too few": good[:3],
        "too many": [*good, good[0]],
        "an incomplete line": [*good[:3], good[3][:-1]],
        "swapped": [good[1], good[0], *good[2:]],
        "of another row": [*good[:3], result(99, form=form)],
        "two in one": [good[0][:-1] + good[1], *good[2:]],
        "a NUL byte": [*good[:3], result(23, b'"\0"', form)],
        "nothing": [],
        "not UTF-8": [*good[:3], result(23, b'"\xff"', form)],
    }
    if isinstance(form, TableForm):
        for text in (b"", b"GARBAGE", b"1,2", b'1,"error":"x"', b'"', b"1} {", b"[" * 5000):
            forged[str(text)[:20]] = [*good[:3], result(23, text, form)]
        forged["two and none"] = [result(20, b"1,2", form), result(21, b"", form), *good[2:]]
        forged["another end"] = [*good[:3], good[3].replace(b"null", b'"no"')]
        forged["another name"] = [*good[:3], good[3].replace(b"output", b"result")]
    for name, lines in forged.items():
        results = read_results(block(form), range(4), b"".join(lines), {})
        assert results.ok == [], name
        assert [o.error.code for o in results.failed if o.error] == ["bad_return"] * 4, name
    with pytest.raises(ValueError, match=r"errors of the rows \[7\]"):
        read_results(block(form), range(4), b"".join(good), {7: CallError("a", "b")})


@pytest.mark.parametrize("form", [OpenAIForm(), TableForm()], ids=["openai", "table"])
def test_parts_of_a_block(form: Form) -> None:
    """Results of some rows, with errors between them, and one that nests too deep."""
    deep = b"[" * 600 + b"]" * 600
    lines = result(21, deep + b" " * 300, form) + result(23, b'{"usage":{"prompt_tokens":5}}', form)
    results = read_results(block(form), range(1, 4), lines, {2: CallError("KeyError", "'x'")})
    (done,) = results.ok
    assert (done.numbers, done.positions) == ([23], [13])
    assert done.lines == result(23, b'{"usage":{"prompt_tokens":5}}', form)
    assert done.usage == Usage(input_tokens=5)
    failed = {o.row.number: o.error.code for o in results.failed if o.error}
    assert failed == {21: "bad_return", 22: "KeyError"}
