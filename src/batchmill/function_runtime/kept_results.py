"""Keeps what user code returned in a form that nothing it does later can change.

A function may return the same dict or array each time, or go on writing to it. So a result becomes text as soon as it
is returned, while its call counts as running: code of the result itself that hangs or dies is blamed on its row.
"""

from __future__ import annotations

import contextlib

from . import installed
from .requests import bad_return
from .values import SIMPLE, Unserializable, Writer, are_plain

DUMP_ERRORS = (ValueError, TypeError, OverflowError, RecursionError)
RESULT_BYTES_MAX = 1 << 30  # of one result as JSON: what a line of a dataset may have
_FIXED = SIMPLE - {str}  # numbers, bools and None
_BYTES = frozenset([bytes])
_SIZED = frozenset([str, bytes])
_UNSIZED = _FIXED | {list}


class Unkept(Exception):
    """A result has no form; `error` is that of its row."""

    def __init__(self, error):
        super().__init__(error)
        self.error = error


class ResultKeeper:
    """
    Kept results are numbers, bools, None, and JSON as bytes; for columns also texts, and lists of all these.

    Args:
        error_of: makes the error of a row from an exception of user code.
    """

    def __init__(self, error_of):
        self._error_of = error_of
        self._is_plain = False  # whether the latest results were: then the next ones are written without a look first
        self.size_bytes = 0  # of what was kept, until somebody sets it to 0

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
            write = _copied_array
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
                    if type(values[row]) is bytes:
                        values[row] = self._keep_or_fail(ask, row, next(results), text_of_result)
        self._measure(ask, first, values[first:end])

    def keep_all(self, ask, first, results):
        """Keep the results of consecutive rows; None stands for those in `ask.errors`."""
        if ask.is_exact or _FIXED.issuperset(map(type, results)):
            return results
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
        sizes = list(map(len, kept)) if kinds == _BYTES else [len(v) if type(v) in _SIZED else 0 for v in kept]
        self.size_bytes += sum(sizes)
        if max(sizes) > RESULT_BYTES_MAX:
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


def _for_column(result):
    kind = type(result)
    if kind is str:
        return result
    if kind is list and SIMPLE.issuperset(map(type, result)):
        return result[:]
    return text_of_result(result)


def _copied_array(result):
    numpy = installed.loaded("numpy")
    return result.copy() if numpy is not None and type(result) is numpy.ndarray else result


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
