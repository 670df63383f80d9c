"""What became of the rows and live requests of each adapter of an engine. Pure: told what happens and when."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from batchmill.types import AdapterStats, Usage

NAMES_MAX = 100
OTHERS = "other"


class _Counts(Struct, eq=False):
    rows: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    hits: int = 0
    loads: int = 0
    busy_s: float = 0.0
    flying: int = 0
    since: float = 0.0  # when the first of those that fly began


class AdapterCounts:
    """By own name, the first hundred names each for itself."""

    def __init__(self) -> None:
        self._counts: dict[str, _Counts] = {}

    def began(self, name: str, now: float) -> None:
        """A row or live request has been sent."""
        counts = self._of(name)
        if not counts.flying:
            counts.since = now
        counts.flying += 1

    def ended(self, name: str, now: float) -> None:
        """It is back, answered or not."""
        counts = self._of(name)
        counts.flying -= 1
        if not counts.flying:
            counts.busy_s += now - counts.since

    def answered(self, name: str, usage: Usage | None, *, found: bool) -> None:
        """It has its answer; `found`: the adapter was there when it could have gone."""
        counts = self._of(name)
        counts.rows += 1
        counts.hits += found
        if usage is not None:
            counts.input_tokens += usage.input_tokens
            counts.output_tokens += usage.output_tokens

    def loaded(self, name: str) -> None:
        self._of(name).loads += 1

    def stats(self, now: float) -> list[AdapterStats]:
        return list(self._stats(now))

    def _stats(self, now: float) -> Iterator[AdapterStats]:
        for name, each in self._counts.items():
            busy_s = each.busy_s + (now - each.since if each.flying else 0.0)
            yield AdapterStats(
                name, each.rows, each.input_tokens, each.output_tokens, each.hits, each.loads, busy_s
            )  # fmt: skip

    def _of(self, name: str) -> _Counts:
        if name not in self._counts and len(self._counts) >= NAMES_MAX:
            name = OTHERS
        return self._counts.setdefault(name, _Counts())
