"""Jobs: create, look, steer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from starlette.responses import Response

from batchmill.dialects.native.orders import Orders
from batchmill.dialects.native.views import Shown
from batchmill.errors import BatchmillError, InvalidInput
from batchmill.server.operations import Call, Operation, json_reply
from batchmill.services.repeats import once_for, retry_count_of
from batchmill.services.services import Services
from batchmill.states import JobState
from batchmill.types import Amendment, Caller, JobOrder, JobQuery, JobView
from batchmill.wire.native import (
    PAGE_MAX,
    Accepted,
    Change,
    JobPage,
    ListJobs,
    NewJob,
    RemoteJobList,
    Settlement,
)
from batchmill.wire.operations import (
    AMEND_JOB,
    CREATE_JOB,
    EXPLAIN_JOB,
    LIST_JOBS,
    LIST_REMOTE_JOBS,
    REMOVE_JOB,
    SETTLE_REMOTE_JOB,
    SHOW_JOB,
    STEERING,
    VERIFY_JOB,
    Endpoint,
)

SCANNED_MAX = 5000  # jobs that one page with a filter looks at
CONFLICT, MISSING, GONE = 409, 404, 410


class Jobs:
    def __init__(self, services: Services, shown: Shown, orders: Orders) -> None:
        self._services, self._shown, self._orders = services, shown, orders
        self._desk = services.jobs

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
            *(self._steering(endpoint, getattr(self._desk, verb)) for verb, endpoint in STEERING.items()),
        )  # fmt: skip

    def _steering(self, endpoint: Endpoint[JobView], ask: Callable[[Caller, str], Awaitable[JobView]]) -> Operation:
        async def steer(call: Call) -> Response:
            await ask(call.caller, call.path["job_id"])
            return await self.show(call)

        return Operation.of(endpoint, steer, errors=(MISSING, CONFLICT))

    async def create(self, call: Call) -> Response:
        asked: NewJob = call.body
        headers = call.request.headers
        once = once_for(
            call.caller, f"{CREATE_JOB.method} {CREATE_JOB.path}", call.raw, headers.get("idempotency-key"),
            retry_count_of(headers.get("x-stainless-retry-count")), arrived=self._services.clock.now(),
        )  # fmt: skip
        # An order that is known already is answered whatever has become of its files, its models or the key's rate.
        repeats = self._services.repeats
        known = await repeats.find(once)
        call.on_delivered(lambda: repeats.delivered(once))
        if known is not None:
            view = self._shown.job(*await self._desk.show_with_results(call.caller, known))
            return json_reply(Accepted("repeated", view), 201)
        call.spend()
        async with self._orders.inputs(call.caller, asked) as records:
            order = self._orders.job(call.caller, asked, records, once)
            submitted = await self._desk.submit(call.caller, order)
        # From here on the job is stored: whatever fails now, the caller gets its id.
        try:
            view = self._shown.job(*await self._desk.show_with_results(call.caller, submitted.id))
        except BatchmillError:
            view = self._shown.job(self._as_ordered(submitted.id, order))
        return json_reply(Accepted(submitted.how, view), 201)

    def _as_ordered(self, job_id: str, order: JobOrder) -> JobView:
        """The job as it was stored, where it cannot be looked at just now."""
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
        found: list[JobView] = []
        after, scanned = query.after, 0
        while len(found) < query.limit and scanned < SCANNED_MAX:
            size = query.limit + 1 if label is None else PAGE_MAX
            wanted = JobQuery(state=query.state, model=query.model, since=query.since, after=after, limit=size)
            some = await self._desk.list_with_results(call.caller, wanted)
            for view, results in some:
                after, scanned = view.id, scanned + 1
                if _fits(view, query.state, label):
                    found.append(self._shown.job(view, results))
                    if len(found) == query.limit:
                        break
            else:
                if len(some) < size:
                    return json_reply(JobPage(found))
                continue
            is_last = len(some) < size and some[-1][0].id == after
            return json_reply(JobPage(found, None if is_last else after))
        return json_reply(JobPage(found, after))

    async def show(self, call: Call) -> Response:
        return json_reply(self._shown.job(*await self._desk.show_with_results(call.caller, call.path["job_id"])))

    async def remove(self, call: Call) -> Response:
        return json_reply(self._shown.job(await self._desk.remove(call.caller, call.path["job_id"])))

    async def amend(self, call: Call) -> Response:
        change: Change = call.body
        if change == Change():
            raise InvalidInput("nothing is to be changed: give priority, deadline or budget", code="nothing_to_change")
        if change.deadline is not None and change.deadline <= self._services.clock.now():
            raise InvalidInput("the deadline lies in the past: cancel the job instead", code="invalid_deadline")
        amendment = Amendment(change.priority, change.deadline, change.budget)
        await self._desk.amend(call.caller, call.path["job_id"], amendment)
        return await self.show(call)

    async def explain(self, call: Call) -> Response:
        return json_reply(self._shown.wait(await self._desk.explain(call.caller, call.path["job_id"])))

    async def remote(self, call: Call) -> Response:
        found = await self._desk.remote(call.caller, call.path["job_id"])
        return json_reply(RemoteJobList([self._shown.remote(each) for each in found]))

    async def settle_remote(self, call: Call) -> Response:
        told: Settlement = call.body
        job_id, tag = call.path["job_id"], call.path["tag"]
        return json_reply(self._shown.remote(await self._desk.settle_remote(call.caller, job_id, tag, told.remote_id)))

    async def verify(self, call: Call) -> Response:
        return json_reply(self._shown.ledger(await self._desk.verify(call.caller, call.path["job_id"])))


def _label(text: str | None) -> tuple[str, str | None] | None:
    """NAME or NAME=VALUE."""
    if text is None:
        return None
    name, equals, value = text.partition("=")
    return name, value if equals else None


def _fits(view: JobView, state: JobState | None, label: tuple[str, str | None] | None) -> bool:
    if state is not None and view.state != state:
        return False
    if label is None:
        return True
    name, value = label
    return name in view.labels and value in (None, view.labels[name])
