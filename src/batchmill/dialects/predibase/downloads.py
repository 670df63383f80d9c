"""Files that are fetched by a link, which works once, for an hour: the link itself is all that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from batchmill.server.file_reply import FileReply
from batchmill.server.hosts import base_of
from batchmill.server.operations import Call, Content, Operation
from batchmill.services.links import SIGNATURE_CHARS_MAX
from batchmill.services.services import Services

PATH = "/predibase/files/{file_id}"
DOWNLOAD = "the download of"  # what a link is for
LIFETIME_S = 3600.0
OCTETS = Content("application/octet-stream")
GONE = 410


class Signed(Struct, frozen=True, forbid_unknown_fields=True):
    signature: Annotated[str, Meta(max_length=SIGNATURE_CHARS_MAX)] = ""


class Downloads:
    def __init__(self, services: Services) -> None:
        self._files, self._links = services.files, services.links

    def operations(self) -> Sequence[Operation]:
        return [
            Operation(
                "fetchLinkedFile", "GET", PATH, "Fetch a file by its link", None, self.fetch,
                query=Signed, reply=OCTETS, also={206: OCTETS, 416: None}, errors=(403, 404, GONE),
            )
        ]  # fmt: skip

    def url(self, request: Request, project: str, file_id: str) -> str:
        """A new link to a file of a project, at the address that whoever asks has written."""
        signature = self._links.sign(DOWNLOAD, file_id, project, LIFETIME_S)
        return f"{base_of(request)}{PATH.format(file_id=file_id)}?signature={signature}"

    async def fetch(self, call: Call) -> Response:
        """A download that breaks off may be begun again, or gone on with as a range; one that arrived whole may not.

        Of several at the same time one comes to its end.
        """
        query: Signed = call.query
        file_id = call.path["file_id"]
        link = await self._links.open(query.signature, DOWNLOAD, file_id)
        call.belongs_to(link.project)
        file = await self._files.open(await self._files.get(link.project, file_id))
        reply = FileReply(
            call.request,
            file,
            filename=file.record.filename,
            before_the_end=lambda: self._links.begin_use(link),
        )
        if reply.is_to_the_end:
            call.on_delivered(lambda: self._links.use_up(link))
        return reply
