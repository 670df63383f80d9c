"""What is read while it comes to be: events of a job, its results, the rows that are finished so far."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
from starlette.responses import Response

from batchmill.dialects.native.jobs import CONFLICT, GONE, MISSING
from batchmill.dialects.native.views import Shown
from batchmill.errors import InvalidInput, InvalidTransition, UnknownName
from batchmill.server.operations import Call, Operation
from batchmill.server.replies import FileReply, PieceReply
from batchmill.services.files import FileRecord, Removal, Result
from batchmill.services.services import Services
from batchmill.states import JobState
from batchmill.types import JobView
from batchmill.wire.operations import (
    EVENTS,
    JOB_ERRORS,
    JOB_RESULTS,
    JSON_LINES,
    OCTETS,
    WATCH_JOB,
)

MEDIA = {".jsonl": JSON_LINES, ".csv": "text/csv", ".parquet": "application/vnd.apache.parquet"}
HEARTBEAT_S = 15.0  # without a word, after which proxies and clients would think that nobody is there
PIECE_BYTES = 256 * 1024
LAST_EVENT_CHARS_MAX = 64
PRELUDE = b": a job's views; `end` follows the last one\n\n"


class Following:
    def __init__(self, services: Services, shown: Shown) -> None:
        self._services, self._shown = services, shown
        self._desk = services.jobs

    def operations(self) -> Sequence[Operation]:
        files, lines = JOB_RESULTS.media, JOB_ERRORS.media[0]
        return (
            Operation.of(WATCH_JOB, self.watch, errors=(MISSING,)),
            Operation.of(JOB_RESULTS, self.results, also={206: files, 416: None}, errors=(MISSING, CONFLICT, GONE)),
            Operation.of(JOB_ERRORS, self.errors, also={206: lines, 416: None}, errors=(MISSING, CONFLICT, GONE)),
        )  # fmt: skip

    # -- events -------------------------------------------------------------------------------------------------------

    async def watch(self, call: Call) -> Response:
        job_id, interval_s = call.path["job_id"], call.query.interval_s
        await self._desk.show(call.caller, job_id)  # an unknown job is refused before anything is promised
        last = call.request.headers.get("last-event-id", "")[:LAST_EVENT_CHARS_MAX]
        return PieceReply(self._events(call, job_id, interval_s, last), media=EVENTS)

    async def _events(self, call: Call, job_id: str, interval_s: float, last: str) -> AsyncGenerator[bytes]:
        """Every event is a whole view: who comes back gets the newest, unless it has seen that one already."""
        yield PRELUDE
        stopping = asyncio.ensure_future(self._services.stopping.wait())
        views = self._desk.watch(call.caller, job_id, interval_s)
        following = asyncio.ensure_future(anext(views, None))
        try:
            while True:
                await asyncio.wait({following, stopping}, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
                if stopping.done():
                    return  # without `end`: the client comes back, to the server that starts next
                if not following.done():
                    yield b": still here\n\n"
                    continue
                view = following.result()
                if view is None:
                    yield b"event: end\ndata: {}\n\n"
                    return
                following = asyncio.ensure_future(anext(views, None))
                event = await self._event(call, view)
                if event[0] != last:
                    yield event[1]
                    last = event[0]
        finally:
            for task in (following, stopping):
                task.cancel()
            await asyncio.gather(following, stopping, return_exceptions=True)
            await views.aclose()

    async def _event(self, call: Call, view: JobView) -> tuple[str, bytes]:
        """The id of an event, and the event."""
        if JobState(view.state).is_at_rest:
            told = self._shown.job(*await self._desk.show_with_results(call.caller, view.id))
        else:
            told = self._shown.job(view)
        data = msgspec.json.encode(told)
        name = hashlib.sha256(data).hexdigest()[:16]
        return name, b"id: %s\nevent: view\ndata: %s\n\n" % (name.encode(), data)

    # -- files --------------------------------------------------------------------------------------------------------

    async def results(self, call: Call) -> Response:
        if call.query.partial:
            if "range" in call.request.headers:
                raise InvalidInput("partial results have no ranges: they grow", code="no_ranges")
            return await self._partial(call)
        view, output, _ = await self._ended(call)
        if output is None:  # no row of a job that keeps errors apart succeeded: its results are a file of no lines
            return Response(b"", media_type=JSON_LINES)
        return await self._file(call, output)

    async def errors(self, call: Call) -> Response:
        view, _, errors = await self._ended(call)
        if errors is None:
            why = "its rows that failed stand among its results" if view.rows_failed else "none of its rows failed"
            raise UnknownName(f"the job {view.id} has no error file: {why}", code="no_file")
        return await self._file(call, errors)

    async def _ended(self, call: Call) -> tuple[JobView, Result, Result]:
        view = await self._desk.show(call.caller, call.path["job_id"])
        if not JobState(view.state).is_at_rest:
            raise InvalidTransition(
                f"the job {view.id} is {view.state}, {view.rows_ok + view.rows_failed:,} of {view.rows:,} rows are "
                "done: partial=true gives those"
            )
        if view.output is None:  # it ended before any row was planned
            raise UnknownName(f"the job {view.id} has no result file", code="no_file")
        return view, *await self._desk.results_of(view)

    async def _file(self, call: Call, record: FileRecord | Removal) -> Response:
        """Raises: Gone."""
        if isinstance(record, Removal):
            raise record.error()
        file = await self._services.files.open(record)
        return FileReply(call.request, file, filename=record.filename, media=media_of(record.filename))

    async def _partial(self, call: Call) -> Response:
        """The file is gone from its folder before the first byte of it is sent: nothing can leave it behind."""
        path = await self._desk.partial(call.caller, call.path["job_id"])
        file = await asyncio.to_thread(_taken, path)
        return PieceReply(_pieces(file), media=JSON_LINES)


def _taken(path: str) -> BinaryIO:
    file = open(path, "rb")  # noqa: SIM115 - `_pieces` closes it
    os.unlink(path)
    return file


async def _pieces(file: BinaryIO) -> AsyncGenerator[bytes]:
    with file:
        while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
            yield piece


def media_of(filename: str) -> str:
    """What a file holds, by the end of its name; packed ones are just bytes."""
    return MEDIA.get(Path(filename).suffix.lower(), OCTETS)
