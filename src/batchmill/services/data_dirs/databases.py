"""Opens the database that the configuration names, as its owner."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa

from batchmill.config import Config, DatabaseEntry
from batchmill.errors import DatabaseOwned, ModelFailed
from batchmill.models.secrets import resolve
from batchmill.optional import require
from batchmill.store.names import DATABASE
from batchmill.store.sql.database import Database

log = logging.getLogger("batchmill.owner")

POLL_S = 0.6  # longer than the time between two heartbeats
EXIT_REPLACED = 75  # EX_TEMPFAIL: a supervisor starts it again, as a standby


def open_backend(entry: DatabaseEntry) -> Any:
    """Connect to PostgreSQL; this process does not own the database yet.

    Raises: InvalidConfig, DatabaseUnavailable.
    """
    return require("batchmill.store.sql.postgres", "a PostgreSQL database").PostgresBackend(read_address(entry))


def open_to_read(config: Config) -> sa.Engine | None:
    """An engine for the database that changes nothing and needs no ownership; None: there is no database yet.

    Raises: InvalidConfig, ModelFailed.
    """
    if config.database.url is not None:
        postgres = require("batchmill.store.sql.postgres", "a PostgreSQL database")
        return postgres.create_engine(read_address(config.database), poolclass=sa.pool.NullPool)
    path = config.data_dir / DATABASE
    if not path.exists():
        return None
    return sa.create_engine(f"sqlite:///file:{quote(str(path))}?mode=ro&uri=true", poolclass=sa.pool.NullPool)


def read_address(entry: DatabaseEntry) -> Any:
    """The address of the PostgreSQL database, with its password. Raises: InvalidConfig, ModelFailed."""
    postgres = require("batchmill.store.sql.postgres", "a PostgreSQL database")
    password = None
    if entry.password is not None:
        try:
            password = resolve(entry.password, key="password").reveal()
        except ModelFailed as error:
            raise type(error)(f"database.password: {error.message}", code=error.code) from None
    assert entry.url is not None, "a configured database"
    return postgres.read_url(entry.url, password)


def describe(config: Config) -> str:
    """Where the database of a configuration is, for people on other machines; without a password."""
    if config.database.url is None:
        return f"the database {config.data_dir / DATABASE} on {socket.gethostname()}"
    postgres = require("batchmill.store.sql.postgres", "a PostgreSQL database")
    return postgres.place_of(read_address(config.database))


async def file_of(config: Config, database: Database) -> str:
    """Which of all copies of a database it is, also by another path or address and on another host; empty: unknown."""
    if config.database.url is not None:
        postgres = require("batchmill.store.sql.postgres", "a PostgreSQL database")
        return await database.read(postgres.identify)
    path = config.data_dir / DATABASE
    return f"{path.stat().st_ino} on {os.statvfs(path).f_fsid:x}"


def process_name() -> str:
    """The name of this process in messages of other ones."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def claim(backend: Any, address: str, data_dir: str, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Become the owner, also of a database whose owner was killed: its silence is waited for.

    Args: address: the URL of this server; empty: it serves nothing.

    Raises: DatabaseOwned while another process renews its ownership; InvalidConfig for another `data_dir` than the one
        whose files the database names.
    """
    seen = None
    while True:
        try:
            lease = backend.claim(process_name(), address, data_dir)
        except DatabaseOwned as error:
            if seen not in (None, error.heartbeat):
                raise
            seen = error.heartbeat
            sleep(POLL_S)
        else:
            lease.on_lost(end_replaced)
            return


def end_replaced() -> None:
    """End this process, whose database has another owner: at once, so that it writes nothing to shared files.

    Its workers end with it.
    """
    log.error(
        "another process has become the owner of the database, because this one did not renew its ownership in time: "
        "this process ends; its jobs go on there"
    )
    logging.shutdown()
    sys.stderr.flush()
    os._exit(EXIT_REPLACED)


def open_database(config: Config, address: str = "") -> Database:
    """Open the database as its owner.

    Raises: InvalidConfig; DatabaseUnavailable; DatabaseOwned.
    """
    if config.database.url is None:
        return Database(config.data_dir / DATABASE)
    backend = open_backend(config.database)
    try:
        claim(backend, address, str(config.data_dir))
    except BaseException:
        backend.close()
        raise
    return Database(backend)
