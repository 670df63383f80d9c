"""Deployments of language models for Predibase's clients, and the events of their engines.

The published client polls every two seconds until an event is called Ready or Failed, at whatever time it happened. So
the reply leaves out events from before the last update. Source: predibase 2025.10.3, `resources/deployments.py`,
`pql/api.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field
from starlette.responses import Response

from batchmill.dialects.predibase.server_config import DeploymentConfig, config_of, context_window, of_deployment_config
from batchmill.errors import Conflict
from batchmill.server.operations import Call, Operation, json_reply
from batchmill.services.llms.records import LlmDeployment
from batchmill.services.services import Services
from batchmill.types import Caller, EngineState, EngineView, Price, Scope
from batchmill.types.models import DIED

STARTS_WITHIN_S = 30.0  # a requested engine begins to start within this time; otherwise it waits for its first call
REQUESTED_AT = "asked_at"
READY, FAILED = "Ready", "Failed"
# Kind of an engine event -> its name in this API. An engine that is started again has crashed, not failed.
NAMES = {
    "waiting": "Pending",
    "starting": "Initializing",
    "ready": READY,
    "failed": "Crashed",
    DIED: "Crashed",
    "restarted": "Restarting",
    "scaled": "Scaling",
    "stopping": "Stopping",
    "stopped": "Stopped",
    "updating": "Updating",
    "updated": READY,
    "update_failed": FAILED,
    "preloaded": "AdapterLoaded",
    "preload_failed": "AdapterFailed",
}
STATUSES = {
    EngineState.STOPPED: "standby",
    EngineState.WAITING: "pending",
    EngineState.STARTING: "initializing",
    EngineState.READY: "ready",
    EngineState.FAILED: "failed",
    EngineState.STOPPING: "standby",
}


class ComputeEvent(Struct, frozen=True, rename="camel", omit_defaults=True):
    event_type: str
    timestamp: str
    message: str = ""
    replica: int | None = None
    in_flight: int | None = None  # when an engine died: how many requests of the caller's project it was answering


class ComputeEvents(Struct, frozen=True, rename="camel"):
    """`resource_active_time`: whole seconds since an engine became ready; null: no engine is ready."""

    name: str
    deployment_status: str
    resource_active_time: int | None
    events: list[ComputeEvent] = field(name="ComputeEvents")


def request_details(now: float) -> dict[str, Any]:
    """Return the entry of a deployment's details that records when its engine was last requested."""
    return {REQUESTED_AT: now}


def status_of(deployment: LlmDeployment, view: EngineView) -> str:
    """Return the status of a deployment. `standby` starts with the first call; `stopped` needs an explicit start."""
    if deployment.is_stopped:
        return "stopped"
    if deployment.is_updating and view.state == EngineState.READY:
        return "updating"
    return STATUSES[EngineState(view.state)]


def compute_events(deployment: LlmDeployment, view: EngineView, *, now: float, detailed: bool) -> ComputeEvents:
    """Return the events since the engine was last requested; without `detailed`, only failures have a message.

    The new engine of an update is ready a moment before the deployment uses it. `Ready` is reported when it does.
    """
    since = float(deployment.details.get(REQUESTED_AT, deployment.created))
    events = [
        ComputeEvent(
            NAMES.get(event.kind, event.kind.capitalize()),
            _time(event.at),
            event.message,
            event.replica,
            event.in_flight,
        )
        for event in view.events
        if event.at >= since and not (deployment.is_updating and event.kind == "ready")
    ]
    names = {event.event_type for event in events}
    ending = _ending(deployment, view, is_late=now - since > STARTS_WITHIN_S)
    if ending is not None and ending not in names:
        events.append(ComputeEvent(ending, _time(since), view.message))
    ready_at = max((event.at for event in view.events if event.kind == "ready"), default=None)
    is_ready = view.state == EngineState.READY and ready_at is not None
    return ComputeEvents(
        deployment.name,
        status_of(deployment, view),
        int(now - ready_at) if is_ready else None,
        [each if detailed or each.event_type == FAILED else _short(each) for each in events],
    )


