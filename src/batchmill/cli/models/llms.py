"""`batchmill llms`: manages language models that batchmill serves. A running server has them at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click
from msgspec.structs import replace

from batchmill.cli.jobs.order_options import pairs, scalar
from batchmill.cli.session import Session, global_options
from batchmill.cli.text import clean, moment, table
from batchmill.cli.values import LONG_TIME, ByteCount, utf8
from batchmill.client import llm_calls
from batchmill.errors import InvalidInput
from batchmill.models import secrets
from batchmill.types.machines import size_text
from batchmill.wire.native import QuotaInfo
from batchmill.wire.native_models import LlmChange, LlmInfo, LlmList, NewLlm, QuarantinedRequest

if TYPE_CHECKING:
    from batchmill.client.asynchronous import AsyncClient


T = TypeVar("T", NewLlm, LlmChange)

SHOWN_CHARS, MESSAGE_CHARS = 60, 4_000


name_argument = click.argument("name", metavar="NAME", callback=utf8)
project_option = click.option(
    "--project", metavar="NAME", callback=utf8, help="The project, on this machine [default]."
)


def settings_options(command):
    """Add the options of an engine. Omitted settings are those of the base model."""
    options = (
        click.option(
            "--engine-arg", "args", metavar="NAME=VALUE", multiple=True, callback=utf8,
            help="A flag of vLLM, such as max-model-len=4096. An update replaces all flags.",
        ),
        click.option(
            "--hf-token", metavar="REFERENCE", callback=utf8,
            help='A token for the model hub: "env:NAME", "file:PATH", on this machine also "secret:NAME".',
        ),
        click.option("--replicas-min", type=click.IntRange(0), metavar="N", help="Replicas that always stay [0]."),
        click.option("--replicas-max", type=click.IntRange(1), metavar="N", help="The most replicas [1]."),
        click.option("--cooldown", type=LONG_TIME, metavar="SPAN", help="Stop a replica that is idle for 10m, 2h …"),
        click.option(
            "--scale-up-requests", type=click.IntRange(1), metavar="N", help="Scale up above this load [128]."
        ),
        click.option("--memory", metavar="SIZE", type=ByteCount(), help="Memory of each replica: 12GiB."),
        click.option("--gpus", type=click.IntRange(0), metavar="N", help="GPUs of each replica."),
        click.option("--adapters/--no-adapters", "takes_adapters", default=None, help="Serve adapters [yes]."),
        click.option(
            "--preload", "preloaded", metavar="ADAPTER", multiple=True, callback=utf8,
            help="An adapter to load when the engine starts.",
        ),
        click.option("--description", metavar="TEXT", callback=utf8),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def _settings(flags: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request body that flags set."""
    args = {name: scalar(value) for name, value in pairs(flags.pop("args"), "--engine-arg", bare="true").items()}
    fields = {"cooldown_s": flags.pop("cooldown"), "memory_bytes": flags.pop("memory")} | flags
    fields |= {"engine_args": args or None, "preloaded_adapters": list(fields.pop("preloaded")) or None}
    return {name: value for name, value in fields.items() if value is not None}


def _with_token(session: Session, body: T) -> T:
    """Replace the reference to a token: for a server by the token itself, for the owner of a data directory by one with
    an absolute path. Raises: InvalidInput for a plain token, which every user of the machine could see.
    """
    token = body.hf_token
    if not isinstance(token, str):
        return body
    if not token.startswith(secrets.KINDS):
        raise InvalidInput(
            '--hf-token is "env:NAME", "file:PATH" or "secret:NAME", never the token itself', code="invalid_secret"
        )
    if session.server_url is None:
        return replace(body, hf_token=session.absolute(token))
    if token.startswith("secret:"):
        raise InvalidInput(
            'callers cannot use the secrets of a server: --hf-token is "env:NAME" or "file:PATH" of this machine',
            code="invalid_secret",
        )
    return replace(body, hf_token=secrets.resolve(token).reveal())


@click.group()
def llms() -> None:
    """Language models that batchmill serves itself. Their engines start on demand."""


@llms.command()
@name_argument
@click.argument("base_model", metavar="BASE", callback=utf8)
@settings_options
@project_option
@global_options
@click.pass_obj
def create(session: Session, name: str, base_model: str, project: str | None, **flags: Any) -> int:
    """Deploy BASE as NAME. BASE is a configured model, or a model hub id that the configuration allows."""
    body = NewLlm(name, base_model, **_settings(flags))
    return _change(
        session, project, lambda client: client.call(llm_calls.create(_with_token(session, body))), "is deployed"
    )


