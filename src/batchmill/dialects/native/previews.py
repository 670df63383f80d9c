"""Previews before anything is spent: validate, plan, estimate; and the list of models."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response

from batchmill.dialects.native.orders import Orders, Shown
from batchmill.jobs.pools.tallies import ModelGauge
from batchmill.server.operations import Call, Operation, json_reply
from batchmill.server.replies import unless_gone
from batchmill.services.previews import PreviewService
from batchmill.services.services import Services
from batchmill.states import JobState
from batchmill.types import Caller, JobOrder, JobQuery, ModelSpec
from batchmill.wire.native import Estimated, ModelInfo, ModelList, Planned, PoolInfo
from batchmill.wire.operations import ESTIMATE, LIST_MODELS, PLAN, VALIDATE

RATES_FROM = 200  # of the newest jobs, one may tell how fast the same models were
MISSING = 404
T = TypeVar("T")


class Looking:
    def __init__(self, services: Services, shown: Shown, orders: Orders) -> None:
        self._services, self._shown, self._orders = services, shown, orders
        self._previews = PreviewService(services.config.data_dir, services.files.room)

    def operations(self) -> Sequence[Operation]:
        return (
            Operation.of(VALIDATE, self.validate, errors=(MISSING,)),
            Operation.of(PLAN, self.plan, errors=(MISSING,)),
            Operation.of(ESTIMATE, self.estimate, errors=(MISSING,)),
            Operation.of(LIST_MODELS, self.models),
        )

    async def validate(self, call: Call) -> Response:
        async with self._orders.inputs(call.caller, call.body) as records:
            work = self._previews.validate(self._orders.work(call.caller, call.body, records))
            report = await self._unless_gone(call, work)
        return json_reply(self._shown.report(report))

    async def plan(self, call: Call) -> Response:
        async with self._orders.inputs(call.caller, call.body) as records:
            work = self._previews.plan(self._orders.work(call.caller, call.body, records))
            found = await self._unless_gone(call, work)
        return json_reply(Planned(self._shown.report(found.report), found.plan))

    async def estimate(self, call: Call) -> Response:
        async with self._orders.inputs(call.caller, call.body) as records:
            order = self._orders.work(call.caller, call.body, records)
            found = await self._unless_gone(call, self._previews.estimate(order, await self._rate(call.caller, order)))
        return json_reply(Estimated(self._shown.report(found.report), found.estimate))

    @staticmethod
    async def _unless_gone(call: Call, work: Coroutine[Any, Any, T]) -> T:
        """Reading every row of a dataset is stopped when nobody waits for what it says."""
        found = await unless_gone(call, work)
        if found is None:
            raise ClientDisconnect
        return found

    async def _rate(self, caller: Caller, order: JobOrder) -> float | None:
        """Rows a second of the newest finished job of the same models."""
        names = ", ".join(model.name for model in order.models)
        for view in await self._services.jobs.list(caller, JobQuery(limit=RATES_FROM)):
            if view.model == names and view.state == JobState.COMPLETED and view.elapsed_s:
                return view.rows / view.elapsed_s
        return None

    async def models(self, call: Call) -> Response:
        pools: dict[str, ModelGauge] = {}
        for each in self._services.gauges():  # of two under one name, one is ending
            if each.name not in pools or each.ready > pools[each.name].ready:
                pools[each.name] = each
        specs = self._services.directory.specs(call.caller)
        return json_reply(ModelList([self._info(spec, pools.get(spec.name)) for spec in specs]))

    def _info(self, spec: ModelSpec, pool: ModelGauge | None) -> ModelInfo:
        adapters = [name for name, adapter in spec.targets().items() if adapter is not None]
        pool_info = None
        if pool is not None:
            note = self._shown.text(pool.failure or pool.note)
            pool_info = PoolInfo(pool.workers, pool.ready, pool.in_flight, pool.live, note)
        return ModelInfo(spec.name, spec.engine, adapters, spec.price, pool_info)
