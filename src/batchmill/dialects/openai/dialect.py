"""OpenAI's API on the wire: every operation of it, and one envelope for what goes wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from batchmill.dialects.openai import errors, files, webhook_endpoints
from batchmill.dialects.openai.batches import Batches
from batchmill.dialects.openai.inference import Inference, Models
from batchmill.errors import BatchmillError
from batchmill.server.operations import Operation
from batchmill.services.places import Places
from batchmill.services.services import Services


class OpenAIDialect:
    name = "openai"

    def __init__(self, services: Services) -> None:
        self._services = services
        self._places = Places(services.config.data_dir)

    def operations(self) -> Sequence[Operation]:
        services = self._services
        return [
            *files.operations(services),
            *files.upload_operations(services),
            *Batches(services).operations(),
            *Models(services).operations(),
            *webhook_endpoints.operations(services),
            *Inference(services).operations(),
        ]

    def refusal(self, error: BatchmillError) -> Response:
        return errors.refusal(error, self._places.hide(error.message))

    def error_schema(self) -> dict[str, Any]:
        return errors.schema()
