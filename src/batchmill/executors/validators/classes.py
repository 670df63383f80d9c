"""Schemas that are classes: their JSON Schema, and their code where it validates. No code of theirs runs here."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from msgspec.structs import replace

from batchmill.errors import InvalidInput, ModelFailed
from batchmill.executors.validators.messages import LoadOrder
from batchmill.executors.validators.validators import ValidatorFailed, ValidatorProcess
from batchmill.models import functions
from batchmill.types import OutputSchema

_CLASS = re.compile(r"(.+\.py|([\w.-]+/)*[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):[A-Za-z_][\w.]*")


def is_class(text: str) -> bool:
    """Whether a text is FILE.py:CLASS or package.module:CLASS."""
    return _CLASS.fullmatch(text) is not None


async def class_schema(source: str, cwd: Path, schema: OutputSchema) -> OutputSchema:
    """As `with_class`, for a class named from `cwd` on. Raises: InvalidInput."""
    return await with_class(functions.absolute(source, cwd), schema)


async def with_class(source: str, schema: OutputSchema) -> OutputSchema:
    """The schema with the document of a class, unless it has one, and its code if that validates.

    Raises: InvalidInput.
    """
    try:
        code = await asyncio.to_thread(functions.digest_with_imports, source)
        process, loaded = await ValidatorProcess.start(LoadOrder(source, code))
    except (ModelFailed, ValidatorFailed) as error:
        raise InvalidInput(f"the schema {source}: {error.message}", code="invalid_schema") from None
    await process.close()
    schema = replace(schema, document=schema.document or loaded.document)
    return replace(schema, validator=source, code=code) if loaded.has_validators else schema
