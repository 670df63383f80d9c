"""Jobs: create, list, show, change, watch, and download their results."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
from starlette.responses import Response

from batchmill.dialects.native.orders import Orders, Redactor
from batchmill.errors import BatchmillError, Conflict, InvalidInput, InvalidTransition, UnknownName
from batchmill.object_store.urls import is_object_url
from batchmill.server.delivery import take_order
from batchmill.server.operations import Call, Operation, json_reply
from batchmill.server.replies import FileReply, PieceReply
from batchmill.services.files.files import Removal, Result
from batchmill.services.files.records import FileRecord
from batchmill.services.repeats import once_for, retry_count_of
from batchmill.services.services import Services
from batchmill.states import JobState
from batchmill.types import Amendment, Caller, JobOrder, JobQuery, JobView, Submitted
from batchmill.wire.native import PAGE_MAX, Accepted, Change, JobPage, ListJobs, NewJob, RemoteJobList, Settlement
from batchmill.wire.operations import (
    AMEND_JOB,
    CREATE_JOB,
    EVENTS,
    EXPLAIN_JOB,
    JOB_ERRORS,
    JOB_RESULTS,
    JSON_LINES,
    LIST_JOBS,
    LIST_REMOTE_JOBS,
    OCTETS,
    REMOVE_JOB,
    RETRY_JOB,
    SETTLE_REMOTE_JOB,
    SHOW_JOB,
    STEERING,
    VERIFY_JOB,
    WATCH_JOB,
    Endpoint,
)

SCANNED_MAX = 5000  # limit of jobs that one page with a filter reads
CONFLICT, MISSING, GONE = 409, 404, 410


class NativeJobs:
    def __init__(self, services: Services, redactor: Redactor, orders: Orders) -> None:
        self._services, self._redactor, self._orders = services, redactor, orders
        self._project_jobs = services.jobs

    def operations(self) -> Sequence[Operation]:
        return (
            Operation.of(CREATE_JOB, self.create, errors=(MISSING, CONFLICT), spends_itself=True),
            Operation.of(LIST_JOBS, self.list, errors=(MISSING,)),
            Operation.of(SHOW_JOB, self.show, errors=(MISSING, GONE)),
            Operation.of(AMEND_JOB, self.amend, errors=(MISSING, CONFLICT)),
            Operation.of(EXPLAIN_JOB, self.explain, errors=(MISSING,)),
            Operation.of(LIST_REMOTE_JOBS, self.remote, errors=(MISSING,)),
            Operation.of(SETTLE_REMOTE_JOB, self.settle_remote, errors=(MISSING, CONFLICT)),
            Operation.of(VERIFY_JOB, self.verify, errors=(MISSING, CONFLICT)),
            Operation.of(REMOVE_JOB, self.remove, errors=(MISSING, CONFLICT, GONE)),
            Operation.of(RETRY_JOB, self.retry, errors=(MISSING, CONFLICT)),
            *(self._steering(endpoint, getattr(self._project_jobs, verb)) for verb, endpoint in STEERING.items()),
        )  # fmt: skip

    def _steering(self, endpoint: Endpoint[JobView], change: Callable[[Caller, str], Awaitable[JobView]]) -> Operation:
        async def steer(call: Call) -> Response:
            await change(call.caller, call.path["job_id"])
            return await self.show(call)

        return Operation.of(endpoint, steer, errors=(MISSING, CONFLICT))

    async def create(self, call: Call) -> Response:
        body: NewJob = call.body
        headers = call.request.headers
        once = once_for(
            call.caller, f"{CREATE_JOB.method} {CREATE_JOB.path}", call.raw, headers.get("idempotency-key"),
            retry_count_of(headers.get("x-stainless-retry-count")), arrived=self._services.clock.now(),
        )  # fmt: skip
        order: JobOrder | None = None

        async def submit() -> Submitted:
            nonlocal order
            async with self._orders.inputs(call.caller, body) as inputs:
                order = self._orders.job(call.caller, body, inputs, once)
                return await self._project_jobs.submit(call.caller, order)

        submitted = await take_order(call, self._services.repeats, once, submit)
        # The job is stored now. The caller gets its id even if the view fails.
        try:
            view = self._redactor.job(*await self._project_jobs.show_with_results(call.caller, submitted.id))
        except BatchmillError:
            if order is None:  # of a repeated one
                raise
            view = self._redactor.job(self._as_ordered(submitted.id, order))
        return json_reply(Accepted(submitted.how, view), 201)

    def _as_ordered(self, job_id: str, order: JobOrder) -> JobView:
        """Return a view made from the order, for when the job cannot be read just now."""
        return JobView(
            job_id,
            JobState.VALIDATING,
            order.project,
            order.labels,
            order.origin,
            order.policy.priority,
            order.policy.deadline,
            input=order.dataset.paths,
            created=self._services.clock.now(),
        )

    async def list(self, call: Call) -> Response:
        query: ListJobs = call.query
        label = _label(query.label)
        page: list[JobView] = []
        after, scanned = query.after, 0
        while len(page) < query.limit and scanned < SCANNED_MAX:
            size = query.limit + 1 if label is None else PAGE_MAX
            job_query = JobQuery(state=query.state, model=query.model, since=query.since, after=after, limit=size)
            batch = await self._project_jobs.list_with_results(call.caller, job_query)
            for view, results in batch:
                after, scanned = view.id, scanned + 1
                if _is_match(view, query.state, label):
                    page.append(self._redactor.job(view, results))
                    if len(page) == query.limit:
                        break
            else:
                if len(batch) < size:
                    return json_reply(JobPage(page))
                continue
            is_last = len(batch) < size and batch[-1][0].id == after
            return json_reply(JobPage(page, None if is_last else after))
        return json_reply(JobPage(page, after))

    async def show(self, call: Call) -> Response:
        return json_reply(
            self._redactor.job(*await self._project_jobs.show_with_results(call.caller, call.path["job_id"]))
        )

    async def remove(self, call: Call) -> Response:
        return json_reply(self._redactor.job(await self._project_jobs.remove(call.caller, call.path["job_id"])))

    async def retry(self, call: Call) -> Response:
        await self._project_jobs.retry(call.caller, call.path["job_id"], call.body)
        return await self.show(call)

    async def amend(self, call: Call) -> Response:
        change: Change = call.body
        if change == Change():
            raise InvalidInput("nothing changes: set priority, deadline or budget", code="nothing_to_change")
        if change.deadline is not None and change.deadline <= self._services.clock.now():
            raise InvalidInput("the deadline is in the past: cancel the job instead", code="invalid_deadline")
        amendment = Amendment(**msgspec.structs.asdict(change))
        await self._project_jobs.amend(call.caller, call.path["job_id"], amendment)
        return await self.show(call)

    async def explain(self, call: Call) -> Response:
        return json_reply(self._redactor.wait(await self._project_jobs.explain(call.caller, call.path["job_id"])))

    async def remote(self, call: Call) -> Response:
        remote_jobs = await self._project_jobs.remote(call.caller, call.path["job_id"])
        return json_reply(RemoteJobList([self._redactor.remote(each) for each in remote_jobs]))

    async def settle_remote(self, call: Call) -> Response:
        body: Settlement = call.body
        job_id, tag = call.path["job_id"], call.path["tag"]
        return json_reply(
            self._redactor.remote(await self._project_jobs.settle_remote(call.caller, job_id, tag, body.remote_id))
        )

    async def verify(self, call: Call) -> Response:
        return json_reply(self._redactor.ledger(await self._project_jobs.verify(call.caller, call.path["job_id"])))


def _label(text: str | None) -> tuple[str, str | None] | None:
    """Parse a label filter: NAME or NAME=VALUE."""
    if text is None:
        return None
    name, equals, value = text.partition("=")
    return name, value if equals else None


def _is_match(view: JobView, state: JobState | None, label: tuple[str, str | None] | None) -> bool:
    if state is not None and view.state != state:
        return False
    if label is None:
        return True
    name, value = label
    return name in view.labels and value in (None, view.labels[name])


MEDIA = {".jsonl": JSON_LINES, ".csv": "text/csv", ".parquet": "application/vnd.apache.parquet"}
HEARTBEAT_S = 15.0  # seconds between heartbeats, so that proxies and clients do not time out
PIECE_BYTES = 256 * 1024
LAST_EVENT_CHARS_MAX = 64
PRELUDE = b": a job's views; `end` follows the last one\n\n"


class JobStreams:
    def __init__(self, services: Services, redactor: Redactor) -> None:
        self._services, self._redactor = services, redactor
        self._project_jobs = services.jobs

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
        await self._project_jobs.show(call.caller, job_id)  # refuse an unknown job before the stream starts
        last = call.request.headers.get("last-event-id", "")[:LAST_EVENT_CHARS_MAX]
        return PieceReply(self._events(call, job_id, interval_s, last), media=EVENTS)

    async def _events(self, call: Call, job_id: str, interval_s: float, last: str) -> AsyncGenerator[bytes]:
        """Yield whole views. A client that reconnects gets the newest view, unless it has it already."""
        yield PRELUDE
        stopping = asyncio.ensure_future(self._services.stopping.wait())
        views = self._project_jobs.watch(call.caller, job_id, interval_s)
        following = asyncio.ensure_future(anext(views, None))
        try:
            while True:
                await asyncio.wait({following, stopping}, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
                if stopping.done():
                    return  # without `end`, the client reconnects, to the next server
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
        """Return the id of an event, and the event."""
        if JobState(view.state).is_at_rest:
            info = self._redactor.job(*await self._project_jobs.show_with_results(call.caller, view.id))
        else:
            info = self._redactor.job(view)
        data = msgspec.json.encode(info)
        name = hashlib.sha256(data).hexdigest()[:16]
        return name, b"id: %s\nevent: view\ndata: %s\n\n" % (name.encode(), data)

    # -- files --------------------------------------------------------------------------------------------------------

    async def results(self, call: Call) -> Response:
        if call.query.partial:
            if "range" in call.request.headers:
                raise InvalidInput(
                    "partial results cannot be requested as a range, because they grow: leave the Range header out",
                    code="no_ranges",
                )
            return await self._partial(call)
        if call.query.sampled or call.query.numbered:
            name = "sampled" if call.query.sampled else "numbered"
            raise InvalidInput(f"{name} is for partial results: set partial too", code="invalid_sample")
        view, output, _ = await self._ended(call)
        if output is None:  # errors are in a file of their own, and no row succeeded: the results are empty
            return Response(b"", media_type=JSON_LINES)
        return await self._file(call, output)

    async def errors(self, call: Call) -> Response:
        view, _, errors = await self._ended(call)
        if errors is None:
            why = "its failed rows are in the result file" if view.rows_failed else "none of its rows failed"
            raise UnknownName(f"the job {view.id} has no error file: {why}", code="no_file")
        return await self._file(call, errors)

    async def _ended(self, call: Call) -> tuple[JobView, Result, Result]:
        view = await self._project_jobs.show(call.caller, call.path["job_id"])
        if not JobState(view.state).is_at_rest:
            raise InvalidTransition(
                f"the job {view.id} is {view.state}, {view.rows_ok + view.rows_failed:,} of {view.rows:,} rows are "
                "done: get those with partial=true"
            )
        if view.output is None:  # the job ended before its rows were planned
            raise UnknownName(f"the job {view.id} has no result file", code="no_file")
        if is_object_url(view.output):
            shown = self._redactor.job(view).output or "an object store"
            raise Conflict(f"the results of the job {view.id} are in {shown}: read them there", code="no_copy_here")
        return view, *await self._project_jobs.results_of(view)

    async def _file(self, call: Call, record: FileRecord | Removal) -> Response:
        """Raises: Gone."""
        if isinstance(record, Removal):
            raise record.error()
        file = await self._services.files.open(record)
        return FileReply(call.request, file, filename=record.filename, media=media_of(record.filename))

    async def _partial(self, call: Call) -> Response:
        """Send partial results. The file is unlinked before the first byte is sent, so that it cannot stay behind."""
        job_id, query = call.path["job_id"], call.query
        path = await self._project_jobs.partial(call.caller, job_id, is_numbered=query.numbered, sampled=query.sampled)
        file = await asyncio.to_thread(_open_and_unlink, path)
        return PieceReply(_pieces(file), media=OCTETS if query.numbered else JSON_LINES)


def _open_and_unlink(path: str) -> BinaryIO:
    file = open(path, "rb")  # noqa: SIM115 - `_pieces` closes it
    os.unlink(path)
    return file


async def _pieces(file: BinaryIO) -> AsyncGenerator[bytes]:
    with file:
        while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
            yield piece


def media_of(filename: str) -> str:
    """Return the media type for the suffix of a name; compressed files are octets."""
    return MEDIA.get(Path(filename).suffix.lower(), OCTETS)
