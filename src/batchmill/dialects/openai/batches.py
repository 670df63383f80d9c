"""/v1/batches: create, retrieve, list and cancel batches. A batch object shows committed records only.

Source: OpenAI's API reference, "Batch".
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.responses import Response

from batchmill.dialects.openai.errors import UnknownParam
from batchmill.dialects.openai.files import ExpiresAfter
from batchmill.errors import BatchmillError, Conflict, InvalidTransition, UnknownName
from batchmill.server.bodies import InvalidField
from batchmill.server.delivery import take_order
from batchmill.server.fast_path import Cancel, Headers, Reply
from batchmill.server.operations import JSON_HEADERS, Call, Operation, json_bytes, json_reply
from batchmill.services.files.records import FileRecord
from batchmill.services.path_redaction import PathRedactor
from batchmill.services.project_jobs import NO_RESULTS, ResultIds
from batchmill.services.repeats import once_for, retry_count_of
from batchmill.services.services import Services
from batchmill.states import EXPIRED, JobState
from batchmill.types import Caller, DatasetSpec, JobOrder, JobQuery, JobView, Once, Policy, Price, Scope, Submitted
from batchmill.wire.rows.forms import URLS

JOB, BATCH = "job_", "batch_"

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
_STATUS: dict[JobState, Status] = {
    JobState.VALIDATING: "validating",
    JobState.PLANNING: "validating",
    JobState.QUEUED: "in_progress",
    JobState.RUNNING: "in_progress",
    JobState.PAUSED: "in_progress",
    JobState.FINALIZING: "finalizing",
    JobState.CANCELLING: "cancelling",
    JobState.COMPLETED: "completed",
    JobState.CANCELLED: "cancelled",
    JobState.EXPIRED: "expired",
    JobState.FAILED: "failed",
}


class BatchError(Struct, frozen=True):
    code: str | None
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(Struct, frozen=True):
    data: list[BatchError]
    object: Literal["list"] = "list"


class RequestCounts(Struct, frozen=True):
    total: int
    completed: int
    failed: int


class InputDetails(Struct, frozen=True):
    cached_tokens: int


class OutputDetails(Struct, frozen=True):
    reasoning_tokens: int = 0  # engines do not count them separately


class BatchUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Progress(Struct, frozen=True):
    """Fields that OpenAI's object does not have; the openai package has them in `model_extra`."""

    job: str
    state: str
    reason: str | None
    message: str
    notes: list[str]  # messages of its engines, such as "starting vLLM: 20 s"
    remaining_s: float | None
    rows_per_s: float | None
    cost: float | None  # USD
    prices: dict[str, Price]  # USD per million tokens, for the models of the batch


class Batch(Struct, frozen=True, kw_only=True):
    """Source: OpenAI's API reference, "the batch object"."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None
    batchmill: Progress


def batch_id(job_id: str) -> str:
    return BATCH + job_id.removeprefix(JOB)


def job_id(batch_id: str) -> str:
    """Return the id of a batch's job; an empty text if it is not the id of a batch."""
    return JOB + batch_id.removeprefix(BATCH) if batch_id.startswith(BATCH) else ""


