"""Results as Parquet whose input columns are the input's own bytes."""

import datetime
import decimal
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from finished_job import FinishedJob, quiet

from batchmill.errors import InputChanged
from batchmill.jobs.results.gathering import gather
from batchmill.jobs.results.parquet import appended_columns, column_parquet, parquet_footer, thrift_compact
from batchmill.jobs.results.parquet.thrift_compact import NotThrift, read_struct, write_struct
from batchmill.store.segments.format import BlockMeta, frame_columns
from batchmill.wire.rows.forms import TableForm

ROWS = 10


def table_of_types(rows: int = ROWS) -> pa.Table:
    """A column of every kind, each with a null."""
    moment = datetime.datetime(2024, 2, 29, 12, 30, 1, 250_000)
    values = {
        "real": pa.array([float("nan"), *[0.5] * (rows - 2), None]),
        "small": pa.array([*range(rows - 1), None], pa.int8()),
        "natural": pa.array([*range(rows - 1), None], pa.uint32()),
        "text": pa.array([*["one", "two", "three"] * rows][: rows - 1] + [None]),
        "large": pa.array(["x" * 50] * (rows - 1) + [None], pa.large_string()),
        "bytes": pa.array([b"\0\xff"] * (rows - 1) + [None]),
        "price": pa.array([decimal.Decimal("1.50")] * (rows - 1) + [None], pa.decimal128(9, 2)),
        "day": pa.array([moment.date()] * (rows - 1) + [None]),
        "at": pa.array([moment] * (rows - 1) + [None], pa.timestamp("us", "Europe/Berlin")),
        "nanos": pa.array([moment] * (rows - 1) + [None], pa.timestamp("ns")),
        "kind": pa.array([*["a", "b"] * rows][: rows - 1] + [None]).dictionary_encode(),
        "list": pa.array([[1, 2], [], None] * rows, pa.list_(pa.int32()))[:rows],
        "struct": pa.array([{"a": 1, "b": [{"c": "x"}]}] * (rows - 1) + [None]),
        "map": pa.array([[("k", 1)]] * (rows - 1) + [None], pa.map_(pa.string(), pa.int64())),
        "vector": pa.array([[1.0, 2.0]] * (rows - 1) + [None], pa.list_(pa.float32(), 2)),
        "empty": pa.nulls(rows),
    }
    return pa.table(values, metadata={"owner": "someone"})


class FilesJob(FinishedJob):
    """A job every row of which has a result."""

    def __init__(self, folder: Path, source: Path | list[Path]) -> None:
        super().__init__(folder, source, TableForm(), columnar=True)
        values = pa.array([{"n": number} for number in range(len(self.leaders))])
        sink = pa.BufferOutputStream()
        batch = pa.RecordBatch.from_arrays([values], ["output"])
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        numbers = self.leaders
        self.commit(
            frame_columns(
                sink.getvalue().to_pybytes(), range(len(numbers)), numbers,
                generation=0, shard=0, epoch=1, meta=BlockMeta(),
            )
        )  # fmt: skip


@pytest.fixture
def copied(monkeypatch) -> list[int]:
    """Row groups of any size are copied; the list has an item for each output that was written so."""
    written = []
    write = appended_columns.write

    def noted(part, *rest):
        write(part, *rest)
        written.append(part.size_bytes)

    monkeypatch.setattr(appended_columns, "write", noted)
    monkeypatch.setattr(appended_columns, "GROUP_ROWS_MIN", 1)
    return written


def gathered(folder: Path, source: Path | list[Path]) -> tuple[pa.Table, Path]:
    output = folder / "out.parquet"
    gather(FilesJob(folder / "job", source).order(output), quiet)
    return pq.read_table(output), output


