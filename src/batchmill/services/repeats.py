"""Orders that arrive again: known by the caller's own key, or by being the same to the byte.

Clients repeat their POSTs blindly when a reply is late or lost. `once_for` names an order, `RepeatedOrders` says which
job it is already, and hears from `server/delivery.py` that its reply has arrived. Which job an order becomes is written
in the transaction that stores the job (`jobs/ledger/records.py`). Source: draft-ietf-httpapi-idempotency-key-header.
"""

from __future__ import annotations

import hashlib
import re

import msgspec
import sqlalchemy as sa

from batchmill.errors import InvalidInput
from batchmill.jobs.ledger import records
from batchmill.ports import Clock
from batchmill.services.remote import task_records
from batchmill.store.database import Database
from batchmill.types import Caller, Once

KEY_CHARS_MAX = 255
AGAIN_S = 900.0  # a client that says "I have asked before" means an order it sent at most so long ago
_KEY = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]{0,253}[\x21-\x7e])?")


class RepeatedOrders:
    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock

    async def find(self, once: Once) -> str | None:
        """The job that this order is already; None: it would be a new one. Raises: Conflict."""
        return await records.known(self._database, once, self._clock.now())

    async def delivered(self, once: Once) -> None:
        """The reply to this order has arrived: the same order without a key is another one from now on."""
        if once.blind:
            await self._database.write(_delivered, once.key, self._clock.now())


def _delivered(db: sa.Connection, key: str, now: float) -> None:
    records.answered(db, key, now)
    task_records.forget_order(db, key)


def once_for(
    caller: Caller,
    route: str,
    raw_body: bytes,
    idempotency_key: str | None,
    retry_count: int,
    *,
    arrived: float | None = None,
) -> Once:
    """The name under which this order would be known again.

    Args:
        route: method and path template; the same key on two routes is two orders.
        retry_count: how often the client says it has sent this before (`x-stainless-retry-count`).
        arrived: when it came, in seconds since the epoch.

    Raises: InvalidInput for a key that is empty, too long or not printable.
    """
    fingerprint = hashlib.sha256(raw_body).hexdigest()
    who = [caller.project, caller.key, route]
    if idempotency_key is not None:
        return Once(_name("key", [*who, _checked(idempotency_key)]), fingerprint)
    again_s = AGAIN_S if retry_count > 0 else None
    return Once(_name("blind", [*who, fingerprint]), fingerprint, blind=True, again_s=again_s, arrived=arrived)


def retry_count_of(header: str | None) -> int:
    """What `x-stainless-retry-count` says; 0 where it is absent or no count, for it only ever adds safety."""
    return int(header) if header is not None and re.fullmatch(r"[0-9]{1,4}", header) else 0


def _checked(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise InvalidInput(
            f"Idempotency-Key must be 1 to {KEY_CHARS_MAX} printable ASCII characters, not {key[:40]!r}",
            code="invalid_idempotency_key",
        )
    return key


def _name(kind: str, parts: list[str | None]) -> str:
    """Hashed: of bounded length, and no caller can write another's."""
    return f"{kind}:{hashlib.sha256(msgspec.json.encode(parts)).hexdigest()}"
