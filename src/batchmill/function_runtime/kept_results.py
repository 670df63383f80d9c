"""Keeps what user code returned in a form that nothing it does later can change.

A function may return the same dict or array each time, or go on writing to it. So a result becomes text as soon as it
is returned, while its call counts as running: code of the result itself that hangs or dies is blamed on its row.
"""

from __future__ import annotations

import contextlib

from . import installed
from .requests import bad_return
from .values import DEPTH_MAX, SIMPLE, Unserializable, Writer, are_plain

DUMP_ERRORS = (ValueError, TypeError, OverflowError, RecursionError)
RESULT_BYTES_MAX = 1 << 30  # of one result as JSON: what a line of a dataset may have
_FIXED = SIMPLE - {str}  # numbers, bools and None
_BYTES = frozenset([bytes])
_SIZED = frozenset([str, bytes])
_UNSIZED = _FIXED | {list}
_CONTAINERS = frozenset([dict, list, tuple])


class Unkept(Exception):
    """A result has no form; `error` is that of its row."""

    def __init__(self, error):
        super().__init__(error)
        self.error = error


class ResultSerializer:
    """
    Kept results are numbers, bools, None, and JSON as bytes; for columns also texts, and lists of all these.

    Args:
        error_of: makes the error of a row from an exception of user code.
    """

    def __init__(self, error_of):
        self._error_of = error_of
        self._is_plain = False  # whether the latest results were: then the next ones are written without a look first
        self.size_bytes = 0  # of what was kept, until the reader sets it to 0

    def how(self, ask, check=None):
        """(types of results that are kept as they are, what writes any other one and may raise anything).

        The latter is None if all are kept as they are.

        Args:
            check: what results go through first, if anything; it may raise.
        """
        write = None
        if ask.leaves_as_arrow:
            write = _for_column
        elif not ask.is_exact:
            write = installed.dump if self._is_plain and check is None else text_of_result
        elif ask.rows > 1:
            write = _copied
        fixed = SIMPLE if ask.leaves_as_arrow else _FIXED
        if check is None:
            return fixed, write

        def check_and_write(result):
            try:
                value = check(result)
            except Exception as error:  # the result's own code may run here
                raise Unkept(bad_return(error)) from None
            return value if write is None or type(value) in fixed else write(value)

        return frozenset(), check_and_write

    def rewrite(self, ask, row, result, error):
        """The text of a result that was refused with this error; None if its row has an error now."""
        if isinstance(error, DUMP_ERRORS):
            return self._keep_or_fail(ask, row, result, text_of_result)
        ask.errors[row] = error.error if isinstance(error, Unkept) else self._error_of(error)
        return None

    def end_run(self, ask, first, end, written):
        """Check the results of rows that were called one after another; those that need another text get it.

        Args:
            written: the results behind the bytes among them, in their order.
        """
        values = ask.values
        if written and not (ask.is_exact or ask.leaves_as_arrow):
            was_plain, self._is_plain = self._is_plain, are_plain(written)
            if was_plain and not self._is_plain:
                results = iter(written)
                for row in range(first, end):
                    if type(values[row]) is bytes and _is_unchanged(result := next(results), values[row]):
                        values[row] = self._keep_or_fail(ask, row, result, text_of_result)
        self._measure(ask, first, values[first:end])

    def keep_all(self, ask, first, results):
        """Keep the results of consecutive rows; None stands for those in `ask.errors`."""
        if _FIXED.issuperset(map(type, results)):
            return results
        if ask.is_exact:
            return [_copied(each) for each in results] if ask.left > len(results) else results
        kept, write = None, _for_column if ask.leaves_as_arrow else text_of_result
        if not ask.leaves_as_arrow and are_plain(results):
            with contextlib.suppress(MemoryError, *DUMP_ERRORS):  # found row by row
                kept = list(map(installed.dump, results))
        if kept is None:
            rows = range(first, first + len(results))
            kept = [self._keep_or_fail(ask, row, result, write) for row, result in zip(rows, results)]
        self._measure(ask, first, kept)
        return kept

    def _measure(self, ask, first, kept):
        """Count the bytes of kept results. One that is too large is an error of its row."""
        kinds = set(map(type, kept))
        if _UNSIZED.issuperset(kinds) or ask.is_exact:
            return
        sizes = map(len, kept) if kinds == _BYTES else [len(v) if type(v) in _SIZED else 0 for v in kept]
        size = sum(sizes)
        self.size_bytes += size
        if size > RESULT_BYTES_MAX:
            sizes = [len(v) if type(v) in _SIZED else 0 for v in kept]
            for place, size in enumerate(sizes):
                if size > RESULT_BYTES_MAX:
                    message = f"the result has {size} bytes, and may have {RESULT_BYTES_MAX}"
                    ask.errors[first + place] = ["bad_return", message, ""]
                    ask.values[first + place] = kept[place] = None

    def _keep_or_fail(self, ask, row, result, write):
        if type(result) in _FIXED:
            return result
        try:
            return write(result)
        except Unkept as unkept:
            ask.errors[row] = unkept.error
        except MemoryError as error:
            ask.errors[row] = self._error_of(error)
        return None


def _is_unchanged(result, text):
    """Whether a result still is what was written. If the function has changed it since, only the text has its value."""
    try:
        return installed.dump(result) == text
    except DUMP_ERRORS:
        return False


def _for_column(result):
    kind = type(result)
    if kind is str:
        return result
    if kind is list and SIMPLE.issuperset(map(type, result)):
        return result[:]
    return text_of_result(result)


def _copied(result, path=()):
    """A copy of a result: its dicts, lists and arrays may be filled again for the next call."""
    kind, numpy = type(result), installed.loaded("numpy")
    if numpy is not None and kind is numpy.ndarray:
        return result.copy()
    if kind not in _CONTAINERS or id(result) in path or len(path) == DEPTH_MAX:  # what is too deep is refused later
        return result
    path = (*path, id(result))
    if kind is dict:
        return {name: _copied(each, path) for name, each in result.items()}
    return kind(result) if SIMPLE.issuperset(map(type, result)) else kind([_copied(each, path) for each in result])


def text_of_result(value):
    """The JSON of any result. Raises: Unkept, MemoryError."""
    try:
        return installed.dump(value if are_plain((value,)) else Writer().value(value))
    except MemoryError:
        raise
    except BaseException as error:  # what runs here may be the result's own code
        raise Unkept(bad_return(error)) from None


def texts_of(values, errors, rows):
    """(rows that have a result, its JSON) of kept values, or of values that only we hold; others get an error."""
    if errors:
        kept = [(row, value) for row, value in zip(rows, values) if row not in errors]
        rows, values = [row for row, _ in kept], [value for _, value in kept]
    kinds = set(map(type, values))
    if kinds == {bytes}:
        return rows, values
    try:
        if bytes in kinds:
            return rows, [value if type(value) is bytes else installed.dump(value) for value in values]
        return rows, list(map(installed.dump, values))
    except DUMP_ERRORS:  # a number without end, text that is not UTF-8: found row by row
        done, texts = [], []
    for row, value in zip(rows, values):
        try:
            texts.append(value if type(value) is bytes else installed.dump(Writer().value(value)))
            done.append(row)
        except (Unserializable, *DUMP_ERRORS) as error:
            errors[row] = bad_return(error)
    return done, texts
