"""OpenSearch ML Commons on the wire. It knows what its clients call things; what they mean is done by services."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from batchmill.dialects.ml_commons import errors
from batchmill.dialects.ml_commons.cluster import Cluster, Health
from batchmill.dialects.ml_commons.cluster_settings import ClusterSettings
from batchmill.dialects.ml_commons.predict import Datasets, Predict
from batchmill.dialects.ml_commons.resources import Connectors, Groups, Models, Tasks
from batchmill.errors import BatchmillError
from batchmill.server.operations import Operation
from batchmill.services.places import Places
from batchmill.services.services import Services


class MlCommonsDialect:
    name = "ml_commons"

    def __init__(self, services: Services) -> None:
        self._services = services
        self._hide = Places(services.config.data_dir).hide

    def operations(self) -> Sequence[Operation]:
        services = self._services
        parts = (
            Cluster(services), ClusterSettings(services),
            Connectors(services), Models(services), Groups(services),
            Predict(services, Datasets(services)), Tasks(services), Health(services),
        )  # fmt: skip
        return [operation for part in parts for operation in part.operations()]

    def refusal(self, error: BatchmillError) -> Response:
        return errors.refusal(error, self._hide(error.message))

    def error_schema(self) -> dict[str, Any]:
        return errors.schema()
