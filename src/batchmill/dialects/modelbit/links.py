"""Answers that are left at the server and fetched by a link, for an hour: the link itself is all that it takes.

Source: Modelbit's page on large REST responses.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from batchmill.errors import InvalidConfig, UnknownName
from batchmill.server.file_reply import FileReply
from batchmill.server.operations import Call, Content, Operation
from batchmill.services.services import Services
from batchmill.wire.json_bytes import encode
from batchmill.wire.messages import Answer

PATH = "/modelbit/links/{file_id}.json"
PURPOSE = "links"  # of the file that holds an answer
KEPT_S = 3600.0
SIGNATURE_CHARS_MAX = 512
UNREADABLE = "secret_unreadable"  # SecretBox: it was sealed for another file, or by another server
_JSON = Content("application/json", {})


class Signed(Struct, frozen=True, forbid_unknown_fields=True):
    signature: Annotated[str, Meta(max_length=SIGNATURE_CHARS_MAX)] = ""


class _Link(Struct, frozen=True):
    data: str


class Links:
    def __init__(self, services: Services) -> None:
        self._files, self._box = services.files, services.vault.box

    def operations(self) -> Sequence[Operation]:
        return [
            Operation(
                "getLinkedAnswer", "GET", PATH, "Fetch an answer by its link", None, self.fetch,
                query=Signed, reply=_JSON, also={206: _JSON, 416: None}, errors=(404,),
            )
        ]  # fmt: skip

    async def save(self, project: str, base: str, body: bytes) -> Answer:
        """Keep an answer, and answer with the link to it."""
        writer = await self._files.writer(project)
        try:
            await writer.write(body)
            record = await writer.commit(purpose=PURPOSE, filename="answer.json", expires_s=KEPT_S)
        finally:
            await writer.discard()
        sealed = self._box.seal(project.encode(), _owner(record.id))
        signature = base64.urlsafe_b64encode(sealed).decode().rstrip("=")
        return Answer(0, encode(_Link(f"{base}{PATH.format(file_id=record.id)}?signature={signature}")))

    async def fetch(self, call: Call) -> Response:
        """Raises: UnknownName for a link that was never given, or has expired."""
        query: Signed = call.query
        file_id = call.path["file_id"]
        try:
            padded = query.signature + "=" * (-len(query.signature) % 4)
            project = self._box.open(base64.b64decode(padded, b"-_", validate=True), _owner(file_id)).decode()
        except (binascii.Error, ValueError, InvalidConfig) as error:
            if isinstance(error, InvalidConfig) and error.code != UNREADABLE:
                raise  # the server's key file itself
            raise UnknownName("there is no such link, or it has expired", code="unknown_file") from None
        file = await self._files.open(await self._files.get(project, file_id))
        return FileReply(call.request, file, filename=file.record.filename, media=_JSON.media)


def base_of(request: Request) -> str:
    """The server's address as whoever asks has written it."""
    return f"{request.url.scheme}://{request.headers['host']}"


def _owner(file_id: str) -> str:
    return f"the link to {file_id}"
