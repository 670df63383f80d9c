"""Blocks of lines that are read in stages: the same rows, errors and result lines as when they are read at once."""

from __future__ import annotations

import json
import random

import pytest

from batchmill.function_runtime import row_lines
from batchmill.function_runtime.arguments import Parameters, read_stages
from batchmill.function_runtime.requests import StagedRequest
from batchmill.function_runtime.row_lines import OPENAI, STAGE_BYTES, TABLE, read_lines, stages_of

URL = "/v1/chat/completions"
ANY = Parameters([], [], None)
META = {
    "id": 7, "from_job": True, "staged": True, "exact": False, "urls": [URL], "forms": ["data"], "drop": [],
    "prefix": "p_", "first": 40,
}  # fmt: skip


@pytest.fixture(params=["msgspec", "standard library"], autouse=True)
def decoders(request, monkeypatch):
    if request.param != "msgspec":
        monkeypatch.setattr(row_lines, "_openai_line", None)
        monkeypatch.setattr(row_lines, "_table_line", None)


def block_of(layout, rows, bad=()):
    """Lines of 1 kB each; those in `bad` cannot be read."""
    bodies = [{"n": n, "text": "é" * 400} for n in range(rows)]
    if layout == OPENAI:
        bodies = [{"custom_id": f"c{n}", "method": "POST", "url": URL, "body": body} for n, body in enumerate(bodies)]
    lines = [json.dumps(body, ensure_ascii=False).encode() for body in bodies]
    return b"".join([b'{"broken\n' if n in bad else line + b"\n" for n, line in enumerate(lines)])


def request_of(layout, rows, data):
    meta = META | {"layout": layout, "rows": rows}
    return StagedRequest(meta, read_stages(meta, data, ANY))


def call_all(request, failing=(), upto=None):
    """Call the rows in order, as a RowCaller does; returns the rows that were called."""
    called = []
    while request.has_runs():
        first, end = request.runs.pop()
        if upto is not None and first >= upto:
            request.runs.append((first, end))
            return called
        request.values[first] = {"got": request.bound.calls[first - request.bound.first]["n"]}
        if first in failing:
            request.values[first], request.errors[first] = None, ["ValueError", "no", ""]
        called.append(first)
        if first + 1 < end:
            request.runs.append((first + 1, end))
    return called


def test_pieces_are_whole_lines():
    """Whatever the lengths of lines, pieces join to the block, and each ends where a line ends."""
    random.seed(3)
    for longest in (10, 5_000, 3 * STAGE_BYTES):
        data = b"".join([b"x" * random.randint(0, longest) + b"\n" for _ in range(60)])
        pieces = [bytes(piece) for piece in stages_of(memoryview(data))]
        assert b"".join(pieces) == data and all(piece.endswith(b"\n") for piece in pieces)
    assert list(stages_of(b"")) == []


@pytest.mark.parametrize("layout", [OPENAI, TABLE])
def test_staged_results_are_those_of_the_whole_block(layout):
    """Unreadable rows and rows that raise, in any stage, leave the same lines and errors as one reading of all."""
    bad, failing = {0, 99, 100, 299}, {5, 160}
    data = block_of(layout, 300, bad)
    assert len(list(stages_of(data))) > 2
    request = request_of(layout, 300, data)
    called = call_all(request, failing)
    assert called == [row for row in range(300) if row not in bad]
    _, errors, writer = read_lines(META | {"layout": layout, "rows": 300}, data)
    errors |= {row: ["ValueError", "no", ""] for row in failing}
    assert request.take_lines(300) == writer.write([{"got": n} for n in range(300)], dict(errors), range(300))
    assert {row: error[0] for row, error in request.errors.items()} == {row: error[0] for row, error in errors.items()}


@pytest.mark.parametrize("cut", [0, 1, 63, 64, 65, 128, 200, 300])
def test_results_may_leave_in_the_middle(cut):
    """What has left is not sent again, and nothing is missing, wherever the cut falls in a stage."""
    data = block_of(OPENAI, 300)
    request = request_of(OPENAI, 300, data)
    called = call_all(request, upto=cut)
    early = request.take_lines(cut)
    called += call_all(request)
    lines = (early + request.take_lines(300)).splitlines()
    assert called == list(range(300)) and len(early.splitlines()) == cut
    assert [json.loads(line)["id"] for line in lines] == [f"p_{40 + row}" for row in range(300)]


def test_rows_are_freed_with_their_stage():
    """No value of an earlier stage is held once the next one is read."""
    request = request_of(TABLE, 300, block_of(TABLE, 300))
    first_stage = len(request.bound.calls)
    call_all(request, upto=first_stage)
    assert first_stage < 300 and set(request.values) == {None}


@pytest.mark.parametrize("announced", [299, 301])
def test_another_number_of_rows_than_announced(announced):
    """The stage that does not fit fails with all after it; the rows before have their results."""
    request = request_of(TABLE, announced, block_of(TABLE, 300))
    called = call_all(request)
    assert 0 < len(called) < announced or announced == 301
    assert len(request.take_lines(announced).splitlines()) == len(called)
    assert sorted(request.errors) == list(range(len(called), announced))
    assert {error[0] for error in request.errors.values()} == {"invalid_json"}
