"""`batchmill models`: lists models, and manages the versions of deployed functions."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

import click
from msgspec.structs import replace

from batchmill.cli.models.deploy import signature_of
from batchmill.cli.session import EXIT_OK, Session, global_options
from batchmill.cli.text import clean, moment, table
from batchmill.cli.values import utf8
from batchmill.client import calls
from batchmill.errors import InvalidInput
from batchmill.wire.native import AliasInfo, BackendInfo, FunctionDetail, ModelInfo, NewAlias, VersionInfo
from batchmill.wire.native_models import LIMIT_DEFAULT, LIMIT_MAX, LogEntry, LogPage, LogQuery

if TYPE_CHECKING:
    from batchmill.client.asynchronous import AsyncClient


POLL_S = 1.0
BUILD_CHARS_MAX = 1_000_000
TEXT_CHARS_MAX = 20_000
REQUESTS_SHOWN = 3


async def show_logs(session: Session, name: str, query: LogQuery, *, follow: bool, is_build: bool) -> None:
    """Print the logs of a function; with `follow` until interrupted."""
    if is_build and (follow or query.request is not None):
        raise InvalidInput("--build shows the log of the build, not of calls: leave out --follow and --request")
    async with session.open() as client:
        if not follow and query.request is None:
            _print_build(session, await client.model(name).log(branch=query.branch, version=query.version or "latest"))
        if not is_build:
            await _print_calls(session, client, name, query, follow=follow)


def _print_build(session: Session, text: str) -> None:
    if session.as_json:
        session.emit("log", text=text)
    elif text:
        session.print(clean(text, BUILD_CHARS_MAX, lines=True))


async def _print_calls(session: Session, client: AsyncClient, name: str, query: LogQuery, *, follow: bool) -> None:
    page: LogPage | None = await client.call(calls.model_calls(name, query))
    while page is not None:
        if page.is_lost:
            session.say("some lines are already deleted")
        for entry in page.entries:
            _print_entry(session, entry)
        if not follow:
            return
        if not page.entries:
            await asyncio.sleep(POLL_S)
        page = await client.call(calls.model_calls(name, replace(query, after=page.next)))


def _print_entry(session: Session, entry: LogEntry) -> None:
    if session.as_json:
        session.emit("line", entry=entry)
        return
    requests = [clean(each, 100) for each in entry.requests[:REQUESTS_SHOWN]]
    more = len(entry.requests) - len(requests)
    origin = ", ".join(requests) + (f" and {more} more" if more else "") or entry.stage
    for line in clean(entry.text, TEXT_CHARS_MAX, lines=True).split("\n"):
        session.print(f"{moment(entry.at)} {origin} | {line}")


NAME_CHARS_MAX = 80
LATEST, MAIN = "latest", "main"
_BACKEND = re.compile(r"(?:(.+)/)?([1-9][0-9]{0,8})(?:=([0-9.]+))?")


name_argument = click.argument("name", metavar="NAME", callback=utf8)
branch_option = click.option("--branch", metavar="NAME", callback=utf8, help="The branch [main].")


@click.group(invoke_without_command=True)
@global_options
@click.pass_context
def models(ctx: click.Context) -> int:
    """List models; manage deployed functions."""
    session: Session = ctx.obj
    return EXIT_OK if ctx.invoked_subcommand is not None else session.run(_models(session))


async def _models(session: Session) -> int:
    listed = await session.app.models(session.config())
    if session.as_json:
        for model in listed:
            session.emit("model", model=model)
        return EXIT_OK
    if not listed:
        session.print("there are no models: name some in batchmill.toml, as [models.NAME], or `batchmill deploy` one")
        return EXIT_OK
    head = ["NAME", "ENGINE", "ADAPTERS", "USD PER MILLION TOKENS"]
    for line in table([head, *(_columns(model) for model in listed)]):
        session.print(line)
    return EXIT_OK


def _columns(model: ModelInfo) -> list[str]:
    adapters = ", ".join(clean(name, NAME_CHARS_MAX) for name in model.adapters)
    price = "-" if model.price is None else model.price.in_words
    return [clean(model.name, NAME_CHARS_MAX), model.engine, adapters or "-", price]


@models.command()
@name_argument
@global_options
@click.pass_obj
def show(session: Session, name: str) -> int:
    """Show a deployed function: its inputs, versions and example calls."""

    async def print_all() -> None:
        async with session.open() as client:
            function = await client.model(name).show()
        if session.as_json:
            session.emit("model", model=function)
        else:
            _print_function(session, function)

    return session.run(print_all())


def _print_function(session: Session, function: FunctionDetail) -> None:
    latest = [each for each in function.versions if function.latest.get(each.branch) == each.number]
    for version in latest:
        session.print(f"{clean(version.reference)}: {clean(signature_of(version))}")
        if version.interface is not None and version.interface.summary:
            session.print(f"  {clean(version.interface.summary)}")
        session.print(f"  from {clean(version.source)}, {moment(version.created)}, workers: {version.workers}")
        if version.packages:
            session.print(f"  packages: {clean(', '.join(version.packages), 4000)}")
    for alias in function.aliases:
        session.print(f"{function.name}@{clean(alias.name)}: {_shares(alias)}")
    for api, command in function.examples.items():
        session.print(f"\n{api}:\n  {clean(command, 4000)}")


def _shares(alias: AliasInfo) -> str:
    total = sum(each.weight for each in alias.backends)
    shares = [f"{each.branch}/{each.number} {100 * each.weight / total:.0f} %" for each in alias.backends]
    copies = [f"{each.branch}/{each.number}" for each in alias.mirrors]
    return clean(", ".join(shares) + (f"; copies to {', '.join(copies)}" if copies else ""))


@models.command()
@name_argument
@global_options
@click.pass_obj
def versions(session: Session, name: str) -> int:
    """List the versions of a deployed function, including failed ones."""

    async def print_all() -> None:
        async with session.open() as client:
            function = await client.model(name).show()
        if session.as_json:
            for version in function.versions:
                session.emit("version", version=version)
            return
        head = ["VERSION", "STATE", "CREATED", "SOURCE", "WHY"]
        for line in table([head, *(_version(each, function) for each in function.versions)]):
            session.print(line)

    return session.run(print_all())


def _version(version: VersionInfo, function: FunctionDetail) -> list[str]:
    is_latest = function.latest.get(version.branch) == version.number
    error = (version.error or "").rstrip().rpartition("\n")[2]
    return [
        clean(f"{version.branch}/{version.number}"), LATEST if is_latest else version.state, moment(version.created),
        clean(version.source, NAME_CHARS_MAX), clean(error, NAME_CHARS_MAX) or "-",
    ]  # fmt: skip


@models.command()
@name_argument
@branch_option
@click.option("--version", metavar="N", callback=utf8, help="The version [the newest].")
@click.option("--request", metavar="ID", callback=utf8, help="Only of this request, or of this job's rows.")
@click.option("--follow", is_flag=True, help="Follow the output of calls until interrupted.")
@click.option("--build", "is_build", is_flag=True, help="Only the log of the version's creation.")
@click.option(
    "--limit",
    type=click.IntRange(1, LIMIT_MAX),
    default=LIMIT_DEFAULT,
    show_default=True,
    help="The number of last lines of calls.",
)
@global_options
@click.pass_obj
def logs(
    session: Session,
    name: str,
    branch: str | None,
    version: str | None,
    request: str | None,
    *,
    follow: bool,
    is_build: bool,
    limit: int,
) -> int:
    """Print the output of a version's creation (pip's, the function's own, a traceback), then what its calls printed
    and raised."""
    query = LogQuery(branch, version, request, None, limit)
    return session.run(show_logs(session, name, query, follow=follow, is_build=is_build))


@models.command()
@name_argument
@click.argument("number", type=click.IntRange(min=1), required=False)
@branch_option
@global_options
@click.pass_obj
def rollback(session: Session, name: str, number: int | None, branch: str | None) -> int:
    """Make an earlier version the latest: NUMBER, or the previous one."""

    async def move(client: AsyncClient) -> str:
        version = await client.model(name).rollback(number, branch=branch or MAIN)
        return f"latest of {version.name} is {version.reference} now"

    return _change(session, move)


@models.command()
@name_argument
@click.argument("source", metavar="BRANCH", callback=utf8)
@click.option("--into", metavar="BRANCH", default=MAIN, show_default=True, callback=utf8)
@global_options
@click.pass_obj
def merge(session: Session, name: str, source: str, into: str) -> int:
    """Make the latest of one branch a new version of another."""

    async def move(client: AsyncClient) -> str:
        version = await client.model(name).merge(source, into=into)
        return f"{version.reference} is ready: {version.source}"

    return _change(session, move)


@models.command()
@name_argument
@branch_option
@global_options
@click.pass_obj
def restart(session: Session, name: str, branch: str | None) -> int:
    """Create the latest version again as a new one, with new workers. No call is lost."""

    async def move(client: AsyncClient) -> str:
        version = await client.model(name).restart(branch=branch or MAIN)
        return f"{version.reference} is ready: {version.source}"

    return _change(session, move)


@models.command()
@name_argument
@click.argument("label", metavar="ALIAS", callback=utf8)
@click.argument("backends", metavar="[BRANCH/]N[=WEIGHT]...", nargs=-1)
@click.option("--mirror", "mirrors", metavar="[BRANCH/]N", multiple=True, help="A version that gets copies of calls.")
@click.option("--remove", "is_removal", is_flag=True, help="Remove the alias.")
@global_options
@click.pass_obj
def alias(
    session: Session, name: str, label: str, *, backends: tuple[str, ...], mirrors: tuple[str, ...], is_removal: bool
) -> int:
    """Point an alias at versions: `alias NAME prod 3`, or split its calls: `alias NAME prod 3=90 4=10`."""
    if is_removal == bool(backends):
        raise InvalidInput("name the versions of the alias, or give --remove")

    async def change(client: AsyncClient) -> str:
        if is_removal:
            await client.model(name).remove_alias(label)
            return f"{name}@{label} is removed"
        body = NewAlias([_backend(each) for each in backends], [_backend(each) for each in mirrors])
        return f"{name}@{label}: {_shares(await client.call(calls.set_alias(name, label, body)))}"

    return _change(session, change)


def _backend(text: str) -> BackendInfo:
    match = _BACKEND.fullmatch(text)
    try:
        weight = 1.0 if match is None or match[3] is None else float(match[3])
    except ValueError:
        match = None
    if match is None or not 0 < weight <= 1e6:
        raise InvalidInput(f"{text!r} is not a version: write 3, 3=90 or feat/x/3=10")
    return BackendInfo(int(match[2]), match[1] or MAIN, weight)


@models.command()
@name_argument
@click.option("--branch", metavar="NAME", callback=utf8, help="The branch [all; with --version: main].")
@click.option("--version", metavar="N", callback=utf8, help="The version [all].")
@global_options
@click.pass_obj
def remove(session: Session, name: str, branch: str | None, version: str | None) -> int:
    """Remove a version, a branch, or all of a deployed function."""

    async def end(client: AsyncClient) -> str:
        removed = (await client.call(calls.remove_model(name, branch=branch, version=version))).versions
        return f"removed: {', '.join(each.reference for each in removed)}"

    return _change(session, end)


def _change(session: Session, change) -> int:
    """Change a function and print the outcome."""

    async def work() -> None:
        async with session.open() as client:
            message = await change(client)
        if session.as_json:
            session.emit("changed", message=message)
        else:
            session.print(clean(message, 4000))

    return session.run(work())
