"""AdapterNames: the name of each adapter in an engine server. A name belongs to one path for the engine's life."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import Struct

from batchmill.types import AdapterStats, Usage


class Adapter(Struct, frozen=True):
    """An adapter that rows may name. Two projects may use the same name for different adapters."""

    name: str  # as rows have it
    path: str  # a directory, or an id on the Hugging Face hub


class AdapterNames:
    """Gives each adapter a name in the engine: its own, with a number if another path already has that name."""

    def __init__(self) -> None:
        self._names: dict[Adapter, str] = {}
        self._used: set[str] = set()

    def of(self, adapter: Adapter) -> str:
        """The name of an adapter in the engine's calls and replies."""
        assigned = self._names.get(adapter)
        if assigned is not None:
            return assigned
        name, number = adapter.name, 1
        while name in self._used:
            number += 1
            name = f"{adapter.name}#{number}"
        self._used.add(name)
        self._names[adapter] = name
        return name

    def restorer(self, adapter: Adapter) -> Restorer | None:
        """A filter that restores an adapter's own name in replies; None if the engine uses that name."""
        name = self.of(adapter)
        return None if name == adapter.name else Restorer(name, adapter.name)


class Restorer:
    """Replaces the engine's name of an adapter in `model`, even if two pieces of a stream split it."""

    def __init__(self, name: str, own: str) -> None:
        # No JSON string contains these bytes: its quotes would be escaped.
        self._pairs = [(_member(name, colon), _member(own, colon)) for colon in (b'"model":', b'"model": ')]
        self._tail_max = max(len(old) for old, _ in self._pairs) - 1
        self._tail = b""

    def restore(self, data: bytes) -> bytes:
        """Filter a complete reply."""
        for old, new in self._pairs:
            data = data.replace(old, new)
        return data

    def feed(self, piece: bytes) -> bytes:
        """Filter a piece of a stream; a possible start of the name is kept for the next piece."""
        data = self.restore(self._tail + piece)
        size = next((n for n in range(min(self._tail_max, len(data)), 0, -1) if self._begins(data[-n:])), 0)
        self._tail = data[len(data) - size :]
        return data[: len(data) - size]

    def flush(self) -> bytes:
        """Return the kept bytes at the end of the stream."""
        tail, self._tail = self._tail, b""
        return tail

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
    since: float = 0.0  # when the adapter last became busy


class AdapterCounts:
    """Counters by adapter name, for the first hundred names."""

    def __init__(self) -> None:
        self._counts: dict[str, _Counts] = {}

    def record_start(self, name: str, now: float) -> None:
        """Count a row or live request that is sent."""
        counts = self._of(name)
        if not counts.in_flight:
            counts.since = now
        counts.in_flight += 1

    def record_end(self, name: str, now: float) -> None:
        """Count the end of a row or live request, with or without a reply."""
        counts = self._of(name)
        counts.in_flight -= 1
        if not counts.in_flight:
            counts.busy_s += now - counts.since

    def record_reply(self, name: str, usage: Usage | None, *, was_loaded: bool) -> None:
        """Count a reply. `was_loaded`: the adapter was loaded when the request could have been sent."""
        counts = self._of(name)
        counts.rows += 1
        counts.hits += was_loaded
        if usage is not None:
            counts.input_tokens += usage.input_tokens
            counts.output_tokens += usage.output_tokens

    def record_load(self, name: str) -> None:
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
