"""What `batchmill doctor` looks at: each check says what it found, and the way out where something is wrong.

A part that has something to check adds a function to CHECKS. A check changes nothing, but creates the data directory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from batchmill.config import Config
from batchmill.errors import BatchmillError
from batchmill.optional import require
from batchmill.services.data_dirs.data_dirs import prepare_data_dir
from batchmill.services.data_dirs.databases import open_to_read, read_address
from batchmill.types.cluster import Check


def check_data_dir(config: Config) -> Iterator[Check]:
    """Whether the data directory can be used."""
    try:
        prepare_data_dir(config.data_dir)
    except BatchmillError as error:
        yield Check("data directory", False, error.message)
    else:
        yield Check("data directory", True, str(config.data_dir))


def check_database(config: Config) -> Iterator[Check]:
    """Whether the PostgreSQL database can be reached and used, and who owns it."""
    if config.database.url is None:
        yield Check("database", True, "SQLite in the data directory")
        return
    try:
        diagnosis = require("batchmill.store.sql.diagnosis", "a PostgreSQL database")
        for name, ok, note in diagnosis.diagnose(read_address(config.database)):
            yield Check(name, ok, note)
    except BatchmillError as error:
        yield Check("database", False, error.message)


def check_storage(config: Config) -> Iterator[Check]:
    """Whether the object store of `[storage]` can be used, and the key file outlives the data directory."""
    if config.storage.objects is None:
        return
    if config.loses_key_file:
        yield Check("key file", False, f"{config.secrets_key} is in the data directory: set secrets.key_file")
    try:
        checks = require("batchmill.store.object_checks", "[storage] objects")
        is_reached = True
        for name, ok, note in checks.examine(config.storage.objects):
            is_reached &= ok or name != "object store"
            yield Check(name, ok, note)
        if is_reached:
            yield from _check_owner(config, config.storage.objects)
    except BatchmillError as error:
        yield Check("object store", False, error.message)


def _check_owner(config: Config, url: str) -> Iterator[Check]:
    """Whether the prefix of `[storage]` belongs to the database."""
    examine_owner = require("batchmill.store.prefix_owner:examine", "[storage] objects")
    engine = open_to_read(config)
    try:
        yield Check(*examine_owner(url, engine))
    finally:
        if engine is not None:
            engine.dispose()


CHECKS: tuple[Callable[[Config], Iterator[Check]], ...] = (check_data_dir, check_database, check_storage)


def examine(config: Config) -> list[Check]:
    """The result of every check."""
    return [found for check in CHECKS for found in check(config)]
