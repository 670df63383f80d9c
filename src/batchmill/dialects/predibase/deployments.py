"""Deployments of language models as Predibase's clients see them, and the events of their engines.

The published client asks every two seconds until an event is called Ready or Failed, whenever that was: so an update
is not answered with what was ready before it. Source: predibase 2025.10.3, `resources/deployments.py`, `pql/api.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field
from starlette.responses import Response

from batchmill.dialects.predibase.server_config import DeploymentConfig, context_window, of_deployment_config, shown
from batchmill.errors import Conflict
from batchmill.server.operations import Call, Operation, json_reply
from batchmill.services.llms.records import LlmDeployment
from batchmill.services.services import Services
from batchmill.types import Caller, EngineState, EngineView, Price, Scope
from batchmill.types.models import DIED

STARTS_WITHIN_S = 30.0  # an engine that was asked for has begun to start; otherwise it waits for a first call
ASKED = "asked_at"
READY, FAILED = "Ready", "Failed"
# Kind of an event -> its name here. What fails and is tried again has not failed.
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
    in_flight: int | None = None  # of a server that died: requests of the caller's project


class ComputeEvents(Struct, frozen=True, rename="camel"):
    """`resource_active_time`: whole seconds since an engine was ready; null: none is."""

    name: str
    deployment_status: str
    resource_active_time: int | None
    events: list[ComputeEvent] = field(name="ComputeEvents")


def asked(now: float) -> dict[str, Any]:
    """What a deployment remembers of when its engine was last asked for."""
    return {ASKED: now}


def status_of(deployment: LlmDeployment, view: EngineView) -> str:
    """`standby`: it starts with the first call; `stopped`: it answers none until somebody starts it."""
    if deployment.is_stopped:
        return "stopped"
    if deployment.is_updating and view.state == EngineState.READY:
        return "updating"
    return STATUSES[EngineState(view.state)]


def compute_events(deployment: LlmDeployment, view: EngineView, *, now: float, detailed: bool) -> ComputeEvents:
    """Everything since its engine was last asked for; without `detailed`, only failures say more than their names.

    The new engine of an update is ready a moment before the deployment has it: `Ready` is told when it has.
    """
    since = float(deployment.details.get(ASKED, deployment.created))
    found = [
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
    names = {event.event_type for event in found}
    ending = _ending(deployment, view, is_late=now - since > STARTS_WITHIN_S)
    if ending is not None and ending not in names:
        found.append(ComputeEvent(ending, _time(since), view.message))
    ready_at = max((event.at for event in view.events if event.kind == "ready"), default=None)
    is_ready = view.state == EngineState.READY and ready_at is not None
    return ComputeEvents(
        deployment.name,
        status_of(deployment, view),
        int(now - ready_at) if is_ready else None,
        [each if detailed or each.event_type == FAILED else _short(each) for each in found],
    )


def _ending(deployment: LlmDeployment, view: EngineView, *, is_late: bool) -> str | None:
    """How what was asked for has ended; None: it is under way."""
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


PLACE = "/v2/deployments"
REPEATED_S = 3_600.0  # an order that arrives again within this time is the one that came before
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
    """`max_input_length`: tokens of prompt and answer together; 0: only the engine knows."""

    name: str
    max_input_length: int


class Accelerator(Struct, frozen=True):
    id: str


class Deployment(Struct, frozen=True, rename="camel"):
    """`type` is shared for a model of the configuration, private for one that the project made."""

    name: str
    uuid: str
    description: str | None
    type: str
    status: str
    message: str  # why it waits or has failed: of a failure the engine's last lines
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
    """The client reads `error.message` of this call alone."""

    error: LogsDetail


class Deployments:
    def __init__(self, services: Services) -> None:
        self._llms, self._clock = services.llms, services.clock

    def operations(self) -> Sequence[Operation]:
        one = f"{PLACE}/{{name}}"
        return [
            Operation(
                "createDeployment", "POST", PLACE, "Deploy a language model", Scope.ADMIN, self.create,
                body=CreateDeployment, reply=OneDeployment, errors=(404, 409),
            ),
            Operation(
                "listDeployments", "GET", PLACE, "The deployments", Scope.READ, self.list, query=ListDeployments,
                reply=ManyDeployments,
            ),
            Operation(
                "recommendedConfig", "GET", f"{PLACE}/recommended-config", "How a base model is best deployed",
                Scope.READ, self.recommend, query=RecommendedConfig, reply=DeploymentConfig, errors=(404,),
            ),
            Operation(
                "showDeployment", "GET", one, "A deployment", Scope.READ, self.get, reply=OneDeployment, errors=(404,),
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
                "deploymentRequestLogs", "GET", f"{one}/request-logs", "There are none", Scope.READ, self.logs,
                query=LogsQuery, errors=(404, 422),
            ),
            Operation(
                "deploymentEvents", "GET", "/llms/{name}/events", "What became of a deployment", Scope.READ,
                self.events, query=EventsQuery, reply=ComputeEvents, errors=(404,),
            ),
        ]  # fmt: skip

    async def create(self, call: Call) -> Response:
        """Its engine starts at once, so that a config that does not work says so. An order may arrive twice."""
        order: CreateDeployment = call.body
        settings = of_deployment_config(order.config)
        digest = hashlib.sha256(call.raw).hexdigest()
        details = asked(self._clock.now()) | {"digest": digest}
        try:
            made = await self._llms.create(
                call.caller, order.name, settings, description=order.description or None, details=details
            )
        except Conflict:
            had = self._llms.find(call.caller, order.name)
            is_repeated = had is not None and had.details.get("digest") == digest
            if had is None or not is_repeated or self._clock.now() - had.created > REPEATED_S:
                raise
            made = had  # its engine was not started yet, where a crash came before the reply
        if not made.is_stopped:
            await self._llms.start(call.caller, made.name)
        return json_reply(OneDeployment(self._shown(call.caller, made)))

    async def list(self, call: Call) -> Response:
        wanted = TYPES.get(call.query.type)
        found = [self._shown(call.caller, each) for each in self._llms.list(call.caller)]
        return json_reply(ManyDeployments([each for each in found if wanted in (None, each.type)]))

    async def get(self, call: Call) -> Response:
        return json_reply(OneDeployment(self._shown(call.caller, self._llms.get(call.caller, call.path["name"]))))

    async def update(self, call: Call) -> Response:
        """Omitted settings are unchanged. The running engine answers until the new one is ready."""
        body: UpdateDeployment = call.body
        caller, name = call.caller, call.path["name"]
        if body.config is None:
            changed = await self._llms.update(caller, name, description=body.description)
            return json_reply(OneDeployment(self._shown(call.caller, changed)))
        had = self._llms.get(caller, name)
        settings = of_deployment_config(body.config, had.settings)
        details = had.details | asked(self._clock.now())
        changed = await self._llms.update(caller, name, settings, body.description, details)
        if not changed.is_updating and not changed.is_stopped:
            await self._llms.start(caller, name)
        return json_reply(OneDeployment(self._shown(call.caller, changed)))

    async def delete(self, call: Call) -> Response:
        await self._llms.delete(call.caller, call.path["name"])
        return Response(status_code=204)

    async def recommend(self, call: Call) -> Response:
        """What the config of a deployment of this base model would be: what is not said is best left to the engine."""
        query: RecommendedConfig = call.query
        config = DeploymentConfig(query.base_model, quantization=query.quantization, accelerator=query.accelerator)
        settings = of_deployment_config(config)
        self._llms.spec(call.caller, settings)
        return json_reply(shown(settings))

    async def logs(self, call: Call) -> Response:
        self._llms.get(call.caller, call.path["name"])
        return json_reply(NoLogs(LogsDetail(NO_LOGS)), 422)

    async def events(self, call: Call) -> Response:
        found = self._llms.get(call.caller, call.path["name"])
        view = self._llms.shown(call.caller, found)
        return json_reply(compute_events(found, view, now=self._clock.now(), detailed=call.query.detailed))

    def _shown(self, caller: Caller, deployment: LlmDeployment) -> Deployment:
        view, config = self._llms.shown(caller, deployment), shown(deployment.settings)
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