@llms.command("list")
@project_option
@global_options
@click.pass_obj
def list_llms(session: Session, project: str | None) -> int:
    """List the language models and the state of their engines."""

    async def show_all(client: AsyncClient) -> None:
        listed: LlmList = await client.call(llm_calls.llms())
        if session.as_json:
            for each in listed.llms:
                session.emit("llm", llm=each)
        elif not listed.llms:
            session.print("there are no language models: `batchmill llms create NAME BASE` deploys one")
        else:
            head = ["NAME", "BASE", "STATE", "REPLICAS", "USD PER MILLION TOKENS", "BY"]
            for line in table([head, *(_columns(each) for each in listed.llms)]):
                session.print(line)

    return _with(session, project, show_all)


def _columns(info: LlmInfo) -> list[str]:
    return [
        clean(info.name, SHOWN_CHARS), clean(info.base_model, SHOWN_CHARS), _state(info),
        f"{info.ready} of {info.replicas_min}-{info.replicas_max}", "-" if info.price is None else info.price.in_words,
        "configuration" if info.is_configured else "API",
    ]  # fmt: skip


def _state(info: LlmInfo) -> str:
    if info.is_stopped:
        return "stopped by hand"
    return f"{info.state}, updating" if info.is_updating else info.state


@llms.command()
@name_argument
@project_option
@global_options
@click.pass_obj
def show(session: Session, name: str, project: str | None) -> int:
    """Show a language model: its settings, adapters and the state of its engine."""

    async def print_all(client: AsyncClient) -> None:
        info = await client.llm(name)
        if session.as_json:
            session.emit("llm", llm=info)
        else:
            first, *more = _lines(info)
            session.print(clean(first, MESSAGE_CHARS))
            for line in more:
                session.print(f"  {clean(line, MESSAGE_CHARS, lines=True)}")

    return _with(session, project, print_all)


def _lines(info: LlmInfo) -> list[str]:
    needs = [f"{info.memory_bytes:,} bytes of memory"] if info.memory_bytes else []
    needs += [f"{info.gpus} GPUs"] if info.gpus else []
    lines = [
        f"{info.name}: {info.base_model}, {_state(info)}",
        f"replicas: {info.ready} ready of {info.replicas}; {info.replicas_min} to {info.replicas_max}",
        *([f"each takes {' and '.join(needs)}"] if needs else []),
        *(f"{name} = {value}" for name, value in info.engine_args.items()),
        *(["has a token for the model hub"] if info.has_hf_token else []),
        *([f"adapters: {', '.join(info.adapters)}"] if info.adapters else []),
        *([f"loaded ahead: {', '.join(info.preloaded_adapters)}"] if info.preloaded_adapters else []),
        *([f"USD per million tokens: {info.price.in_words}"] if info.price is not None else []),
        *([f"{info.description}"] if info.description else []),
    ]
    return [*lines, f"{info.message}"] if info.message else lines


@llms.command()
@name_argument
@click.option("--base", "base_model", metavar="BASE", callback=utf8, help="Another base model.")
@settings_options
@project_option
@global_options
@click.pass_obj
def update(session: Session, name: str, base_model: str | None, project: str | None, **flags: Any) -> int:
    """Update a deployment. Omitted settings are unchanged. The old engine answers until the new one is ready."""
    settings = _settings(flags) | ({} if base_model is None else {"base_model": base_model})
    if not settings:
        raise InvalidInput("nothing to update: see `batchmill llms update --help`")
    body = _with_token(session, LlmChange(**settings))
    return _change(session, project, lambda client: client.call(llm_calls.change(name, body)), "is changed")


@llms.command()
@name_argument
@project_option
@global_options
@click.pass_obj
def delete(session: Session, name: str, project: str | None) -> int:
    """Remove a deployment. Running jobs continue."""
    return _change(session, project, lambda client: client.remove_llm(name), "is deleted")


@llms.command()
@name_argument
@project_option
@global_options
@click.pass_obj
def start(session: Session, name: str, project: str | None) -> int:
    """Start an engine now."""
    return _change(session, project, lambda client: client.start_llm(name), "starts")


