"""Files: an upload is the body of one request, as it is, written to disk as it comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct
from starlette.responses import Response

from batchmill.dialects.native.following import FILE, OCTETS
from batchmill.dialects.native.views import file_info
from batchmill.server.file_reply import FileReply
from batchmill.server.operations import Call, Content, Operation, json_reply
from batchmill.services.files import BATCH, FILENAME_CHARS_MAX
from batchmill.services.services import Services
from batchmill.types import Scope
from batchmill.wire.native import PAGE_DEFAULT, PAGE_MAX, PREFIX, FileInfo, FilePage

FILES = f"{PREFIX}/files"
ONE = f"{FILES}/{{file_id}}"
EXPIRES_S_MAX = 10 * 365 * 86_400
MISSING, CONFLICT, GONE = 404, 409, 410


class Upload(Struct, frozen=True, forbid_unknown_fields=True):
    filename: Annotated[str, Meta(min_length=1, max_length=FILENAME_CHARS_MAX)]  # its end says what the file holds
    expires_s: Annotated[float, Meta(gt=0, le=EXPIRES_S_MAX)] | None = None  # from now


class ListFiles(Struct, frozen=True, forbid_unknown_fields=True):
    purpose: Annotated[str, Meta(max_length=64)] | None = None
    limit: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = PAGE_DEFAULT
    after: str | None = None


class Files:
    def __init__(self, services: Services) -> None:
        self._files = services.files
        self._bytes_max = services.config.server.file_bytes_max

    def operations(self) -> Sequence[Operation]:
        return (
            Operation(
                "storeFile", "POST", FILES, "Upload a file: the body is the file", Scope.SUBMIT, self.upload,
                query=Upload, body=Content(OCTETS, FILE), reply=FileInfo, status=201,
                body_bytes_max=self._bytes_max,
            ),
            Operation(
                "listStoredFiles", "GET", FILES, "Files, the newest first", Scope.READ, self.list,
                query=ListFiles, reply=FilePage, errors=(MISSING,),
            ),
            Operation(
                "showFile", "GET", ONE, "One file", Scope.READ, self.show, reply=FileInfo, errors=(MISSING, GONE),
            ),
            Operation(
                "removeFile", "DELETE", ONE, "Delete a file", Scope.SUBMIT, self.delete,
                reply=None, status=204, errors=(MISSING, CONFLICT, GONE),
            ),
            Operation(
                "fileContent", "GET", f"{ONE}/content", "The bytes of a file, whole or a range", Scope.READ,
                self.content, reply=Content(OCTETS, FILE), also={206: Content(OCTETS, FILE), 416: None},
                errors=(MISSING, GONE),
            ),
        )  # fmt: skip

    async def upload(self, call: Call) -> Response:
        asked: Upload = call.query
        writer = await self._files.writer(call.caller.project)
        try:
            async for piece in call.request.stream():
                await writer.write(piece)
            record = await writer.commit(purpose=BATCH, filename=asked.filename, expires_s=asked.expires_s)
        finally:
            await writer.discard()
        return json_reply(file_info(record), 201)

    async def list(self, call: Call) -> Response:
        query: ListFiles = call.query
        found, has_more = await self._files.list(
            call.caller.project, purpose=query.purpose, after=query.after, limit=query.limit
        )
        after = found[-1].id if has_more else None
        return json_reply(FilePage([file_info(record) for record in found], after))

    async def show(self, call: Call) -> Response:
        return json_reply(file_info(await self._files.get(call.caller.project, call.path["file_id"])))

    async def delete(self, call: Call) -> Response:
        await self._files.delete(call.caller.project, call.path["file_id"], call.caller.in_words)
        return Response(None, 204)

    async def content(self, call: Call) -> Response:
        record = await self._files.get(call.caller.project, call.path["file_id"])
        file = await self._files.open(record)
        return FileReply(call.request, file, filename=record.filename, media=OCTETS)
