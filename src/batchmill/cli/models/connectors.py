"""`batchmill connectors`: manages connectors to remote APIs. A running server has them at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from batchmill.cli.session import Session, global_options
from batchmill.cli.text import clean, moment, table
from batchmill.cli.values import utf8
from batchmill.client.calls import typed_request
from batchmill.control import operations
from batchmill.errors import InvalidInput
from batchmill.models.connectors.reading import FILE_BYTES_MAX, refuse_unknown
from batchmill.services.remote.stored import ConnectorRecord, RemoteModel

LOCAL = "its connectors may call any address, so it runs on this machine; a server's API creates other connectors"
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

    async def make(client: Any) -> None:
        created: ConnectorRecord = await client.call(
            typed_request(operations.CREATE_CONNECTOR, body=operations.ConnectorFields(fields))
        )
        model: RemoteModel | None = None
        if name is not None:
            model = await client.call(
                typed_request(operations.REGISTER_MODEL, created.id, body=operations.NewRemoteModel(name))
            )
        if session.as_json:
            session.emit("connector", connector=created, model=model)
            return
        session.print(created.id if model is None else model.id)
        message = "" if model is None else f"; the model {clean(model.name)} uses it"
        session.say(f"connector {created.id}: {clean(created.connector.name)}{message}")

    return _with(session, make, project)


@connectors.command("list")
@click.option("--project", callback=utf8, help="Only connectors of this project.")
@global_options
@click.pass_obj
def list_connectors(session: Session, project: str | None) -> int:
    """List the connectors and their models."""
    session.local_only("connectors list", LOCAL)

    async def print_all(client: Any) -> None:
        listed = await client.call(typed_request(operations.LIST_CONNECTORS))
        connectors, models = listed.connectors, listed.models
        if session.as_json:
            for each in connectors:
                session.emit("connector", connector=each)
        elif not connectors:
            session.print("there are no connectors")
        else:
            head = ["ID", "NAME", "PROJECT", "BY", "MODELS", "CHANGED"]
            for line in table([head, *(_columns(each, models) for each in connectors)]):
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

    async def print_all(client: Any) -> None:
        record: ConnectorRecord = await client.call(typed_request(operations.SHOW_CONNECTOR, connector_id))
        if session.as_json:
            session.emit("connector", connector=record)
            return
        connector = record.connector
        session.print(
            f"{connector.id}: {clean(connector.name)} ({connector.protocol}, version {clean(connector.version)})"
        )
        if connector.description:
            session.print(f"  {clean(connector.description)}")
        for action in connector.actions:
            session.print(f"  {action.action_type.lower()}: {action.method} {clean(action.url)}")
        for name, value in connector.parameters.items():
            session.print(f"  parameter {clean(name)}: {clean(value)}")
        for name, reference in connector.credential.items():
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

    async def change(client: Any) -> None:
        record: ConnectorRecord = await client.call(
            typed_request(
                operations.CHANGE_CONNECTOR, connector_id, body=operations.ConnectorFields(fields), redeploy=redeploy
            )
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

    async def end(client: Any) -> None:
        record: ConnectorRecord = await client.call(
            typed_request(operations.DELETE_CONNECTOR, connector_id, with_models=with_models)
        )
        if session.as_json:
            session.emit("connector_deleted", id=record.id)
        else:
            session.print(f"connector {record.id} ({clean(record.connector.name)}) is deleted")

    return _with(session, end)


def _read(session: Session, verb: str, file: str) -> dict[str, Any]:
    """Read the fields of a JSON file. Raises: InvalidInput, also for an unknown field."""
    session.local_only(f"connectors {verb}", LOCAL)
    path = session.cwd / Path(file).expanduser()
    try:
        with path.open("rb") as stream:
            data = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidInput(f"the connector {path} cannot be read: {error.strerror}", code="no_file") from None
    if len(data) > FILE_BYTES_MAX:
        raise InvalidInput(f"the connector {path} is larger than {FILE_BYTES_MAX:,} bytes", code="no_file")
    try:
        fields = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidInput(f"the connector {path} is not a JSON object: {error}", code="invalid_connector") from None
    refuse_unknown(fields)
    return fields


def _with(session: Session, work: Callable[[Any], Awaitable[None]], project: str | None = None) -> int:
    async def run() -> None:
        async with session.open(project) as client:
            await work(client)

    return session.run(run())
