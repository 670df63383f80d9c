"""_predict and _batch_predict: calls of a remote model, for one answer or for a batch.

There are two kinds of batch. Without a `dataset`, the action `batch_predict` starts a batch at the provider with the
caller's parameters. With a `dataset`, batchmill runs the rows of files of this server as a job. The job uses the
model's batch API unless the body sets another `route`.
Source: ML Commons, "PredictHandlers" and "Batch predict".
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from msgspec.structs import replace
from starlette.responses import Response

from batchmill.dialects.ml_commons.requests import (
    CONFLICT,
    MISSING,
    PREFIX,
    body_of,
    is_plain,
    json_bytes_reply,
    operation,
    refuse_missing,
    reply,
)
from batchmill.errors import BatchmillError, InvalidInput, UnknownName
from batchmill.server.bodies import parse_json, parse_object
from batchmill.server.json_inspection import VALUES_MAX, inspect
from batchmill.server.operations import Call, Operation
from batchmill.server.replies import run_until_disconnect, whole_answer
from batchmill.services.directory.rows import ServedModel
from batchmill.services.files.records import FileRecord
from batchmill.services.remote import model_fields
from batchmill.services.remote.models import AUTO, BATCH, ONLINE
from batchmill.services.remote.stored import RemoteModel
from batchmill.services.remote.task_records import TaskRecord
from batchmill.services.repeats import once_for
from batchmill.services.services import Services
from batchmill.types import Caller, DatasetSpec, JobOrder, LiveHead, LiveRequest, Once, Policy, Scope
from batchmill.types.connectors import BATCH_PREDICT, BATCH_PREDICT_STATUS, CANCEL_BATCH_PREDICT, PREDICT

READABLE = ("batch", "batch_output")
FORMATS = {".csv": "csv", ".parquet": "parquet"}
HOUR_S = 3600.0


class Dataset(Struct, frozen=True, forbid_unknown_fields=True):
    """The ids of uploaded files whose rows are run."""

    file_id: str | None = None
    file_ids: Annotated[list[str], Meta(max_length=1000)] = []
    format: Literal["openai", "jsonl", "csv", "parquet"] | None = None


class BatchOfRows(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a batch with a dataset."""

    dataset: Dataset
    action_type: str | None = None
    route: Literal["auto", "batch", "online"] | None = None
    completion_window: Annotated[str, Meta(pattern="^[1-9][0-9]{0,3}h$")] | None = None
    budget: Annotated[float, Meta(gt=0)] | None = None  # USD
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    on_invalid: Literal["fail", "skip"] = "fail"
    metadata: Annotated[dict[str, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)] = {}


class DatasetTasks:
    """Run the rows of datasets as jobs. Raises: UnknownName for a file of another project; InvalidInput."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def run(self, caller: Caller, model: RemoteModel, values: dict[str, Any], once: Once) -> TaskRecord:
        """Start the job of a batch. A repeated order returns the existing task, even if its files were deleted."""
        if values.get("parameters"):
            raise InvalidInput(
                "a dataset's rows contain their parameters: leave `parameters` out, or set them in the connector",
                code="parameters_with_dataset",
            )
        fields = {name: each for name, each in values.items() if name not in ("parameters", "dlq") or each}
        batch = parse_json(msgspec.json.encode(fields), BatchOfRows)
        existing = await self._services.remote_tasks.find_existing_job(caller, once)
        if existing is not None:
            return existing
        async with self._inputs(caller, batch.dataset) as records:
            order = self._order(caller, model, batch, records)
            return await self._services.remote_tasks.run(caller, model.id, replace(order, once=once))

    def _order(self, caller: Caller, model: RemoteModel, batch: BatchOfRows, records: list[FileRecord]) -> JobOrder:
        services = self._services
        limits, now = services.config.limits, services.clock.now()
        hours = None if batch.completion_window is None else int(batch.completion_window[:-1])
        route = batch.route or self._default_route(model)
        dataset = DatasetSpec(
            [str(services.files.path(each)) for each in records],
            format=batch.dataset.format or _format(records),
            **msgspec.structs.asdict(limits),
        )
        policy = Policy(
            on_invalid=batch.on_invalid, budget=batch.budget, priority=batch.priority, on_engine_failure="fail",
            deadline=None if hours is None else now + hours * HOUR_S,
        )  # fmt: skip
        origin = {"model": model.id, "route": route, "input_file_id": records[0].id, "key": caller.key}
        return JobOrder(
            dataset, [services.remote_models.spec(model.id, route=route)], policy=policy,
            rows_max=services.config.server.rows_max, project=caller.project, labels=batch.metadata, origin=origin,
        )  # fmt: skip

    def _default_route(self, model: RemoteModel) -> str:
        """Return the batch API if the model's connector has one that batchmill supports, otherwise AUTO."""
        try:
            self._services.remote_models.spec(model.id, route=BATCH)
        except InvalidInput:
            return AUTO
        return BATCH

    @contextlib.asynccontextmanager
    async def _inputs(self, caller: Caller, dataset: Dataset) -> AsyncIterator[list[FileRecord]]:
        """Hold the files of a dataset, so that they are not deleted before the job is stored."""
        ids = [*([] if dataset.file_id is None else [dataset.file_id]), *dataset.file_ids]
        if not ids or len(set(ids)) < len(ids) or (dataset.file_id is not None and dataset.file_ids):
            raise InvalidInput(
                'a dataset is {"file_id": "file-…"}, or {"file_ids": […]} with each file once', code="invalid_dataset"
            )
        async with contextlib.AsyncExitStack() as stack:
            records = [await stack.enter_async_context(self._services.files.hold(caller.project, each)) for each in ids]
            for record in records:
                if record.purpose not in READABLE:
                    raise InvalidInput(
                        f"the file {record.id} has the purpose {record.purpose!r}: a dataset needs files with the "
                        f"purpose {' or '.join(READABLE)}",
                        code="wrong_purpose",
                    )
            yield records


