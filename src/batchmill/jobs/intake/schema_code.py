"""The code of a job's schema: a deployed class that validates answers."""

from __future__ import annotations

from typing import Protocol

from batchmill.errors import JobPaused
from batchmill.states import PauseReason
from batchmill.types import OutputSchema

VALIDATOR_FAILED = "validator_failed"


class SchemaCode(Protocol):
    """The code of deployed classes that validate answers."""

    async def bring(self, schema: OutputSchema) -> None:
        """Have the code of a job's class and its environment in place.

        Raises: JobPaused (`validator_failed`) if its version was removed, or cannot be had here.
        """

    async def remove_unused(self) -> None:
        """Remove the classes that came with jobs, once no job has them. Called regularly."""


class NoSchemaCode:
    """A `SchemaCode` without classes."""

    async def bring(self, schema: OutputSchema) -> None:
        if schema.version is not None:
            raise JobPaused(
                f"the class {schema.version.reference} is not deployed here", code=VALIDATOR_FAILED,
                reason=PauseReason.ENGINE_FAILED,
            )  # fmt: skip

    async def remove_unused(self) -> None:
        """There are none."""
