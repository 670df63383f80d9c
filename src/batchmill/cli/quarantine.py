"""`batchmill quarantine`: requests that engines of language models died of."""

from __future__ import annotations

import click

from batchmill.cli.llms import project_option
from batchmill.cli.session import Session, global_options
from batchmill.cli.text import clean, moment, table
from batchmill.errors import InvalidInput
from batchmill.wire.native_llms import QuarantinedRequest

SHOWN_CHARS = 60
DIGEST_CHARS = 12  # shown, and enough to name one


@click.group()
def quarantine() -> None:
    """Requests that engines of language models died of: they are refused for a while."""


@quarantine.command("list")
@project_option
@global_options
@click.pass_obj
def list_requests(session: Session, project: str | None) -> int:
    """List them: those of all projects, on this machine."""

    async def run() -> None:
        async with session.open(project) as opened:
            found = await opened.quarantine()
        if session.as_json:
            for each in found:
                session.emit("request", request=each)
        elif not found:
            session.print("no engine has died of a request lately")
        else:
            head = ["REQUEST", "PROJECT", "MODEL", "URL", "DEATHS", "IT", "LAST"]
            for line in table([head, *map(_columns, found)]):
                session.print(line)

    return session.run(run())


def _columns(each: QuarantinedRequest) -> list[str]:
    return [
        each.digest[:DIGEST_CHARS], clean(each.project, SHOWN_CHARS), clean(each.model, SHOWN_CHARS),
        clean(each.url, SHOWN_CHARS), str(each.deaths), "is refused" if each.is_refused else "runs alone",
        moment(each.at),
    ]  # fmt: skip


@quarantine.command()
@click.argument("digest", metavar="[REQUEST]", required=False)
@click.option("--all", "everything", is_flag=True, help="All of them.")
@project_option
@global_options
@click.pass_obj
def clear(session: Session, digest: str | None, everything: bool, project: str | None) -> int:
    """Let a request go, by the beginning of its digest, or all of them: engines are given it again."""
    if (digest is None) != everything:
        raise InvalidInput("name a request of `batchmill quarantine list`, or give --all")

    async def run() -> None:
        async with session.open(project) as opened:
            gone = await opened.clear_quarantine(digest)
        if session.as_json:
            for each in gone:
                session.emit("request", request=each)
        else:
            session.print(f"{len(gone)} requests may run again")

    return session.run(run())
