"""Predibase's API for its published package, whose first request asks which project the key belongs to."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from starlette.responses import Response

from batchmill.dialects.predibase import errors
from batchmill.dialects.predibase.batches import BatchInference
from batchmill.dialects.predibase.deployments import Deployments
from batchmill.dialects.predibase.files import DatasetHandlers, Downloads
from batchmill.dialects.predibase.serving import Serving
from batchmill.errors import BatchmillError
from batchmill.server.operations import Call, Operation, json_reply
from batchmill.services.path_redaction import PathRedactor
from batchmill.services.services import Services
from batchmill.types import Scope

ANYBODY = "anybody"  # the user of a server without keys
NAMESPACE = uuid.UUID("6fa459ea-ee8a-3ca4-894e-db77e160355e")  # for user ids, which are made from project and key


class Subscription(Struct, frozen=True, rename="camel"):
    """A fixed subscription, which the client expects. The operator of the server decides who may use it."""

    id: str = "batchmill"
    tier: str = "ENTERPRISE"
    is_trial: bool = False
    expiration: str | None = None
    days_remaining_in_plan: int | None = None
    active: bool = True


class Tenant(Struct, frozen=True, rename="camel"):
    """A project. Its name is part of the URLs of its deployments."""

    name: str
    short_code: str
    subscription: Subscription = Subscription()


class User(Struct, frozen=True):
    id: str
    username: str
    uuid: str
    tenant: Tenant


class Users:
    def __init__(self, services: Services) -> None:
        self._services = services

    def operations(self) -> Sequence[Operation]:
        return [
            Operation(
                "currentUser", "GET", "/users/current", "The project that the key belongs to", Scope.READ, self.current,
                reply=User,
            )
        ]  # fmt: skip

    async def current(self, call: Call) -> Response:
        name, project = call.caller.key or ANYBODY, call.caller.project
        return json_reply(User(name, name, str(uuid.uuid5(NAMESPACE, f"{project}/{name}")), Tenant(project, project)))


class PredibaseDialect:
    name = "predibase"

    def __init__(self, services: Services) -> None:
        self._path_redactor = PathRedactor(services.config.data_dir)
        downloads = Downloads(services)
        self._groups = (
            Users(services),
            DatasetHandlers(services, downloads),
            BatchInference(services, downloads),
            downloads,
            Deployments(services),
            Serving(services),
        )

    def operations(self) -> Sequence[Operation]:
        return [operation for group in self._groups for operation in group.operations()]

    def refusal(self, error: BatchmillError) -> Response:
        message = self._path_redactor.hide(error.message)
        if isinstance(error, errors.LoraxRefused):
            return errors.lorax_refusal(error.error, message, is_openai=error.is_openai)
        return errors.refusal(error, message)

    def error_schema(self) -> dict[str, Any]:
        return errors.SCHEMA
