"""Calls of deployments. Bodies are read where the function runs; here they are handed on, and answers handed back.

Source: Modelbit's REST API; what its published client sends and reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from batchmill.dialects.modelbit.errors import envelope
from batchmill.dialects.modelbit.express import FastRows
from batchmill.dialects.modelbit.later import Later
from batchmill.dialects.modelbit.links import Links
from batchmill.dialects.modelbit.requests import Wanted, is_batch, read_wanted
from batchmill.dialects.modelbit.metadata import PATHS, branch_of, is_certain, is_ours
from batchmill.errors import BatchmillError, ModelFailed, UnknownName
from batchmill.server.bodies import Refusal
from batchmill.server.function_replies import Events, answer, reply_of
from batchmill.server.hosts import base_of
from batchmill.server.operations import Call, Content, Elsewhere, Operation, json_reply
from batchmill.services.places import Places
from batchmill.services.services import Services
from batchmill.types import Scope
from batchmill.wire.call_forms import ROWS
from batchmill.wire.json_bytes import encode, shallow

if TYPE_CHECKING:
    from batchmill.services.functions.calls import Target

BODY: dict[str, Any] = {
    "type": "object",
    "required": ["data"],
    "properties": {
        "data": {"description": "[[id, argument, …], …], or the argument of one call"},
        "timeout_seconds": {"type": ["integer", "null"], "minimum": 1},
        "response_format": {"enum": ["links", None]},
        "response_webhook": {"type": ["string", "null"]},
        "response_webhook_ignore_timeout": {"type": ["boolean", "null"]},
        "row_errors": {"type": "boolean"},
    },
    "additionalProperties": True,
}
_BODY = Content("application/json", BODY)
_REPLY = Content("application/json", {"type": "object"})


class _Named(msgspec.Struct):
    """What a body of another API says."""

    model: str


_named = msgspec.json.Decoder(_Named).decode


class Calls:
    def __init__(self, services: Services) -> None:
        self._functions, self._versions, self._directory = services.functions, services.versions, services.directory
        self._links, self._later = Links(services), Later(services)
        self._hide = Places(services.config.data_dir).hide

    def operations(self) -> Sequence[Operation]:
        fast_handler = FastRows(self._functions)
        return [
            Operation(
                f"callDeployment{suffix}", "POST", path, "Call a function once, or for many rows", Scope.SUBMIT,
                self.call, body=_BODY, reply=_REPLY, errors=(404, 409, 422), is_raw=True, claims=is_ours,
                body_bytes_max=None, fast_handler=fast_handler,
            )
            for suffix, path in PATHS.items()
        ]  # fmt: skip

    async def call(self, call: Call) -> Response:
        """The answer; with `response_webhook` it is sent there, and the reply says under which id.

        Of a function that sends events a single call hears them as they come; a batch has a list of them for each row.
        """
        encoding = call.request.headers.get("content-encoding", "identity")
        if encoding.strip().lower() != "identity":
            raise Refusal("a compressed body is not taken: leave Content-Encoding out", code="unsupported_media_type")
        target = await self._target(call)
        raw = await call.request.body()
        wanted = read_wanted(raw)
        links = base_of(call.request) if wanted.as_link else None
        if wanted.webhook is not None:
            batch_id = await self._later.promise(call.caller, target, wanted, links)
            return json_reply({"batchId": batch_id} | ({"data": []} if is_batch(raw) else {}))
        if target.interface.streams and links is None and not is_batch(raw):
            _, pieces = await self._functions.stream(call.caller, target, ROWS, wanted.body)
            return Events(pieces, self._say)
        answered = await self._answer(call, target, wanted)
        if links is not None and answered.status_code == 200:
            return reply_of(await self._links.save(call.caller.project, links, bytes(answered.body)))
        return answered

    async def _target(self, call: Call) -> Target:
        """Raises: Elsewhere for a path that some model of the configuration serves, and that body names it: nothing
        else is read for a function that is not there."""
        name, url = call.path["deployment"], call.request.scope["path"]
        try:
            return self._functions.find(call.caller, name, branch_of(call.path), call.path["version"])
        except UnknownName:
            is_there = self._versions.get(name) and not self._versions.is_hidden(name, call.caller.project)
            if is_certain(url) or is_there or not self._directory.list(call.caller):
                raise
        raw = await call.request.body()
        if self._is_named(call, raw):
            raise Elsewhere(raw)
        return self._functions.find(call.caller, name, branch_of(call.path), call.path["version"])

    def _is_named(self, call: Call, raw: bytes) -> bool:
        try:
            self._directory.find(call.caller, _named(shallow(raw)).model)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, UnknownName):
            return False
        return True

    async def _answer(self, call: Call, target: Target, wanted: Wanted) -> Response:
        """Within the time that the client has, even where the function has to be loaded first."""
        try:
            async with asyncio.timeout(wanted.patience_s):
                return await answer(call, self._functions, target, ROWS, (wanted.body, b""))
        except TimeoutError:
            raise ModelFailed(
                f"no answer within timeout_seconds and a little more: {target.name} was still being loaded, or "
                "behind other calls",
                code="timeout",
            ) from None

    def _say(self, error: BatchmillError) -> bytes:
        return encode(envelope(error, self._hide(error.message)))
