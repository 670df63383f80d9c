"""`batchmill secrets`: stores keys of remote services, encrypted. A running server uses them at once."""

from __future__ import annotations

import sys

import click

from batchmill.cli.session import Session, global_options
from batchmill.cli.text import clean, count, moment, table
from batchmill.cli.values import utf8
from batchmill.client.calls import typed_request
from batchmill.control import operations
from batchmill.errors import InvalidInput
from batchmill.models.secrets import SECRET_BYTES_MAX, check_name

LOCAL = "secrets are stored on the machine that runs the models: run the command there"


@click.group()
def secrets() -> None:
    """Store secrets. Models and connectors refer to them as "secret:NAME". No command shows a secret."""


@secrets.command("set")
@click.argument("name", metavar="NAME", callback=utf8)
@global_options
@click.pass_obj
def set_secret(session: Session, name: str) -> int:
    """Set or replace a secret. It is read from standard input, or prompted for."""
    session.local_only("secrets set", LOCAL)
    check_name(name)
    value = _read(name)

    async def put() -> None:
        async with session.open() as client:
            await client.call(typed_request(operations.PUT_SECRET, name, body=operations.SecretValue(value)))
        if session.as_json:
            session.emit("secret", name=name)
        else:
            session.print(f'secret {name} is set: refer to it as "secret:{name}"')

    return session.run(put())


def _read(name: str) -> str:
    """Read the secret from standard input. Other users can see a command line, and shells store it."""
    if sys.stdin.isatty():
        return click.prompt(f"The secret {name}", hide_input=True, err=True).strip()
    data = sys.stdin.buffer.read(SECRET_BYTES_MAX + 1)
    if len(data) > SECRET_BYTES_MAX:
        raise InvalidInput(f"a secret has {SECRET_BYTES_MAX:,} bytes at most", code="invalid_secret")
    try:
        return data.decode().strip()
    except UnicodeDecodeError:
        raise InvalidInput(f"the secret {name} is not one line of plain text", code="invalid_secret") from None


@secrets.command("list")
@global_options
@click.pass_obj
def list_secrets(session: Session) -> int:
    """List the names of secrets, with the last characters of long ones."""
    session.local_only("secrets list", LOCAL)

    async def show() -> None:
        async with session.open() as client:
            records = (await client.call(typed_request(operations.LIST_SECRETS))).secrets
        if session.as_json:
            for each in records:
                session.emit("secret", secret=each)
        elif not records:
            session.print("there are no secrets")
        else:
            rows = [[each.name, f"…{each.hint}" if each.hint else "", moment(each.changed)] for each in records]
            for line in table([["NAME", "ENDS IN", "CHANGED"], *rows]):
                session.print(clean(line, lines=True))

    return session.run(show())


@secrets.command()
@click.argument("name", metavar="NAME", callback=utf8)
@global_options
@click.pass_obj
def remove(session: Session, name: str) -> int:
    """Remove a secret. Jobs that need it pause."""
    session.local_only("secrets remove", LOCAL)

    async def forget() -> None:
        async with session.open() as client:
            await client.call(typed_request(operations.REMOVE_SECRET, name))
        if session.as_json:
            session.emit("secret_removed", name=name)
        else:
            session.print(f"secret {clean(name)} is removed")

    return session.run(forget())


@secrets.command()
@global_options
@click.pass_obj
def rotate(session: Session) -> int:
    """Encrypt all secrets with a new key and remove the old key. The secrets do not change."""
    session.local_only("secrets rotate", LOCAL)

    async def replace_key() -> None:
        async with session.open() as client:
            rotated = await client.call(typed_request(operations.ROTATE_SECRETS))
        if session.as_json:
            session.emit("rotated", rotated=rotated)
            return
        session.print(
            f"now under a new key: {count(rotated.rewrapped, 'secret')}; keys removed: {rotated.keys_removed}"
        )
        for owner in rotated.unreadable:
            session.say(f"{clean(owner)} cannot be read, before and after: set its secret again")

    return session.run(replace_key())