@llms.command()
@name_argument
@project_option
@global_options
@click.pass_obj
def stop(session: Session, name: str, project: str | None) -> int:
    """Stop a deployment until it is started again. Its engine stops when it is idle."""
    return _change(session, project, lambda client: client.stop_llm(name), "is stopped")


@llms.command()
@name_argument
@project_option
@global_options
@click.pass_obj
def events(session: Session, name: str, project: str | None) -> int:
    """Print recent events: starts, failures with the engine's last lines, preloaded adapters."""

    async def print_all(client: AsyncClient) -> None:
        for each in await client.llm_events(name):
            if session.as_json:
                session.emit("event", event=each)
                continue
            replica = "" if each.replica is None else f" (replica {each.replica})"
            in_flight = sum(each.by_project.values()) if each.in_flight is None else each.in_flight
            if in_flight or each.by_project:
                replica += f", {in_flight} requests in flight"
            message = f": {each.message}" if each.message else ""
            session.print(clean(f"{moment(each.at)}  {each.kind}{replica}{message}", MESSAGE_CHARS, lines=True))

    return _with(session, project, print_all)


def _change(
    session: Session, project: str | None, change: Callable[[AsyncClient], Awaitable[LlmInfo]], outcome: str
) -> int:
    """Change a deployment and print the outcome."""

    async def work(client: AsyncClient) -> None:
        info = await change(client)
        if session.as_json:
            session.emit("llm", llm=info)
            return
        message = f": {info.message}" if info.message else ""
        session.print(clean(f"{info.name} {outcome}{message}", MESSAGE_CHARS, lines=True))

    return _with(session, project, work)


def _with(session: Session, project: str | None, work: Callable[[AsyncClient], Awaitable[None]]) -> int:
    async def run() -> None:
        async with session.open(project) as client:
            await work(client)

    return session.run(run())


ROW_SHOWN_CHARS = 60
DIGEST_CHARS = 12  # shown; enough to identify one


@click.group()
def quarantine() -> None:
    """Requests that crashed engines of language models. They are refused for a while."""


@quarantine.command("list")
@project_option
@global_options
@click.pass_obj
def list_requests(session: Session, project: str | None) -> int:
    """List quarantined requests; on this machine, those of all projects."""

    async def run() -> None:
        async with session.open(project) as client:
            requests = await client.quarantine()
        if session.as_json:
            for each in requests:
                session.emit("request", request=each)
        elif not requests:
            session.print("no request has crashed an engine lately")
        else:
            head = ["REQUEST", "PROJECT", "MODEL", "URL", "DEATHS", "IT", "LAST"]
            for line in table([head, *map(_row_columns, requests)]):
                session.print(line)

    return session.run(run())


def _row_columns(each: QuarantinedRequest) -> list[str]:
    return [
        each.digest[:DIGEST_CHARS], clean(each.project, ROW_SHOWN_CHARS), clean(each.model, ROW_SHOWN_CHARS),
        clean(each.url, ROW_SHOWN_CHARS), str(each.deaths), "is refused" if each.is_refused else "runs alone",
        moment(each.at),
    ]  # fmt: skip


@quarantine.command()
@click.argument("digest", metavar="[REQUEST]", required=False)
@click.option("--all", "everything", is_flag=True, help="Release all requests.")
@project_option
@global_options
@click.pass_obj
def clear(session: Session, digest: str | None, everything: bool, project: str | None) -> int:
    """Release a request, by a prefix of its digest, or all requests."""
    if (digest is None) != everything:
        raise InvalidInput("name a request of `batchmill quarantine list`, or give --all")

    async def run() -> None:
        async with session.open(project) as client:
            released = await client.clear_quarantine(digest)
        if session.as_json:
            for each in released:
                session.emit("request", request=each)
        else:
            session.print(f"{len(released)} requests may run again")

    return session.run(run())


DISK = "disk"  # the only quota in bytes


@click.command()
@project_option
@global_options
@click.pass_obj
def quotas(session: Session, project: str | None) -> int:
    """Show a project's usage and limit of each quota."""

    async def run() -> None:
        async with session.open(project) as client:
            usage = await client.quotas()
        if session.as_json:
            for each in usage:
                session.emit("quota", quota=each)
        else:
            for line in table([["QUOTA", "HAS", "MAY HAVE"], *map(_quota_columns, usage)]):
                session.print(line)

    return session.run(run())


def _quota_columns(each: QuotaInfo) -> list[str]:
    render = size_text if each.quota == DISK else "{:,}".format
    return [each.quota, render(each.used), render(each.most)]
