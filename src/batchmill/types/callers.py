"""Who is asking, and what they may do."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class Scope(StrEnum):
    """What a key may be used for. Each holds those before it."""

    READ = "read"  # look at files, jobs, results and models
    SUBMIT = "submit"  # upload, run, steer one's own jobs, call models
    ADMIN = "admin"  # keys, webhooks, and everything of every project's server
    DEPLOY = "deploy"  # bring code that runs as the server's user: only who runs the machine makes such a key


class Caller(Struct, frozen=True):
    """Who is asking: a project by one of its keys, or anybody on this machine where there are no keys."""

    project: str
    scope: Scope
    key: str | None = None  # its public id
    models: frozenset[str] | None = None  # names it may use; None: all that the project may
    requests_per_minute: int | None = None
    # Public ids of the keys that minted its own, and their rates, the first of them first: they pay for it too.
    minted_by: tuple[tuple[str, int | None], ...] = ()
    expires: float | None = None  # when its key ends; None: never

    @property
    def in_words(self) -> str:
        """Who it is, for those who ask later what became of something."""
        return "somebody without a key" if self.key is None else f"the key {self.key}"

    def may(self, scope: Scope) -> bool:
        order = list(Scope)
        return order.index(self.scope) >= order.index(scope)
