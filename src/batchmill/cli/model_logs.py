"""`batchmill models logs`: what was printed while a version was made, and what its calls print and raise."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from msgspec.structs import replace

from batchmill.cli.session import Session
from batchmill.cli.text import clean, moment
from batchmill.client import calls
from batchmill.errors import InvalidInput
from batchmill.wire.native_logs import LogEntry, LogPage, LogQuery

if TYPE_CHECKING:
    from batchmill.client.asynchronous import AsyncClient

POLL_S = 1.0
BUILD_CHARS_MAX = 1_000_000
TEXT_CHARS_MAX = 20_000
REQUESTS_SHOWN = 3


async def show_logs(session: Session, name: str, query: LogQuery, *, follow: bool, is_build: bool) -> None:
    """Print them; with `follow` until interrupted."""
    if is_build and (follow or query.request is not None):
        raise InvalidInput("--build is of the making, which is no call: leave out --follow and --request")
    async with session.open() as opened:
        if not follow and query.request is None:
            _build(session, await opened.model(name).log(branch=query.branch, version=query.version or "latest"))
        if not is_build:
            await _calls(session, opened, name, query, follow=follow)


def _build(session: Session, text: str) -> None:
    if session.as_json:
        session.emit("log", text=text)
    elif text:
        session.print(clean(text, BUILD_CHARS_MAX, lines=True))


async def _calls(session: Session, opened: AsyncClient, name: str, query: LogQuery, *, follow: bool) -> None:
    page: LogPage | None = await opened.call(calls.model_calls(name, query))
    while page is not None:
        if page.is_lost:
            session.say("some lines are kept no longer")
        for entry in page.entries:
            _entry(session, entry)
        if not follow:
            return
        if not page.entries:
            await asyncio.sleep(POLL_S)
        page = await opened.call(calls.model_calls(name, replace(query, after=page.next)))


def _entry(session: Session, entry: LogEntry) -> None:
    if session.as_json:
        session.emit("line", entry=entry)
        return
    told = [clean(each, 100) for each in entry.requests[:REQUESTS_SHOWN]]
    more = len(entry.requests) - len(told)
    of = ", ".join(told) + (f" and {more} more" if more else "") or entry.stage
    for line in clean(entry.text, TEXT_CHARS_MAX, lines=True).split("\n"):
        session.print(f"{moment(entry.at)} {of} | {line}")
