"""Requests that engines died of: what owners and workers tell each other of them."""

from __future__ import annotations

from msgspec import Struct

ALONE_DEATHS_MAX = 2  # of an engine with one request alone in flight: then it is refused
BUDGET_WINDOW_S = 3600.0


class Suspect(Struct, frozen=True):
    """A request that was alone in flight when an engine died."""

    digest: str  # of the base model, the path, the adapter and the body
    project: str  # whose it was
    url: str
    deaths: int  # from ALONE_DEATHS_MAX on it is refused
    at: float  # seconds since the epoch: the last of them
    model: str = ""

    @property
    def is_refused(self) -> bool:
        return self.deaths >= ALONE_DEATHS_MAX


class Charge(Struct, frozen=True):
    """A death of an engine that is a project's."""

    project: str
    at: float  # seconds since the epoch


class Poison(Struct, frozen=True):
    """What an engine of a model knows of such requests when it starts, and whenever that changes."""

    suspects: list[Suspect] = []
    charges: list[Charge] = []  # of the last hour
    deaths_per_hour: int = 3  # of one project: beyond it, its requests run last and alone