WRITERS = {
    "plain": {},
    "several groups": {"row_group_size": 3},
    "zstd": {"compression": "zstd", "row_group_size": 3},
    "gzip": {"compression": "gzip"},
    "no compression": {"compression": "none"},
    "old version": {"version": "1.0", "row_group_size": 3},
    "old moments": {"use_deprecated_int96_timestamps": True},
    "second version of pages": {"data_page_version": "2.0"},
    "page index": {"write_page_index": True, "row_group_size": 3},
    "checksums": {"write_page_checksum": True},
    "no statistics": {"write_statistics": False},
    "no dictionaries": {"use_dictionary": False},
    "no types of Arrow": {"store_schema": False},
    "decimals as integers": {"store_decimal_as_integer": True},
    "lists as of old": {"use_compliant_nested_type": False},
    "sorted": {"sorting_columns": [pq.SortingColumn(1)], "row_group_size": 5},
}


@pytest.mark.parametrize("options", WRITERS.values(), ids=WRITERS)
def test_the_input_comes_out_as_it_was(tmp_path, copied, options):
    """Whatever wrote the input: its columns have the types and values that it is read with, and its own bytes."""
    source = tmp_path / "in.parquet"
    pq.write_table(table_of_types(), source, **options)
    found, output = gathered(tmp_path, source)
    there = pq.read_table(source)
    assert copied == [output.stat().st_size]
    assert found.schema.names == [*there.schema.names, "output", "error"]
    assert found.drop_columns(["output", "error"]).schema.equals(there.schema)
    assert str(found.drop_columns(["output", "error"]).to_pylist()) == str(there.to_pylist())
    assert found["output"].to_pylist() == [{"n": number} for number in range(ROWS)]
    assert found["error"].null_count == ROWS
    footer = footer_of(source)
    assert output.read_bytes()[: footer.start] == source.read_bytes()[: footer.start]


def test_statistics_and_sizes_stay_and_the_results_have_theirs(tmp_path, copied):
    source = tmp_path / "in.parquet"
    pq.write_table(table_of_types(), source, row_group_size=4)
    found, before = pq.ParquetFile(gathered(tmp_path, source)[1]).metadata, pq.ParquetFile(source).metadata
    assert (found.num_rows, found.num_row_groups, found.num_columns) == (ROWS, 3, before.num_columns + 2)
    for number in range(found.num_row_groups):
        for column in range(before.num_columns):
            kept, given = found.row_group(number).column(column), before.row_group(number).column(column)
            assert kept.to_dict() == given.to_dict()
        results = found.row_group(number).column(before.num_columns)
        assert (results.path_in_schema, results.statistics.min) == ("output.n", number * 4)
        assert found.row_group(number).total_byte_size > before.row_group(number).total_byte_size


def test_files_follow_each_other(tmp_path, copied):
    """A dataset of several files: the offsets of later ones move, their page indexes are left behind."""
    paths = [tmp_path / f"{number}.parquet" for number in range(3)]
    for number, path in enumerate(paths):
        pq.write_table(table_of_types(5 + number), path, row_group_size=4, write_page_index=number > 0)
    found, output = gathered(tmp_path, paths)
    there = pa.concat_tables(map(pq.read_table, paths))
    assert copied and str(found.drop_columns(["output", "error"]).to_pylist()) == str(there.to_pylist())
    assert [each["n"] for each in found["output"].to_pylist()] == list(range(18))
    metadata = pq.ParquetFile(output).metadata
    assert [metadata.row_group(at).num_rows for at in range(6)] == [4, 1, 4, 2, 4, 3]


def test_no_column_has_an_index_of_pages(tmp_path, copied):
    """Readers refuse files in which some columns have an index of pages and others have none."""
    source = tmp_path / "in.parquet"
    pq.write_table(table_of_types(), source, write_page_index=True, row_group_size=4)
    metadata = pq.ParquetFile(gathered(tmp_path, source)[1]).metadata
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
    assert copied and not any(chunk.has_offset_index or chunk.has_column_index for chunk in chunks)


