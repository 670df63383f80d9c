"""_predict and _batch_predict: calls of a remote model, for one answer or for a batch.

A batch means one of two things: the provider's own, begun by the action `batch_predict` with what the caller gave, or,
where the body holds a `dataset`, rows of files of this server, which batchmill hands over and reconciles itself. The
latter goes through the model's batch API unless another `route` is asked for.
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
    MISSING,
    PREFIX,
    TAKEN,
    body_of,
    is_plain,
    operation,
    refuse_missing,
    reply,
    written,
)
from batchmill.errors import BatchmillError, InvalidInput, UnknownName
from batchmill.server.bodies import parse_json, parse_object
from batchmill.server.json_inspection import VALUES_MAX, inspect
from batchmill.server.operations import Call, Operation
from batchmill.server.replies import unless_gone, whole_answer
from batchmill.services.files import FileRecord
from batchmill.services.model_rows import ServedModel
from batchmill.services.remote import model_fields
from batchmill.services.remote.models import AUTO, BATCH, ONLINE, RemoteModel
from batchmill.services.remote.task_records import TaskRecord
from batchmill.services.repeats import once_for
from batchmill.services.services import Services
from batchmill.types import Caller, DatasetSpec, JobOrder, LiveHead, LiveRequest, Once, Policy, Scope
from batchmill.types.connectors import BATCH_PREDICT, BATCH_PREDICT_STATUS, CANCEL_BATCH_PREDICT, PREDICT

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


class DatasetTasks:
    """Raises: UnknownName for a file that is not the caller's; InvalidInput for what does not fit."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def run(self, caller: Caller, model: RemoteModel, values: dict[str, Any], once: Once) -> TaskRecord:
        """Start the job of a batch. The same order again is that job's task, whatever has become of its files."""
        if values.get("parameters"):
            raise InvalidInput(
                "a dataset's rows hold their parameters themselves: leave `parameters` out, or put them into the "
                "connector",
                code="parameters_with_dataset",
            )
        fields = {name: each for name, each in values.items() if name not in ("parameters", "dlq") or each}
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


FORM = "ml_commons"
ONE = f"{PREFIX}/models/{{model_id}}"
BATCH_ROUTE = f"POST {ONE}/_batch_predict"
BATCH_FIELDS = ("parameters", "action_type", "dlq")
PREDICT_VALUES_MAX = 200_000  # of a body whose parameters the model's worker reads
CLIENT_LEFT = 499
SHOWN_CHARS = 80
OTHER_ACTIONS = (BATCH_PREDICT_STATUS, CANCEL_BATCH_PREDICT, "EXECUTE")
# A gateway's own words for a failure may be answered by anybody's: opensearch-py sends 502, 503 and 504 again at once.
REMOTE_ERRORS = (402, 404, 409, 422, 502, 504)


