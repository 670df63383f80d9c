"""Results of Parquet that is read where it lies: outcomes joined with the input's own columns."""

import io
import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from finished_job import FinishedJob, quiet
from msgspec.structs import replace

from batchmill.errors import InputChanged, LedgerBroken
from batchmill.jobs.results import column_windows
from batchmill.jobs.results.gathering import gather, partial
from batchmill.jobs.results.parquet import appended_columns
from batchmill.store.segments.format import BlockMeta, frame_columns
from batchmill.types import RowError
from batchmill.wire.rows.forms import TableForm

ROWS = 10


class ColumnJob(FinishedJob):
    def __init__(self, folder: Path) -> None:
        self.table = pa.table({"n": range(ROWS), "real": [float("nan"), *([0.5] * (ROWS - 1))]})
        self.source = folder / "in.parquet"
        pq.write_table(self.table, self.source, row_group_size=4)
        super().__init__(folder / "job", self.source, TableForm(), columnar=True)

    def columns(self, positions: Sequence[int], values: pa.Array, name: str = "output") -> bytes:
        """A block of results as a column."""
        sink = pa.BufferOutputStream()
        batch = pa.RecordBatch.from_arrays([values], [name])
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        numbers = self.leaders
        return frame_columns(
            sink.getvalue().to_pybytes(), list(positions), [numbers[position] for position in positions],
            generation=len(self.plans) - 1, shard=0, epoch=1, meta=BlockMeta(),
        )  # fmt: skip


@pytest.fixture(params=["encoded", "copied"])
def job(request, tmp_path, monkeypatch) -> ColumnJob:
    """Row groups as small as these are joined, unless none is too small to be copied."""
    if request.param == "copied":
        monkeypatch.setattr(appended_columns, "GROUP_ROWS_MIN", 1)
    return ColumnJob(tmp_path)


def table_of(job: ColumnJob, path: Path) -> pa.Table:
    gather(job.order(path), quiet)
    return pq.read_table(path)


def lines_of(job: ColumnJob, path: Path) -> list[dict]:
    gather(job.order(path), quiet)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_blocks_in_any_order_are_joined_with_their_rows(job, tmp_path):
    job.commit(job.columns([4, 5, 6, 7, 8], pa.array([4, 5, 6, 7, 8], pa.int16())))
    job.commit(
        job.columns([9, 3, 1], pa.array([9, 3, 1], pa.int16())), job.columns([0, 2], pa.array([0, 2], pa.int16()))
    )
    found = table_of(job, tmp_path / "out.parquet")
    assert found.schema.field("output").type == pa.int16()
    assert found["output"].to_pylist() == found["n"].to_pylist() == list(range(ROWS))
    assert str(found["real"].to_pylist()) == str(job.table["real"].to_pylist())  # NaN stays NaN


def test_the_same_where_rows_alternate_between_many_blocks(job, tmp_path, monkeypatch):
    monkeypatch.setattr(column_windows, "SLICES_MAX", 2)
    monkeypatch.setattr(column_windows, "KEPT_BYTES", 1)
    job.commit(job.columns(range(0, ROWS, 2), pa.array(range(0, ROWS, 2))))
    job.commit(job.columns([1, 3, 7, 9], pa.array([1, 3, 7, 9])), job.block([5], failed=True))
    found = table_of(job, tmp_path / "out.parquet")
    assert found["output"].to_pylist() == [None if n == 5 else n for n in range(ROWS)]
    assert found["error"].to_pylist() == [f"went_wrong: row {n}" if n == 5 else None for n in range(ROWS)]


@pytest.mark.parametrize(
    ("first", "second", "kind", "values"),
    [
        (pa.array([1, 2]), pa.array([0.5] * 8), pa.float64(), [1.0, 2.0, *[0.5] * 8]),
        (pa.array([1, 2]), pa.array(["x"] * 8), pa.string(), ["1", "2", *['"x"'] * 8]),
        (pa.array([1, None]), pa.nulls(8), pa.int64(), [1, *[None] * 9]),
        (pa.array([[1], []]), pa.array([[0.5]] * 8), pa.list_(pa.float64()), [[1.0], [], *[[0.5]] * 8]),
        (pa.array([2**60, 1]), pa.array([0.5] * 8), pa.string(), [str(2**60), "1", *["0.5"] * 8]),
        (pa.array([{"a": 1}] * 2), pa.array([1] * 8), pa.string(), [*['{"a":1}'] * 2, *["1"] * 8]),
    ],
    ids=["float", "text", "null", "vector", "large", "object"],
)
def test_results_of_different_types_get_the_type_that_holds_all(job, tmp_path, first, second, kind, values):
    job.commit(job.columns([0, 1], first), job.columns(range(2, ROWS), second))
    found = table_of(job, tmp_path / "out.parquet")
    assert str(found.schema.field("output").type).replace("element", "item") == str(kind)
    assert found["output"].to_pylist() == values