def _ending(deployment: LlmDeployment, view: EngineView, *, is_late: bool) -> str | None:
    """Return the event that ends the requested start or update; None: it is still under way."""
    if view.state == EngineState.FAILED or deployment.problem:
        return FAILED
    if deployment.is_updating or deployment.is_stopped:
        return None
    is_standing_by = view.state == EngineState.STOPPED and is_late
    return READY if view.state == EngineState.READY or is_standing_by else None


def _short(event: ComputeEvent) -> ComputeEvent:
    return ComputeEvent(event.event_type, event.timestamp)


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()


PATH = "/v2/deployments"
REPEATED_S = 3_600.0  # an identical order within this time is a repetition
SHARED, PRIVATE = "shared", "private"
TYPES = {"shared": SHARED, "serverless": SHARED, "private": PRIVATE, "dedicated": PRIVATE}
NO_LOGS = "batchmill keeps no log of requests and answers, so there is none to download"

Name = Annotated[str, Meta(min_length=1, max_length=200)]


class CreateDeployment(Struct, frozen=True, forbid_unknown_fields=True):
    name: Name
    config: DeploymentConfig
    description: str | None = None


class UpdateDeployment(Struct, frozen=True, forbid_unknown_fields=True):
    config: DeploymentConfig | None = None
    description: str | None | UnsetType = UNSET


