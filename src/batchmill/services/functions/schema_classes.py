"""Versions whose code is a class that validates answers: what they may set, how they are checked, and their names.

A class that came without a name is named by its project and its code, so that the same class is the same version, and
belongs to nobody else. A person cannot choose such a name.
"""

from __future__ import annotations

import asyncio
import hashlib
import re

from msgspec.structs import fields, replace

from batchmill.errors import InvalidInput, ModelFailed
from batchmill.executors.validators.messages import LoadOrder
from batchmill.executors.validators.validators import ValidatorFailed, ValidatorProcess
from batchmill.optional import require
from batchmill.services.functions.function import VersionTarget
from batchmill.services.functions.names import MAIN, is_unnamed
from batchmill.types import DeployedSchema, Isolation, ModelSpec, OutputSchema, SchemaVersion
from batchmill.wire.bundles import SCHEMA, DeployOrder
from batchmill.wire.schemas.output_schema import VALIDATION, one_line

KEPT_S = 86_400.0  # how long an unnamed version stays that no job has, since it was last deployed
# What a class may have besides its code; the other settings are those of functions.
SETTINGS = {"name", "target", "branch", "source", "requirements", "python", "is_shared", "kind"}
_MISSING = re.compile(r"No module named '([\w.]+)'")


def check_settings(order: DeployOrder) -> None:
    """Raises: InvalidInput for a setting that would have no effect, by its name."""
    for each in fields(DeployOrder):
        if each.name not in SETTINGS and getattr(order, each.name) not in (each.default, [], {}):
            raise InvalidInput(
                f"{each.name} is a setting of functions, and {order.target} is deployed as a schema: leave it out",
                code="invalid_order",
            )
    if not order.name and (order.branch != MAIN or order.is_shared is not None):
        raise InvalidInput("a class without a name has no branches and is not shared: name it", code="missing_name")


def named(order: DeployOrder, project: str, digest: str) -> DeployOrder:
    """The order of a class with its name. Args: digest: of its code and settings."""
    if order.name:
        return order
    code = hashlib.sha256(f"{project}\n{digest}".encode()).hexdigest()
    name = f"{SCHEMA}_{code[:20]}"
    assert is_unnamed(name)
    return replace(order, name=name)


async def load_class(spec: ModelSpec, isolation: Isolation | None) -> DeployedSchema:
    """Load the class of a version in its own environment. Raises: ModelFailed, also for a document that is no schema.

    Nothing that its process says is trusted: the class shares its memory.
    """
    function = spec.function
    assert function is not None, "it is being deployed"
    order = LoadOrder(spec.source, function.digest, function.folder, spec.python)
    try:
        process, loaded = await ValidatorProcess.start(order, isolation)
    except ValidatorFailed as error:
        raise ModelFailed(error.message + _way_out(error.message)) from None
    await process.close()
    try:
        document = one_line(loaded.document, spec.source)
        await asyncio.to_thread(require(f"{VALIDATION}:check_schema", "a schema"), OutputSchema(document))
    except InvalidInput as error:
        raise ModelFailed(f"the JSON Schema of {spec.source} cannot be used: {error.message}") from None
    return DeployedSchema(document, loaded.has_validators)


def schema_of(target: VersionTarget) -> OutputSchema:
    """The schema of a version of a class, for a job that it is pinned by."""
    spec, function = target.model, target.model.function
    assert function is not None and function.schema is not None, "it is a class"
    deployed = function.schema
    if not deployed.has_validators:
        return OutputSchema(deployed.document)
    version = SchemaVersion(f"{target.name}@{target.branch}/{target.number}", function.folder, spec.python)
    return OutputSchema(deployed.document, validator=spec.source, code=function.digest, version=version)


def _way_out(message: str) -> str:
    found = _MISSING.search(message)
    if found is None:
        return ""
    name = found[1].partition(".")[0]
    return (
        f"\nThe environment of the class lacks {name}. If that is a package, name it in the requirements (`batchmill "
        f"deploy … --schema --requirements FILE`, `batchmill run … --schema-requirements FILE`, `Client.run(…, "
        "schema_requirements=…)`); if it is a file of yours, "
        "have it beside the class, or include it"
    )
