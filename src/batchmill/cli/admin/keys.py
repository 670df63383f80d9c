"""`batchmill keys`: create, list and revoke the keys of a server. A running server applies changes at once."""

from __future__ import annotations

import time

import click

from batchmill.cli.session import Session, global_options
from batchmill.cli.text import clean, moment, table
from batchmill.cli.values import LONG_TIME, utf8
from batchmill.types import Scope
from batchmill.wire.native import KeyInfo, NewKey


@click.group()
def keys() -> None:
    """Manage the API keys of a server. A key has a project and a scope."""


@keys.command()
@click.option("--name", required=True, callback=utf8, metavar="TEXT", help="What the key is for.")
@click.option("--project", callback=utf8, help="The project of the key [default; at a server: that of your key].")
@click.option(
    "--scope", type=click.Choice([each.value for each in Scope]), default=Scope.SUBMIT.value, show_default=True,
    help="read: look; submit: upload, run, call models; admin: keys, webhooks and connectors of its project; deploy: "
         "functions too, whose code runs as the server's user. Deploy keys are created only beside the data directory.",
)  # fmt: skip
@click.option("--model", "models", multiple=True, metavar="NAME", help="A model or adapter that it may use [all].")
@click.option("--expires", type=LONG_TIME, metavar="SPAN", help="Expiry: 90d, 12h [never].")
@click.option("--rpm", type=click.IntRange(1), metavar="N", help="Requests per minute [the server's limit].")
@global_options
@click.pass_obj
def create(
    session: Session, name: str, project: str | None, scope: str, *, models: tuple[str, ...], expires: float | None,
    rpm: int | None,
) -> int:  # fmt: skip
    """Create a key. It is shown once; batchmill stores only its digest."""

    async def make() -> None:
        async with session.open() as client:
            expires_at = None if expires is None else time.time() + expires
            created = await client.create_key(
                NewKey(name, Scope(scope), project, list(models) or None, rpm, expires_at)
            )
        if session.as_json:
            session.emit("key", key=created.key, record=created.record)
        else:
            session.print(created.key)
            session.say(
                f"key {created.record.id} of the project {clean(created.record.project)}; it is not shown again"
            )

    return session.run(make())


@keys.command("list")
@click.option("--project", callback=utf8, help="Only the keys of this project.")
@global_options
@click.pass_obj
def list_keys(session: Session, project: str | None) -> int:
    """List the keys, newest first, including revoked ones."""

    async def show() -> None:
        async with session.open() as client:
            records = [each for each in await client.keys() if project in (None, each.project)]
        if session.as_json:
            for record in records:
                session.emit("key", record=record)
        elif not records:
            session.print("there are no keys")
        else:
            head = ["ID", "NAME", "PROJECT", "SCOPE", "MODELS", "RPM", "STATE", "CREATED", "LAST USED"]
            for line in table([head, *map(_columns, records)]):
                session.print(line)

    return session.run(show())


def _columns(record: KeyInfo) -> list[str]:
    models = "all" if record.models is None else ", ".join(record.models)
    return [
        record.id, clean(record.name, 40), clean(record.project), record.scope.value, clean(models, 40),
        str(record.requests_per_minute or ""), _state(record), moment(record.created),
        "" if record.last_used is None else moment(record.last_used),
    ]  # fmt: skip


def _state(record: KeyInfo) -> str:
    if record.revoked is not None:
        return "revoked"
    if record.expires is None:
        return "valid"
    return f"until {moment(record.expires)}" if record.expires > time.time() else "expired"


@keys.command()
@click.argument("key_id", metavar="ID", callback=utf8)
@click.option("--with-minted", is_flag=True, help="Also revoke all keys that it created, directly or indirectly.")
@global_options
@click.pass_obj
def revoke(session: Session, key_id: str, with_minted: bool) -> int:
    """Revoke a key permanently."""

    async def end() -> None:
        async with session.open() as client:
            record = await client.revoke_key(key_id, with_minted=with_minted)
        minted = ", ".join(record.minted)
        if session.as_json:
            session.emit("key", record=record, minted=record.minted)
        elif not minted or with_minted:
            session.print(f"key {record.id} ({clean(record.name)}) is revoked{minted and f', and {minted}'}")
        else:
            session.print(f"key {record.id} ({clean(record.name)}) is revoked")
            session.say(f"keys that it created are still valid: {minted}; --with-minted revokes them too")

    return session.run(end())
