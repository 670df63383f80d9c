"""A batch whose rows are files of this server: from what a body says of it to an order, and the task it becomes.

It goes through the model's batch API unless another `route` is asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from batchmill.errors import InvalidInput
from batchmill.server.bodies import parse_json
from batchmill.services.files import FileRecord
from batchmill.services.remote.models import RemoteModel
from batchmill.services.remote.specs import AUTO, BATCH
from batchmill.services.remote.task_records import TaskRecord
from batchmill.services.services import Services
from batchmill.types import Caller, DatasetSpec, JobOrder, Once, Policy

READABLE = ("batch", "batch_output")
FORMATS = {".csv": "csv", ".parquet": "parquet"}
HOUR_S = 3600.0


class Dataset(Struct, frozen=True, forbid_unknown_fields=True):
    """Uploaded files whose rows are run, by their ids."""

    file_id: str | None = None
    file_ids: Annotated[list[str], Meta(max_length=1000)] = []
    format: Literal["openai", "jsonl", "csv", "parquet"] | None = None


class BatchOfRows(Struct, frozen=True, forbid_unknown_fields=True):
    """What a body holds beside a dataset."""

    dataset: Dataset
    action_type: str | None = None
    route: Literal["auto", "batch", "online"] | None = None
    completion_window: Annotated[str, Meta(pattern="^[1-9][0-9]{0,3}h$")] | None = None
    budget: Annotated[float, Meta(gt=0)] | None = None  # USD
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    on_invalid: Literal["fail", "skip"] = "fail"
    metadata: Annotated[dict[str, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)] = {}


class Datasets:
    """Raises: UnknownName for a file that is not the caller's; InvalidInput for what does not fit."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def run(self, caller: Caller, model: RemoteModel, told: dict[str, Any], once: Once) -> TaskRecord:
        """Start the job of a batch. The same order again is that job's task, whatever has become of its files."""
        if told.get("parameters"):
            raise InvalidInput(
                "a dataset's rows hold their parameters themselves: leave `parameters` out, or put them into the "
                "connector",
                code="parameters_with_dataset",
            )
        fields = {name: each for name, each in told.items() if name not in ("parameters", "dlq") or each}
        asked = parse_json(msgspec.json.encode(fields), BatchOfRows)
        known = await self._services.remote_tasks.known_job(caller, once)
        if known is not None:
            return known
        async with self._inputs(caller, asked.dataset) as records:
            order = self._order(caller, model, asked, records)
            return await self._services.remote_tasks.run(caller, model.id, replace(order, once=once))

    def _order(self, caller: Caller, model: RemoteModel, asked: BatchOfRows, records: list[FileRecord]) -> JobOrder:
        services = self._services
        limits, now = services.config.limits, services.clock.now()
        hours = None if asked.completion_window is None else int(asked.completion_window[:-1])
        route = asked.route or self._usual(model)
        dataset = DatasetSpec(
            [str(services.files.path(each)) for each in records],
            format=asked.dataset.format or _format(records),
            **msgspec.structs.asdict(limits),
        )
        policy = Policy(
            on_invalid=asked.on_invalid, budget=asked.budget, priority=asked.priority, on_engine_failure="fail",
            deadline=None if hours is None else now + hours * HOUR_S,
        )  # fmt: skip
        origin = {"model": model.id, "route": route, "input_file_id": records[0].id, "key": caller.key}
        return JobOrder(
            dataset, [services.remote_models.spec(model.id, route=route)], policy=policy,
            rows_max=services.config.server.rows_max, project=caller.project, labels=asked.metadata, origin=origin,
        )  # fmt: skip

    def _usual(self, model: RemoteModel) -> str:
        """A batch goes through the batch API, where the model's connector has one that is known."""
        try:
            self._services.remote_models.spec(model.id, route=BATCH)
        except InvalidInput:
            return AUTO
        return BATCH

    @contextlib.asynccontextmanager
    async def _inputs(self, caller: Caller, dataset: Dataset) -> AsyncIterator[list[FileRecord]]:
        """The files, which nobody deletes before the job that reads them is stored."""
        named = [*([] if dataset.file_id is None else [dataset.file_id]), *dataset.file_ids]
        if not named or len(set(named)) < len(named) or (dataset.file_id is not None and dataset.file_ids):
            raise InvalidInput(
                'a dataset is {"file_id": "file-…"}, or {"file_ids": […]} with each file once', code="invalid_dataset"
            )
        async with contextlib.AsyncExitStack() as held:
            records = [
                await held.enter_async_context(self._services.files.hold(caller.project, each)) for each in named
            ]
            for record in records:
                if record.purpose not in READABLE:
                    raise InvalidInput(
                        f"the file {record.id} has the purpose {record.purpose!r}; what is run has "
                        f"{' or '.join(READABLE)}",
                        code="wrong_purpose",
                    )
            yield records


def _format(records: list[FileRecord]) -> str | None:
    """What the uploaded names say; None for lines of JSON, whose first row says what they are."""
    found = {FORMATS.get(Path(each.filename.removesuffix(".gz").removesuffix(".zst")).suffix) for each in records}
    if len(found) > 1:
        raise InvalidInput("the files of a dataset must have one format", code="format_mismatch")
    return found.pop()