class ListDeployments(Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["shared", "serverless", "private", "dedicated"] | None = None


class RecommendedConfig(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    base_model: Name
    accelerator: str | None = None
    quantization: str | None = None


class EventsQuery(Struct, frozen=True, forbid_unknown_fields=True):
    detailed: bool = False


class LogsQuery(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    from_: str | None = field(default=None, name="from")
    to: str | None = None
    adapter_id: str | None = None


class Model(Struct, frozen=True, rename="camel"):
    """`max_input_length`: tokens of prompt and answer together; 0: only the engine knows it."""

    name: str
    max_input_length: int


class Accelerator(Struct, frozen=True):
    id: str


class Deployment(Struct, frozen=True, rename="camel"):
    """`type` is shared for a configured model, private for a deployment that the project created."""

    name: str
    uuid: str
    description: str | None
    type: str
    status: str
    message: str  # why it waits or has failed; after a failure, the last lines of the engine's log
    model: Model
    accelerator: Accelerator
    quantization: str | None
    current_replicas: int
    config: DeploymentConfig
    uses_guaranteed_capacity: bool
    created_at: str
    price: Price | None


class OneDeployment(Struct, frozen=True):
    data: Deployment


class ManyDeployments(Struct, frozen=True):
    data: list[Deployment]


class LogsDetail(Struct, frozen=True):
    message: str


class NoLogs(Struct, frozen=True):
    """The reply to a request for logs. The client reads `error.message` for this call only."""

    error: LogsDetail


class Deployments:
    def __init__(self, services: Services) -> None:
        self._llms, self._clock = services.llms, services.clock

    def operations(self) -> Sequence[Operation]:
        one = f"{PATH}/{{name}}"
        return [
            Operation(
                "createDeployment", "POST", PATH, "Deploy a language model", Scope.ADMIN, self.create,
                body=CreateDeployment, reply=OneDeployment, errors=(404, 409),
            ),
            Operation(
                "listDeployments", "GET", PATH, "List the deployments", Scope.READ, self.list, query=ListDeployments,
                reply=ManyDeployments,
            ),
            Operation(
                "recommendedConfig", "GET", f"{PATH}/recommended-config", "The recommended config for a base model",
                Scope.READ, self.recommend, query=RecommendedConfig, reply=DeploymentConfig, errors=(404,),
            ),
            Operation(
                "showDeployment", "GET", one, "Show a deployment", Scope.READ, self.get, reply=OneDeployment,
                errors=(404,),
            ),
            Operation(
                "updateDeployment", "PUT", one, "Change a deployment", Scope.ADMIN, self.update,
                body=UpdateDeployment, reply=OneDeployment, errors=(404, 409),
            ),
            Operation(
                "deleteDeployment", "DELETE", one, "Delete a deployment", Scope.ADMIN, self.delete, status=204,
                errors=(404, 409),
            ),
            Operation(
                "deploymentRequestLogs", "GET", f"{one}/request-logs", "Refused: request logs are not kept",
                Scope.READ, self.logs, query=LogsQuery, errors=(404, 422),
            ),
            Operation(
                "deploymentEvents", "GET", "/llms/{name}/events", "The events of a deployment", Scope.READ,
                self.events, query=EventsQuery, reply=ComputeEvents, errors=(404,),
            ),
        ]  # fmt: skip

    async def create(self, call: Call) -> Response:
        """Deploy a model and start its engine at once, so a wrong config fails early. An order may arrive twice."""
        order: CreateDeployment = call.body
        settings = of_deployment_config(order.config)
        digest = hashlib.sha256(call.raw).hexdigest()
        details = request_details(self._clock.now()) | {"digest": digest}
        try:
            deployment = await self._llms.create(
                call.caller, order.name, settings, description=order.description or None, details=details
            )
        except Conflict:
            existing = self._llms.find(call.caller, order.name)
            is_repeated = existing is not None and existing.details.get("digest") == digest
            if existing is None or not is_repeated or self._clock.now() - existing.created > REPEATED_S:
                raise
            deployment = existing  # its engine may not have started, if a crash came before the reply
        if not deployment.is_stopped:
            await self._llms.start(call.caller, deployment.name)
        return json_reply(OneDeployment(self._view(call.caller, deployment)))

    async def list(self, call: Call) -> Response:
        kind = TYPES.get(call.query.type)
        deployments = [self._view(call.caller, each) for each in self._llms.list(call.caller)]
        return json_reply(ManyDeployments([each for each in deployments if kind in (None, each.type)]))

    async def get(self, call: Call) -> Response:
        return json_reply(OneDeployment(self._view(call.caller, self._llms.get(call.caller, call.path["name"]))))

    async def update(self, call: Call) -> Response:
        """Change a deployment. Omitted settings are unchanged. The old engine answers until the new one is ready."""
        body: UpdateDeployment = call.body
        caller, name = call.caller, call.path["name"]
        if body.config is None:
            changed = await self._llms.update(caller, name, description=body.description)
            return json_reply(OneDeployment(self._view(call.caller, changed)))
        current = self._llms.get(caller, name)
        settings = of_deployment_config(body.config, current.settings)
        details = current.details | request_details(self._clock.now())
        changed = await self._llms.update(caller, name, settings, body.description, details)
        if not changed.is_updating and not changed.is_stopped:
            await self._llms.start(caller, name)
        return json_reply(OneDeployment(self._view(call.caller, changed)))

    async def delete(self, call: Call) -> Response:
        await self._llms.delete(call.caller, call.path["name"])
        return Response(status_code=204)

    async def recommend(self, call: Call) -> Response:
        """Return a config for a deployment of this base model; the engine chooses what the config leaves out."""
        query: RecommendedConfig = call.query
        config = DeploymentConfig(query.base_model, quantization=query.quantization, accelerator=query.accelerator)
        settings = of_deployment_config(config)
        self._llms.spec(call.caller, settings)
        return json_reply(config_of(settings))

    async def logs(self, call: Call) -> Response:
        self._llms.get(call.caller, call.path["name"])
        return json_reply(NoLogs(LogsDetail(NO_LOGS)), 422)

    async def events(self, call: Call) -> Response:
        deployment = self._llms.get(call.caller, call.path["name"])
        view = self._llms.shown(call.caller, deployment)
        return json_reply(compute_events(deployment, view, now=self._clock.now(), detailed=call.query.detailed))

    def _view(self, caller: Caller, deployment: LlmDeployment) -> Deployment:
        view, config = self._llms.shown(caller, deployment), config_of(deployment.settings)
        gpus = deployment.model.needs.gpus
        return Deployment(
            name=deployment.name,
            uuid=deployment.id,
            description=deployment.description,
            type=SHARED if deployment.is_configured else PRIVATE,
            status=status_of(deployment, view),
            message=view.message,
            model=Model(deployment.settings.base_model, context_window(deployment.model) or 0),
            accelerator=Accelerator(f"gpu_{gpus}" if gpus else "cpu"),
            quantization=config.quantization,
            current_replicas=view.replicas,
            config=config,
            uses_guaranteed_capacity=False,
            created_at=datetime.fromtimestamp(deployment.created, UTC).isoformat(),
            price=deployment.model.price,
        )