def batch_of(view: JobView, results: ResultIds = NO_RESULTS, *, hide: Callable[[str], str] = str) -> Batch:
    """Return a job as a batch. `hide` removes what only the operator of the server may read from a message."""
    state, origin = _state(view), view.origin or {}
    has_expired = state is JobState.EXPIRED or view.reason == EXPIRED or _is_late(view)
    return Batch(
        id=batch_id(view.id),
        endpoint=origin.get("endpoint", ""),
        model=view.model if view.model and "," not in view.model else None,
        errors=_errors(view, hide) if state is JobState.FAILED else None,
        input_file_id=origin.get("input_file_id", ""),
        completion_window=origin.get("completion_window", ""),
        status=_status(state, has_expired),
        output_file_id=results.output,
        error_file_id=results.errors,
        created_at=int(view.created),
        in_progress_at=_seconds(view.started),
        expires_at=_seconds(view.deadline),
        finalizing_at=_seconds(view.finalizing or (view.cancelling if has_expired else None)),
        completed_at=_ended(view, JobState.COMPLETED),
        failed_at=_ended(view, JobState.FAILED),
        expired_at=_ended(view, JobState.EXPIRED),
        cancelling_at=None if has_expired else _seconds(view.cancelling),
        cancelled_at=_ended(view, JobState.CANCELLED),
        request_counts=RequestCounts(view.rows, view.rows_ok, view.rows_failed),
        usage=_usage(view),
        metadata=view.labels or None,
        batchmill=Progress(
            view.id,
            view.state,
            view.reason,
            hide(view.message),
            [hide(note) for note in view.notes],
            view.remaining_s,
            view.rows_per_s,
            view.cost,
            view.prices,
        ),  # fmt: skip
    )


def _state(view: JobView) -> JobState:
    """Return the job's state. A paused job that is being cancelled is shown as cancelling, not in progress."""
    is_stopped = view.state == JobState.PAUSED and view.cancelling is not None
    return JobState.CANCELLING if is_stopped else JobState(view.state)


def _is_late(view: JobView) -> bool:
    return view.cancelling is not None and view.deadline is not None and view.cancelling >= view.deadline


def _status(state: JobState, has_expired: bool) -> Status:
    """Return OpenAI's status. A cancelling batch whose time has expired is shown as finalizing."""
    return "finalizing" if state is JobState.CANCELLING and has_expired else _STATUS[state]


def _seconds(time: float | None) -> int | None:
    return None if time is None else int(time)


def _ended(view: JobView, state: JobState) -> int | None:
    return _seconds(view.finished) if view.state == state else None


def _errors(view: JobView, hide: Callable[[str], str]) -> BatchErrors:
    """Return why a batch failed: the errors of validation, or the engine's message."""
    if not view.problems:
        return BatchErrors([BatchError(view.reason or "failed", hide(view.message))])
    errors = [BatchError(each.code, hide(each.message), each.line or None) for each in view.problems]
    more = view.problems_total - len(errors)
    if more > 0:
        errors.append(BatchError("more_errors", f"{more:,} more errors are not listed"))
    return BatchErrors(errors)


def _usage(view: JobView) -> BatchUsage:
    usage = view.usage
    return BatchUsage(
        usage.input_tokens,
        InputDetails(usage.cached_tokens),
        usage.output_tokens,
        OutputDetails(),
        usage.input_tokens + usage.output_tokens,
    )


FRONTEND = "openai"
ROUTE = "POST /v1/batches"
WINDOW_HOURS_MAX = 8760  # a year
SHOWN_CHARS = 80
_WINDOW = re.compile(r"([1-9][0-9]{0,3})h")

