"""Files. The body of an upload is the file itself, which is written to disk as it arrives."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.responses import Response

from batchmill.dialects.native.orders import file_info
from batchmill.server.operations import Call, Operation, json_reply
from batchmill.server.replies import FileReply
from batchmill.services.files.files import BATCH
from batchmill.services.services import Services
from batchmill.wire.native import FilePage, ListFiles, StoreFile
from batchmill.wire.operations import (
    FILE_CONTENT,
    LIST_FILES,
    OCTETS,
    REMOVE_FILE,
    SHOW_FILE,
    STORE_FILE,
)

MISSING, CONFLICT, GONE = 404, 409, 410


class Files:
    def __init__(self, services: Services) -> None:
        self._files = services.files
        self._bytes_max = services.config.server.file_bytes_max

    def operations(self) -> Sequence[Operation]:
        return (
            Operation.of(STORE_FILE, self.upload, body_bytes_max=self._bytes_max),
            Operation.of(LIST_FILES, self.list, errors=(MISSING,)),
            Operation.of(SHOW_FILE, self.show, errors=(MISSING, GONE)),
            Operation.of(REMOVE_FILE, self.delete, errors=(MISSING, CONFLICT, GONE)),
            Operation.of(
                FILE_CONTENT, self.content, also={206: FILE_CONTENT.media[0], 416: None}, errors=(MISSING, GONE)
            ),
        )

    async def upload(self, call: Call) -> Response:
        query: StoreFile = call.query
        writer = await self._files.writer(call.caller.project)
        try:
            async for piece in call.request.stream():
                await writer.write(piece)
            record = await writer.commit(purpose=BATCH, filename=query.filename, expires_s=query.expires_s)
        finally:
            await writer.discard()
        return json_reply(file_info(record), 201)

    async def list(self, call: Call) -> Response:
        query: ListFiles = call.query
        records, has_more = await self._files.list(
            call.caller.project, purpose=query.purpose, after=query.after, limit=query.limit
        )
        after = records[-1].id if has_more else None
        return json_reply(FilePage([file_info(record) for record in records], after))

    async def show(self, call: Call) -> Response:
        return json_reply(file_info(await self._files.get(call.caller.project, call.path["file_id"])))

    async def delete(self, call: Call) -> Response:
        await self._files.delete(call.caller.project, call.path["file_id"], call.caller.in_words)
        return Response(None, 204)

    async def content(self, call: Call) -> Response:
        record = await self._files.get(call.caller.project, call.path["file_id"])
        file = await self._files.open(record)
        return FileReply(call.request, file, filename=record.filename, media=OCTETS)
