"""The fields of ML Commons' remote models: which are read, which are refused by name, and what they may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from batchmill.errors import InvalidInput
from batchmill.services.remote.interfaces import read_interface
from batchmill.services.remote.model_rates import read_limiter
from batchmill.services.remote.model_records import ModelDetails

REMOTE = "REMOTE"
NAME_CHARS_MAX = 256
TEXT_CHARS_MAX = 10_000
SHOWN_CHARS = 80
# What nobody here would act on, and why; a client that never hears of it would count on it.
_STRANGERS = {
    "guardrails": "nothing checks what goes into a model or comes out of it",
}
_ACCESS_FIELDS = ("backend_roles", "add_all_backend_roles")


def name_of(fields: Mapping[str, Any]) -> str:
    """Raises: InvalidInput."""
    name = fields.get("name")
    if name is None:
        raise InvalidInput("model name is null", code="missing_name")
    if not isinstance(name, str) or not 0 < len(name.strip()) <= NAME_CHARS_MAX or not name.isprintable():
        raise InvalidInput(f"a model's name is 1 to {NAME_CHARS_MAX} printable characters", code="invalid_name")
    return name


def refuse_strangers(fields: Mapping[str, Any]) -> None:
    """Raises: InvalidInput for a field that would be promised something here."""
    kind = fields.get("function_name")
    if kind is not None and str(kind).upper() != REMOTE:
        raise InvalidInput(
            f"function_name must be remote: models that are loaded from files, such as {str(kind)[:SHOWN_CHARS]!r}, "
            "are `batchmill deploy`ed",
            code="not_remote",
        )
    for name, why in _STRANGERS.items():
        if fields.get(name) not in (None, {}):
            raise InvalidInput(f"{name} is not supported here: {why}; leave it out", code="unsupported_field")
    if any(fields.get(name) not in (None, False, []) for name in _ACCESS_FIELDS):
        raise InvalidInput(
            "You cannot specify model access control parameters because the Security plugin or model access control "
            "is disabled on your cluster.",
            code="no_access_control",
        )


def require_remote(fields: Mapping[str, Any]) -> None:
    """Raises: InvalidInput where the kind is not said: ML Commons takes that for a model loaded from files."""
    if fields.get("function_name") is None:
        raise InvalidInput(
            "model format is null: a model without function_name is one that is loaded from files; write "
            '"function_name": "remote"',
            code="not_remote",
        )


def details_of(fields: Mapping[str, Any], old: ModelDetails) -> ModelDetails:
    """What fields say of a model besides its name and connector. Raises: InvalidInput."""
    changed: dict[str, Any] = {}
    if (description := fields.get("description")) is not None:
        if not isinstance(description, str) or len(description) > TEXT_CHARS_MAX:
            raise InvalidInput(f"a description is a text of at most {TEXT_CHARS_MAX:,} characters", code="invalid_text")
        changed["description"] = description
    if (enabled := fields.get("is_enabled")) is not None:
        changed["is_enabled"] = _flag("is_enabled", enabled)
    if "rate_limiter" in fields:
        changed["rate_limiter"] = read_limiter(fields["rate_limiter"])
    if "interface" in fields:
        changed["interface"] = read_interface(fields["interface"])
    setting = fields.get("deploy_setting")
    if setting is not None:
        if not isinstance(setting, Mapping):
            raise InvalidInput('deploy_setting is an object: {"is_auto_deploy_enabled": false}', code="invalid_field")
        told = setting.get("is_auto_deploy_enabled")
        changed["is_auto_deploy"] = None if told is None else _flag("is_auto_deploy_enabled", told)
    return replace(old, **changed)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(f"{name} is true or false, not {str(value)[:SHOWN_CHARS]!r}", code="invalid_field")
    return value
