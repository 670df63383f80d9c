"""/v1/webhook_endpoints: register endpoints for the events of batches.

Source: OpenAI's API reference, "Webhook endpoints".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct
from starlette.responses import Response

from batchmill.models.secrets import Secret
from batchmill.server.operations import Call, Operation, json_reply
from batchmill.services.services import Services
from batchmill.services.webhooks.endpoints import EVENT_TYPES, NAME_CHARS_MAX, WebhookRecord
from batchmill.types import Scope

PATH = "/v1/webhook_endpoints"
ONE = PATH + "/{webhook_endpoint_id}"
TYPES_MAX = 64

Name = Annotated[str, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
EventTypes = Annotated[list[str], Meta(min_length=1, max_length=TYPES_MAX, description=", ".join(EVENT_TYPES))]


class CreateEndpoint(Struct, frozen=True, forbid_unknown_fields=True):
    event_types: EventTypes
    name: Name
    url: Annotated[str, Meta(description="A public https URL, unless the operator allows another host.")]


class UpdateEndpoint(Struct, frozen=True, forbid_unknown_fields=True):
    event_types: EventTypes | None = None
    name: Name | None = None
    url: str | None = None


class RotateSecret(Struct, frozen=True, forbid_unknown_fields=True):
    keep_old_secret_active_for_24_hours: bool = False


class TestEndpoint(Struct, frozen=True, forbid_unknown_fields=True):
    event_type: str


class ListEndpoints(Struct, frozen=True, forbid_unknown_fields=True):
    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 20


class WebhookEndpoint(Struct, frozen=True):
    id: str
    created_at: int
    event_types: list[str]
    name: str
    url: str
    updated_at: int
    signing_secret_hint: str | None
    object: Literal["webhook_endpoint"] = "webhook_endpoint"


class WebhookEndpointWithSecret(WebhookEndpoint, frozen=True, kw_only=True):
    signing_secret: str


class WebhookEndpointPage(Struct, frozen=True):
    data: list[WebhookEndpoint]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class DeletedWebhookEndpoint(Struct, frozen=True):
    id: str
    deleted: bool = True
    object: Literal["webhook_endpoint.deleted"] = "webhook_endpoint.deleted"


class WebhookEndpointTest(Struct, frozen=True):
    event_type: str
    status_code: int
    webhook_endpoint_id: str
    success: Literal[True] = True
    object: Literal["webhook_endpoint.test"] = "webhook_endpoint.test"


class WebhookEventTypes(Struct, frozen=True):
    data: list[str]
    object: Literal["list"] = "list"


def operations(services: Services) -> Sequence[Operation]:
    return WebhookEndpoints(services).operations()


class WebhookEndpoints:
    def __init__(self, services: Services) -> None:
        self._webhooks = services.webhooks

    def operations(self) -> Sequence[Operation]:
        admin = Scope.ADMIN
        return (
            Operation(
                "createWebhookEndpoint", "POST", PATH, "Register an endpoint; its secret is shown once", admin,
                self.create, body=CreateEndpoint, reply=WebhookEndpointWithSecret, errors=(409,),
            ),
            Operation(
                "listWebhookEndpoints", "GET", PATH, "List endpoints, the newest first", admin, self.list,
                query=ListEndpoints, reply=WebhookEndpointPage, errors=(404,),
            ),
            Operation(
                "retrieveWebhookEndpoint", "GET", ONE, "Show an endpoint", admin, self.retrieve, reply=WebhookEndpoint,
                errors=(404,),
            ),
            Operation(
                "updateWebhookEndpoint", "POST", ONE, "Change an endpoint", admin, self.update,
                body=UpdateEndpoint, reply=WebhookEndpoint, errors=(404,),
            ),
            Operation(
                "deleteWebhookEndpoint", "DELETE", ONE, "Delete an endpoint", admin, self.delete,
                reply=DeletedWebhookEndpoint, errors=(404,),
            ),
            Operation(
                "rotateWebhookSecret", "POST", ONE + "/rotate_secret", "Replace the secret; it is shown once", admin,
                self.rotate, body=RotateSecret, body_is_optional=True, reply=WebhookEndpointWithSecret, errors=(404,),
            ),
            Operation(
                "testWebhookEndpoint", "POST", ONE + "/test", "Send a sample event now", admin, self.test,
                body=TestEndpoint, reply=WebhookEndpointTest, errors=(404,),
            ),
            Operation(
                "listWebhookEventTypes", "GET", "/v1/webhook_event_types", "List the types of events", admin,
                self.types, reply=WebhookEventTypes,
            ),
        )  # fmt: skip

    async def create(self, call: Call) -> Response:
        body: CreateEndpoint = call.body
        endpoint, secret = await self._webhooks.create(
            call.caller.project, name=body.name, url=body.url, event_types=body.event_types
        )
        return json_reply(_with_secret(endpoint, secret))

    async def list(self, call: Call) -> Response:
        query: ListEndpoints = call.query
        records, has_more = await self._webhooks.list(call.caller.project, after=query.after, limit=query.limit)
        endpoints = [_endpoint(each) for each in records]
        first, last = (endpoints[0].id, endpoints[-1].id) if endpoints else (None, None)
        return json_reply(WebhookEndpointPage(endpoints, has_more, first, last))

    async def retrieve(self, call: Call) -> Response:
        return json_reply(_endpoint(await self._webhooks.get(*_project_and_id(call))))

    async def update(self, call: Call) -> Response:
        body: UpdateEndpoint = call.body
        changed = await self._webhooks.update(
            *_project_and_id(call), name=body.name, url=body.url, event_types=body.event_types
        )
        return json_reply(_endpoint(changed))

    async def delete(self, call: Call) -> Response:
        project, endpoint_id = _project_and_id(call)
        await self._webhooks.delete(project, endpoint_id)
        return json_reply(DeletedWebhookEndpoint(endpoint_id))

    async def rotate(self, call: Call) -> Response:
        body: RotateSecret = call.body or RotateSecret()
        changed, secret = await self._webhooks.rotate(
            *_project_and_id(call), keep_old=body.keep_old_secret_active_for_24_hours
        )
        return json_reply(_with_secret(changed, secret))

    async def test(self, call: Call) -> Response:
        body: TestEndpoint = call.body
        project, endpoint_id = _project_and_id(call)
        status = await self._webhooks.test(project, endpoint_id, body.event_type)
        return json_reply(WebhookEndpointTest(body.event_type, status, endpoint_id))

    async def types(self, call: Call) -> Response:
        return json_reply(WebhookEventTypes(list(EVENT_TYPES)))


def _project_and_id(call: Call) -> tuple[str, str]:
    return call.caller.project, call.path["webhook_endpoint_id"]


def _endpoint(record: WebhookRecord) -> WebhookEndpoint:
    return WebhookEndpoint(
        record.id, int(record.created), record.events, record.name, record.url, int(record.updated),
        record.hint,
    )  # fmt: skip


def _with_secret(record: WebhookRecord, secret: Secret) -> WebhookEndpointWithSecret:
    return WebhookEndpointWithSecret(
        record.id, int(record.created), record.events, record.name, record.url, int(record.updated),
        record.hint, signing_secret=secret.reveal(),
    )  # fmt: skip
