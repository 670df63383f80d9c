"""`batchmill storage`: which database the prefix of an object store belongs to."""

from __future__ import annotations

import time

import click

from batchmill.cli.session import EXIT_FAILED, EXIT_OK, Session, global_options
from batchmill.cli.text import clean
from batchmill.errors import InvalidInput
from batchmill.optional import require
from batchmill.services.data_dirs.databases import describe, open_to_read

SHOWN_CHARS = 1000
OWNER = "batchmill.store.prefix_owner"
WARNING = (
    "If the other database is used again, each of the two removes objects that the other needs. Watching for three "
    "minutes whether its server still runs …"
)


@click.group()
def storage() -> None:
    """Show or change which database the prefix of [storage] belongs to."""


@storage.command()
@click.option("--take-over", "takes_over", is_flag=True, help="Give the prefix to this database for good.")
@global_options
@click.pass_obj
def owner(session: Session, takes_over: bool) -> int:
    """Show which database the prefix of [storage] belongs to. Exit code 0 if it is this one, or none."""
    session.local_only("storage owner", "run it on the server's machine, with its configuration")
    config = session.config()
    url = config.storage.objects
    if url is None:
        raise InvalidInput("there is no [storage] objects in the configuration", code="no_storage")

    def wait(seconds: float) -> None:
        session.say(WARNING)
        time.sleep(seconds)

    prefixes, engine = require(OWNER, "[storage] objects"), open_to_read(config)
    try:
        if takes_over:
            is_own, message = True, prefixes.take_over(url, engine, describe(config), wait)
        else:
            _, is_own, message = prefixes.examine(url, engine)
    finally:
        if engine is not None:
            engine.dispose()
    code = EXIT_OK if is_own else EXIT_FAILED
    if session.as_json:
        session.emit("storage_owner", exit_code=code, is_own=is_own, message=message)
    else:
        session.print(clean(message, SHOWN_CHARS))
    return code
