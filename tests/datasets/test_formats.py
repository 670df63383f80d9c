import gzip
import json
import sys

import pytest
import zstandard
from dataset_rows import openai_row

from batchmill.datasets import layout, readers
from batchmill.datasets.formats import columns_schema, detect
from batchmill.datasets.inflate import blocks
from batchmill.datasets.sealed import SealedRows
from batchmill.errors import InvalidDataset
from batchmill.types import DatasetSpec, MediaColumn
from batchmill.wire.rows.forms import TableForm

ROWS = [openai_row("a"), openai_row("b")]
LINES = b"".join(row + b"\n" for row in ROWS)
BOM = b"\xef\xbb\xbf"


def found(path, **spec):
    result = detect(DatasetSpec([path], **spec))
    return result.format, result.columns


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (LINES, ("openai", [])),
        (BOM + b"\n" + LINES, ("openai", [])),
        (b'{"custom_id":"a","url":"/x"}', ("openai", [])),
        (b'{"url":"http://x","title":"y"}\n', ("jsonl", ["url", "title"])),
        (b'{"body":"text"}', ("jsonl", ["body"])),
        (b'nope\n{"a":1}\n', ("jsonl", ["a"])),
        (b"nope\n" * 200, ("openai", [])),
        (b"[" * 100_000, ("openai", [])),
    ],
)
def test_jsonl_is_told_by_its_first_row(write, lines, expected):
    """Requests have a url and a body; anything else is a table; a file nobody can read counts as requests."""
    assert found(write(lines)) == expected


def test_the_format_may_be_named(write):
    """`format` overrides what the name and the first row say."""
    assert found(write(LINES), format="jsonl")[0] == "jsonl"
    assert found(write(b'{"a":1}'), format="openai") == ("openai", [])
    assert found(write(b"a,b\n1,2\n", "x.data"), format="csv") == ("csv", ["a", "b"])


@pytest.mark.parametrize("name", ["x.jsonl", "x.ndjson", "x.JSON", "x", "x.data"])
def test_names(write, name):
    """Known suffixes say the format, and a file without one is told by its first byte."""
    assert found(write(LINES, name)) == ("openai", [])


@pytest.mark.parametrize(
    ("text", "name", "code"),
    [
        (b"PAR1xxxx", "x.jsonl", "format_mismatch"),
        (LINES, "x.parquet", "format_mismatch"),
        (LINES, "x.jsonl.gz", "format_mismatch"),
        (gzip.compress(LINES), "x.jsonl", "format_mismatch"),
        (gzip.compress(LINES), "x.jsonl.zst", "format_mismatch"),
        (b"hello", "x.txt", "unknown_format"),
        (b"[\n" + LINES + b"]", "x.json", "not_jsonl"),
        (b'[{"a":1},{"a":2}]', "x.jsonl", "not_jsonl"),
        (b'{\n  "a": 1\n}', "x.json", "not_jsonl"),
        ("a".encode("utf-16"), "x.jsonl", "invalid_encoding"),
        ("a,b\n".encode("utf-16"), "x.csv", "invalid_encoding"),
        (b"", "x.jsonl", "empty_file"),
        (b"\n", "x.csv", "invalid_header"),
        (b"a,,b\n", "x.csv", "invalid_header"),
        (b"a,b,a\n", "x.csv", "invalid_header"),
        (b"PAR1" + b"x" * 100, "x.parquet", "invalid_parquet"),
    ],
)
def test_files_that_cannot_be_read(write, text, name, code):
    """A file as a whole that is not what it says is refused with a stable code that names it."""
    with pytest.raises(InvalidDataset) as caught:
        found(write(text, name))
    assert caught.value.code == code
    assert name in caught.value.message


def test_unlike_files(write):
    """The files of a dataset have one format."""
    with pytest.raises(InvalidDataset, match="must have one format") as caught:
        detect(DatasetSpec([write(LINES), write(b"a\n1\n", "b.csv")]))
    assert caught.value.code == "format_mismatch"


