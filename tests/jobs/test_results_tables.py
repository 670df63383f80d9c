"""Results of tables: CSV and Parquet, with the input's columns as they were."""

import csv
import gc
import gzip
import hashlib
import io
import json
import resource
import signal
import tempfile
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from finished_job import FinishedJob, quiet
from hypothesis import given
from hypothesis import strategies as st

from batchmill import part_files
from batchmill.errors import InvalidInput, StorageFull
from batchmill.jobs.results import result_columns
from batchmill.jobs.results.gathering import TableSource, create_table, gather
from batchmill.jobs.results.parquet import result_parquet
from batchmill.store.segments.format import BlockMeta, BlockRows, frame
from batchmill.types import Outcome, Row
from batchmill.wire.json_bytes import DEPTH_MAX
from batchmill.wire.rows.forms import TableForm


def table_job(tmp_path: Path, rows: list[str], *, keys: bool = False) -> FinishedJob:
    (tmp_path / "in.jsonl").write_text("".join(row + "\n" for row in rows))
    return FinishedJob(tmp_path / "job", tmp_path / "in.jsonl", TableForm(), keys=keys)


def answer(job: FinishedJob, outputs: list[str]) -> None:
    """Commit one outcome for each row: the JSON given as its output."""
    numbers = job.leaders
    lines = [
        job.form.write(Outcome(Row(0, number, job.raws[number], job.form), output.encode()))
        for number, output in zip(numbers, outputs, strict=True)
    ]
    part = BlockRows(list(range(len(numbers))), numbers, lines)
    job.commit(frame(part, generation=0, shard=0, epoch=1, ok=True, meta=BlockMeta()))


def read_csv(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text, newline=""), strict=True))


def written(job: FinishedJob, path: Path) -> pa.Table:
    gather(job.order(path), quiet)
    return pq.read_table(path)


def test_csv_keeps_digits_and_text(tmp_path):
    """Strings are bare, numbers have the digits they came with, objects are JSON, nulls and absent columns empty."""
    job = table_job(tmp_path, ['{"a":1.10,"b":"x, \\"y\\"\\n"}', '{"b":null,"c":{"d":[1]}}'])
    answer(job, ["123456789012345678901234567890", '{"e":0.10}'])
    gather(job.order(tmp_path / "out.csv"), quiet)
    assert read_csv((tmp_path / "out.csv").read_text()) == [
        ["a", "b", "c", "output", "error"],
        ["1.10", 'x, "y"\n', "", "123456789012345678901234567890", ""],
        ["", "", '{"d":[1]}', '{"e":0.10}', ""],
    ]


CELLS = st.text(st.sampled_from("ab,;'\"\r\n \t\\\0\x1c\x85\u2028é"), max_size=5)


@given(st.lists(st.fixed_dictionaries({"a": CELLS, "b\r": CELLS}), max_size=6))
def test_csv_comes_back_as_it_was(records):
    """Whatever characters a cell holds, a reader of CSV finds the same cells again."""
    with tempfile.TemporaryDirectory() as folder:
        source = TableSource(Path(folder), ["a", "b\r"], fixed=True, added=("output", "error"))
        table = create_table("csv", Path(folder, "out.csv"), source)
        table.write([json.dumps({**record, "output": "\r", "error": None}).encode() + b"\n" for record in records])
        table.publish()
        found = read_csv(Path(folder, "out.csv").read_bytes().decode())
    assert found == [["a", "b\r", "output", "error"], *([each["a"], each["b\r"], "\r", ""] for each in records)]


