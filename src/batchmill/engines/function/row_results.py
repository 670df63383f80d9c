"""Turns what a function's process returns into results of rows. User code can write to that memory: all is checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from batchmill.function_runtime.row_lines import OTHER_FORM
from batchmill.types import ColumnResultBlock, Outcome, ResultBlock, Row, RowBlock, RowError, Usage
from batchmill.wire.calls import CallError
from batchmill.wire.json_bytes import DEPTH_MAX, decode, is_too_deep
from batchmill.wire.rows.forms import OpenAIForm, usage_of

MESSAGE_CHARS_MAX = 2048
SHALLOW_BYTES_MAX = 2 * DEPTH_MAX  # a result up to here cannot nest too deep

_values = msgspec.json.Decoder(list[msgspec.Raw])


def outcome_of(row: Row, body: bytes) -> Outcome:
    """The outcome of a row whose call returned this JSON."""
    if len(body) > SHALLOW_BYTES_MAX and is_too_deep(body, DEPTH_MAX):
        message = f"the function returned a value nested deeper than {DEPTH_MAX} levels"
        return Outcome(row, error=RowError("bad_return", message), status=0)
    if b'"usage"' in body and body[:1] == b"{":
        return Outcome(row, body, None, 200, usage_of(decode(body)))
    return Outcome(row, body)


def outcomes_of(rows: Sequence[Row], values: bytes, errors: dict[int, CallError]) -> list[Outcome]:
    """The outcomes of rows; `errors` by index."""
    bodies = _values.decode(values)
    if len(bodies) != len(rows):
        wrong = RowError("bad_return", f"the function's process answered {len(bodies)} of {len(rows)} rows")
        return [Outcome(row, error=wrong, status=0) for row in rows]
    if not errors and b'"usage"' not in values and len(values) <= SHALLOW_BYTES_MAX:
        return [Outcome(row, bytes(body)) for row, body in zip(rows, bodies, strict=True)]
    return [
        failed(row, errors[place]) if place in errors else outcome_of(row, bytes(body))
        for place, (row, body) in enumerate(zip(rows, bodies, strict=True))
    ]


def failed(row: Row, error: CallError) -> Outcome:
    """The outcome of a row that has no result."""
    message = error.message[:MESSAGE_CHARS_MAX].encode("utf-8", "backslashreplace").decode()
    return Outcome(row, error=RowError(error.code, message), status=0)


class OpenRows:
    """The rows of a batch that have no result yet, by their index. Results come in any order, each once."""

    def __init__(self, rows: int) -> None:
        self.count = rows
        self._done = bytearray(rows)

    @property
    def is_whole(self) -> bool:
        """Whether no row has a result."""
        return self.count == len(self._done)

    def places(self) -> list[int]:
        return [place for place, is_done in enumerate(self._done) if not is_done]

    def places_of(self, meta: dict[str, Any]) -> range | list[int]:
        """The rows that a `results` frame has. Raises: ValueError, TypeError if they are not open."""
        first, count, done = meta["first"], meta["rows"], self._done
        places = meta.get("places")
        if places is None:
            if (type(first), type(count)) != (int, int) or not (0 <= first < first + count <= len(done)):
                raise ValueError(f"results of {count} rows from row {first} on, of {len(done)}")
            if done.find(1, first, first + count) >= 0:
                raise ValueError(f"results of {count} rows from row {first} on, of which some were returned before")
            return range(first, first + count)
        if type(places) is not list or len(places) != count or {*map(type, places)} != {int}:
            raise ValueError(f"results of {count} rows at {places!r:.200}")
        if min(places) < 0 or max(places) >= len(done) or len(set(places)) < count:
            raise ValueError(f"results of {count} rows from {min(places)} to {max(places)}, of {len(done)}")
        if any(done[place] for place in places):
            raise ValueError(f"results of {count} rows from {min(places)} on, of which some were returned before")
        return places

    def close(self, places: range | list[int]) -> None:
        """Note that these rows have a result."""
        self.count -= len(places)
        if isinstance(places, range):
            self._done[places.start : places.stop] = b"\x01" * len(places)
        else:
            for place in places:
                self._done[place] = 1


class BlockResults(Struct, frozen=True):
    """The results of some rows of a block."""

    ok: list[ResultBlock] | list[ColumnResultBlock]
    failed: list[Outcome]
    other_forms: list[Row] = []  # that were not called: the worker must read them


class _Response(Struct):
    body: msgspec.Raw


class _OpenAIResult(Struct):
    response: _Response


class _TableResult(Struct):
    output: msgspec.Raw


class _TableEnd(Struct, forbid_unknown_fields=True, gc=False):
    """What follows the columns in a line of a table."""

    row: int
    output: msgspec.Raw
    error: None


_ends = msgspec.json.Decoder(list[_TableEnd])
_openai_result, _table_result = msgspec.json.Decoder(_OpenAIResult), msgspec.json.Decoder(_TableResult)


def read_results(
    block: RowBlock, rows: range | list[int], lines: bytes, errors: dict[int, CallError]
) -> BlockResults:  # fmt: skip
    """The results of some rows of a block.

    Args:
        rows: by index in the block.
        lines: one for each row that is not in `errors`.
        errors: by index in the block.

    Raises: ValueError if errors belong to other rows.
    """
    places = rows_without(errors, rows)
    texts = lines.split(b"\n")
    last = texts.pop()
    flaw = "a NUL byte" if b"\0" in lines else "an incomplete line" if last else ""
    flaw = flaw or _find_flaw(block, places, texts)
    if flaw:  # a header of a segment has NUL bytes, a line never
        error = CallError("bad_return", f"the function's process returned {flaw}")
        return BlockResults([], _failed(block, dict.fromkeys(rows, error)))
    if too_deep := _too_deep(block, places, texts):
        errors = errors | too_deep
        kept = [(place, text) for place, text in zip(places, texts, strict=True) if place not in too_deep]
        places, texts = [place for place, _ in kept], [text for _, text in kept]
        lines = b"".join([text + b"\n" for text in texts])
    ok: list[ResultBlock] = []
    if len(places):
        usage = _usage_of(block, texts) if b'"usage"' in lines else Usage()
        positions, numbers = _select(block.positions, places), _select(block.numbers, places)
        ok = [ResultBlock(lines, positions, numbers, block.lease, usage)]
    if not errors:
        return BlockResults(ok, [])
    others = [place for place, error in errors.items() if error.code == OTHER_FORM]
    failures = {place: error for place, error in errors.items() if error.code != OTHER_FORM}
    return BlockResults(ok, _failed(block, failures), _rows(block, others))


def rows_without(errors: dict[int, CallError], rows: range | list[int]) -> range | list[int]:
    """The rows that have no error. Raises: ValueError if errors belong to other rows."""
    if not errors:
        return rows
    if not errors.keys() <= set(rows):
        raise ValueError(f"errors of the rows {sorted(errors)} in results of {len(rows)} rows from row {rows[0]} on")
    return [place for place in rows if place not in errors]


def _select(numbers: Sequence[int], places: range | list[int]) -> Sequence[int]:
    if isinstance(places, range):
        return numbers[places.start : places.stop]
    return [numbers[place] for place in places]


def _failed(block: RowBlock, errors: dict[int, CallError]) -> list[Outcome]:
    places = sorted(errors)
    return [failed(row, errors[place]) for row, place in zip(_rows(block, places), places, strict=True)]


def _rows(block: RowBlock, places: Sequence[int]) -> list[Row]:
    raws = block.lines[:-1].split(b"\n")
    return [Row(block.positions[at], block.numbers[at], raws[at].strip(), block.form, block.lease) for at in places]


def _find_flaw(block: RowBlock, places: range | list[int], texts: list[bytes]) -> str:
    """What is wrong with the lines; empty if nothing is."""
    if len(texts) != len(places):
        return f"{len(texts)} lines for {len(places)} rows"
    try:
        for text in () if all(map(bytes.isascii, texts)) else texts:
            text.decode()
    except UnicodeDecodeError:
        return "bytes that are not UTF-8"
    if not isinstance(block.form, OpenAIForm):
        return _find_table_flaw(block, places, texts)
    head = b'{"id":"' + block.form.id_prefix.encode().replace(b"%", b"%%") + b'%d","custom_id":'
    heads = [head % number for number in _select(block.numbers, places)]
    return "" if all(map(bytes.startswith, texts, heads)) else "lines of other rows"


def _find_table_flaw(block: RowBlock, places: range | list[int], texts: list[bytes]) -> str:
    """As `_find_flaw`; outputs must be JSON, as gathering reads them for a table."""
    rows = block.lines[:-1].split(b"\n")
    heads = [rows[place].strip()[:-1].rstrip() for place in places]
    if not all(map(bytes.startswith, texts, heads)):
        return "lines of other rows"
    tails = [text[len(head) :] for head, text in zip(heads, texts, strict=True)]
    if b"{" in heads:  # of a row without columns, whose output follows no comma
        tails = [b"," + tail if head == b"{" else tail for head, tail in zip(heads, tails, strict=True)]
    try:
        ends = _ends.decode(b'[{"row":0' + b',{"row":0'.join(tails) + b"]") if texts else []
    except (msgspec.MsgspecError, RecursionError):
        return "results that are not JSON"
    return "" if len(ends) == len(texts) else "results that are not JSON"


def _too_deep(block: RowBlock, places: range | list[int], texts: list[bytes]) -> dict[int, CallError]:
    if not texts or max(map(len, texts)) <= SHALLOW_BYTES_MAX:
        return {}
    around = 2 if isinstance(block.form, OpenAIForm) else 1  # levels of a line around a result
    return {
        place: CallError("bad_return", f"the function returned a value nested deeper than {DEPTH_MAX} levels")
        for place, text in zip(places, texts, strict=True)
        if len(text) > SHALLOW_BYTES_MAX and is_too_deep(text, DEPTH_MAX + around)
    }


def _usage_of(block: RowBlock, texts: list[bytes]) -> Usage:
    """The tokens that results report, as replies of models do."""
    is_openai = isinstance(block.form, OpenAIForm)
    total = Usage()
    for line in texts:
        if b'"usage"' not in line:
            continue
        body = _openai_result.decode(line).response.body if is_openai else _table_result.decode(line).output
        reply = decode(bytes(body))
        usage = usage_of(reply) if isinstance(reply, dict) else None
        total = total if usage is None else total + usage
    return total
