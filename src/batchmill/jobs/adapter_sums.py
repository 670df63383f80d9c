"""What became of the rows of each adapter, summed over all workers of a model, those that have ended too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from batchmill.types import AdapterStats

ADAPTERS_MAX = 1000  # told apart, of all models together
OTHER = "other"  # what all further ones are counted under


class AdapterSums:
    """Counters that only grow, since this process began."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], AdapterStats] = {}

    @property
    def by_adapter(self) -> Mapping[tuple[str, str], AdapterStats]:
        """(model, own name) -> its sums."""
        return self._sums

    def add(self, model: str, before: Sequence[AdapterStats], now: Sequence[AdapterStats]) -> None:
        """What one worker says, and what the same one said the last time."""
        earlier = {each.name: each for each in before}
        for each in now:
            known = earlier.get(each.name)
            if known is None or each.rows < known.rows or each.loads < known.loads:  # its engine began anew
                known = AdapterStats(each.name)
            if each != known:
                self._add(model, each, known)

    def _add(self, model: str, now: AdapterStats, before: AdapterStats) -> None:
        key = model, now.name
        if key not in self._sums and len(self._sums) >= ADAPTERS_MAX:
            key = model, OTHER
        total = self._sums.get(key) or AdapterStats(key[1])
        self._sums[key] = replace(
            total,
            rows=total.rows + now.rows - before.rows,
            input_tokens=total.input_tokens + now.input_tokens - before.input_tokens,
            output_tokens=total.output_tokens + now.output_tokens - before.output_tokens,
            hits=total.hits + now.hits - before.hits,
            loads=total.loads + now.loads - before.loads,
            busy_s=total.busy_s + now.busy_s - before.busy_s,
        )