def test_files_of_different_writers_are_encoded(tmp_path, copied):
    """Readers trust statistics by the name of the writer, of which a file has one."""
    paths = [tmp_path / "0.parquet", tmp_path / "1.parquet"]
    for path in paths:
        pq.write_table(table_of_types().select(["real"]), path)
    data = paths[1].read_bytes()
    paths[1].write_bytes(data.replace(b"parquet-cpp-arrow", b"another-cpp-arrow"))
    assert paths[1].read_bytes() != data
    assert gathered(tmp_path, paths)[0].num_rows == 2 * ROWS and not copied


def test_files_that_were_written_differently_are_encoded(tmp_path, copied):
    """The same columns of different storage have no common footer."""
    paths = [tmp_path / "0.parquet", tmp_path / "1.parquet"]
    table = table_of_types().select(["nanos", "real"])
    pq.write_table(table, paths[0])
    pq.write_table(table, paths[1], use_deprecated_int96_timestamps=True)
    found, _ = gathered(tmp_path, paths)
    assert not copied and found["nanos"].to_pylist() == table["nanos"].to_pylist() * 2


def test_row_groups_without_rows_are_left_out(tmp_path, copied):
    table, source = table_of_types(), tmp_path / "in.parquet"
    with pq.ParquetWriter(source, table.schema) as writer:
        for part in (table.slice(0, 0), table.slice(0, 6), table.slice(0, 0), table.slice(6)):
            writer.write_table(part)
    found, output = gathered(tmp_path, source)
    assert copied and pq.ParquetFile(output).num_row_groups == 2
    assert str(found.select(table.schema.names).to_pylist()) == str(table.to_pylist())


@pytest.mark.parametrize("limit", [{"GROUP_ROWS_MIN": 4}, {"RESULT_BYTES_MAX": 10}, {"GROUP_ROWS_MAX": 2}])
def test_small_row_groups_and_large_results_are_encoded(tmp_path, copied, monkeypatch, limit):
    for name, value in limit.items():
        monkeypatch.setattr(appended_columns, name, value)
    source = tmp_path / "in.parquet"
    pq.write_table(table_of_types(), source, row_group_size=3)
    found, output = gathered(tmp_path, source)
    assert not copied and pq.ParquetFile(output).num_row_groups == 1
    assert str(found.select(table_of_types().schema.names).to_pylist()) == str(pq.read_table(source).to_pylist())


def test_footers_that_are_too_long_are_not_read(tmp_path, copied, monkeypatch):
    source = tmp_path / "in.parquet"
    pq.write_table(table_of_types(), source)
    size = source.stat().st_size - footer_of(source).start
    for limit, is_copied in ((size - 1, False), (size, True)):
        monkeypatch.setattr(appended_columns, "FOOTER_BYTES_MAX", limit)
        found, _ = gathered(tmp_path, source)
        assert bool(copied) == is_copied and found.num_rows == ROWS
        shutil.rmtree(tmp_path / "job")


def test_an_input_that_changes_while_it_is_copied_is_found(tmp_path, copied, monkeypatch):
    """Bytes that no column chunk has are the input's too."""
    source = tmp_path / "in.parquet"
    pq.write_table(table_of_types(), source)
    read = parquet_footer.read_footer

    def changing(*arguments):
        footer = read(*arguments)
        data = bytearray(source.read_bytes())
        data[2] ^= 1
        source.write_bytes(data)
        return footer

    monkeypatch.setattr(parquet_footer, "read_footer", changing)
    with pytest.raises(InputChanged):
        gathered(tmp_path, source)
    assert not list(tmp_path.glob("out*"))


def test_the_same_outcomes_give_the_same_bytes(tmp_path, copied):
    source = tmp_path / "in.parquet"
    pq.write_table(table_of_types(), source, row_group_size=3)
    one = gathered(tmp_path, source)[1].read_bytes()
    shutil.rmtree(tmp_path / "job")
    assert gathered(tmp_path, source)[1].read_bytes() == one and len(copied) == 2