def test_parquet_without_pyarrow(write, monkeypatch):
    """Where pyarrow is missing the error names the extra that brings it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyarrow"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, readers.MODULES["parquet"], raising=False)
    with pytest.raises(InvalidDataset, match=r"pip install 'batchmill\[parquet\]'"):
        found(write(b"PAR1", "x.parquet"))


PACKED = {
    "x.jsonl.gz": gzip.compress(LINES),
    "x.jsonl.zst": zstandard.compress(LINES),
    "members.jsonl.gz": gzip.compress(ROWS[0] + b"\n") + gzip.compress(ROWS[1]) + b"\0" * 512,
    "frames.jsonl.zst": zstandard.compress(ROWS[0] + b"\n") + zstandard.compress(ROWS[1] + b"\n"),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_jsonl(write, sealed, home, name):
    """gzip and zstd, in one member or several, are read like the lines they hold, and the source is what counts."""
    report = sealed(write(PACKED[name], name))
    assert SealedRows(home).read(0, 2) == ROWS
    assert report.seal.sources[0].size_bytes == len(PACKED[name])
    assert report.seal.files[0].path == str(home / layout.ROWS)
    assert {path.suffix for path in home.iterdir()} <= {".json", ".jsonl", ".u64", ".u32", ".bin"}


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.jsonl.zst"])
@pytest.mark.parametrize(
    "spoil", [lambda data: data[:-3], lambda data: data + b"garbage", lambda data: data[:30] + b"!" * 30 + data[60:]]
)
def test_damaged_archives(write, sealed, name, spoil):
    """An archive that is cut, spoilt, or followed by something else is refused."""
    with pytest.raises(InvalidDataset) as caught:
        sealed(write(spoil(PACKED[name]), name))
    assert caught.value.code == ("invalid_gzip" if name.endswith("gz") else "invalid_zstd")


@pytest.mark.parametrize("codec", ["gzip", "zstd"])
def test_bombs_come_in_bounded_blocks(tmp_path, codec):
    """64 MiB of zeros in a few KiB are never in memory at once."""
    zeros = bytes(64 * 1024 * 1024)
    path = tmp_path / "bomb"
    path.write_bytes(gzip.compress(zeros) if codec == "gzip" else zstandard.compress(zeros))
    sizes = [len(block) for block in blocks(str(path), codec, lambda _: None)]
    assert sum(sizes) == len(zeros)
    assert max(sizes) <= 16 * 1024 * 1024


def test_several_packed_files(write, sealed, home):
    """Files that are converted keep their own names and line numbers, and never run into each other."""
    one = write(gzip.compress(BOM + ROWS[0]), "1.jsonl.gz")
    two = write(BOM + b"\n" + ROWS[1] + b"\nnope", "2.jsonl")
    report = sealed(one, two)
    assert SealedRows(home).read(0, 3) == [*ROWS, b"nope"]
    assert [(p.path, p.line) for p in report.problems] == [(two, 3)]


CSV = b'a,b\r\n1,"x, ""y""\nz"\r\n\r\n\xc3\xa9,\n'


@pytest.mark.parametrize(("text", "name"), [(CSV, "t.csv"), (BOM + CSV, "t.csv"), (gzip.compress(CSV), "t.csv.gz")])
def test_csv(write, sealed, home, text, name):
    """Cells are strings; quotes, line ends in cells and blank lines are as RFC 4180 has them."""
    report = sealed(write(text, name))
    assert [json.loads(row) for row in SealedRows(home).read(0, 2)] == [
        {"a": "1", "b": 'x, "y"\nz'},
        {"a": "é", "b": ""},
    ]
    assert (report.seal.format, report.seal.columns, report.problems) == ("csv", ["a", "b"], [])
    assert columns_schema(home) is None


def test_blank_lines_of_one_column_are_rows(write, sealed, home):
    """In a CSV of one column a blank line is an empty cell, and every line behind the header has its row."""
    report = sealed(write(b'\na\n1\n\n2\r\n\r\n""\n', "t.csv"))
    assert [json.loads(row)["a"] for row in SealedRows(home).read(0, report.seal.rows)] == ["1", "", "2", "", ""]
    assert report.problems == []


def test_csv_rows_that_are_wrong(write, sealed, home):
    """Ragged, unreadable and long records are refused on their own line and keep their place among the rows."""
    text = b'a,b\n1,2\n"x\ny",2\n1\n1,2,3\n\xff,1\n"a"b,c\n' + b"x" * 200 + b",1\n3,4\n"
    report = sealed(write(text, "t.csv"), spec={"line_bytes_max": 150 + 60})
    assert [(p.code, p.line, p.row) for p in report.problems] == [
        ("bad_row_width", 5, 2),
        ("bad_row_width", 6, 3),
        ("invalid_encoding", 7, 4),
        ("invalid_csv", 8, 5),
        ("line_too_long", 9, 6),
    ]
    rows = SealedRows(home).read(0, 8)
    assert json.loads(rows[1]) == {"a": "x\ny", "b": "2"}
    assert json.loads(rows[2]) == {"a": "1"}
    assert json.loads(rows[7]) == {"a": "3", "b": "4"}
    lines = [json.loads(line) for line in (home / layout.REJECTED).read_text().splitlines()]
    assert [(line["row"], line["code"]) for line in lines] == [(p.row, p.code) for p in report.problems]


def test_media_that_are_wrong_are_at_their_lines(write, sealed):
    """What is found in a row of CSV after its conversion has the line of its record, in each file."""
    one = write(b'a,img\n"x\ny",/gone\n1,2,3\n4,/gone too\n', "one.csv")
    other = write(b"a,img\n\n1,/not there\n", "other.csv")
    form = TableForm("{a}", media=[MediaColumn("image", "img")])
    report = sealed(one, other, spec={"media_folder": "/"}, form=form)
    assert [(p.code, p.path, p.line, p.row) for p in report.problems] == [
        ("media_missing", one, 2, 0),
        ("bad_row_width", one, 4, 1),
        ("media_missing", one, 5, 2),
        ("media_missing", other, 3, 3),
    ]


@pytest.mark.parametrize("text", [b'a\n1\n"open\n2\n3\n', b'a\n"' + b"x" * 2000 + b"\n"])
def test_a_quote_left_open(write, sealed, text):
    """A quote that is never closed is an error that names its line: the rest of the file is not one cell."""
    with pytest.raises(InvalidDataset, match="is a quote left open") as caught:
        sealed(write(text, "t.csv"), spec={"line_bytes_max": 1000})
    assert caught.value.code == "invalid_csv"


def test_csv_columns_are_checked_once(write, sealed):
    """A header that lacks a column of the prompt, or uses a result's name, refuses the file."""
    with pytest.raises(InvalidDataset, match="needs a column 'revue'.*did you mean 'review'") as caught:
        sealed(write(b"review,n\nx,1\n", "t.csv"), form=TableForm(prompt="{revue}"))
    assert caught.value.code == "missing_column"
    with pytest.raises(InvalidDataset, match="named 'output'") as caught:
        sealed(write(b"review,output\nx,1\n", "t.csv"))
    assert caught.value.code == "column_conflict"
    with pytest.raises(InvalidDataset, match="same columns") as caught:
        sealed(write(b"a,b\n1,2\n", "1.csv"), write(b"b,a\n1,2\n", "2.csv"))
    assert caught.value.code == "schema_mismatch"
