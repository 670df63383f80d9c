"""`batchmill connectors`: remote APIs that the machine's user describes. A running server has them at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from batchmill.cli.session import Session, global_options
from batchmill.cli.text import clean, moment, table
from batchmill.cli.values import utf8
from batchmill.client.calls import ask
from batchmill.control import operations as own
from batchmill.errors import InvalidInput
from batchmill.models.connectors.reading import FILE_BYTES_MAX, refuse_unknown
from batchmill.services.remote.connector_records import ConnectorRecord
from batchmill.services.remote.model_records import RemoteModel

LOCAL = "only the operator of the machine sets what they may reach; callers of a server create connectors over the API"
SHOWN_CHARS = 60


id_argument = click.argument("connector_id", metavar="ID", callback=utf8)
file_argument = click.argument("file", metavar="FILE", callback=utf8)


@click.group()
def connectors() -> None:
    """Connectors: remote APIs as data, and their models. Connectors of this command may call any address."""


@connectors.command()
@file_argument
@click.option("--project", default="default", show_default=True, callback=utf8, help="The project.")
@click.option("--model", "name", metavar="NAME", callback=utf8, help="Also create a deployed model.")
@global_options
@click.pass_obj
def create(session: Session, file: str, project: str, name: str | None) -> int:
    """Create a connector from a JSON file. batchmill stores its credentials encrypted; "env:NAME" and
    "file:PATH" stay references."""
    fields = _read(session, "create", file)

    async def make(opened: Any) -> None:
        made: ConnectorRecord = await opened.call(ask(own.CREATE_CONNECTOR, body=own.ConnectorFields(fields)))
        model: RemoteModel | None = None
        if name is not None:
            model = await opened.call(ask(own.REGISTER_MODEL, made.id, body=own.NewRemoteModel(name)))
        if session.as_json:
            session.emit("connector", connector=made, model=model)
            return
        session.print(made.id if model is None else model.id)
        message = "" if model is None else f"; the model {clean(model.name)} goes through it"
        session.say(f"connector {made.id}: {clean(made.connector.name)}{message}")

    return _with(session, make, project)


@connectors.command("list")
@click.option("--project", callback=utf8, help="Only connectors of this project.")
@global_options
@click.pass_obj
def list_connectors(session: Session, project: str | None) -> int:
    """List the connectors and their models."""
    session.local_only("connectors list", LOCAL)

    async def print_all(opened: Any) -> None:
        listed = await opened.call(ask(own.LIST_CONNECTORS))
        found, models = listed.connectors, listed.models
        if session.as_json:
            for each in found:
                session.emit("connector", connector=each)
        elif not found:
            session.print("there are no connectors")
        else:
            head = ["ID", "NAME", "PROJECT", "BY", "MODELS", "CHANGED"]
            for line in table([head, *(_columns(each, models) for each in found)]):
                session.print(line)

    return _with(session, print_all, project)


def _columns(record: ConnectorRecord, models: list[RemoteModel]) -> list[str]:
    used = ", ".join(each.id for each in models if each.connector == record.id)
    by = "command" if record.connector.is_trusted else "API"
    name = clean(record.connector.name, SHOWN_CHARS)
    return [record.id, name, clean(record.project), by, used or "-", moment(record.changed)]


@connectors.command()
@id_argument
@global_options
@click.pass_obj
def show(session: Session, connector_id: str) -> int:
    """Show a connector: its actions, parameters, and the references of its credentials."""
    session.local_only("connectors show", LOCAL)

    async def print_all(opened: Any) -> None:
        record: ConnectorRecord = await opened.call(ask(own.SHOW_CONNECTOR, connector_id))
        if session.as_json:
            session.emit("connector", connector=record)
            return
        found = record.connector
        session.print(f"{found.id}: {clean(found.name)} ({found.protocol}, version {clean(found.version)})")
        if found.description:
            session.print(f"  {clean(found.description)}")
        for action in found.actions:
            session.print(f"  {action.action_type.lower()}: {action.method} {clean(action.url)}")
        for name, value in found.parameters.items():
            session.print(f"  parameter {clean(name)}: {clean(value)}")
        for name, reference in found.credential.items():
            session.print(f"  credential {clean(name)}: {clean(reference)}")

    return _with(session, print_all)


@connectors.command()
@id_argument
@file_argument
@click.option("--redeploy", is_flag=True, help="Undeploy the models that use it during the update.")
@global_options
@click.pass_obj
def update(session: Session, connector_id: str, file: str, redeploy: bool) -> int:
    """Update a connector from a JSON file. Omitted fields are unchanged. Credentials alone may change while
    models are deployed."""
    fields = _read(session, "update", file)

    async def change(opened: Any) -> None:
        record: ConnectorRecord = await opened.call(
            ask(own.CHANGE_CONNECTOR, connector_id, body=own.ConnectorFields(fields), redeploy=redeploy)
        )
        if session.as_json:
            session.emit("connector", connector=record)
        else:
            session.print(f"connector {record.id} is changed: revision {record.revision}")

    return _with(session, change)


@connectors.command()
@id_argument
@click.option(
    "--models",
    "with_models",
    is_flag=True,
    help="Also delete its models, and first cancel their batches at providers.",
)
@global_options
@click.pass_obj
def delete(session: Session, connector_id: str, with_models: bool) -> int:
    """Delete a connector and its credentials. No model may use it."""
    session.local_only("connectors delete", LOCAL)

    async def end(opened: Any) -> None:
        record: ConnectorRecord = await opened.call(ask(own.DELETE_CONNECTOR, connector_id, with_models=with_models))
        if session.as_json:
            session.emit("connector_deleted", id=record.id)
        else:
            session.print(f"connector {record.id} ({clean(record.connector.name)}) is deleted")

    return _with(session, end)


def _read(session: Session, verb: str, file: str) -> dict[str, Any]:
    """The fields of a JSON file; a misspelt one is an error. Raises: InvalidInput."""
    session.local_only(f"connectors {verb}", LOCAL)
    path = session.cwd / Path(file).expanduser()
    try:
        with path.open("rb") as opened:
            data = opened.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidInput(f"the connector {path} cannot be read: {error.strerror}", code="no_file") from None
    if len(data) > FILE_BYTES_MAX:
        raise InvalidInput(f"the connector {path} is larger than {FILE_BYTES_MAX:,} bytes", code="no_file")
    try:
        fields = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidInput(f"the connector {path} is no JSON object: {error}", code="invalid_connector") from None
    refuse_unknown(fields)
    return fields


def _with(session: Session, work: Callable[[Any], Awaitable[None]], project: str | None = None) -> int:
    async def run() -> None:
        async with session.open(project) as opened:
            await work(opened)

    return session.run(run())
