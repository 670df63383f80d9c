"""Quarantine: requests that crashed engines, and the projects of the crashes; shared by all workers of a model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import sqlalchemy as sa
from msgspec.structs import replace

from batchmill.config import QuarantineEntry
from batchmill.errors import BatchmillError, InvalidInput
from batchmill.ports.clock import Clock
from batchmill.store.sql.database import Database
from batchmill.store.sql.tables import quarantine
from batchmill.types.models import BUDGET_WINDOW_S, Charge, Poison, Suspect
from batchmill.wire.messages import Charged, Learn, Suspected

log = logging.getLogger("batchmill.quarantine")

CHARGES_MAX = 1_000  # of one model; the oldest are dropped
SHOWN_CHARS = 64  # of an ambiguous digest


class Quarantine:
    """
    Args:
        database: where it is stored; None: in memory only.
    """

    def __init__(
        self, clock: Clock, database: Database | None = None, settings: QuarantineEntry = QuarantineEntry()
    ) -> None:
        self._clock, self._database, self.settings = clock, database, settings
        self._suspects: dict[str, Suspect] = {}  # digest -> of any model, the oldest first
        self._charges: dict[str, list[Charge]] = {}  # model -> of the last hour
        self._writing: set[asyncio.Task[None]] = set()
        self._listeners: list[Callable[[str, Learn], None]] = []

    async def load(self) -> None:
        """Read the quarantine from the database."""
        if self._database is not None:
            for suspect in await self._database.read(_read_all):
                self._suspects[suspect.digest] = suspect
        self._forget_old()

    def poison(self, model: str) -> Poison:
        """The quarantined requests that engines of a base model get."""
        self._forget_old()
        return Poison(
            [each for each in self._suspects.values() if each.model == model],
            list(self._charges.get(model, ())),
            self.settings.deaths_per_hour,
        )

    def record(self, model: str, message: Suspected | Charged) -> None:
        """Record a worker's report about a base model."""
        match message:
            case Suspected(suspect):
                self.suspect(model, suspect)
            case Charged(charge, is_taken_back):
                self.charge(model, charge, is_taken_back=is_taken_back)

    def listen(self, listener: Callable[[str, Learn], None]) -> None:
        """Call `listener` with a base model and the state for its engines, each time that changes."""
        self._listeners.append(listener)

    def _publish(self, model: str) -> None:
        for listener in self._listeners:
            listener(model, Learn(self.poison(model)))

    def suspect(self, model: str, suspect: Suspect) -> None:
        """Record that an engine died with this request alone in flight; 0 deaths: an engine has since survived it."""
        suspect = replace(suspect, model=model)
        self._suspects.pop(suspect.digest, None)
        removed = [] if suspect.deaths else [suspect.digest]
        if suspect.deaths:
            self._suspects[suspect.digest] = suspect
        while len(self._suspects) > self.settings.entries_max:
            oldest = next(iter(self._suspects))
            del self._suspects[oldest]
            removed.append(oldest)
        self._write([suspect] if suspect.deaths else [], removed)
        self._publish(model)

    def charge(self, model: str, charge: Charge, *, is_taken_back: bool = False) -> None:
        """Charge a death to a project, or take the charge back."""
        since = self._clock.now() - BUDGET_WINDOW_S
        charges = [each for each in self._charges.get(model, ()) if each.at > since and each != charge]
        self._charges[model] = [*charges, *([] if is_taken_back else [charge])][-CHARGES_MAX:]
        self._publish(model)

    def list(self, project: str | None) -> list[Suspect]:
        """The requests of a project, or of all; the oldest first."""
        self._forget_old()
        return [each for each in self._suspects.values() if project in (None, each.project)]

    def clear(self, project: str | None, digest: str | None = None) -> list[Suspect]:
        """Remove requests from the quarantine, and return them.

        Args:
            project: None: of all projects.
            digest: the beginning of one request's digest; None: all requests.

        Raises: InvalidInput (`ambiguous_request`) if several digests begin like that.
        """
        cleared = [each for each in self.list(project) if digest is None or each.digest.startswith(digest)]
        if digest is not None and len(cleared) > 1:
            raise InvalidInput(
                f"{len(cleared):,} requests begin with {digest[:SHOWN_CHARS]!r}: write more of the digest",
                code="ambiguous_request",
            )
        for each in cleared:
            del self._suspects[each.digest]
        self._write([], [each.digest for each in cleared])
        for model in {each.model for each in cleared}:
            self._publish(model)
        return cleared

    async def close(self) -> None:
        """Wait until everything is written."""
        if self._writing:
            await asyncio.wait(self._writing)

    def _forget_old(self) -> None:
        since = self._clock.now() - self.settings.expires_s
        old = [each.digest for each in self._suspects.values() if each.at < since]
        for digest in old:
            del self._suspects[digest]
        if old:
            self._write([], old)

    def _write(self, added: list[Suspect], removed: list[str]) -> None:
        if self._database is not None and (added or removed):
            task = asyncio.create_task(self._store(self._database, added, removed))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    async def _store(self, database: Database, added: list[Suspect], removed: list[str]) -> None:
        try:
            await database.write(_change, added, removed)
        except BatchmillError as error:  # it is valid in memory until this process ends
            log.warning("could not store the quarantined requests: %s", error.message)


def _read_all(db: sa.Connection) -> list[Suspect]:
    rows = db.execute(sa.select(quarantine).order_by(quarantine.c.at))
    return [Suspect(row.digest, row.project, row.url, row.deaths, row.at, row.model) for row in rows]


def _change(db: sa.Connection, added: list[Suspect], removed: list[str]) -> None:
    for digest in [*removed, *(each.digest for each in added)]:
        db.execute(quarantine.delete().where(quarantine.c.digest == digest))
    for each in added:
        db.execute(
            quarantine.insert().values(
                digest=each.digest, model=each.model, project=each.project, url=each.url, deaths=each.deaths, at=each.at
            )
        )
