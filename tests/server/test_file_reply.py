from __future__ import annotations

import pytest

from batchmill.server.file_reply import NOTHING, Span, disposition, span_of


@pytest.mark.parametrize(
    ("asked", "span"),
    [
        ("bytes=0-3", Span(0, 4)),
        ("bytes=0-0", Span(0, 1)),
        ("bytes=4-", Span(4, 10)),
        ("bytes=0-", Span(0, 10)),
        ("bytes=7-99", Span(7, 10)),
        ("bytes=-3", Span(7, 10)),
        ("bytes=-99", Span(0, 10)),
        ("Bytes=1-2", Span(1, 3)),
        ("bytes=10-", NOTHING),
        ("bytes=10-12", NOTHING),
        ("bytes=-0", NOTHING),
        ("bytes=5-4", None),
        ("bytes=-", None),
        ("bytes=a-b", None),
        ("bytes=0-1,4-5", None),
        ("rows=0-1", None),
        ("", None),
        ("bytes=" + "9" * 19 + "-", None),
    ],
)
def test_ranges(asked, span):
    """One range of bytes is understood by the grammar; what is none is ignored, what lies beyond is refused."""
    assert span_of(asked, 10) == span


def test_an_empty_file_has_no_ranges():
    """No byte of an empty file can be asked for."""
    assert [span_of(asked, 0) for asked in ("bytes=0-", "bytes=0-0", "bytes=-1")] == [NOTHING] * 3


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("rows.jsonl", 'attachment; filename="rows.jsonl"'),
        ("../../etc/passwd", 'attachment; filename="passwd"'),
        ("C:\\boot.ini", 'attachment; filename="boot.ini"'),
        (".bashrc", 'attachment; filename="bashrc"'),
        ("..", 'attachment; filename="file"'),
        ("a/", 'attachment; filename="file"'),
        ('a"b', "attachment; filename=\"a_b\"; filename*=UTF-8''a%22b"),
        ("zwölf.jsonl", "attachment; filename=\"zw_lf.jsonl\"; filename*=UTF-8''zw%C3%B6lf.jsonl"),
    ],
)
def test_names_to_save_under(name, header):
    """A file is saved under a plain name in one folder, whatever it is called."""
    assert disposition(name) == header
