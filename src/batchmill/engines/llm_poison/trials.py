"""Rows that were in flight when a server died: which of them are tried next, with nothing beside them. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable

from batchmill.engines.adapter_names import Adapter
from batchmill.engines.llm_calls import Call

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
