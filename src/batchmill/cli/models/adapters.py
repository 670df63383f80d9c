"""`batchmill adapters`: registers LoRA adapters under names that rows use. A running server has them at once."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec.structs import replace

from batchmill.cli.session import Session, global_options
from batchmill.cli.text import clean, moment, table
from batchmill.cli.values import utf8
from batchmill.client.calls import typed_request
from batchmill.control import operations
from batchmill.services.adapters.records import read_reference
from batchmill.wire.native_models import AdapterInfo, NewAdapter

if TYPE_CHECKING:
    from batchmill.client.asynchronous import AsyncClient

SHOWN_CHARS = 60


name_argument = click.argument("name", metavar="NAME[/VERSION]", callback=utf8)
project_option = click.option(
    "--project", metavar="NAME", callback=utf8, help="The project, on this machine [default]."
)


@click.group()
def adapters() -> None:
    """Adapters: LoRA weights for a language model. Rows name NAME for the newest version, or NAME/VERSION."""


@adapters.command()
@click.argument("name", metavar="NAME", callback=utf8)
@click.argument("source", metavar="SOURCE", callback=utf8)
@click.option("--base", metavar="MODEL", required=True, callback=utf8, help="The base model.")
@click.option(
    "--token", metavar="REFERENCE", callback=utf8,
    help='The token for a model hub: "secret:NAME", on this machine also "env:NAME" or "file:PATH".',
)  # fmt: skip
@project_option
@global_options
@click.pass_obj
def add(session: Session, name: str, source: str, *, base: str, token: str | None, project: str | None) -> int:
    """Register an adapter and wait until it is ready.

    SOURCE is a folder, ORG/NAME[@REVISION] of a model hub, or s3://BUCKET/PREFIX, gs:// or az://. Registering
    a name again creates its next version.
    """

    async def make(client: AsyncClient) -> None:
        adapter = await _add(session, client, NewAdapter(name, base, source, token))
        if session.as_json:
            session.emit("adapter", adapter=adapter)
            return
        session.print(adapter.own_name)
        session.say(f"{clean(adapter.own_name)} is ready for {clean(adapter.base)}: rank {adapter.rank}")

    return _with(session, project, make)


async def _add(session: Session, client: AsyncClient, request: NewAdapter) -> AdapterInfo:
    """Register an adapter. A folder is uploaded to a server; the owner of a data directory reads it in place."""
    if session.server_url is not None:
        return await client.add_adapter(
            request.name, os.path.expanduser(request.source), base=request.base, token=request.token
        )
    source = request.source
    if Path(source).expanduser().is_dir() or source.startswith((".", "~")):
        source = os.path.abspath(Path(source).expanduser())
    token = request.token and session.absolute(request.token)
    return await client.call(typed_request(operations.ADD_ADAPTER, body=replace(request, source=source, token=token)))


@adapters.command("list")
@click.option("--base", metavar="MODEL", callback=utf8, help="Only adapters of this base model.")
@project_option
@global_options
@click.pass_obj
def list_adapters(session: Session, base: str | None, project: str | None) -> int:
    """List the registered adapters, all versions."""

    async def show_all(client: AsyncClient) -> None:
        adapters = await client.adapters(base)
        if session.as_json:
            for each in adapters:
                session.emit("adapter", adapter=each)
        elif not adapters:
            session.print("there are no adapters: `batchmill adapters add NAME SOURCE --base MODEL` registers one")
        else:
            head = ["NAME", "BASE", "STATE", "RANK", "SIZE", "SOURCE", "CHANGED"]
            for line in table([head, *(_columns(each) for each in adapters)]):
                session.print(line)

    return _with(session, project, show_all)


def _columns(info: AdapterInfo) -> list[str]:
    return [
        clean(info.own_name, SHOWN_CHARS), clean(info.base, SHOWN_CHARS), info.state,
        str(info.rank) if info.rank else "-", _size(info.bytes) if info.bytes else "-",
        clean(info.source, SHOWN_CHARS), moment(info.changed),
    ]  # fmt: skip


def _size(size_bytes: int) -> str:
    size, units = float(size_bytes), ["B", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.3g} {units[0]}"


@adapters.command()
@name_argument
@project_option
@global_options
@click.pass_obj
def show(session: Session, name: str, project: str | None) -> int:
    """Show an adapter; without a version, the newest that is ready."""
    base_name, version = read_reference(name)

    async def print_all(client: AsyncClient) -> None:
        info = await client.adapter(base_name, version)
        if session.as_json:
            session.emit("adapter", adapter=info)
            return
        session.print(f"{clean(info.own_name)}: {info.state}, for {clean(info.base)}")
        session.print(f"  from {clean(info.source)}")
        if info.rank:
            session.print(f"  rank {info.rank}, {_size(info.bytes)}, sha256 {info.digest}")
        if info.trained_for:
            session.print(f"  trained for {clean(info.trained_for)}")
        if info.message:
            session.print(f"  {clean(info.message)}")

    return _with(session, project, print_all)


@adapters.command()
@name_argument
@project_option
@global_options
@click.pass_obj
def remove(session: Session, name: str, project: str | None) -> int:
    """Remove a version, or all versions of a name. Unfinished jobs keep their versions."""
    base_name, version = read_reference(name)

    async def end(client: AsyncClient) -> None:
        removed = await client.remove_adapter(base_name, version)
        if session.as_json:
            session.emit("adapters_removed", names=[each.own_name for each in removed])
        else:
            session.print(f"removed: {', '.join(clean(each.own_name) for each in removed)}")

    return _with(session, project, end)


def _with(session: Session, project: str | None, work: Callable[[AsyncClient], Awaitable[None]]) -> int:
    async def run() -> None:
        async with session.open(project) as client:
            await work(client)

    return session.run(run())