def test_csv_rows_that_failed_say_why(tmp_path):
    """Errors stand in their rows, and no error file is written."""
    job = table_job(tmp_path, ['{"a":1}', '{"a":2}'])
    job.run_all(failed={1})
    manifest = gather(job.order(tmp_path / "out.csv"), quiet)
    assert read_csv((tmp_path / "out.csv").read_text())[2] == ["2", "", "went_wrong: row 1"]
    assert (manifest.errors, manifest.failed, manifest.causes) == (None, 1, {"went_wrong": (1, "row 1")})
    assert not (tmp_path / "out.errors.jsonl").exists()


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_csv_can_be_compressed(tmp_path, suffix):
    """The name of the output decides how it is packed."""
    job = table_job(tmp_path, ['{"a":1}', '{"a":2}'])
    job.run_all()
    gather(job.order(tmp_path / f"out.csv{suffix}"), quiet)
    data = (tmp_path / f"out.csv{suffix}").read_bytes()
    text = gzip.decompress(data) if suffix == ".gz" else zstandard.ZstdDecompressor().decompressobj().decompress(data)
    assert len(read_csv(text.decode())) == 3


def test_folded_rows_have_a_column(tmp_path):
    """When rows share outcomes a column says whose they have; otherwise there is no such column."""
    job = table_job(tmp_path, ['{"a":1}', '{"a":2}', '{"a":1}'], keys=True)
    job.run_all()
    gather(job.order(tmp_path / "out.csv"), quiet)
    header, *rows = read_csv((tmp_path / "out.csv").read_text())
    assert header == ["a", "output", "error", "folded_from"]
    assert [row[3] for row in rows] == ["", "", "0"]
    table = written(job, tmp_path / "out.parquet")
    assert table.schema.field("folded_from").type == pa.int64()
    assert table.column("folded_from").to_pylist() == [None, None, 0]


DEEP = "[" * DEPTH_MAX + "]" * DEPTH_MAX


@pytest.mark.parametrize(
    ("outputs", "kind", "values"),
    [
        (['"a"', "null", '"b"'], pa.string(), ["a", None, "b"]),
        (["1", "2", "null"], pa.int64(), [1, 2, None]),
        (["1", "2.5", "-0.5"], pa.float64(), [1.0, 2.5, -0.5]),
        (["true", "false", "null"], pa.bool_(), [True, False, None]),
        (["[0.5,1]", "[]", "null"], pa.list_(pa.float64()), [[0.5, 1.0], [], None]),
        (["[1,2,3]", "[]", "null"], pa.list_(pa.int64()), [[1, 2, 3], [], None]),
        (
            ["[9007199254740993]", "[-9223372036854775808,1]", "[]"],
            pa.list_(pa.int64()),
            [[2**53 + 1], [-(2**63), 1], []],
        ),
        (["[9007199254740992]", "[0.5]", "[]"], pa.list_(pa.float64()), [[2.0**53], [0.5], []]),
        (["[9007199254740993]", "[0.5]", "[]"], pa.string(), ["[9007199254740993]", "[0.5]", "[]"]),
        (["[9007199254740993,0.5]", "[0.5]", "[1]"], pa.string(), ["[9007199254740993,0.5]", "[0.5]", "[1]"]),
        (["[9223372036854775808]", "[1]", "null"], pa.string(), ["[9223372036854775808]", "[1]", None]),
        (["[]", "null", "null"], pa.list_(pa.int64()), [[], None, None]),
        (["[true]", "[1]", "null"], pa.string(), ["[true]", "[1]", None]),
        (["[1]", "2", "null"], pa.string(), ["[1]", "2", None]),
        ([DEEP, "2", "null"], pa.string(), [DEEP, "2", None]),
        (['{"b":1.10}', "[1,[2]]", "null"], pa.string(), ['{"b":1.10}', "[1,[2]]", None]),
        (['"a"', "1", "null"], pa.string(), ['"a"', "1", None]),
        (["9007199254740993", "2", "3"], pa.int64(), [9007199254740993, 2, 3]),
        (["9007199254740993", "2.5", "3"], pa.string(), ["9007199254740993", "2.5", "3"]),
        (["9223372036854775808", "2", "3"], pa.string(), ["9223372036854775808", "2", "3"]),
        (["1e999", "2", "3"], pa.string(), ["1e999", "2", "3"]),
        (["null", "null", "null"], pa.string(), [None, None, None]),
    ],
)
def test_parquet_output_has_the_type_of_its_values(tmp_path, outputs, kind, values):
    """`output` is text, number, vector or truth value where all rows have one, and JSON text where they differ."""
    job = table_job(tmp_path, ['{"a":1}', '{"a":2}', '{"a":3}'])
    answer(job, outputs)
    table = written(job, tmp_path / "out.parquet")
    assert table.schema.field("output").type == kind
    assert table.column("output").to_pylist() == values
    assert table.column("a").to_pylist() == [1, 2, 3]


