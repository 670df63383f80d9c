"""Rows that wait for their turn, or for their adapter. Pure: an order, and who may go."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Set
from itertools import count

from msgspec import Struct

from batchmill.engines.llm.adapters import Adapter
from batchmill.engines.llm.calls import Call


class _Group(Struct, eq=False):
    """The rows of one adapter, the first one first."""

    calls: list[tuple[int, Call]] = []  # a heap
    late_to: int = -1  # rows up to here could have gone, had their adapter been there


class AdapterQueue:
    """Calls in the order in which they came first; those of an adapter that is not loaded are passed over."""

    def __init__(self) -> None:
        self._groups: dict[Adapter | None, _Group] = {}
        self._numbers = count()
        self._size = 0
        self._projects: Counter[str] = Counter()  # whose calls wait

    def __len__(self) -> int:
        return self._size

    def number(self, call: Call) -> None:
        """Give a call that has come its turn, whether it waits here or elsewhere."""
        if call.turn < 0:
            call.turn = next(self._numbers)

    def push(self, call: Call) -> None:
        """A call that has come, or comes back to its old place."""
        self.number(call)
        self._projects[call.project] += 1
        group = self._groups.setdefault(call.adapter, _Group())
        heapq.heappush(group.calls, (call.turn, call))
        self._size += 1

    def pop(self, may_go: Callable[[Adapter], bool]) -> Call | None:
        """The first call that needs no adapter or whose adapter may be used."""
        free = [group for adapter, group in self._groups.items() if adapter is None or may_go(adapter)]
        if not free:
            return None
        group = min(free, key=lambda group: group.calls[0][0])
        turn, call = heapq.heappop(group.calls)
        call.found_it = turn > group.late_to
        self._drop_empty(call.adapter)
        self._left([call])
        return call

    def mark_late(self, adapters: Iterable[Adapter], room: int) -> int:
        """There is room for so many rows of these adapters, which are not loaded. Returns how many wait for that."""
        left = room
        for adapter in adapters:
            if not left:
                break
            group = self._groups[adapter]
            late = heapq.nsmallest(left, (turn for turn, _ in group.calls))
            group.late_to = max(group.late_to, late[-1])
            left -= len(late)
        return room - left

    def take_all(self, adapter: Adapter) -> list[Call]:
        """Every call of an adapter, in order: none of them can be made."""
        group = self._groups.pop(adapter, _Group())
        calls = [call for _, call in sorted(group.calls, key=lambda one: one[0])]
        self._left(calls)
        return calls

    def take_of(self, projects: Set[str]) -> list[Call]:
        """Every call of some projects, in order."""
        taken = []
        for adapter, group in list(self._groups.items()):
            found = [one for one in group.calls if one[1].project in projects]
            if found:
                group.calls = [one for one in group.calls if one[1].project not in projects]
                heapq.heapify(group.calls)
                self._drop_empty(adapter)
                taken += found
        calls = [call for _, call in sorted(taken, key=lambda one: one[0])]
        self._left(calls)
        return calls

    def projects(self) -> set[str]:
        """Whose calls wait."""
        return set(self._projects)

    def _left(self, calls: Iterable[Call]) -> None:
        for call in calls:
            self._size -= 1
            self._projects[call.project] -= 1
            if not self._projects[call.project]:
                del self._projects[call.project]

    def adapters(self) -> list[Adapter]:
        """Those that rows wait for, in the order of their first rows."""
        waiting = [(group.calls[0][0], adapter) for adapter, group in self._groups.items() if adapter is not None]
        return [adapter for _, adapter in sorted(waiting, key=lambda one: one[0])]

    def first_turn(self, adapter: Adapter) -> int:
        return self._groups[adapter].calls[0][0]

    def waiting(self, adapter: Adapter) -> int:
        """Rows of an adapter."""
        return len(self._groups[adapter].calls) if adapter in self._groups else 0

    def _drop_empty(self, adapter: Adapter | None) -> None:
        if not self._groups[adapter].calls:
            del self._groups[adapter]


ROUNDS_MAX = 16  # so many groups of a project's suspects at most; those of a group that dies are tried one by one
LAST_GROUP_MAX = 8  # rows of a project beyond its budget that go together


class Trials:
    """The rows that wait to be tried."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __len__(self) -> int:
        return len(self.calls)

    def add(self, call: Call) -> None:
        self.calls.append(call)

    def take(self, adapter: Adapter) -> list[Call]:
        """Those of an adapter: none of them can be made."""
        taken = [call for call in self.calls if call.adapter == adapter]
        self.calls = [call for call in self.calls if call.adapter != adapter]
        return taken

    def projects(self) -> set[str]:
        return {call.project for call in self.calls}

    def adapters(self) -> list[Adapter]:
        return [call.adapter for call in self.calls if call.adapter is not None]

    def next_group(self, *, is_last: Callable[[str], bool], may_go: Callable[[Call], bool]) -> list[Call]:
        """The rows to try now; they stay until `start`. `is_last`: of a project whose turn comes after others'."""
        waiting = sorted(self.calls, key=lambda call: (is_last(call.project), not call.is_prime, call.turn))
        first = next((call for call in waiting if may_go(call)), None)
        if first is None or first.is_prime:
            return [] if first is None else [first]
        alike = [call for call in waiting if call.project == first.project and not call.is_prime]
        most = math.ceil(len(alike) / ROUNDS_MAX)
        if is_last(first.project):
            most = LAST_GROUP_MAX if not first.tracked.deaths else most
        return [call for call in alike if call.adapter == first.adapter][: max(1, most)]

    def start(self, group: list[Call]) -> None:
        """They are in flight."""
        for call in group:
            self.calls.remove(call)
