"""batchmill's own API on the wire: every operation of it, and one envelope for what goes wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from batchmill.dialects.native import errors
from batchmill.dialects.native.adapters import Adapters
from batchmill.dialects.native.files import Files
from batchmill.dialects.native.following import Following
from batchmill.dialects.native.functions import Functions
from batchmill.dialects.native.jobs import Jobs
from batchmill.dialects.native.keys import Keys
from batchmill.dialects.native.llms import Llms
from batchmill.dialects.native.looking import Looking
from batchmill.dialects.native.orders import Orders
from batchmill.dialects.native.quarantine import QuarantinedRequestsOf
from batchmill.dialects.native.views import Shown
from batchmill.errors import BatchmillError
from batchmill.server.operations import Operation
from batchmill.services.services import Services


class NativeDialect:
    name = "native"

    def __init__(self, services: Services) -> None:
        self._shown = Shown(services.config.data_dir)
        orders = Orders(services)
        self._groups = (
            Files(services),
            Jobs(services, self._shown, orders),
            Following(services, self._shown),
            Looking(services, self._shown, orders),
            Keys(services),
            Functions(services, self._shown),
            Llms(services, self._shown),
            Adapters(services, self._shown),
            QuarantinedRequestsOf(services),
        )

    def operations(self) -> Sequence[Operation]:
        return [operation for group in self._groups for operation in group.operations()]

    def refusal(self, error: BatchmillError) -> Response:
        return errors.refusal(error, self._shown.text(error.message))

    def error_schema(self) -> dict[str, Any]:
        return errors.schema()
