"""Finds a pooler between batchmill and PostgreSQL that gives one server connection to several clients in turn.

There, the session of a connection changes between two transactions: timeouts of one client apply to another, and the
state of a lost commit cannot be settled.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from batchmill.errors import InvalidConfig

_SESSION = sa.text("SELECT pg_backend_pid()")


def refuse(place: str, connections: Sequence[sa.Connection]) -> None:
    """Raises: InvalidConfig where two open connections use one session of the server, or one uses two."""
    sessions = []
    for each in connections:
        sessions.append(each.execute(_SESSION).scalar_one())
        each.rollback()  # a pooler gives the session to the next one from here on
    first, *others = connections
    # Transactions that stay open hold their sessions, so that the first connection gets another one than before.
    again = [each.execute(_SESSION).scalar_one() for each in others]
    again.insert(0, first.execute(_SESSION).scalar_one())
    for each in connections:
        each.rollback()
    if again != sessions or len(set(sessions)) != len(connections):
        raise refusal(place)


def refusal(place: str) -> InvalidConfig:
    """The error of a database behind a pooler."""
    return InvalidConfig(
        f"{place} is reached through a pooler that shares server connections between clients (pgbouncer with pool_mode "
        "= transaction, for example): batchmill needs a session for each of its few connections. Name the PostgreSQL "
        "server itself, or a pool with pool_mode = session",
        code="database_pooled",
    )
