"""Rows and files that programs write and others read differently."""

from __future__ import annotations

import json

import pytest
from dataset_rows import CHAT, openai_row

from batchmill.datasets.checking.inspection import Inspector
from batchmill.datasets.csv_rows import columns
from batchmill.datasets.formats import SourceFile
from batchmill.datasets.orders import ByteRange, SealOrder, SourcePart, ValidatedChunk
from batchmill.errors import InvalidDataset
from batchmill.types import DatasetSpec
from batchmill.wire.rows.forms import OpenAIForm, TableForm

ODD = (
    ('{"n":1,"n":2}', "'n' is used twice"), ('{"n":1e400}', "1e400"), ('{"n":%s}' % ("7" * 6000), "6,000 digits"),
    ('{"a":{"b":1,"b":2}}', "'b' is used twice"),
)  # fmt: skip


def refused(tmp_path, lines, form, **order):
    """What is wrong with which row."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    name = "jsonl" if isinstance(form, TableForm) else "openai"
    wanted = SealOrder(DatasetSpec([str(path)], format=name), form, **order)
    size = path.stat().st_size
    part = SourcePart(0, str(path), str(path), 0, 0, size)
    chunks = [
        each for each in Inspector(wanted).inspect(ByteRange(0, part, 0, size)) if isinstance(each, ValidatedChunk)
    ]
    return {each.row: (each.code, each.message) for chunk in chunks for each in chunk.refused}


def test_rows_that_are_read_in_two_ways_are_refused(tmp_path):
    """A name twice and numbers that readers cannot hold are errors of their rows, in tables and in requests."""
    for text, words in ODD:
        table = [b'{"n":1}', text.encode(), b'{"n":2}']
        found = refused(tmp_path, table, TableForm())
        assert list(found) == [1] and found[1][0] == "ambiguous_json" and words in found[1][1], text
        bad = openai_row("b").replace(b'"body": {', b'"body": {"x": ' + text.encode() + b", ")
        for order in ({"urls": [frozenset({CHAT})]}, {"any_model": True}):
            found = refused(tmp_path, [openai_row("a"), bad, openai_row("c")], OpenAIForm(), **order)
            assert list(found) == [1] and found[1][0] == "ambiguous_json" and words in found[1][1], text


def test_tables_of_plain_rows_are_not_looked_at_one_by_one(tmp_path):
    """Columns that hold objects, or names with a colon, are not a reason to refuse a row."""
    rows = [{"n": 1}, {"a": {"a": 1, "b": [{"a": 1}]}}, {'x":y': 2, "x": "\u2019"}, {"n": 1e308}]
    assert refused(tmp_path, [json.dumps(each).encode() for each in rows], TableForm()) == {}


def test_lines_that_end_with_cr_alone_get_a_hint(tmp_path):
    """Of a file that an old program wrote, the one line there is says how to convert it."""
    found = refused(tmp_path, [openai_row("a") + b"\r" + openai_row("b")], OpenAIForm())
    assert found[0][0] == "invalid_json" and "tr '\\r' '\\n'" in found[0][1]


@pytest.mark.parametrize(("header", "said"), [("a;b", "semicolons"), ("a\tb", "tabs"), ("a|b", "bars")])
def test_other_separators_get_a_hint(tmp_path, header, said):
    """A header that is one column because its cells are not separated by commas is refused, with the way out."""
    path = tmp_path / "in.csv"
    path.write_text(f"{header}\n1,2\n")
    with pytest.raises(InvalidDataset, match=said) as caught:
        columns(SourceFile(str(path), "csv", None), DatasetSpec([str(path)], format="csv"))
    assert "csvformat" in caught.value.message
    path.write_text("a;b,c\n1,2\n")
    assert columns(SourceFile(str(path), "csv", None), DatasetSpec([str(path)], format="csv")) == ["a;b", "c"]
