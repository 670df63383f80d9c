"""Batch inference jobs over datasets, with the adapters that their rows name. Views come from committed records only.

Source: the published client, which reads the first five fields of a job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.responses import Response

from batchmill.dialects.predibase.files import CONFLICT, MISSING, Downloads, summary_of, why_failed
from batchmill.dialects.predibase.server_config import ServerConfig, of_server_config
from batchmill.errors import BatchmillError, InvalidDataset, InvalidTransition, UnknownName
from batchmill.server.delivery import take_order
from batchmill.server.operations import Call, Operation, json_reply
from batchmill.services.files.records import FileRecord
from batchmill.services.named_datasets import OPENAI, DatasetRecord, DatasetState
from batchmill.services.path_redaction import PathRedactor
from batchmill.services.project_jobs import NO_RESULTS, ResultIds
from batchmill.services.repeats import once_for
from batchmill.services.services import Services
from batchmill.states import JobState
from batchmill.types import (
    Caller,
    DatasetSpec,
    JobOrder,
    JobQuery,
    JobView,
    ModelSpec,
    Once,
    Policy,
    Price,
    Scope,
    Submitted,
)

FRONTEND = "predibase"

Status = Literal["queued", "running", "completed", "failed", "cancelled"]
_STATUS: dict[JobState, Status] = {
    JobState.VALIDATING: "queued",
    JobState.PLANNING: "queued",
    JobState.QUEUED: "queued",
    JobState.RUNNING: "running",
    JobState.PAUSED: "running",
    JobState.FINALIZING: "running",
    JobState.CANCELLING: "running",
    JobState.COMPLETED: "completed",
    JobState.CANCELLED: "cancelled",
    JobState.EXPIRED: "failed",
    JobState.FAILED: "failed",
}


class Rows(Struct, frozen=True):
    total: int  # 0: not counted yet
    succeeded: int
    failed: int


class Tokens(Struct, frozen=True):
    input: int
    cached: int  # of the input
    output: int


class PerMillion(Struct, frozen=True):
    """USD per million tokens."""

    input: float
    cached: float
    output: float


class Job(Struct, frozen=True, kw_only=True, rename="camel"):
    uuid: str
    original_request: dict[str, Any]
    status: Status
    error: str | None
    result_path: str | None  # None: there are no results to download
    state: str  # batchmill's own state
    message: str  # what it waits for, or its engine's message
    dataset_id: str | None
    model: str
    rows: Rows
    errors: dict[str, int]  # code -> rows
    tokens: Tokens
    cost: float | None  # USD; None: no price is known
    price_per_million: PerMillion | None
    progress: float  # 0 to 1
    rows_per_second: float | None
    remaining_seconds: float | None
    created_at: float  # seconds since the epoch, like the two below
    started_at: float | None
    finished_at: float | None


def job_of(view: JobView, results: ResultIds, hide: Callable[[str], str], *, reasons: Sequence[str] = ()) -> Job:
    """Return a job for the client. `hide` removes the server's paths from a message; `reasons` say why it is slow."""
    origin = view.origin or {}
    state = JobState(view.state)
    usage = view.usage
    return Job(
        uuid=view.id,
        original_request=origin.get("request", {}),
        status=_status(view, state),
        error=_error(view, state, hide),
        result_path=None if results.output is None else f"/v2/batch-inference/{view.id}/results",
        state=view.state,
        message=hide("; ".join([*reasons]) or view.message or "; ".join(view.notes)),
        dataset_id=origin.get("dataset_id"),
        model=view.model,
        rows=Rows(view.rows, view.rows_ok, view.rows_failed),
        errors=view.errors,
        tokens=Tokens(usage.input_tokens, usage.cached_tokens, usage.output_tokens),
        cost=view.cost,
        price_per_million=_price(view.prices),
        progress=_progress(view, state),
        rows_per_second=view.rows_per_s,
        remaining_seconds=view.remaining_s,
        created_at=view.created,
        started_at=view.started,
        finished_at=view.finished,
    )


def _status(view: JobView, state: JobState) -> Status:
    """Return the client's status. A job that paused before its first row ran is still queued."""
    return "queued" if state is JobState.PAUSED and view.started is None else _STATUS[state]


def _error(view: JobView, state: JobState, hide: Callable[[str], str]) -> str | None:
    """Return why a job failed: the first bad lines, or the engine's message; None for other jobs."""
    if state is JobState.EXPIRED:
        return hide(view.message) or "the deadline passed before all rows ran: the results contain the finished rows"
    if state is not JobState.FAILED:
        return None
    return hide(summary_of(view.problems, view.problems_total) or view.message or view.reason or "failed")