def _format(records: list[FileRecord]) -> str | None:
    """Return the format by file name; None for JSON lines, whose first row decides between the two formats."""
    formats = {FORMATS.get(Path(each.filename.removesuffix(".gz").removesuffix(".zst")).suffix) for each in records}
    if len(formats) > 1:
        raise InvalidInput("the files of a dataset must have one format", code="format_mismatch")
    return formats.pop()


FORM = "ml_commons"
ONE = f"{PREFIX}/models/{{model_id}}"
BATCH_ROUTE = f"POST {ONE}/_batch_predict"
BATCH_FIELDS = ("parameters", "action_type", "dlq")
PREDICT_VALUES_MAX = 200_000  # limit of JSON values in a body that the model's worker parses
CLIENT_LEFT = 499
SHOWN_CHARS = 80
OTHER_ACTIONS = (BATCH_PREDICT_STATUS, CANCEL_BATCH_PREDICT, "EXECUTE")
# Statuses of a remote service that are passed on. opensearch-py repeats 502, 503 and 504 at once.
REMOTE_ERRORS = (402, 404, 409, 422, 502, 504)


class RemoteAnswered(BatchmillError):
    """A remote service answered with an error; `status` is its own."""

    code = "remote_error"

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class PredictHandlers:
    def __init__(self, services: Services, datasets: DatasetTasks) -> None:
        self._services, self._datasets = services, datasets
        self._models, self._tasks = services.remote_models, services.remote_tasks

    def operations(self) -> Sequence[Operation]:
        errors = (MISSING, *REMOTE_ERRORS)
        return [
            operation(
                "predictModel", f"POST {ONE}/_predict", "Call a model", Scope.SUBMIT, self.predict,
                body="required", errors=errors, body_bytes_max=None, values_max=PREDICT_VALUES_MAX,
                check_access=self.check_access,
            ),
            operation(
                "predictWithAlgorithm", f"POST {PREFIX}/_predict/{{algorithm}}/{{model_id}}",
                "Call a model with documents", Scope.SUBMIT, self.predict, body="required", errors=errors,
                body_bytes_max=None, values_max=PREDICT_VALUES_MAX, check_access=self.check_access,
            ),
            operation(
                "batchPredictModel", BATCH_ROUTE, "Start a batch at the provider, or run the rows of a dataset",
                Scope.SUBMIT, self.batch, body="required", errors=(*errors, CONFLICT), body_bytes_max=None,
                check_access=self.check_access,
            ),
        ]  # fmt: skip

    # -- one answer ---------------------------------------------------------------------------------------------------

    async def predict(self, call: Call) -> Response:
        refuse_missing(call)
        if _action(_requested_action(call), PREDICT) == BATCH_PREDICT:
            return await self._batch(call)
        response = await run_until_disconnect(call, self._predict(call))
        return Response(status_code=CLIENT_LEFT) if response is None else response

    async def _predict(self, call: Call) -> Response:
        model = await self._ready_model(call)
        interface = model.details.interface or {}
        await self._check(call, interface, "input", call.raw)
        spec = self._models.spec(model.id, route=ONLINE)
        request = LiveRequest(f"{ONE}/_predict", call.raw, form=FORM, is_admitted=True)
        head, pieces = await self._services.live.call(call.caller, ServedModel(model.id, spec), request)
        answer = await whole_answer(pieces)
        if head.status < 400:
            await self._check(call, interface, "output", answer)
        return _answer(call, head, answer)

    @staticmethod
    async def _check(call: Call, interface: dict[str, str], side: str, value: bytes) -> None:
        """Check a request or an answer against the model's interface. Raises: InvalidInput."""
        if side in interface:
            assert call.programs is not None, "calls over HTTP have programs"
            await model_fields.check(side, interface[side], value, call.programs, call.caller.project)

    def _model(self, caller: Caller, path: dict[str, str]) -> RemoteModel:
        """Return the model of a path. Raises: UnknownName, also for a model that the caller's key may not use."""
        model = self._models.get(caller, path["model_id"])
        allowed = caller.models
        if allowed is not None and model.id not in allowed and model.name not in allowed:
            raise UnknownName(f"Failed to find model with the provided model id: {model.id}", code="model_not_found")
        return model

    def check_access(self, caller: Caller, path: dict[str, str]) -> None:
        """Check that the caller may use the model of the path. Raises: UnknownName."""
        self._model(caller, path)

    async def _ready_model(self, call: Call) -> RemoteModel:
        """Return the model of the path when it is deployed and below its rate limit."""
        model = await self._models.ready(call.caller, self._model(call.caller, call.path).id)
        self._models.admit(model.id)
        return model

    # -- a batch ------------------------------------------------------------------------------------------------------

    async def batch(self, call: Call) -> Response:
        refuse_missing(call)
        if _action(_requested_action(call), BATCH_PREDICT) == PREDICT:
            return await self._predict(call)
        return await self._batch(call)

    async def _batch(self, call: Call) -> Response:
        self._tasks.check_enabled()
        assert call.programs is not None, "calls over HTTP have programs"
        await inspect(call.raw, VALUES_MAX, call.programs, call.caller.project)
        fields = body_of(call)
        model = await self._ready_model(call)
        once = once_for(
            call.caller, f"{BATCH_ROUTE} {model.id}", call.raw, call.request.headers.get("idempotency-key"), 0,
            arrived=self._services.clock.now(),
        )  # fmt: skip
        if "dataset" in fields:
            task = await self._datasets.run(call.caller, model, fields, once)
        else:
            _check_fields(fields)
            parameters = _parameters(fields)
            task = await self._tasks.predict(call.caller, model.id, parameters, once)
        call.on_delivered(lambda: self._services.repeats.mark_delivered(once))
        return reply(call, {"task_id": task.id, "status": "CREATED", "remote_job": task.remote_job})


