"""A schema whose class validates in Python, at a server: its code is deployed, and the order names the version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from batchmill.errors import Forbidden
from batchmill.types.engine_traits import ENGINES
from batchmill.wire.bundles import SCHEMA
from batchmill.wire.native import ModelInfo, VersionInfo
from batchmill.wire.schemas.class_schemas import has_validators, schema_of
from batchmill.wire.schemas.output_schema import needless_schema

OptionsT = TypeVar("OptionsT", bound=Mapping[str, Any])


def has_code(options: Mapping[str, Any]) -> bool:
    """Whether the schema of an order is a class whose validators are Python."""
    source = options.get("schema")
    if not isinstance(source, type):
        return False
    schema_of(source)  # completes models whose annotations name later classes
    return has_validators(source)


def settings_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """What the class of an order is deployed with: no name, so that the same code is the same version."""
    return {"name": "", "kind": SCHEMA, "requirements": options.get("schema_requirements")}


def models_of(options: Mapping[str, Any]) -> Sequence[str]:
    """The models of an order by name; empty: those that its rows name."""
    model = options.get("model")
    return options.get("models") or ([] if model is None else [model])


def check_models(names: Sequence[str], models: Sequence[ModelInfo]) -> None:
    """Check what the schema of an order is for, before its class is deployed: that takes seconds.

    Args: names, models: those of the order, and those of the server. Raises: InvalidInput if none has answers to check.
    """
    engines = {model.name: model.engine for model in models}
    known = [ENGINES.get(engines.get(name, "")) for name in names]
    if known and all(traits is not None and traits.takes_columns for traits in known):
        raise needless_schema()


def with_version(options: OptionsT, version: VersionInfo) -> OptionsT:
    """The order, which names the version."""
    left = {name: value for name, value in options.items() if name not in ("schema", "schema_requirements")}
    return left | {"validator": reference_of(version)}  # type: ignore[return-value]


def reference_of(version: VersionInfo) -> str:
    return f"{version.name}@{version.branch}/{version.number}"


def refused(source: str, error: Forbidden) -> Forbidden:
    """Why a key may not bring code, and the way out."""
    return Forbidden(
        f"the validators of {source} are Python, which this key may not bring to the server ({error.message}): use a "
        "key with the scope deploy; or deploy the class once with such a key (`batchmill deploy FILE.py:CLASS --schema "
        "--name NAME`) and name it as the validator NAME; or give the JSON Schema of the class alone",
        code=error.code,
    )
