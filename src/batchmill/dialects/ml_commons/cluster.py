"""Calls about the cluster that clients make first: its name and version, its health, and ML Commons' counters.

Source: OpenSearch, "Cluster health"; ML Commons, "Stats".
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta
from starlette.responses import Response

import batchmill
from batchmill.dialects.ml_commons.requests import MISSING, PREFIX, Common, Flag, Search, operation, reply, search_of
from batchmill.dialects.ml_commons.resources import node_id, task_document
from batchmill.errors import InvalidInput, UnknownName
from batchmill.server.operations import Call, Operation
from batchmill.services.live_calls import LiveCall
from batchmill.services.services import Services
from batchmill.types import Scope

VERSION = "3.5.0"  # of the OpenSearch whose ML Commons this API follows
TAGLINE = "The OpenSearch Project: https://opensearch.org/"
PROFILE = f"{PREFIX}/profile"
FLAGS = ("return_all_tasks", "return_all_models")
LISTS = ("model_ids", "task_ids", "node_ids")
IDS_MAX = 1000


class Cluster:
    def __init__(self, services: Services) -> None:
        self._models, self._tasks = services.remote_models, services.remote_tasks
        self._node = node_id(services.config.data_dir)
        self._uuid = hashlib.sha256(f"cluster {services.config.data_dir}".encode()).hexdigest()[:22]

    def operations(self) -> Sequence[Operation]:
        return [
            operation("getClusterInfo", "GET /", "Name and version of the server", Scope.READ, self.info, errors=()),
            *(
                operation(name, f"GET {path}", "Deployed models and running tasks", Scope.READ, handler,
                          query=Search, body="optional", errors=(MISSING,))
                for name, path, handler in (
                    ("getProfile", PROFILE, self.everything),
                    ("getModelsProfile", f"{PROFILE}/models", self.models),
                    ("getModelProfile", f"{PROFILE}/models/{{model_ids}}", self.models),
                    ("getTasksProfile", f"{PROFILE}/tasks", self.tasks),
                    ("getTaskProfile", f"{PROFILE}/tasks/{{task_ids}}", self.tasks),
                )
            ),
        ]  # fmt: skip

    async def info(self, call: Call) -> Response:
        fields = {
            "name": "batchmill",
            "cluster_name": "batchmill",
            "cluster_uuid": self._uuid,
            "version": {
                "distribution": "opensearch",
                "number": VERSION,
                "build_type": "batchmill",
                "build_hash": batchmill.__version__,
                "minimum_wire_compatibility_version": "2.19.0",
                "minimum_index_compatibility_version": "2.0.0",
            },
            "tagline": TAGLINE,
        }
        return reply(call, fields)

    async def everything(self, call: Call) -> Response:
        return self._reply(call, {**self._model_fields(call, []), **await self._task_fields(call, [])})

    async def models(self, call: Call) -> Response:
        return self._reply(call, self._model_fields(call, _path_ids(call, "model_ids")))

    async def tasks(self, call: Call) -> Response:
        return self._reply(call, await self._task_fields(call, _path_ids(call, "task_ids")))

    def _reply(self, call: Call, node: dict[str, Any]) -> Response:
        fields = {name: each for name, each in node.items() if each}
        return reply(call, {"nodes": {self._node: fields}} if fields else {})

    def _model_fields(self, call: Call, ids: list[str]) -> dict[str, Any]:
        chosen = _body_ids(call, "model_ids") or ids
        models = [each for each in self._models.all(call.caller) if each.is_deployed or each.id in chosen]
        return {
            "models": {
                each.id: {"model_state": each.state, "worker_nodes": [self._node] if each.is_deployed else []}
                for each in models
                if not chosen or each.id in chosen
            }
        }

    async def _task_fields(self, call: Call, ids: list[str]) -> dict[str, Any]:
        chosen = _body_ids(call, "task_ids") or ids
        tasks = [each for each in await self._tasks.all(call.caller) if not each.has_ended or each.id in chosen]
        return {
            "tasks": {each.id: task_document(each, self._node) for each in tasks if not chosen or each.id in chosen}
        }


def _path_ids(call: Call, name: str) -> list[str]:
    """Return the ids of the path, which are separated by commas."""
    return [each for each in call.path.get(name, "").split(",") if each][:IDS_MAX]


def _body_ids(call: Call, name: str) -> list[str]:
    """Return the ids of the body. Raises: InvalidInput for an unknown field."""
    query = search_of(call)
    for key, value in query.items():
        if key in FLAGS and isinstance(value, bool):
            continue
        if key in LISTS and isinstance(value, list) and len(value) <= IDS_MAX:
            continue
        raise InvalidInput(
            f"a profile takes {', '.join(FLAGS)} (true or false) and {', '.join(LISTS)} (lists), not {key[:80]!r}: "
            f"{str(value)[:80]}"
        )
    return [str(each) for each in query.get(name, [])]


HEALTH, STATS = "/_cluster/health", "stats"
PROJECTS_MAX = 10_000  # limit of projects with counters
INDEXES = ("connector", "model", "task", "config", "controller")
_NODES = re.compile(r"(?P<sign>>=|<=|>|<|ge\(|le\(|gt\(|lt\()?(?P<number>[0-9]{1,6})\)?")
Text = Annotated[str, Meta(max_length=64)]


class HealthQuery(Common, frozen=True, forbid_unknown_fields=True):
    """What a health check may wait for. Everything is true at once, except a node count other than one."""

    level: Literal["cluster", "indices", "shards", "awareness_attributes"] = "cluster"
    wait_for_status: Literal["", "green", "yellow", "red"] = ""
    wait_for_nodes: Text = ""
    wait_for_active_shards: Text = ""
    wait_for_events: Text = ""
    wait_for_no_initializing_shards: Flag = "false"
    wait_for_no_relocating_shards: Flag = "false"
    timeout: Text = ""
    cluster_manager_timeout: Text = ""
    master_timeout: Text = ""
    expand_wildcards: Text = ""
    local: Flag = "false"


class ClusterHandlers:
    def __init__(self, services: Services) -> None:
        self._connectors, self._models = services.connectors, services.remote_models
        self._tasks = services.remote_tasks
        self._node = node_id(services.config.data_dir)
        self._requests: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        services.live.listen(self._count)

    def operations(self) -> Sequence[Operation]:
        all_nodes, one_node = f"{PREFIX}/{STATS}", f"{PREFIX}/{{node_id}}/{STATS}"
        return [
            operation("getClusterHealth", f"GET {HEALTH}", "The health of the cluster", Scope.READ, self.health,
                      query=HealthQuery, errors=(408,)),
            operation("getIndexHealth", f"GET {HEALTH}/{{index}}", "The health of an index", Scope.READ, self.health,
                      query=HealthQuery, errors=(408,)),
            operation("getStats", f"GET {all_nodes}", "All counters", Scope.READ, self.stats, errors=()),
            operation("getStat", f"GET {all_nodes}/{{stat}}", "Some counters", Scope.READ, self.stats, errors=()),
            operation("getNodeStats", f"GET {one_node}", "The counters of a node", Scope.READ, self.stats),
            operation("getNodeStat", f"GET {one_node}/{{stat}}", "Some counters of a node", Scope.READ, self.stats),
        ]  # fmt: skip

    async def health(self, call: Call) -> Response:
        query: HealthQuery = call.query
        is_met = _is_met(query.wait_for_nodes)
        fields = {
            "cluster_name": "batchmill",
            "status": "green",
            "timed_out": not is_met,
            "number_of_nodes": 1,
            "number_of_data_nodes": 1,
            "discovered_master": True,
            "discovered_cluster_manager": True,
            **dict.fromkeys(
                (
                    "active_primary_shards", "active_shards", "relocating_shards", "initializing_shards",
                    "unassigned_shards", "delayed_unassigned_shards", "number_of_pending_tasks",
                    "number_of_in_flight_fetch", "task_max_waiting_in_queue_millis",
                ),
                0,
            ),
            "active_shards_percent_as_number": 100.0,
        }  # fmt: skip
        return reply(call, fields, 200 if is_met else 408)

    async def stats(self, call: Call) -> Response:
        """Return counters of the caller's project. Calls are counted since the server started."""
        if (node := call.path.get("node_id", "_all")) not in (self._node, "_all", "_local"):
            raise UnknownName(f"the node {node[:80]!r} does not exist: use {self._node}", code="unknown_node")
        project, models = call.caller.project, self._models.all(call.caller)
        tasks = await self._tasks.all(call.caller)
        cluster: dict[str, Any] = {
            "ml_connector_count": len(self._connectors.all(call.caller)),
            "ml_model_count": len(models),
            **{f"ml_{each}_index_status": "green" for each in INDEXES},
        }
        node_fields: dict[str, Any] = {
            "ml_deployed_model_count": sum(each.is_deployed for each in models),
            "ml_executing_task_count": sum(not each.has_ended for each in tasks),
            "ml_request_count": self._requests[project],
            "ml_failure_count": self._failures[project],
            "ml_circuit_breaker_trigger_count": 0,
        }
        names = [each for each in call.path.get("stat", "").split(",") if each not in ("", "_all")]
        for name in names:
            if name not in cluster and name not in node_fields:
                stats = ", ".join((*cluster, *node_fields))
                raise InvalidInput(f"the stat {name[:80]!r} does not exist: use one of {stats}", code="unknown_stat")
        chosen = {name: value for name, value in node_fields.items() if not names or name in names}
        fields = {name: value for name, value in cluster.items() if not names or name in names}
        if "node_id" in call.path:
            fields = {}
        return reply(call, fields | {"nodes": {self._node: chosen}} if chosen else fields)

    def _count(self, call: LiveCall) -> None:
        """Count an ended call if its model is a remote model."""
        if self._models.find(call.model, call.project) is None:
            return
        if call.project not in self._requests and len(self._requests) >= PROJECTS_MAX:
            self._requests.clear()
            self._failures.clear()
        self._requests[call.project] += 1
        self._failures[call.project] += call.error is not None or call.status >= 400


def _is_met(nodes: str) -> bool:
    """True if one node satisfies the condition, for example "1", ">=1" or "ge(1)". Raises: InvalidInput."""
    if not nodes:
        return True
    match = _NODES.fullmatch(nodes)
    if match is None:
        raise InvalidInput(f'wait_for_nodes is a number, ">=N" or "<=N", not {nodes!r}', code="invalid_value")
    number, sign = int(match["number"]), match["sign"] or ""
    nearest = {">=": number <= 1, "ge(": number <= 1, "<=": number >= 1, "le(": number >= 1}
    strictly = {">": number < 1, "gt(": number < 1, "<": number > 1, "lt(": number > 1}
    return (nearest | strictly).get(sign, number == 1)
