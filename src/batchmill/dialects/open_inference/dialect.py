"""The Open Inference Protocol (V2) over HTTP, with Triton's extensions: its operations and its errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace
from starlette.responses import Response

from batchmill.dialects.open_inference.inference import Generation, Inference
from batchmill.dialects.open_inference.models import Metadata, Repository, StatisticsCalls
from batchmill.dialects.open_inference.settings import Settings
from batchmill.errors import BatchmillError
from batchmill.server.operations import Operation
from batchmill.server.replies import SCHEMA, text_reply
from batchmill.services.places import Places
from batchmill.services.services import Services

WORDS = {"unknown_url": "Not Found", "method_not_allowed": "Method Not Allowed"}  # all that Triton says


class OpenInferenceDialect:
    name = "open_inference"

    def __init__(self, services: Services) -> None:
        self._hide = Places(services.config.data_dir).hide
        self._groups = (
            Inference(services),
            Metadata(services),
            StatisticsCalls(services),
            Repository(services),
            Generation(services),
            Settings(services),
        )

    def operations(self) -> Sequence[Operation]:
        """A query is read by none of them, as Triton reads none: its clients have one for the proxies on their way."""
        return [replace(operation, has_free_query=True) for group in self._groups for operation in group.operations()]

    def refusal(self, error: BatchmillError) -> Response:
        return text_reply(error, WORDS.get(error.code) or self._hide(error.message))

    def error_schema(self) -> dict[str, Any]:
        return SCHEMA
