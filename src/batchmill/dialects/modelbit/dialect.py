"""Modelbit's inference API on the wire: deployments are called at /v1, and an error is one text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from batchmill.dialects.modelbit import errors
from batchmill.dialects.modelbit.calls import Calls, Links
from batchmill.dialects.modelbit.metadata import Metadata
from batchmill.errors import BatchmillError
from batchmill.server.operations import Operation
from batchmill.server.replies import SCHEMA
from batchmill.services.places import Places
from batchmill.services.services import Services


class ModelbitDialect:
    name = "modelbit"

    def __init__(self, services: Services) -> None:
        self._services = services
        self._places = Places(services.config.data_dir)

    def operations(self) -> Sequence[Operation]:
        services = self._services
        return [*Calls(services).operations(), *Metadata(services).operations(), *Links(services).operations()]

    def refusal(self, error: BatchmillError) -> Response:
        return errors.refusal(error, self._places.hide(error.message))

    def error_schema(self) -> dict[str, Any]:
        return SCHEMA
