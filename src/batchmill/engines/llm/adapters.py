"""AdapterNames: the names of adapters in an engine server, one name a folder for the life of the engine."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import Struct

from batchmill.types import AdapterStats, Usage


class Adapter(Struct, frozen=True):
    """An adapter that rows may name. Two projects may call different ones by the same name."""

    name: str  # its own
    place: str  # a directory, or the id of a model hub


class AdapterNames:
    """Gives each adapter a name in the engine: its own, or that with a number where another place has it already."""

    def __init__(self) -> None:
        self._names: dict[Adapter, str] = {}
        self._taken: set[str] = set()

    def of(self, adapter: Adapter) -> str:
        """The name in the engine's calls and replies."""
        known = self._names.get(adapter)
        if known is not None:
            return known
        name, number = adapter.name, 1
        while name in self._taken:
            number += 1
            name = f"{adapter.name}#{number}"
        self._taken.add(name)
        self._names[adapter] = name
        return name

    def restorer(self, adapter: Adapter) -> Restorer | None:
        """A filter that puts an adapter's own name into replies; None: it is there already."""
        name = self.of(adapter)
        return None if name == adapter.name else Restorer(name, adapter.name)


class Restorer:
    """Replaces the engine's name of an adapter in `model`, even if it is split over two pieces."""

    def __init__(self, name: str, own: str) -> None:
        # In JSON no text between quotes holds these bytes: its quotes would be escaped.
        self._pairs = [(_member(name, colon), _member(own, colon)) for colon in (b'"model":', b'"model": ')]
        self._most = max(len(old) for old, _ in self._pairs) - 1
        self._kept = b""

    def whole(self, data: bytes) -> bytes:
        """Filter a complete reply."""
        for old, new in self._pairs:
            data = data.replace(old, new)
        return data

    def feed(self, piece: bytes) -> bytes:
        """Filter a piece of a stream; a possible beginning of the name is kept for the next piece."""
        data = self.whole(self._kept + piece)
        keep = next((n for n in range(min(self._most, len(data)), 0, -1) if self._begins(data[-n:])), 0)
        self._kept = data[len(data) - keep :]
        return data[: len(data) - keep]

    def rest(self) -> bytes:
        """The kept bytes, at the end."""
        kept, self._kept = self._kept, b""
        return kept

    def _begins(self, tail: bytes) -> bool:
        return any(old.startswith(tail) for old, _ in self._pairs)


def _member(name: str, key: bytes) -> bytes:
    return key + msgspec.json.encode(name)


NAMES_MAX = 100
OTHERS = "other"


class _Counts(Struct, eq=False):
    rows: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    hits: int = 0
    loads: int = 0
    busy_s: float = 0.0
    in_flight: int = 0
    since: float = 0.0  # when the first of those that fly began


class AdapterCounts:
    """Counters by adapter name, for the first hundred names."""

    def __init__(self) -> None:
        self._counts: dict[str, _Counts] = {}

    def began(self, name: str, now: float) -> None:
        """Count a row or live request that is sent."""
        counts = self._of(name)
        if not counts.in_flight:
            counts.since = now
        counts.in_flight += 1

    def ended(self, name: str, now: float) -> None:
        """Count its return, with or without a reply."""
        counts = self._of(name)
        counts.in_flight -= 1
        if not counts.in_flight:
            counts.busy_s += now - counts.since

    def answered(self, name: str, usage: Usage | None, *, found: bool) -> None:
        """Count its reply; `found`: the adapter was loaded when it could have been sent."""
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
            busy_s = each.busy_s + (now - each.since if each.in_flight else 0.0)
            yield AdapterStats(
                name, each.rows, each.input_tokens, each.output_tokens, each.hits, each.loads, busy_s
            )  # fmt: skip

    def _of(self, name: str) -> _Counts:
        if name not in self._counts and len(self._counts) >= NAMES_MAX:
            name = OTHERS
        return self._counts.setdefault(name, _Counts())
