"""How often the workers of one model have died in a row, and whether the model is to be given up for it."""

from __future__ import annotations

from batchmill.types import Commit

DEATHS_MAX = 5  # in a row without a commit between: then the model is given up
# As many where a row that ran alone was to blame, and no row got through between: it is not the rows. And as many where
# live requests were being answered, and none got through between.
ROW_DEATHS_MAX = 30
GIVEN_UP = "worker_crashed"  # the error of a row that killed its workers


class Deaths:
    def __init__(self) -> None:
        self._plain = self._by_row = self._by_call = 0

    def count(self, *, by_row: bool, by_call: bool) -> None:
        """One more, by a row that ran alone, while live requests were being answered, or by nobody known."""
        if by_row:
            self._plain = 0
            self._by_row += 1
        elif by_call:
            self._by_call += 1
        else:
            self._plain += 1

    @property
    def most(self) -> int:
        return max(self._plain, self._by_row, self._by_call)

    @property
    def are_too_many(self) -> bool:
        return self._plain >= DEATHS_MAX or max(self._by_row, self._by_call) >= ROW_DEATHS_MAX

    @property
    def are_of_rows(self) -> bool:
        """So many by rows that it is not the rows."""
        return self._by_row >= ROW_DEATHS_MAX

    def answered(self) -> None:
        """A live request was answered."""
        self._by_call = 0

    def rest(self) -> None:
        """The replica that died rests while others go on."""
        self._plain = self._by_call = 0

    def got_through(self, commit: Commit) -> bool:
        """Rows were finished: the deaths before them were not the model's. False: one was given up."""
        self._plain = self._by_call = 0
        if not (commit.rows_ok or commit.errors.keys() - {GIVEN_UP}):
            return False
        self._by_row = 0
        return True
