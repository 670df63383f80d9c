"""Rows of a job that arrive as lines of the dataset, and leave as lines of the result file.

A block of rows is parsed once, here, and its results are written once: neither side handles an object for each row.
It is parsed in stages, so that the rows of one are still in the processor's cache when they are called and freed.
"""

from __future__ import annotations

import json

from . import installed
from .installed import msgspec
from .kept_results import texts_of

OPENAI, TABLE = "openai_lines", "table_lines"  # layouts of an `ask`
LAYOUTS = frozenset([OPENAI, TABLE])
INFER = "/infer"  # how the path of a call with tensors ends
ADDRESSED = frozenset(["data"])  # the field of a call whose path names its function
OTHER_FORM = "other_form"  # the error of a row that may be in the form of a live call: the worker reads it
_READ_ERRORS = (ValueError, TypeError, RecursionError, KeyError)

if hasattr(getattr(getattr(msgspec, "json", None), "Decoder", None), "decode_lines"):  # older ones lack it

    class _OpenAILine(msgspec.Struct, gc=False):
        custom_id: msgspec.Raw
        url: str
        body: dict

    _openai_line = msgspec.json.Decoder(_OpenAILine)
    _table_line = msgspec.json.Decoder(dict)
else:
    _openai_line = _table_line = None


STAGE_BYTES = 64 * 1024  # of lines that are parsed together
LINE_END_BYTES = 4096  # searched at once for the end of a line


def stages_of(data):
    """The lines of a block in pieces of about STAGE_BYTES, as memoryviews."""
    data, at = memoryview(data), 0
    while at < len(data):
        end = _line_end(data, at + STAGE_BYTES)
        yield data[at:end]
        at = end


def _line_end(data, at):
    """The place after the first line end from `at` on."""
    while at < len(data):
        found = bytes(data[at : at + LINE_END_BYTES]).find(b"\n")
        if found >= 0:
            return at + found + 1
        at += LINE_END_BYTES
    return len(data)


def read_lines(meta, data, first=0):
    """(rows as dicts, errors by row, a LineWriter). A row that is not called is None and has an error.

    Args:
        data: lines of the request `meta`, all or some.
        first: the number of the first of them in the request; errors are numbered from there.
    """
    if meta["layout"] == TABLE:
        data = bytes(data)
        rows, errors = _read_all(data, _table_line, _read_table, first)
        return rows, errors, TableLines(first, data)
    lines, errors = _read_all(data, _openai_line, _read_openai, first)
    rows = [None if line is None else line.body for line in lines]
    for place in _rows_in_forms(lines, rows, frozenset(meta["urls"]), frozenset(meta["forms"])):
        errors[first + place] = [OTHER_FORM, "", ""]
        rows[place] = None
    for name in meta["drop"]:
        for row in rows:
            if row is not None:
                row.pop(name, None)
    numbers = range(meta["first"], meta["first"] + meta["rows"]) if "first" in meta else meta["numbers"]
    ids = [None if line is None else line.custom_id for line in lines]
    return rows, errors, OpenAILines(first, meta["prefix"], numbers[first : first + len(rows)], ids)


def _rows_in_forms(lines, rows, urls, forms):
    """The rows that may be in the form of a live call: by their URL, or a field of their body.

    Args:
        urls: in which no path of a live call is found.
    """
    if None not in rows:
        others = {line.url for line in lines} - urls
        words = forms | ADDRESSED if others else forms
        has_words = bool(words) and not words.isdisjoint(set().union(*rows))
        if not has_words and not any(url.endswith(INFER) for url in others):
            return []
    return [
        number
        for number, (line, row) in enumerate(zip(lines, rows))
        if row is not None and _may_be_in_form(line.url, row, urls, forms)
    ]


def _may_be_in_form(url, row, urls, forms):
    if url not in urls and (url.endswith(INFER) or not ADDRESSED.isdisjoint(row)):
        return True
    return not forms.isdisjoint(row)


def _read_all(data, decoder, read_one, first):
    """(what each line holds, errors by row, numbered from `first`)."""
    if decoder is not None:
        try:
            return decoder.decode_lines(data), {}
        except _READ_ERRORS:
            pass  # found line by line
    found, errors = [], {}
    for row, line in enumerate(bytes(data)[:-1].split(b"\n"), first):
        try:
            found.append(read_one(line) if decoder is None else decoder.decode(line))
        except _READ_ERRORS as error:
            errors[row] = ["invalid_json", f"the row cannot be read: {error}", ""]
            found.append(None)
    return found, errors


def _read_table(line):
    row = json.loads(line)
    if type(row) is not dict:
        raise ValueError(f"it is not an object, but {type(row).__name__}")
    return row


class _Line:
    __slots__ = ("custom_id", "url", "body")


def _read_openai(text):
    row, line = _read_table(text), _Line()
    line.custom_id, line.url, line.body = installed.dump(row["custom_id"]), row["url"], row["body"]
    if type(line.body) is not dict:
        raise ValueError("its body is not an object")
    return line


class LineWriter:
    """Writes results as lines of the result file.

    Args:
        first: the number of its first row in the request.
    """

    def __init__(self, first):
        self._first = first

    is_arrow = False

    def write(self, values, errors, rows):
        """The lines of rows, without those in `errors`.

        Rows whose result has no JSON form get an error.
        """
        return b"".join(self._lines(*texts_of(values, errors, rows)))

    def _lines(self, rows, texts):
        raise NotImplementedError


class OpenAILines(LineWriter):
    """
    Args:
        prefix: of a line's id, before the row's number.
        numbers: of the rows, in the dataset.
        ids: their `custom_id` as JSON.
    """

    def __init__(self, first, prefix, numbers, ids):
        super().__init__(first)
        self._numbers, self._ids = numbers, ids
        self._fixed = (
            b'{"id":"' + prefix.encode(),
            b'","custom_id":',
            b',"response":{"status_code":200,"request_id":"req_',
            b'","body":',
            b'},"error":null}\n',
        )

    def _lines(self, rows, texts):
        first = self._first
        if type(rows) is range:
            some = slice(rows.start - first, rows.stop - first)
            numbers, ids = self._numbers[some], self._ids[some]
        else:
            numbers, ids = [self._numbers[row - first] for row in rows], [self._ids[row - first] for row in rows]
        digits = list(map(b"%d".__mod__, numbers))
        return _interleaved(len(texts), self._fixed, (digits, ids, digits, texts))


def _interleaved(count, fixed, varying):
    """The pieces of `count` lines: a fixed one, one of each row, a fixed one, and so on."""
    width = len(fixed) + len(varying)
    pieces = [b""] * (count * width)
    for place, piece in enumerate(fixed):
        pieces[2 * place :: width] = [piece] * count
    for place, column in enumerate(varying):
        pieces[2 * place + 1 :: width] = column
    return pieces


class TableLines(LineWriter):
    """Writes each row's own columns, then its output."""

    def __init__(self, first, data):
        super().__init__(first)
        self._data, self._heads = data, None

    def _lines(self, rows, texts):
        if self._heads is None:
            self._heads = [line.strip()[:-1].rstrip() for line in self._data[:-1].split(b"\n")]
        heads = map(self._heads.__getitem__, [row - self._first for row in rows])
        return [
            b'%b%b"output":%b,"error":null}\n' % (head, b"" if head == b"{" else b",", text)
            for head, text in zip(heads, texts)
        ]
