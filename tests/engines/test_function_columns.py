"""Results that come back as a column: user code can write to that memory, so everything is checked."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pyarrow as pa
import pytest

from batchmill.engines.function import column_results
from batchmill.engines.function.batching import RowBatcher
from batchmill.engines.function.column_results import read_column
from batchmill.engines.function.process import STRIKES_MAX, Process, ProcessFault
from batchmill.engines.function.row_batches import BlockBatch
from batchmill.models import redaction
from batchmill.types import ColumnBlock, Interface, Usage
from batchmill.wire.calls import CallError
from batchmill.wire.rows.forms import TableForm

LEASE = object()


def stream_of(array: pa.Array, name: str = "output") -> bytes:
    sink = pa.BufferOutputStream()
    batch = pa.RecordBatch.from_arrays([array], [name])
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def block(rows: int = 3) -> ColumnBlock:
    return ColumnBlock(b"", range(10, 10 + rows), range(rows), TableForm(), LEASE, lambda numbers: [])


def read(array: pa.Array, name: str = "output", rows: int = 3, errors: dict[int, CallError] | None = None):
    return read_column(block(rows), range(rows), stream_of(array, name), errors or {})


def test_a_column_becomes_a_block_of_results():
    results = read(pa.array([1, 2, 3]))
    (done,) = results.ok
    assert (done.positions, done.numbers, done.lease) == (range(10, 13), range(3), LEASE)
    assert pa.ipc.open_stream(done.columns).read_all()["output"].to_pylist() == [1, 2, 3]
    assert results.failed == []


def test_rows_that_failed_are_outcomes_of_their_own():
    results = read(pa.array([1, 3]), errors={1: CallError("ValueError", "two", "")})
    (done,) = results.ok
    assert (list(done.positions), list(done.numbers)) == ([10, 12], [0, 2])
    (failed,) = results.failed
    assert (failed.row.position, failed.row.number, failed.error.code) == (11, 1, "ValueError")


FORGED = {
    "too few": stream_of(pa.array([1, 2])),
    "too many": stream_of(pa.array([1, 2, 3, 4])),
    "no stream": b"nothing of the kind",
    "empty": b"",
    "another column": stream_of(pa.array([1, 2, 3]), "error"),
    "no JSON": stream_of(pa.array([b"{", b"1", b"2"]), "json"),
    "one value too many": stream_of(pa.array([b"1,2", b"1", b"2"]), "json"),
    "lines": stream_of(pa.array([b'{"a":\n1}', b"1", b"2"]), "json"),
    "null for JSON": stream_of(pa.array([b"1", None, b"2"]), "json"),
    "text for JSON": stream_of(pa.array(["1", "2", "3"]), "json"),
    "too deep": stream_of(pa.array([b"[" * 600 + b"]" * 600, b"1", b"2"]), "json"),
    "not UTF-8": stream_of(pa.Array.from_buffers(pa.string(), 3, pa.array([b"\xff", b"a", b"b"]).buffers())),
    "a type without JSON": stream_of(pa.array([None] * 3, pa.month_day_nano_interval())),
}


@pytest.mark.parametrize("data", FORGED.values(), ids=FORGED.keys())
def test_a_forged_column_is_an_error_of_its_rows(data):
    results = read_column(block(), range(3), data, {})
    assert results.ok == []
    assert [(each.row.number, each.error.code) for each in results.failed] == [(n, "bad_return") for n in range(3)]


def test_offsets_beyond_the_data_are_found():
    data = stream_of(pa.array(["ab"]))
    offsets = bytes((0, 0, 0, 0, 2, 0, 0, 0))
    place = data.rindex(offsets + bytes(8))
    forged = data[:place] + bytes((0, 0, 0, 0, 255, 255, 0, 0)) + data[place + 8 :]
    assert len(read_column(block(1), range(1), data, {}).ok) == 1
    assert read_column(block(1), range(1), forged, {}).ok == []


def test_errors_of_other_rows_are_refused():
    with pytest.raises(ValueError, match="errors of the rows"):
        read(pa.array([1, 2, 3]), errors={7: CallError("x", "", "")})


def test_tokens_are_counted():
    usage = {"usage": {"prompt_tokens": 2, "completion_tokens": 1}}
    texts = [b'{"usage":{"prompt_tokens":2,"completion_tokens":1}}'] * 3
    expected = Usage(6, 0, 3)
    for results in (read(pa.array(texts), "json"), read(pa.array([usage] * 3))):
        (done,) = results.ok
        assert done.usage == expected


SECRET = "hunter2-and-more"
NESTED = [
    pa.array([SECRET, "b", None]),
    pa.array([f"say {SECRET}", "b", None], pa.large_string()),
    pa.array([[SECRET], ["b"], None]),
    pa.array([{"a": SECRET, "n": 1}, {"a": "b", "n": 2}, None]),
    pa.array([[("k", SECRET)], [], None], pa.map_(pa.string(), pa.string())),
    pa.array([SECRET, "b", "b"]).dictionary_encode(),
]


@pytest.mark.parametrize("array", NESTED, ids=lambda array: str(array.type).split("<")[0])
def test_secrets_are_masked_before_they_are_written(monkeypatch, array):
    monkeypatch.setattr(redaction, "_known", redaction._LearntSecrets())
    redaction.learn(SECRET)
    results = read(array)
    (done,) = results.ok
    assert SECRET.encode() not in done.columns
    column = pa.ipc.open_stream(done.columns).read_all()["output"]
    assert str(column.to_pylist()[1:]) == str(array.to_pylist()[1:])


def test_large_results_become_several_blocks(monkeypatch):
    """Memory holds whole blocks when results are gathered."""
    monkeypatch.setattr(column_results, "BLOCK_BYTES", 1000)
    usage = [{"usage": {"prompt_tokens": 2}, "text": "x" * 400}] * 7
    results = read_column(block(9), range(9), stream_of(pa.array(usage)), {n: CallError("E", "", "") for n in (2, 5)})
    assert [number for done in results.ok for number in done.numbers] == [0, 1, 3, 4, 6, 7, 8]
    assert len(results.ok) > 2
    values = [
        value for done in results.ok for value in pa.ipc.open_stream(done.columns).read_all()["output"].to_pylist()
    ]
    assert values == usage
    assert sum(done.usage.input_tokens for done in results.ok) == 14


@pytest.mark.parametrize("is_suspect", [True, False])
async def test_the_rest_of_a_block_of_columns_stays_suspect(tmp_path, is_suspect):
    """After too many unexplained deaths, the rows without a result run alone, though they are read again first."""

    async def read_rows(numbers):
        return [b'{"n":%d}' % number for number in numbers]

    interface = Interface()
    model = SimpleNamespace(
        name="m", limits=SimpleNamespace(in_flight_max=0), function=SimpleNamespace(folder="", interface=interface)
    )
    process = Process(model, tmp_path, lambda meta: None)
    batcher = RowBatcher(model, SimpleNamespace(number=1, received_shapes=(), interface=interface), process, None)
    batcher.reader = SimpleNamespace(read=lambda rows: [row.raw for row in rows])
    lease = SimpleNamespace(project="p", job_id="j", job=SimpleNamespace(form=TableForm()))
    batch = BlockBatch(batcher, ColumnBlock(b"", range(10, 13), range(3), TableForm(), lease, read_rows), {})
    batch._open.close(range(1))
    batch.strikes, batch.is_sent = STRIKES_MAX + 1, True
    process.works = {batch.id: batch}
    process._settle([batch], ProcessFault("crashed", "it died"), [], are_suspects=is_suspect)
    await asyncio.gather(*batcher._reading)
    (rest,) = process._suspects if is_suspect else process._waiting
    assert len(process._suspects) + len(process._waiting) == 1
    assert [row.number for row in rest._rows] == [1, 2]
    assert rest.strikes == STRIKES_MAX + 1
