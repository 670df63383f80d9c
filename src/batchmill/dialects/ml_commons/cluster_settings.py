"""Cluster settings, which tutorials and set-up scripts of ML Commons write first.

A setting is acknowledged if it already has that value, or if it has no effect here. Any other setting is refused by
name, with the configuration key that the operator of the server can change. Nothing is stored.
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
SETTINGS_MAX, DEPTH_MAX = 200, 16  # of one request
SHOWN_CHARS = 80
TRUSTED = "trusted_connector_endpoints_regex"
# They limit or place models that run on nodes, which batchmill does not have. Any value is acknowledged.
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
    """Query parameters. Timeouts have no effect, because nothing waits."""

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
                "getClusterSettings", f"GET {PATH}", "Show the settings of the cluster", Scope.READ, self.get,
                query=Reading, errors=(),
            ),
            operation(
                "updateClusterSettings", f"PUT {PATH}", "Acknowledge settings that have these values", Scope.ADMIN,
                self.put, query=Reading, body="required", errors=(),
            ),
        ]  # fmt: skip

    async def get(self, call: Call) -> Response:
        query: Reading = call.query
        fields: dict[str, Any] = {kind: {} for kind in KINDS}
        if is_set(query.include_defaults):
            settings = {PREFIX + name: value for name, (value, _) in self._settings().items()}
            fields["defaults"] = _as_text(query, settings | {PREFIX + TRUSTED: self._entry.trusted_connector_endpoints})
        return reply(call, fields)

    async def put(self, call: Call) -> Response:
        body = body_of(call)
        if unknown := [name for name in body if name not in KINDS]:
            raise InvalidInput(
                f"the field {unknown[0][:SHOWN_CHARS]!r} is unknown: a change of settings has {' and '.join(KINDS)}",
                code="unknown_parameter",
            )
        fields: dict[str, Any] = {"acknowledged": True}
        for kind in KINDS:
            settings = flatten(body.get(kind) or {}, kind)
            for name, value in settings.items():
                self._check(kind, name, value)
            fields[kind] = _as_text(call.query, settings)
        if not any(fields[kind] for kind in KINDS):
            raise InvalidInput("no settings to update", code="missing_field")
        return reply(call, fields)

    def _check(self, kind: str, name: str, value: Any) -> None:
        """Raises: InvalidInput for an unknown setting, or for a value that would change something."""
        short_name = name.removeprefix(PREFIX)
        settings = self._settings()
        if short_name == name or not (short_name in settings or short_name in WITHOUT_EFFECT or short_name == TRUSTED):
            raise InvalidInput(f"{kind} setting [{name[:SHOWN_CHARS]}], not recognized", code="unknown_setting")
        if value is None or short_name in WITHOUT_EFFECT:
            return
        if short_name == TRUSTED:
            self._check_trusted(value)
        elif _text(value) != _text(settings[short_name][0]):
            current, hint = settings[short_name]
            raise InvalidInput(
                f"the setting {name} is {_text(current)} and cannot become {_text(value)[:SHOWN_CHARS]!r}: {hint}",
                code="setting_not_changed",
            )

    def _settings(self) -> dict[str, tuple[Any, str]]:
        return _settings(self._entry, self._has_private)

    def _check_trusted(self, value: Any) -> None:
        """Check expressions. Without configured expressions, connectors may already use any public address."""
        trusted = self._entry.trusted_connector_endpoints
        expressions = value if isinstance(value, list) else [value]
        if missing := [each for each in expressions if trusted and each not in trusted]:
            raise InvalidInput(
                f"the setting {PREFIX}{TRUSTED} does not contain {str(missing[0])[:SHOWN_CHARS]!r}: the operator of "
                "the server can add it with ml_commons.trusted_connector_endpoints",
                code="setting_not_changed",
            )


def _settings(entry: MlCommonsEntry, has_private: bool) -> dict[str, tuple[Any, str]]:
    """Return the supported settings: name -> value, and how to change it."""

    def configured(name: str) -> str:
        return f"the operator of the server can change it with {name}"

    access = "a key always sees the objects of its own project only"
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
        "remote_inference.enabled": (True, "all models of this API are remote"),
        "remote_inference_enabled": (True, "all models of this API are remote"),
        "update_connector.enabled": (True, "connectors can always be changed"),
    }  # fmt: skip


def flatten(settings: Any, kind: str) -> dict[str, Any]:
    """Flatten nested settings into full names. Raises: InvalidInput."""
    flat: dict[str, Any] = {}
    pending: list[tuple[str, Any, int]] = [("", settings, 0)]
    while pending:
        name, value, depth = pending.pop()
        if isinstance(value, Mapping):
            if depth > DEPTH_MAX or len(pending) + len(value) > SETTINGS_MAX:
                raise InvalidInput(
                    f"{kind} has more than {SETTINGS_MAX} settings, or more than {DEPTH_MAX} levels",
                    code="too_many_settings",
                )
            pending += [(f"{name}.{key}" if name else str(key), each, depth + 1) for key, each in value.items()]
        elif name:
            flat[name] = value
        else:
            raise InvalidInput(f"{kind} must be an object of settings", code="invalid_value")
        if len(flat) > SETTINGS_MAX:
            raise InvalidInput(f"{kind} has more than {SETTINGS_MAX} settings", code="too_many_settings")
    return dict(sorted(flat.items()))


def _as_text(query: Reading, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in OpenSearch's form: values are texts, nested unless the query asks for flat names."""
    fields = {name: _setting_text(value) for name, value in settings.items() if value is not None}
    if is_set(query.flat_settings):
        return fields
    nested: dict[str, Any] = {}
    for name, value in fields.items():
        *path, last = name.split(".")
        parent = nested
        for part in path:
            child = parent.setdefault(part, {})
            parent = child if isinstance(child, dict) else parent
        parent[last] = value
    return nested


def _setting_text(value: Any) -> Any:
    return [_text(each) for each in value] if isinstance(value, list) else _text(value)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
