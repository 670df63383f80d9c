"""Predibase's API on the wire, as its published package speaks it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from batchmill.dialects.predibase import errors
from batchmill.dialects.predibase.batches import BatchInference
from batchmill.dialects.predibase.deployments import Deployments
from batchmill.dialects.predibase.files import Datasets, Downloads
from batchmill.dialects.predibase.serving import Serving
from batchmill.dialects.predibase.users import Users
from batchmill.errors import BatchmillError
from batchmill.server.operations import Operation
from batchmill.services.places import Places
from batchmill.services.services import Services


class PredibaseDialect:
    name = "predibase"

    def __init__(self, services: Services) -> None:
        self._places = Places(services.config.data_dir)
        downloads = Downloads(services)
        self._groups = (
            Users(services),
            Datasets(services, downloads),
            BatchInference(services, downloads),
            downloads,
            Deployments(services),
            Serving(services),
        )

    def operations(self) -> Sequence[Operation]:
        return [operation for group in self._groups for operation in group.operations()]

    def refusal(self, error: BatchmillError) -> Response:
        message = self._places.hide(error.message)
        if isinstance(error, errors.LoraxRefused):
            return errors.lorax_refusal(error.error, message, is_openai=error.is_openai)
        return errors.refusal(error, message)

    def error_schema(self) -> dict[str, Any]:
        return errors.SCHEMA
