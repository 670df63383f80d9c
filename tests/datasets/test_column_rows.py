"""Parquet read where it lies: the same rows as its conversion to lines, each byte verified."""

import datetime
import decimal
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchmill.datasets import layout, parquet_rows, verified_file
from batchmill.datasets.orders import SealOrder
from batchmill.datasets.readers import open_rows
from batchmill.datasets.sealing import seal
from batchmill.errors import DatasetDamaged, InputChanged, InvalidDataset
from batchmill.types import DatasetSpec

ROWS = 1000


def _table(rows: int = ROWS) -> pa.Table:
    moment = datetime.datetime(2026, 1, 2, 3, 4, 5, 678)
    return pa.table(
        {
            "number": pa.array(range(rows), pa.int64()),
            "real": pa.array([None if n % 7 == 0 else n / 3 for n in range(rows)], pa.float64()),
            "odd": pa.array([float("nan") if n % 2 else float("inf") for n in range(rows)], pa.float32()),
            "text": pa.array([f"line\n{n} é" for n in range(rows)]),
            "moment": pa.array([moment] * rows, pa.timestamp("us", "UTC")),
            "money": pa.array([decimal.Decimal("1.50")] * rows, pa.decimal128(9, 2)),
            "blob": pa.array([bytes([n % 256]) for n in range(rows)]),
            "vector": pa.array([[n * 0.5, 1.0] for n in range(rows)], pa.list_(pa.float32())),
            "nested": pa.array([{"a": [n], "b": None} for n in range(rows)]),
            "kind": pa.array(["x", "y"] * (rows // 2)).dictionary_encode(),
        }
    )


@pytest.fixture
def write(tmp_path):
    def write(name: str = "in.parquet", table: pa.Table | None = None, **options) -> str:
        path = tmp_path / name
        pq.write_table(_table() if table is None else table, path, **{"row_group_size": 300, **options})
        return str(path)

    return write


def _seal(tmp_path: Path, *paths: str, columnar: bool = True, **spec):
    home = tmp_path / ("columns" if columnar else "lines")
    home.mkdir(exist_ok=True)
    order = SealOrder(DatasetSpec(list(paths), **spec), may_be_columnar=columnar, urls=[None])
    return home, seal(order, home, lambda share: None)


def test_the_rows_are_those_of_the_conversion(tmp_path, write):
    paths = write("a.parquet"), write("b.parquet", row_group_size=77)
    home, report = _seal(tmp_path, *paths)
    lines_home, lines_report = _seal(tmp_path, *paths, columnar=False)
    assert report.seal.is_columnar
    assert not lines_report.seal.is_columnar
    assert (report.seal.rows, report.seal.digest) == (lines_report.seal.rows, lines_report.seal.digest)
    assert report.seal.columns == lines_report.seal.columns
    rows, lines = open_rows(home), open_rows(lines_home)
    assert rows.read_lines(0, rows.rows) == lines.read_lines(0, rows.rows)
    numbers = [1999, 3, 3, 299, 300, 1001, 0]
    assert rows.read_many(numbers) == lines.read_many(numbers)
    assert rows.read(250, 330) == lines.read(250, 330)
    assert rows.read(0, 1) == lines.read(0, 1)  # a step back
    assert not (home / layout.ROWS).exists()
    rows.close()
    lines.close()


def test_columns_are_read_alone_and_over_the_edges_of_row_groups(tmp_path, write):
    home, _ = _seal(tmp_path, write())
    rows = open_rows(home)
    batch = rows.batch(290, 620, ("number", "kind"))
    assert batch.schema.names == ["number", "kind"]
    assert batch["number"].to_pylist() == list(range(290, 620))
    assert rows.batch_of([1, 2, 3, 700, 702], ("number",))["number"].to_pylist() == [1, 2, 3, 700, 702]
    assert rows.batch(5, 9, ()).num_rows == 4
    rows.close()


def test_a_block_of_columns_is_cut_without_a_read(tmp_path, write):
    """Any rows of a block of columns are again such a block, whatever the types of its values."""
    home, _ = _seal(tmp_path, write())
    rows = open_rows(home)
    data, count = rows.read_columns(range(10, 60), None)
    rows.close()
    whole = pa.ipc.open_stream(data).read_all()
    assert count == 50
    for first, last in ((0, 50), (0, 7), (7, 8), (49, 50)):
        cut = pa.ipc.open_stream(rows.cut_columns(data, first, last)).read_all()
        assert cut.drop_columns("odd").equals(whole.slice(first, last - first).drop_columns("odd"))  # a NaN equals none
        assert cut["odd"].to_numpy().tobytes() == whole["odd"].slice(first, last - first).to_numpy().tobytes()


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_changed_byte_is_found_when_it_is_read(tmp_path, write, compression):
    path = write(compression=compression)
    home, _ = _seal(tmp_path, path)
    data = bytearray(Path(path).read_bytes())
    data[len(data) // 3] ^= 1
    Path(path).write_bytes(data)
    rows = open_rows(home)
    with pytest.raises(InputChanged, match="changed since it was sealed"):
        rows.read_lines(0, rows.rows)
    rows.close()


def test_a_file_that_is_gone_or_of_another_size_has_changed(tmp_path, write):
    path = write()
    home, _ = _seal(tmp_path, path)
    with open(path, "ab") as file:
        file.write(b"x")
    rows = open_rows(home)
    with pytest.raises(InputChanged, match="bytes instead of"):
        rows.read(0, 1)
    Path(path).unlink()
    with pytest.raises(InputChanged, match="No such file"):
        rows.read(0, 1)
    rows.close()


@pytest.mark.parametrize("name", [layout.ROW_GROUPS, layout.CHECKSUMS])
def test_a_damaged_index_is_not_blamed_on_the_input(tmp_path, write, name):
    home, _ = _seal(tmp_path, write())
    (home / name).write_bytes((home / name).read_bytes()[:-4])
    with pytest.raises(DatasetDamaged, match=name):
        open_rows(home)


def test_text_that_is_not_utf8_is_refused(tmp_path, write):
    bad = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff\xfe"]).buffers())
    path = write(table=pa.table({"text": bad}))
    with pytest.raises(InvalidDataset, match="UTF8") as refused:
        _seal(tmp_path, path)
    assert refused.value.code == "invalid_parquet"


def test_rows_that_may_be_too_long_are_converted(tmp_path, write):
    path = write(table=pa.table({"text": ["x" * 500, "y"]}))
    _, report = _seal(tmp_path, path, line_bytes_max=400)
    assert not report.seal.is_columnar
    assert [problem.code for problem in report.problems] == ["line_too_long"]


def test_a_repeated_value_that_unpacks_to_more_than_memory_is_converted(tmp_path, write):
    path = write(table=pa.table({"text": pa.array(["x" * 100_000] * 1000)}), row_group_size=1000)
    assert Path(path).stat().st_size < 50_000
    home, report = _seal(tmp_path, path)
    assert not report.seal.is_columnar
    rows = open_rows(home)
    assert msgspec.json.decode(rows.read(999, 1000)[0]) == {"text": "x" * 100_000}
    rows.close()


def test_a_copy_is_converted(tmp_path, write):
    _, report = _seal(tmp_path, write(), copy=True)
    assert not report.seal.is_columnar


def test_a_file_larger_than_a_block_is_read_in_verified_blocks(tmp_path, write):
    import numpy

    size = 4 * verified_file.BLOCK_BYTES // 8
    table = pa.table({"a": numpy.random.default_rng(1).random(size), "b": numpy.arange(size)})
    home, _ = _seal(tmp_path, write(table=table, row_group_size=size))
    rows = open_rows(home)
    assert rows.batch(0, size).to_pydict() == table.to_pydict()
    assert rows.batch(size - 1, size, ("b",))["b"].to_pylist() == [size - 1]
    rows.close()


def test_many_small_row_groups_are_looked_at_once_a_file(tmp_path, write, monkeypatch):
    """The rows of a batch depend on all row groups: to ask again for each group would take time that grows squared."""
    asked = []
    batch_rows = parquet_rows.batch_rows

    def counted(file):
        asked.append(file)
        return batch_rows(file)

    monkeypatch.setattr(parquet_rows, "batch_rows", counted)
    home, _ = _seal(tmp_path, write("a.parquet", row_group_size=2), write("b.parquet", row_group_size=2))
    assert len(asked) == 2
    rows = open_rows(home)
    assert len(rows.read(0, 2 * ROWS)) == 2 * ROWS
    assert len(asked) == 4
    rows.close()