class RemoteAnswered(BatchmillError):
    """What a service answered instead of a prediction, with its own status."""

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
                admits=self.admits,
            ),
            operation(
                "predictWithAlgorithm", f"POST {PREFIX}/_predict/{{algorithm}}/{{model_id}}",
                "Call a model with documents", Scope.SUBMIT, self.predict, body="required", errors=errors,
                body_bytes_max=None, values_max=PREDICT_VALUES_MAX, admits=self.admits,
            ),
            operation(
                "batchPredictModel", BATCH_ROUTE, "Hand a batch to the model's provider, or run the rows of a dataset",
                Scope.SUBMIT, self.batch, body="required", errors=(*errors, TAKEN), body_bytes_max=None,
                admits=self.admits,
            ),
        ]  # fmt: skip

    # -- one answer ---------------------------------------------------------------------------------------------------

    async def predict(self, call: Call) -> Response:
        refuse_missing(call)
        if _action(_said(call), PREDICT) == BATCH_PREDICT:
            return await self._batch(call)
        answered = await unless_gone(call, self._predicted(call))
        return Response(status_code=CLIENT_LEFT) if answered is None else answered

    async def _predicted(self, call: Call) -> Response:
        model = await self._ready(call)
        interface = model.details.interface or {}
        await self._check(call, interface, "input", call.raw)
        spec = self._models.spec(model.id, route=ONLINE)
        request = LiveRequest(f"{ONE}/_predict", call.raw, form=FORM, is_admitted=True)
        head, pieces = await self._services.live.ask(call.caller, ServedModel(model.id, spec), request)
        answer = await whole_answer(pieces)
        if head.status < 400:
            await self._check(call, interface, "output", answer)
        return _answer(call, head, answer)

    @staticmethod
    async def _check(call: Call, interface: dict[str, str], side: str, value: bytes) -> None:
        """Raises: InvalidInput for what is asked, or answered, where the model's interface says another."""
        if side in interface:
            assert call.programs is not None, "it came over HTTP"
            await model_fields.check(side, interface[side], value, call.programs, call.caller.project)

    def _named(self, caller: Caller, path: dict[str, str]) -> RemoteModel:
        """The model of a path. Raises: UnknownName, also for one that the caller's key may not use."""
        model = self._models.get(caller, path["model_id"])
        named = caller.models
        if named is not None and model.id not in named and model.name not in named:
            raise UnknownName(f"Failed to find model with the provided model id: {model.id}", code="model_not_found")
        return model

    def admits(self, caller: Caller, path: dict[str, str]) -> None:
        """Raises: UnknownName."""
        self._named(caller, path)

    async def _ready(self, call: Call) -> RemoteModel:
        """The model that is asked for, if the caller's key may use it."""
        model = await self._models.ready(call.caller, self._named(call.caller, call.path).id)
        self._models.admit(model.id)
        return model

    # -- a batch ------------------------------------------------------------------------------------------------------

    async def batch(self, call: Call) -> Response:
        refuse_missing(call)
        if _action(_said(call), BATCH_PREDICT) == PREDICT:
            return await self._predicted(call)
        return await self._batch(call)

    async def _batch(self, call: Call) -> Response:
        self._tasks.check_enabled()
        assert call.programs is not None, "it came over HTTP"
        await inspect(call.raw, VALUES_MAX, call.programs, call.caller.project)
        fields = body_of(call)
        model = await self._ready(call)
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
        call.on_delivered(lambda: self._services.repeats.delivered(once))
        return reply(call, {"task_id": task.id, "status": "CREATED", "remote_job": task.remote_job})


class _Said(Struct, frozen=True):
    action_type: Raw | UnsetType = UNSET


def _said(call: Call) -> Any:
    """What the body says that it asks for; None: nothing. Raises: InvalidInput."""
    said = parse_json(call.raw, _Said).action_type
    if isinstance(said, UnsetType):
        return None
    if len(bytes(said)) > SHOWN_CHARS:
        return bytes(said)[:SHOWN_CHARS].decode(errors="replace")
    return msgspec.json.decode(said)


def _action(named: Any, of_path: str) -> str:
    """What is asked for: what the body says goes before the path. Raises: InvalidInput."""
    if named is None:
        return of_path
    kind = named.upper() if isinstance(named, str) else ""
    if kind in OTHER_ACTIONS:
        raise InvalidInput("Wrong action type in the rest request path!", code="wrong_action")
    if kind not in (PREDICT, BATCH_PREDICT):
        raise InvalidInput(f"Wrong Action Type of {str(named)[:SHOWN_CHARS]}", code="wrong_action")
    return kind


def _check_fields(values: dict[str, Any]) -> None:
    dlq = values.get("dlq")
    if dlq is not None:
        if not isinstance(dlq, dict) or not dlq.get("bucket") or not dlq.get("region"):
            raise InvalidInput("DLQ bucketName or region cannot be null", code="invalid_dlq")
        raise InvalidInput(
            "dlq is not supported: the task tells what failed, as GET /_plugins/_ml/tasks/<task_id>, and rows of a "
            "dataset have an error file; leave dlq out",
            code="invalid_dlq",
        )
    unknown = [name for name in values if name not in BATCH_FIELDS]
    if unknown:
        raise InvalidInput(
            f"there is nothing called {unknown[0][:SHOWN_CHARS]!r} in a batch: known are "
            f"{', '.join(BATCH_FIELDS)}, and dataset with what belongs to it",
            code="unknown_parameter",
        )


def _parameters(values: dict[str, Any]) -> dict[str, Any]:
    parameters = values.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidInput("parameters must be a JSON object", code="invalid_value")
    return parameters or {}


def _answer(call: Call, head: LiveHead, answer: bytes) -> Response:
    """What an engine answered: a prediction as it came, an error in this API's words."""
    if head.status >= 400:
        raise RemoteAnswered(_message(head.status, answer), head.status)
    if is_plain(call):
        return Response(answer, head.status, {"content-type": head.content_type})
    return written(call, answer, head.status)


def _message(status: int, answer: bytes) -> str:
    try:
        error: Any = parse_object(answer).get("error")
    except InvalidInput:
        error = None
    if isinstance(error, dict):
        error = error.get("message") or error.get("reason")
    return error if isinstance(error, str) and error else f"Error from remote service: status {status}"