class _ActionField(Struct, frozen=True):
    action_type: Raw | UnsetType = UNSET


def _requested_action(call: Call) -> Any:
    """Return the body's `action_type`; None if it has none. Raises: InvalidInput."""
    raw = parse_json(call.raw, _ActionField).action_type
    if isinstance(raw, UnsetType):
        return None
    if len(bytes(raw)) > SHOWN_CHARS:
        return bytes(raw)[:SHOWN_CHARS].decode(errors="replace")
    return msgspec.json.decode(raw)


def _action(requested: Any, default: str) -> str:
    """Return the action of a request: the body's, or the `default` of its path. Raises: InvalidInput."""
    if requested is None:
        return default
    kind = requested.upper() if isinstance(requested, str) else ""
    if kind in OTHER_ACTIONS:
        raise InvalidInput("Wrong action type in the rest request path!", code="wrong_action")
    if kind not in (PREDICT, BATCH_PREDICT):
        raise InvalidInput(f"Wrong Action Type of {str(requested)[:SHOWN_CHARS]}", code="wrong_action")
    return kind


def _check_fields(values: dict[str, Any]) -> None:
    dlq = values.get("dlq")
    if dlq is not None:
        if not isinstance(dlq, dict) or not dlq.get("bucket") or not dlq.get("region"):
            raise InvalidInput("DLQ bucketName or region cannot be null", code="invalid_dlq")
        raise InvalidInput(
            "dlq is not supported: leave it out. GET /_plugins/_ml/tasks/<task_id> shows what failed, and the rows of "
            "a dataset have an error file",
            code="invalid_dlq",
        )
    unknown = [name for name in values if name not in BATCH_FIELDS]
    if unknown:
        raise InvalidInput(
            f"the field {unknown[0][:SHOWN_CHARS]!r} is unknown: a batch has {', '.join(BATCH_FIELDS)}, or dataset and "
            "its settings",
            code="unknown_parameter",
        )


def _parameters(values: dict[str, Any]) -> dict[str, Any]:
    parameters = values.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidInput("parameters must be a JSON object", code="invalid_value")
    return parameters or {}


def _answer(call: Call, head: LiveHead, answer: bytes) -> Response:
    """Reply with an engine's answer: a prediction unchanged, an error in this API's form."""
    if head.status >= 400:
        raise RemoteAnswered(_message(head.status, answer), head.status)
    if is_plain(call):
        return Response(answer, head.status, {"content-type": head.content_type})
    return json_bytes_reply(call, answer, head.status)


def _message(status: int, answer: bytes) -> str:
    try:
        error: Any = parse_object(answer).get("error")
    except InvalidInput:
        error = None
    if isinstance(error, dict):
        error = error.get("message") or error.get("reason")
    return error if isinstance(error, str) and error else f"Error from remote service: status {status}"
