"""Ids of a model hub that rows name as their model: adapters that are fetched before the rows run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import translate

ADAPTERS_MAX = 10_000  # that the rows of one dataset may have fetched
ID_CHARS_MAX = 190  # with its version it is the name of an adapter
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_HUB_ID = re.compile(f"{_PART}/{_PART}")


def is_hub_id(name: str) -> bool:
    """Whether a model hub may have something under this name: OWNER/NAME."""
    return len(name) <= ID_CHARS_MAX and _HUB_ID.fullmatch(name) is not None


class HubPatterns:
    """Which model an adapter is for, by the patterns of their ids; of two that match the first counts."""

    def __init__(self, patterns: Iterable[tuple[str, int, int]]) -> None:
        """(pattern, number of the model, number of its target) each, as in SealOrder."""
        self._patterns = [(re.compile(translate(text)), (model, target)) for text, model, target in patterns]

    def base_of(self, name: str) -> tuple[int, int] | None:
        """The model, and the target, of the base that an adapter of this id is for; None: it may not be fetched."""
        if self._patterns and is_hub_id(name):
            for pattern, base in self._patterns:
                if pattern.fullmatch(name):
                    return base
        return None


class WantedAdapters:
    """Those that rows name. Beyond ADAPTERS_MAX no more are noted: the dataset is refused then."""

    def __init__(self, patterns: Sequence[tuple[str, int, int]]) -> None:
        self._patterns = HubPatterns(patterns)
        self._found: dict[str, tuple[int, int]] = {}
        self._new: list[str] = []

    def base_of(self, name: str) -> tuple[int, int] | None:
        """As `HubPatterns.base_of`; the name is noted."""
        found = self._found.get(name)
        if found is not None:
            return found
        base = self._patterns.base_of(name)
        if base is not None and len(self._found) <= ADAPTERS_MAX:
            self._found[name] = base
            self._new.append(name)
        return base

    def new(self) -> list[str]:
        """What was noted since the last call."""
        names, self._new = self._new, []
        return names