def test_json_texts_and_lines_among_columns(job, tmp_path):
    """Rows that ran one by one left lines, others JSON texts."""
    job.commit(job.block([0, 1]), job.columns([2, 3], pa.array([b"7", b"null"]), "json"))
    job.commit(job.columns(range(4, ROWS), pa.array(["x"] * 6)))
    lines = lines_of(job, tmp_path / "out.jsonl")
    answer = {"answer": "done 0", "usage": {"prompt_tokens": 3}}
    assert [line["output"] for line in lines] == [answer, answer | {"answer": "done 1"}, 7, None, *["x"] * 6]
    assert [line["n"] for line in lines] == list(range(ROWS))
    assert lines[0]["real"] is None
    found = table_of(job, tmp_path / "out.parquet")
    assert [json.loads(text) if text else None for text in found["output"].to_pylist()] == [
        line["output"] for line in lines
    ]
    gather(job.order(tmp_path / "out.csv"), quiet)
    assert (tmp_path / "out.csv").read_text().splitlines()[3:5] == ["2,0.5,7,", "3,0.5,,"]


def test_a_retry_replaces_only_what_failed(job, tmp_path):
    job.commit(job.columns(range(8), pa.array(range(8))), job.block([8, 9], failed=True))
    job.again([8, 9])
    job.commit(job.columns([1], pa.array([90])), job.block([0], failed=True))
    found = table_of(job, tmp_path / "out.parquet")
    assert found["output"].to_pylist() == [*range(8), None, 90]
    assert found["error"].to_pylist() == [*[None] * 8, "went_wrong: row 8", None]


def test_rows_that_never_ran(job, tmp_path):
    job.commit(job.columns([0, 5], pa.array([0.5, 1.5])))
    with pytest.raises(LedgerBroken, match="8 of 10 rows have no outcome"):
        gather(job.order(tmp_path / "out.parquet"), quiet)
    out = io.BytesIO()
    assert partial(job.order(tmp_path / "part.jsonl"), out) == 2
    assert [json.loads(line)["n"] for line in out.getvalue().splitlines()] == [0, 5]
    order = replace(job.order(tmp_path / "out.parquet"), unrun=RowError("cancelled", "it was cancelled"))
    manifest = gather(order, quiet)
    assert (manifest.ok, manifest.failed, manifest.unrun) == (2, 8, 8)
    assert manifest.causes == {"cancelled": (8, "it was cancelled")}
    found = pq.read_table(tmp_path / "out.parquet")
    assert found["output"].to_pylist() == [0.5, None, None, None, None, 1.5, None, None, None, None]
    assert found["error"].null_count == 2


def test_a_job_whose_rows_all_failed(job, tmp_path):
    job.commit(job.block(range(ROWS), failed=True))
    found = table_of(job, tmp_path / "out.parquet")
    assert (found.schema.field("output").type, found["output"].null_count) == (pa.string(), ROWS)


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl"])
def test_a_changed_input_is_found_before_anything_is_published(job, tmp_path, name):
    job.commit(job.columns(range(ROWS), pa.array(range(ROWS))))
    data = bytearray(job.source.read_bytes())
    data[20] ^= 1
    job.source.write_bytes(data)
    with pytest.raises(InputChanged):
        gather(job.order(tmp_path / name), quiet)
    assert not list(tmp_path.glob("out*"))


def test_a_block_that_holds_fewer_results_than_it_says(job, tmp_path):
    block = job.columns(range(ROWS), pa.array(range(ROWS - 1)))
    job.commit(block)
    with pytest.raises(LedgerBroken, match="not 10 results"):
        gather(job.order(tmp_path / "out.parquet"), quiet)