def test_encoding_and_copying_give_the_same_table(tmp_path, copied, monkeypatch):
    source = tmp_path / "in.parquet"
    pq.write_table(table_of_types(), source, row_group_size=3)
    one = gathered(tmp_path, source)[0]
    shutil.rmtree(tmp_path / "job")
    monkeypatch.setattr(column_parquet.appended_columns, "source_of", lambda *_: None)
    assert str(gathered(tmp_path, source)[0].to_pylist()) == str(one.to_pylist()) and len(copied) == 1


# -- footers and Thrift


def footer_of(path: Path) -> parquet_footer.Footer:
    data = path.read_bytes()
    return parquet_footer.read_footer(len(data), lambda first, end: data[first:end])


@pytest.mark.parametrize("options", WRITERS.values(), ids=WRITERS)
def test_a_footer_is_written_as_it_was_read(tmp_path, options):
    source = tmp_path / "in.parquet"
    pq.write_table(table_of_types(), source, **options)
    data, footer = source.read_bytes(), footer_of(source)
    assert write_struct(footer.fields) == data[footer.start : -parquet_footer.END_BYTES]


def test_any_prefix_of_a_footer_is_refused(tmp_path):
    source = tmp_path / "in.parquet"
    pq.write_table(table_of_types().select(["real", "list"]), source)
    data = write_struct(footer_of(source).fields)
    for size in range(len(data)):
        with pytest.raises(NotThrift):
            read_struct(data[:size])
    with pytest.raises(NotThrift, match="1 bytes follow"):
        read_struct(data + b"\0")


@pytest.mark.parametrize(
    "data",
    [
        b"\x1d\x00",  # a kind that there is not
        b"\x1b\x00\x00",  # a map
        b"\x19\x21\x01\x01\x00",  # a list of booleans
        b"\x19\xf5\xff\xff\xff\x7f",  # a list that is longer than the bytes
        b"\x18\xff\xff\xff\xff\x0f",  # bytes that are not there
        b"\x16" + b"\xff" * 10 + b"\x00",  # an integer of more than 64 bits
        b"\x1c" * 40,  # structs within each other
        b"\x19\x19" * 40,  # lists within each other
    ],
)
def test_what_footers_never_have_is_refused(data):
    with pytest.raises(NotThrift):
        read_struct(data)


def test_values_of_every_kind_are_written_as_they_were_read():
    kinds = thrift_compact
    fields = {
        1: kinds.Value(kinds.TRUE, True), 2: kinds.Value(kinds.FALSE, False), 3: kinds.Value(kinds.BYTE, 200),
        4: kinds.Value(kinds.I16, -5), 20: kinds.Value(kinds.I32, 2**31 - 1), 21: kinds.Value(kinds.I64, -(2**63)),
        22: kinds.Value(kinds.DOUBLE, -0.5), 23: kinds.Value(kinds.BINARY, b"x" * 300),
        24: kinds.Value(kinds.LIST, kinds.ListOf(kinds.I64, list(range(15)))),
        25: kinds.Value(kinds.SET, kinds.ListOf(kinds.BINARY, [b"", b"y"])),
        300: kinds.Value(kinds.STRUCT, {1: kinds.Value(kinds.I64, 2**63 - 1)}),
    }  # fmt: skip
    assert read_struct(write_struct(fields)) == fields


@pytest.mark.parametrize("fields", [{}, {4: 1}, {2: 1, 4: 1}])
def test_a_struct_that_is_no_footer_is_refused(fields):
    data = write_struct({number: thrift_compact.Value(thrift_compact.I32, value) for number, value in fields.items()})
    data = b"PAR1" + data + len(data).to_bytes(4, "little") + b"PAR1"
    with pytest.raises(NotThrift, match="without what one has"):
        parquet_footer.read_footer(len(data), lambda first, end: data[first:end])


@pytest.mark.parametrize("end", [b"\x04\0\0\0PAR2", b"\xff\0\0\0PAR1"])
def test_an_end_that_is_none_is_refused(end):
    data = b"PAR1abcd" + end
    with pytest.raises(NotThrift, match="a footer of"):
        parquet_footer.read_footer(len(data), lambda first, end: data[first:end])