def test_parquet_is_written_in_row_groups(tmp_path, monkeypatch):
    """Rows go to the file as groups fill, so memory does not grow with them."""
    monkeypatch.setattr(result_columns, "BATCH_BYTES", 100)
    monkeypatch.setattr(result_parquet, "GROUP_ROWS", 10)
    job = table_job(tmp_path, [f'{{"a":{n}}}' for n in range(95)])
    job.run_all(failed={5, 90})
    table = written(job, tmp_path / "out.parquet")
    with pq.ParquetFile(tmp_path / "out.parquet") as file:
        assert file.metadata.num_row_groups >= 9
    assert table.column("a").to_pylist() == list(range(95))
    assert [n for n, error in enumerate(table.column("error").to_pylist()) if error] == [5, 90]
    output = table.column("output").to_pylist()
    assert (output[5], json.loads(output[6])["answer"]) == (None, "done 6")


EARLY = datetime(1969, 1, 1, tzinfo=UTC)
TYPES = {
    "i8": (pa.int8(), [1, None, -3]),
    "u64": (pa.uint64(), [2**64 - 1, None, 0]),
    "f32": (pa.float32(), [0.1, None, 1e30]),
    "f16": (pa.float16(), [0.5, None, 2.0]),
    "text": (pa.large_string(), ["ä", None, ""]),
    "yes": (pa.bool_(), [True, None, False]),
    "nothing": (pa.null(), [None, None, None]),
    "money": (pa.decimal128(20, 3), [Decimal("12345678901234567.125"), None, Decimal("-1.000")]),
    "wide": (pa.decimal256(60, 0), [Decimal(10**50), None, Decimal(7)]),
    "day": (pa.date32(), [date(2020, 2, 29), None, date(1, 1, 1)]),
    "day64": (pa.date64(), [date(2020, 2, 29), None, date(1969, 12, 31)]),
    "ns": (pa.timestamp("ns"), pa.array([1_582_934_400_123_456_789, None, -1], pa.int64())),
    "utc": (pa.timestamp("us", "UTC"), [datetime(2020, 2, 29, 1, 2, 3, 4, UTC), None, EARLY]),
    "zoned": (pa.timestamp("ms", "Europe/Berlin"), pa.array([1_582_934_400_123, None, 0], pa.int64())),
    "s": (pa.timestamp("s"), pa.array([327_403_382_400, None, -99_999_999_999], pa.int64())),
    "clock": (pa.time32("ms"), [time(1, 2, 3, 4000), None, time(23, 59, 59, 999000)]),
    "fine": (pa.time64("ns"), pa.array([1, None, 86_399_999_999_999], pa.int64())),
    "took": (pa.duration("ms"), pa.array([1500, None, -1], pa.int64())),
    "raw": (pa.binary(), [b"\0\xff", None, b""]),
    "fixed": (pa.binary(2), [b"ab", None, b"\0\0"]),
    "word": (pa.dictionary(pa.int32(), pa.string()), ["a", None, "a"]),
    "list": (pa.list_(pa.decimal128(5, 2)), [[Decimal("1.10"), None], None, []]),
    "large": (pa.large_list(pa.date32()), [[date(2020, 1, 1)], None, []]),
    "pair": (pa.list_(pa.float64(), 2), [[1.0, 2.0], None, [3.0, None]]),
    "struct": (
        pa.struct([("d", pa.date32()), ("n", pa.int64())]),
        [{"d": date(2020, 1, 1), "n": None}, None, {"d": None, "n": 1}],
    ),
    "map": (pa.map_(pa.string(), pa.timestamp("s")), [[("k", datetime(2020, 1, 1))], None, []]),
}  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_parquet_columns_come_back_as_they_were(tmp_path, name):
    """A column of any type that can be read is written with the same type and the same values."""
    kind, values = TYPES[name]
    column = values.cast(kind) if isinstance(values, pa.Array) else pa.array(values, kind)
    pq.write_table(pa.table({name: column}), tmp_path / "in.parquet")
    job = FinishedJob(tmp_path / "job", tmp_path / "in.parquet", TableForm())
    answer(job, ['"x"', '"y"', '"z"'])
    source, result = pq.read_table(tmp_path / "in.parquet"), written(job, tmp_path / "out.parquet")
    assert result.schema.field(name).type == source.schema.field(name).type
    assert result.column(name).combine_chunks().equals(source.column(name).combine_chunks())


