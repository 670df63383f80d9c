"""Answers that are left at the server and fetched by a link, for an hour: the link itself is all that it takes.

Source: Modelbit's page on large REST responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct
from starlette.responses import Response

from batchmill.server.file_reply import FileReply
from batchmill.server.operations import Call, Content, Operation
from batchmill.services.links import SIGNATURE_CHARS_MAX
from batchmill.services.services import Services
from batchmill.wire.json_bytes import encode
from batchmill.wire.messages import Answer

PATH = "/modelbit/links/{file_id}.json"
PURPOSE = "links"  # of the file that holds an answer
ANSWER = "the answer in"  # what a link is for
KEPT_S = 3600.0
_JSON = Content("application/json", {})


class Signed(Struct, frozen=True, forbid_unknown_fields=True):
    signature: Annotated[str, Meta(max_length=SIGNATURE_CHARS_MAX)] = ""


class _Link(Struct, frozen=True):
    data: str


class Links:
    def __init__(self, services: Services) -> None:
        self._files, self._links = services.files, services.links

    def operations(self) -> Sequence[Operation]:
        return [
            Operation(
                "getLinkedAnswer", "GET", PATH, "Fetch an answer by its link", None, self.fetch,
                query=Signed, reply=_JSON, also={206: _JSON, 416: None}, errors=(403, 404, 410),
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
        signature = self._links.sign(ANSWER, record.id, project, KEPT_S)
        return Answer(0, encode(_Link(f"{base}{PATH.format(file_id=record.id)}?signature={signature}")))

    async def fetch(self, call: Call) -> Response:
        """As often as it is asked for, while the link lasts."""
        query: Signed = call.query
        file_id = call.path["file_id"]
        link = await self._links.open(query.signature, ANSWER, file_id)
        call.belongs_to(link.project)
        file = await self._files.open(await self._files.get(link.project, file_id))
        return FileReply(call.request, file, filename=file.record.filename, media=_JSON.media)