MetadataKey = Annotated[str, Meta(min_length=1, max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]


class CreateBatch(Struct, frozen=True, forbid_unknown_fields=True):
    completion_window: Annotated[str, Meta(description='Whole hours, "1h" to "8760h".')]
    endpoint: str
    input_file_id: str
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None


class ListBatches(Struct, frozen=True, forbid_unknown_fields=True):
    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 20


class BatchPage(Struct, frozen=True):
    data: list[Batch]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class BatchHandlers:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._project_jobs = services.jobs
        self._show = partial(batch_of, hide=PathRedactor(services.config.data_dir).hide)

    def operations(self) -> Sequence[Operation]:
        one = "/v1/batches/{batch_id}"
        return (
            Operation(
                "createBatch", "POST", "/v1/batches", "Run the requests of a file", Scope.SUBMIT, self.create,
                body=CreateBatch, reply=Batch, errors=(404, 409, 503), spends_itself=True,
            ),
            Operation(
                "listBatches", "GET", "/v1/batches", "List batches, the newest first", Scope.READ, self.list,
                query=ListBatches, reply=BatchPage, errors=(404,),
            ),
            Operation(
                "retrieveBatch", "GET", one, "Show a batch", Scope.READ, self.retrieve, reply=Batch, errors=(404,),
                fast_handler=self,
            ),
            Operation(
                "cancelBatch", "POST", one + "/cancel", "Stop running requests; finished ones are kept",
                Scope.SUBMIT, self.cancel, reply=Batch, errors=(404, 409, 503),
            ),
        )  # fmt: skip

    async def create(self, call: Call) -> Response:
        once = self._once(call)
        job = (await take_order(call, self._services.repeats, once, lambda: self._submit(call, once))).id
        # The job is stored now. The caller gets its id even if the view fails.
        try:
            view, results = await self._project_jobs.show_with_results(call.caller, job)
        except BatchmillError:
            view, results = self._as_ordered(job, call), NO_RESULTS
        return json_reply(self._show(view, results))

    async def retrieve(self, call: Call) -> Response:
        return json_reply(self._show(*await self._own(call.caller, call.path["batch_id"])))

    def begin(self, path: dict[str, str], headers: Headers, body: bytes, caller: Caller, reply: Reply) -> Cancel | None:
        """Answer `retrieve` for a job that has changed lately, or was asked for. See `FastHandler.begin`."""
        found = self._project_jobs.show_recent(caller, job_id(path["batch_id"]))
        if found is not None and (found[0].origin or {}).get("frontend") == FRONTEND:
            reply(200, JSON_HEADERS, json_bytes(self._show(*found)))
        return None

    async def list(self, call: Call) -> Response:
        query: ListBatches = call.query
        after = None
        if query.after is not None:
            after = (await self._own(call.caller, query.after))[0].id
        job_query = JobQuery(origin=FRONTEND, after=after, limit=query.limit + 1)
        jobs = await self._project_jobs.list_with_results(call.caller, job_query)
        batches = [self._show(await self._with_problems(call.caller, view), ids) for view, ids in jobs[: query.limit]]
        first, last = (batches[0].id, batches[-1].id) if batches else (None, None)
        return json_reply(BatchPage(batches, len(jobs) > query.limit, first, last))

    async def cancel(self, call: Call) -> Response:
        view, results = await self._own(call.caller, call.path["batch_id"])
        if view.state == JobState.CANCELLING:
            return json_reply(self._show(view, results))
        is_retry = retry_count_of(call.request.headers.get("x-stainless-retry-count")) > 0
        try:
            await self._project_jobs.cancel(call.caller, view.id)
        except InvalidTransition:
            is_done = view.state == JobState.CANCELLED and is_retry  # the reply to the first attempt was lost
            if JobState(view.state).is_at_rest and not is_done:
                status = self._show(view).status
                raise Conflict(f"Cannot cancel a batch with status '{status}'.", code="batch_has_ended") from None
        return json_reply(self._show(*await self._own(call.caller, batch_id(view.id))))

    async def _own(self, caller: Caller, batch_id: str) -> tuple[JobView, ResultIds]:
        """Return a batch of this caller. Raises: UnknownName, with the same message for any other id."""
        try:
            view, results = await self._project_jobs.show_with_results(caller, job_id(batch_id))
        except UnknownName:
            view = None
        if view is None or (view.origin or {}).get("frontend") != FRONTEND:
            raise UnknownName(f"No batch found with id '{batch_id[:SHOWN_CHARS]}'.", code="unknown_batch")
        return view, results

    async def _with_problems(self, caller: Caller, view: JobView) -> JobView:
        """Return a listed job with the lines that validation refused, which the list leaves out."""
        is_short = view.state == JobState.FAILED and view.problems_total > len(view.problems)
        return await self._project_jobs.show(caller, view.id) if is_short else view

    def _once(self, call: Call) -> Once:
        headers = call.request.headers
        retries = retry_count_of(headers.get("x-stainless-retry-count"))
        key, arrived = headers.get("idempotency-key"), self._services.clock.now()
        return once_for(call.caller, ROUTE, call.raw, key, retries, arrived=arrived)

    async def _submit(self, call: Call, once: Once) -> Submitted:
        body: CreateBatch = call.body
        hours = window_hours(body.completion_window)
        self._check_endpoint(call.caller, body.endpoint)
        async with self._input(call.caller, body.input_file_id) as record:
            return await self._project_jobs.submit(call.caller, self._job_order(call, record, once, hours))

    def _job_order(self, call: Call, record: FileRecord, once: Once, hours: int) -> JobOrder:
        body: CreateBatch = call.body
        config = self._services.config
        limits = msgspec.structs.asdict(config.limits)
        return JobOrder(
            DatasetSpec([str(self._services.files.path(record))], format="openai", **limits),
            self._services.directory.specs(call.caller),
            policy=Policy(deadline=self._services.clock.now() + hours * 3600, on_engine_failure="fail"),
            endpoint=body.endpoint,
            rows_max=config.server.rows_max,
            default_model=False,
            project=call.caller.project,
            labels=body.metadata or {},
            origin=_origin(call),
            once=once,
        )

    def _as_ordered(self, job: str, call: Call) -> JobView:
        """Return a view made from the order, for when the job cannot be read just now."""
        body: CreateBatch = call.body
        now = self._services.clock.now()
        return JobView(
            job, JobState.VALIDATING, call.caller.project, body.metadata or {}, _origin(call),
            deadline=now + window_hours(body.completion_window) * 3600, created=now,
        )  # fmt: skip

    @contextlib.asynccontextmanager
    async def _input(self, caller: Caller, file_id: str) -> AsyncIterator[FileRecord]:
        """Hold the input file, so that it is not deleted before the job is stored."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                record = await stack.enter_async_context(self._services.files.hold(caller.project, file_id))
            except UnknownName as error:
                raise UnknownParam(error.message, param="input_file_id", code=error.code) from None
            _check_purpose(record)
            yield record

    def _check_endpoint(self, caller: Caller, endpoint: str) -> None:
        directory = self._services.directory
        if endpoint in URLS or directory.serves(endpoint, caller):
            return
        raise InvalidField(
            f"Invalid value: '{endpoint[:SHOWN_CHARS]}'. Supported values are: {', '.join(map(repr, URLS))}, and any "
            "other path that one of your models serves.",
            param="endpoint",
            code="invalid_endpoint",
        )


def _origin(call: Call) -> dict[str, Any]:
    """Return what this API stores with a job."""
    body: CreateBatch = call.body
    expires = body.output_expires_after
    optional = {} if expires is None else {"output_expires_s": expires.seconds}
    return {
        "frontend": FRONTEND, "input_file_id": body.input_file_id, "key": call.caller.key, "endpoint": body.endpoint,
        "completion_window": body.completion_window, **optional,
    }  # fmt: skip


def window_hours(window: str) -> int:
    """Return the hours of a completion window. Raises: InvalidField."""
    match = _WINDOW.fullmatch(window)
    if match is None or int(match[1]) > WINDOW_HOURS_MAX:
        raise InvalidField(
            f"Invalid value: '{window[:SHOWN_CHARS]}'. completion_window must be a number of whole hours, '1h' to "
            f"'{WINDOW_HOURS_MAX}h', such as '24h'",
            param="completion_window",
            code="invalid_completion_window",
        )
    return int(match[1])


def _check_purpose(record: FileRecord) -> None:
    if record.purpose != "batch":
        raise InvalidField(
            f"The file {record.id} has the purpose '{record.purpose}': upload it again with purpose 'batch'",
            param="input_file_id",
            code="wrong_purpose",
        )