def test_a_table_from_csv_is_text(tmp_path):
    """CSV cells are strings, and stay strings in Parquet."""
    (tmp_path / "in.csv").write_text("a,b\n1,x\n2,\n")
    job = FinishedJob(tmp_path / "job", tmp_path / "in.csv", TableForm())
    answer(job, ["1", "2"])
    table = written(job, tmp_path / "out.parquet")
    assert table.select(["a", "b"]).to_pydict() == {"a": ["1", "2"], "b": ["x", ""]}


def test_too_many_columns_are_refused(tmp_path, monkeypatch):
    """Rows with ever new columns cannot become a table; as many as are allowed can."""
    monkeypatch.setattr(result_columns, "COLUMNS_MAX", 3)
    job = table_job(tmp_path, ['{"a":1,"b":1}', '{"c":1}'])
    job.run_all()
    gather(job.order(tmp_path / "out.csv"), quiet)
    monkeypatch.setattr(result_columns, "COLUMNS_MAX", 2)
    with pytest.raises(InvalidInput, match="more than 2 columns"):
        gather(job.order(tmp_path / "out.csv"), quiet)


@pytest.mark.parametrize("name", ["out.csv", "out.parquet"])
def test_tables_are_written_the_same_each_time(tmp_path, name):
    """Gathering a table twice gives the same bytes."""
    job = table_job(tmp_path, [f'{{"a":{n}}}' for n in range(20)])
    job.run_all(failed={3})
    first = gather(job.order(tmp_path / name), quiet)
    data = (tmp_path / name).read_bytes()
    assert gather(job.order(tmp_path / name), quiet) == first
    assert ((tmp_path / name).read_bytes(), first.output.bytes, first.output.rows) == (data, len(data), 20)


@pytest.mark.parametrize("name", ["out.csv", "out.parquet"])
def test_an_abandoned_table_leaves_nothing(tmp_path, name, recwarn):
    """A table that is given up in the middle is gone, without a word."""
    (tmp_path / "dataset").mkdir()
    source = TableSource(tmp_path / "dataset", ["a"], fixed=False, added=("output", "error"))
    table = create_table(name.partition(".")[2], tmp_path / name, source)
    lines = [b'{"a":%d,"output":1,"error":null}\n' % n for n in range(1000)]
    table.learn(lines)
    table.write(lines)
    table.discard()
    table.discard()
    del table
    gc.collect()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dataset"]
    assert [str(warning.message) for warning in recwarn] == []


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    """When there is no room for a row group the job pauses for storage, and the part is gone."""
    monkeypatch.setattr(result_parquet, "GROUP_ROWS", 500)
    monkeypatch.setattr(result_columns, "BATCH_BYTES", 5000)
    monkeypatch.setattr(part_files, "BUFFER_BYTES", 1000)
    (tmp_path / "dataset").mkdir()
    source = TableSource(tmp_path / "dataset", ["a"], fixed=False, added=("output", "error"))
    table = create_table("parquet", tmp_path / "out.parquet", source)
    texts = [hashlib.sha256(b"%d" % number).hexdigest().encode() for number in range(4000)]
    lines = [b'{"a":"%s","output":1,"error":null}\n' % text for text in texts]
    table.learn(lines)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(StorageFull, match="no room"):
            table.write(lines)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    table.discard()
    del table
    gc.collect()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dataset"]
