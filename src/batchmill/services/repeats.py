"""Repeated job orders: recognized by the caller's idempotency key, or by an identical body.

Clients repeat a POST when its reply is late or lost. `once_for` makes the identity of an order. `RepeatedOrders` looks
up its job, and `server/delivery.py` reports to it when the reply was delivered. The transaction that stores a job also
stores the order (`jobs/ledger/records.py`). Source: draft-ietf-httpapi-idempotency-key-header.
"""

from __future__ import annotations

import hashlib
import re

import msgspec
import sqlalchemy as sa

from batchmill.errors import InvalidInput
from batchmill.jobs.ledger import records
from batchmill.ports.clock import Clock
from batchmill.services.remote import task_records
from batchmill.store.sql.database import Database
from batchmill.types import Caller, Once

KEY_CHARS_MAX = 255
AGAIN_S = 900.0  # a client that marks its request as a retry sent the first one at most so long ago
_KEY = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]{0,253}[\x21-\x7e])?")


class RepeatedOrders:
    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock

    async def find(self, once: Once) -> str | None:
        """Return the job of a repeated order; None for a new order. Raises: Conflict."""
        return await records.known(self._database, once, self._clock.now())

    async def mark_delivered(self, once: Once) -> None:
        """Record that the reply was delivered. From now on the same order without a key is a new order."""
        if once.blind:
            self._database.write_soon(_delivered, once.key, self._clock.now())  # orders that come later see it


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
    """Return the identity of an order, by which a repetition is recognized.

    Args:
        route: method and path template; the same key on two routes is two orders.
        retry_count: how often the client says it has sent this before (`x-stainless-retry-count`).
        arrived: when the request came, in seconds since the epoch.

    Raises: InvalidInput for a key that is empty, too long or not printable.
    """
    fingerprint = hashlib.sha256(raw_body).hexdigest()
    scope = [caller.project, caller.key, route]
    if idempotency_key is not None:
        return Once(_name("key", [*scope, _checked(idempotency_key)]), fingerprint)
    again_s = AGAIN_S if retry_count > 0 else None
    return Once(_name("blind", [*scope, fingerprint]), fingerprint, blind=True, again_s=again_s, arrived=arrived)


def retry_count_of(header: str | None) -> int:
    """Read `x-stainless-retry-count`. Returns 0 if it is absent or invalid: it is only an extra safeguard."""
    return int(header) if header is not None and re.fullmatch(r"[0-9]{1,4}", header) else 0


def _checked(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise InvalidInput(
            f"Idempotency-Key must be 1 to {KEY_CHARS_MAX} printable ASCII characters, not {key[:40]!r}",
            code="invalid_idempotency_key",
        )
    return key


def _name(kind: str, parts: list[str | None]) -> str:
    """Return a hash of the parts: it has a fixed length, and one caller cannot produce the name of another's order."""
    return f"{kind}:{hashlib.sha256(msgspec.json.encode(parts)).hexdigest()}"
