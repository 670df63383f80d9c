"""Settings of a cluster: tutorials and set-up scripts of ML Commons write some before they begin.

What is asked for is acknowledged where it is so already, or where there is nothing here that it would change; all else
is refused by name, with the place where the operator of the server says it. Nothing is kept.
Source: OpenSearch, "Cluster settings"; ML Commons, "Cluster settings".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta
from starlette.responses import Response

from batchmill.config import MlCommonsEntry
from batchmill.dialects.ml_commons.requests import Common, Flag, body_of, is_set, operation, reply
from batchmill.errors import InvalidInput
from batchmill.server.operations import Call, Operation
from batchmill.services.services import Services
from batchmill.types import Scope

PATH = "/_cluster/settings"
PREFIX = "plugins.ml_commons."
KINDS = ("persistent", "transient")
SETTINGS_MAX, DEPTH_MAX = 200, 16  # in one request
SHOWN_CHARS = 80
TRUSTED = "trusted_connector_endpoints_regex"
# They bound or place models that run on nodes, of which there are none here: with any value all stays as it is.
WITHOUT_EFFECT = frozenset(
    [
        "allow_custom_deployment_plan",
        "allow_registering_model_via_local_file",
        "allow_registering_model_via_url",
        "controller_enabled",
        "disk_free_space_threshold",
        "enable_inhouse_python_model",
        "exclude_nodes._name",
        "jvm_heap_memory_threshold",
        "local_model.enabled",
        "max_deploy_model_tasks_per_node",
        "max_ml_task_per_node",
        "max_model_on_node",
        "max_register_model_tasks_per_node",
        "model_auto_redeploy.enable",
        "model_auto_redeploy.lifetime_retry_times",
        "model_auto_redeploy_success_ratio",
        "monitoring_request_count",
        "native_memory_threshold",
        "only_run_on_ml_node",
        "sync_up_job_interval_in_seconds",
        "task_dispatch_policy",
    ]
)
Time = Annotated[str, Meta(max_length=32)]


class Reading(Common, frozen=True, forbid_unknown_fields=True):
    """Times have no effect: nothing is waited for."""

    flat_settings: Flag = "false"
    include_defaults: Flag = "false"
    timeout: Time = ""
    cluster_manager_timeout: Time = ""
    master_timeout: Time = ""
    local: Flag = "false"


class ClusterSettings:
    def __init__(self, services: Services) -> None:
        self._entry = services.config.ml_commons
        self._has_private = bool(services.config.server.private_hosts)

    def operations(self) -> Sequence[Operation]:
        return [
            operation(
                "getClusterSettings", f"GET {PATH}", "Settings of the cluster", Scope.READ, self.get, query=Reading,
                errors=(),
            ),
            operation(
                "updateClusterSettings", f"PUT {PATH}", "Acknowledge settings that are so", Scope.ADMIN, self.put,
                query=Reading, body="required", errors=(),
            ),
        ]  # fmt: skip

    async def get(self, call: Call) -> Response:
        query: Reading = call.query
        fields: dict[str, Any] = {kind: {} for kind in KINDS}
        if is_set(query.include_defaults):
            known = {PREFIX + name: value for name, (value, _) in _known(self._entry, self._has_private).items()}
            fields["defaults"] = _shaped(query, known | {PREFIX + TRUSTED: self._entry.trusted_connector_endpoints})
        return reply(call, fields)

    async def put(self, call: Call) -> Response:
        body = body_of(call)
        if unknown := [name for name in body if name not in KINDS]:
            raise InvalidInput(
                f"a change of settings holds {' and '.join(KINDS)}, not {unknown[0][:SHOWN_CHARS]!r}",
                code="unknown_parameter",
            )
        fields: dict[str, Any] = {"acknowledged": True}
        for kind in KINDS:
            settings = flattened(body.get(kind) or {}, kind)
            for name, value in settings.items():
                self._check(kind, name, value)
            fields[kind] = _shaped(call.query, settings)
        if not any(fields[kind] for kind in KINDS):
            raise InvalidInput("no settings to update", code="missing_field")
        return reply(call, fields)

    def _check(self, kind: str, name: str, value: Any) -> None:
        """Raises: InvalidInput for a setting that would change something, or that there is not."""
        own = name.removeprefix(PREFIX)
        known = _known(self._entry, self._has_private)
        if own == name or not (own in known or own in WITHOUT_EFFECT or own == TRUSTED):
            raise InvalidInput(f"{kind} setting [{name[:SHOWN_CHARS]}], not recognized", code="unknown_setting")
        if value is None or own in WITHOUT_EFFECT:
            return
        if own == TRUSTED:
            self._check_trusted(value)
        elif _plain(value) != _plain(known[own][0]):
            is_so, place = known[own]
            raise InvalidInput(
                f"the setting {name} is {_plain(is_so)} here and not {_plain(value)[:SHOWN_CHARS]!r}: {place}",
                code="setting_not_changed",
            )

    def _check_trusted(self, value: Any) -> None:
        """Where no expressions are configured connectors may lead to every public address already."""
        trusted = self._entry.trusted_connector_endpoints
        asked = value if isinstance(value, list) else [value]
        if more := [each for each in asked if trusted and each not in trusted]:
            raise InvalidInput(
                f"the setting {PREFIX}{TRUSTED} does not hold {str(more[0])[:SHOWN_CHARS]!r} here: the operator of the "
                "server adds it with ml_commons.trusted_connector_endpoints",
                code="setting_not_changed",
            )


def _known(entry: MlCommonsEntry, has_private: bool) -> dict[str, tuple[Any, str]]:
    """Settings that mean something here: how each is, and who changes it how."""

    def configured(name: str) -> str:
        return f"the operator of the server changes it with {name}"

    access = "what belongs to a project is seen by its keys, whatever is set"
    return {
        "connector.private_ip_enabled": (has_private, configured("server.private_hosts")),
        "connector_access_control_enabled": (False, access),
        "max_batch_inference_tasks": (
            entry.max_batch_inference_tasks, configured("ml_commons.max_batch_inference_tasks")
        ),
        "model_access_control_enabled": (False, access),
        "model_auto_deploy.enable": (entry.model_auto_deploy, configured("ml_commons.model_auto_deploy")),
        "offline_batch_inference_enabled": (
            entry.offline_batch_inference_enabled, configured("ml_commons.offline_batch_inference_enabled")
        ),
        "remote_inference.enabled": (True, "models are remote ones"),
        "remote_inference_enabled": (True, "models are remote ones"),
        "update_connector.enabled": (True, "connectors can always be changed"),
    }  # fmt: skip


def flattened(settings: Any, kind: str) -> dict[str, Any]:
    """Settings by their whole names, however they are nested. Raises: InvalidInput."""
    found: dict[str, Any] = {}
    left: list[tuple[str, Any, int]] = [("", settings, 0)]
    while left:
        name, value, depth = left.pop()
        if isinstance(value, Mapping):
            if depth > DEPTH_MAX or len(left) + len(value) > SETTINGS_MAX:
                raise InvalidInput(
                    f"{kind} holds more than {SETTINGS_MAX} settings, or nests deeper than {DEPTH_MAX}",
                    code="too_many_settings",
                )
            left += [(f"{name}.{key}" if name else str(key), each, depth + 1) for key, each in value.items()]
        elif name:
            found[name] = value
        else:
            raise InvalidInput(f"{kind} is an object of settings", code="invalid_value")
        if len(found) > SETTINGS_MAX:
            raise InvalidInput(f"{kind} holds more than {SETTINGS_MAX} settings", code="too_many_settings")
    return dict(sorted(found.items()))


def _shaped(query: Reading, settings: Mapping[str, Any]) -> dict[str, Any]:
    """As OpenSearch tells settings: values are texts; nested, or flat where the query says so."""
    fields = {name: _setting_text(value) for name, value in settings.items() if value is not None}
    if is_set(query.flat_settings):
        return fields
    nested: dict[str, Any] = {}
    for name, value in fields.items():
        *path, last = name.split(".")
        place = nested
        for part in path:
            inner = place.setdefault(part, {})
            place = inner if isinstance(inner, dict) else place
        place[last] = value
    return nested


def _setting_text(value: Any) -> Any:
    return [_plain(each) for each in value] if isinstance(value, list) else _plain(value)


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
