"""Previews of a job without its costs: validate, plan and estimate. Also the list of models."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response

from batchmill.dialects.native.orders import Orders, Redactor
from batchmill.errors import InvalidInput
from batchmill.jobs.pools.tallies import ModelGauge
from batchmill.server.operations import Call, Operation, json_reply
from batchmill.server.replies import run_until_disconnect
from batchmill.services.project_jobs import PreviewService
from batchmill.services.services import Services
from batchmill.states import JobState
from batchmill.types import JobOrder, JobQuery, JobView, ModelSpec
from batchmill.wire.native import Estimated, ModelInfo, ModelList, Planned, PoolInfo
from batchmill.wire.operations import ESTIMATE, LIST_MODELS, PLAN, VALIDATE
from batchmill.wire.sampling import sample_of

LEARNED_JOBS_MAX = 200  # newest jobs that are searched for those of the same models
MISSING = 404
T = TypeVar("T")


class Previews:
    def __init__(self, services: Services, redactor: Redactor, orders: Orders) -> None:
        self._services, self._redactor, self._orders = services, redactor, orders
        config = services.config
        self._previews = PreviewService(config.data_dir, services.files.disk_quota, services.jobs, config.projects)

    def operations(self) -> Sequence[Operation]:
        return (
            Operation.of(VALIDATE, self.validate, errors=(MISSING,)),
            Operation.of(PLAN, self.plan, errors=(MISSING,)),
            Operation.of(ESTIMATE, self.estimate, errors=(MISSING,)),
            Operation.of(LIST_MODELS, self.models),
        )

    async def validate(self, call: Call) -> Response:
        if sample_of(call.body.limit, call.body.sample, call.body.seed) is not None:
            raise InvalidInput(
                "limit and sample are for jobs, plans and estimates: all rows are validated", code="invalid_sample"
            )
        async with self._orders.inputs(call.caller, call.body) as inputs:
            work = self._previews.validate(self._orders.work(call.caller, call.body, inputs))
            report = await self._run(call, work)
        return json_reply(self._redactor.report(report))

    async def plan(self, call: Call) -> Response:
        async with self._orders.inputs(call.caller, call.body) as inputs:
            work = self._previews.plan(self._orders.work(call.caller, call.body, inputs))
            preview = await self._run(call, work)
        return json_reply(Planned(self._redactor.report(preview.report), preview.plan))

    async def estimate(self, call: Call) -> Response:
        async with self._orders.inputs(call.caller, call.body) as inputs:
            order = self._orders.work(call.caller, call.body, inputs)
            views = await self._services.jobs.list(call.caller, JobQuery(limit=LEARNED_JOBS_MAX))
            preview = await self._run(call, self._previews.estimate(order, _rate(views, order), views))
        return json_reply(Estimated(self._redactor.report(preview.report), preview.estimate))

    @staticmethod
    async def _run(call: Call, work: Coroutine[Any, Any, T]) -> T:
        """Run a preview, which reads every row of a dataset, until the client disconnects."""
        preview = await run_until_disconnect(call, work)
        if preview is None:
            raise ClientDisconnect
        return preview

    async def models(self, call: Call) -> Response:
        pools: dict[str, ModelGauge] = {}
        for each in self._services.gauges():  # one of two pools with the same name is ending
            if each.name not in pools or each.ready > pools[each.name].ready:
                pools[each.name] = each
        specs = self._services.directory.specs(call.caller)
        return json_reply(ModelList([self._info(spec, pools.get(spec.name)) for spec in specs]))

    def _info(self, spec: ModelSpec, pool: ModelGauge | None) -> ModelInfo:
        adapters = [name for name, adapter in spec.targets().items() if adapter is not None]
        pool_info = None
        if pool is not None:
            note = self._redactor.text(pool.failure or pool.note)
            pool_info = PoolInfo(pool.workers, pool.ready, pool.in_flight, pool.live, note)
        return ModelInfo(spec.name, spec.engine, adapters, spec.price, pool_info)


def _rate(views: Sequence[JobView], order: JobOrder) -> float | None:
    """Return the rows a second of the newest completed job of the same models; None if there is none."""
    names = ", ".join(model.name for model in order.models)
    for view in views:
        if view.model == names and view.state == JobState.COMPLETED and view.elapsed_s:
            return view.rows / view.elapsed_s
    return None