def _price(prices: dict[str, Price]) -> PerMillion | None:
    """Return the price of the base model, which is also the price of its adapters."""
    for price in prices.values():
        return PerMillion(price.input, price.input if price.cached is None else price.cached, price.output)
    return None


def _progress(view: JobView, state: JobState) -> float:
    if state is JobState.COMPLETED:
        return 1.0
    return (view.rows_ok + view.rows_failed) / view.rows if view.rows else 0.0


ROUTE = "POST /v2/batch-inference"
ALL = "/v2/batch-inference"
ONE = f"{ALL}/{{job_id}}"
LIST_DEFAULT, LIST_MAX = 10, 1000
SHOWN_CHARS = 80
HIDDEN = "***"  # replaces a token
CANCELLED_STATES = (JobState.CANCELLING, JobState.CANCELLED)


class CreateJob(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    dataset: Annotated[str, Meta(min_length=1, max_length=600, description="NAME, CONNECTION/NAME or a uuid.")]
    server_config: ServerConfig


class ListJobs(Struct, frozen=True, forbid_unknown_fields=True):
    limit: Annotated[int, Meta(ge=1, le=LIST_MAX)] = LIST_DEFAULT


class Jobs(Struct, frozen=True):
    jobs: list[Job]


class JobPage(Struct, frozen=True):
    """The newest first."""

    data: Jobs


class ResultLink(Struct, frozen=True):
    """A link that works once, for an hour."""

    url: str


class BatchInference:
    def __init__(self, services: Services, downloads: Downloads) -> None:
        self._services, self._downloads = services, downloads
        self._project_jobs, self._files = services.jobs, services.files
        self._show = partial(job_of, hide=PathRedactor(services.config.data_dir).hide)

    def operations(self) -> Sequence[Operation]:
        return (
            Operation(
                "createBatchInference", "POST", ALL, "Run the rows of a dataset on a base model and its adapters",
                Scope.SUBMIT, self.create, body=CreateJob, reply=Job, status=201,
                errors=(MISSING, CONFLICT, 422, 503), spends_itself=True,
            ),
            Operation(
                "listBatchInference", "GET", ALL, "List jobs, the newest first", Scope.READ, self.list,
                query=ListJobs, reply=JobPage,
            ),
            Operation("getBatchInference", "GET", ONE, "One job", Scope.READ, self.get, reply=Job, errors=(MISSING,)),
            Operation(
                "cancelBatchInference", "POST", f"{ONE}/cancel", "Stop running rows; finished rows are kept",
                Scope.SUBMIT, self.cancel, status=204, errors=(MISSING, CONFLICT, 503),
            ),
            Operation(
                "linkBatchInferenceResults", "GET", f"{ONE}/results", "Get a link to the results, which works once",
                Scope.READ, self.results, reply=ResultLink, errors=(MISSING, CONFLICT, 410),
            ),
        )  # fmt: skip

    async def create(self, call: Call) -> Response:
        key, arrived = call.request.headers.get("idempotency-key"), self._services.clock.now()
        once = once_for(call.caller, ROUTE, call.raw, key, 0, arrived=arrived)
        job = (await take_order(call, self._services.repeats, once, lambda: self._submit(call, once))).id
        # The job is stored now. The client gets its id even if the view fails, and does not send the order again.
        try:
            view, results = await self._project_jobs.show_with_results(call.caller, job)
        except BatchmillError:
            view, results = self._as_ordered(job, call), NO_RESULTS
        return json_reply(self._show(view, results), 201)

    async def get(self, call: Call) -> Response:
        view, results = await self._own(call.caller, call.path["job_id"])
        reasons = []
        if not JobState(view.state).is_at_rest:
            reasons = (await self._project_jobs.explain(call.caller, view.id)).reasons
        return json_reply(self._show(view, results, reasons=reasons))

    async def list(self, call: Call) -> Response:
        query: ListJobs = call.query
        jobs = await self._project_jobs.list_with_results(call.caller, JobQuery(origin=FRONTEND, limit=query.limit))
        return json_reply(JobPage(Jobs([self._show(view, results) for view, results in jobs])))

    async def cancel(self, call: Call) -> Response:
        """Cancel a job. It is not an error if the job is cancelled already, because the client repeats its POSTs."""
        view, _ = await self._own(call.caller, call.path["job_id"])
        if view.state not in CANCELLED_STATES:
            try:
                await self._project_jobs.cancel(call.caller, view.id)
            except InvalidTransition:
                view, results = await self._own(call.caller, view.id)
                if view.state not in CANCELLED_STATES:
                    raise InvalidTransition(
                        f"the job {view.id} is {self._show(view, results).status}: it can no longer be cancelled",
                        code="job_has_ended",
                    ) from None
        return Response(None, 204)

    async def results(self, call: Call) -> Response:
        view, results = await self._own(call.caller, call.path["job_id"])
        job = self._show(view, results)
        if not JobState(view.state).is_at_rest or view.state == JobState.PAUSED:
            raise InvalidTransition(
                f"the job {view.id} is {job.status}: its results can be downloaded once it is completed",
                code="results_not_ready",
            )
        if results.output is None:
            why = f": {job.error}" if job.error else ""
            raise InvalidTransition(
                f"the job {view.id} is {job.status} and has no results{why}", code="no_results"
            )  # fmt: skip
        await self._files.get(call.caller.project, results.output)  # raises if the file was deleted
        return json_reply(ResultLink(self._downloads.url(call.request, call.caller.project, results.output)))

    async def _own(self, caller: Caller, job_id: str) -> tuple[JobView, ResultIds]:
        """Return a job that this caller submitted with this API. Raises: UnknownName, the same for any other id."""
        try:
            view, results = await self._project_jobs.show_with_results(caller, job_id)
        except UnknownName:
            view = None
        if view is None or (view.origin or {}).get("frontend") != FRONTEND:
            raise UnknownName(f"there is no batch inference job {job_id[:SHOWN_CHARS]!r}", code="unknown_job")
        return view, results

    async def _submit(self, call: Call, once: Once) -> Submitted:
        order: CreateJob = call.body
        services, caller = self._services, call.caller
        settings = of_server_config(order.server_config)
        record = await services.datasets.find(caller.project, order.dataset)
        _check_runnable(record)
        model = services.llms.spec(caller, await services.llms.keep_token(caller, settings))
        async with services.datasets.hold(record) as file:
            job = self._job_order(call, record, file, model, once)
            return await self._project_jobs.submit(caller, job)

    def _job_order(self, call: Call, record: DatasetRecord, file: FileRecord, model: ModelSpec, once: Once) -> JobOrder:
        config = self._services.config
        limits = msgspec.structs.asdict(config.limits)
        return JobOrder(
            DatasetSpec([str(self._services.files.path(file))], format="openai", **limits),
            [model],
            policy=Policy(on_invalid="skip", on_engine_failure="fail"),
            together=True,
            rows_max=config.server.rows_max,
            project=call.caller.project,
            origin=_origin(call) | {"dataset_id": record.id},
            once=once,
        )

    def _as_ordered(self, job: str, call: Call) -> JobView:
        """Return a view made from the order, for when the job cannot be read just now."""
        now = self._services.clock.now()
        return JobView(job, JobState.VALIDATING, call.caller.project, origin=_origin(call), created=now)


def _origin(call: Call) -> dict[str, Any]:
    """Return what this API stores with a job."""
    return {"frontend": FRONTEND, "key": call.caller.key, "request": _without_token(call.raw)}


def _without_token(raw: bytes) -> dict[str, Any]:
    """Return the order as the client sent it, without the token."""
    request = msgspec.json.decode(raw)
    config = request["serverConfig"]
    if config.get("hfToken") is not None:
        config["hfToken"] = HIDDEN
    return request


def _check_runnable(record: DatasetRecord) -> None:
    """Raises: InvalidTransition while a dataset is being checked; InvalidDataset if its rows cannot be run."""
    if record.state == DatasetState.CHECKING:
        raise InvalidTransition(
            f"the rows of the dataset {record.name!r} are still being checked: wait until it is connected",
            code="dataset_pending",
        )
    if record.state == DatasetState.FAILED:
        raise InvalidDataset(
            f"the dataset {record.name!r} cannot be run: {why_failed(record)}", code="dataset_failed"
        )  # fmt: skip
    if record.details.format != OPENAI:
        raise InvalidDataset(
            f"the dataset {record.name!r} is a table ({record.details.format}): batch inference takes JSON lines of "
            'OpenAI batch rows, {"custom_id": …, "method": "POST", "url": "/v1/chat/completions", "body": {…}}',
            code="not_batch_rows",
        )
