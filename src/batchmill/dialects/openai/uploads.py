"""/v1/uploads: a file in parts. Source: OpenAI's API reference, "Uploads"."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from msgspec import Meta, Struct
from starlette.responses import Response

from batchmill.dialects.openai.files import ExpiresAfter, FileObject, Purpose, file_object
from batchmill.server.bodies import SHOWN_CHARS, Refusal
from batchmill.server.multipart import FORM_BYTES, read_form
from batchmill.server.operations import Call, Content, Operation, json_reply
from batchmill.services.files import FILENAME_CHARS_MAX, FileRecord
from batchmill.services.services import Services
from batchmill.services.upload_records import PART_BYTES_MAX, PARTS_MAX, UploadRecord
from batchmill.services.uploads import MIME_CHARS_MAX, NewUpload, UploadService
from batchmill.types import Scope

FORM = {
    "type": "object",
    "required": ["data"],
    "additionalProperties": False,
    "properties": {"data": {"type": "string", "format": "binary"}},
}


class CreateUpload(Struct, frozen=True, forbid_unknown_fields=True):
    bytes: Annotated[int, Meta(ge=1, le=2**53)]
    filename: Annotated[str, Meta(min_length=1, max_length=FILENAME_CHARS_MAX)]
    mime_type: Annotated[str, Meta(min_length=1, max_length=MIME_CHARS_MAX, description="Kept; it has no effect.")]
    purpose: Purpose
    expires_after: ExpiresAfter | None = None


class CompleteUpload(Struct, frozen=True, forbid_unknown_fields=True):
    part_ids: Annotated[list[str], Meta(min_length=1, max_length=PARTS_MAX)]
    md5: Annotated[str, Meta(pattern="^[0-9a-fA-F]{32}$")] | None = None


class Upload(Struct, frozen=True):
    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["pending", "completed", "cancelled", "expired"]
    file: FileObject | None = None
    object: Literal["upload"] = "upload"


class UploadPart(Struct, frozen=True):
    id: str
    created_at: int
    upload_id: str
    object: Literal["upload.part"] = "upload.part"


def operations(services: Services) -> list[Operation]:
    uploads = services.uploads
    one = "/v1/uploads/{upload_id}"
    return [
        Operation(
            "createUpload", "POST", "/v1/uploads", "Announce a file that comes in parts", Scope.SUBMIT,
            partial(create, uploads), body=CreateUpload, reply=Upload,
        ),
        Operation(
            "addUploadPart", "POST", f"{one}/parts", "Add a part", Scope.SUBMIT, partial(add_part, uploads),
            body=Content("multipart/form-data", FORM), reply=UploadPart, errors=(404, 409, 415, 503),
            body_bytes_max=PART_BYTES_MAX + FORM_BYTES,
        ),
        Operation(
            "completeUpload", "POST", f"{one}/complete", "Join the parts to a file", Scope.SUBMIT,
            partial(complete, uploads), body=CompleteUpload, reply=Upload, errors=(404, 409, 503),
        ),
        Operation(
            "cancelUpload", "POST", f"{one}/cancel", "Drop an upload", Scope.SUBMIT, partial(cancel, uploads),
            reply=Upload, errors=(404, 409),
        ),
    ]  # fmt: skip


async def create(uploads: UploadService, call: Call) -> Response:
    asked: CreateUpload = call.body
    expires = asked.expires_after
    new = NewUpload(
        purpose=asked.purpose,
        filename=asked.filename,
        mime_type=asked.mime_type,
        bytes=asked.bytes,
        file_expires_s=None if expires is None else expires.seconds,
    )
    return json_reply(upload_object(await uploads.create(call.caller.project, new)))


async def add_part(uploads: UploadService, call: Call) -> Response:
    writer = await uploads.part_writer(call.caller.project, call.path["upload_id"])
    try:
        await read_form(
            call.request.stream(),
            call.request.headers.get("content-type", ""),
            file_field="data",
            take_field=_refuse_field,
            take_piece=writer.write,
        )
        part = await writer.commit()
    finally:
        await writer.discard()
    return json_reply(UploadPart(part.id, int(part.created), part.upload))


async def complete(uploads: UploadService, call: Call) -> Response:
    asked: CompleteUpload = call.body
    record, file = await uploads.complete(
        call.caller.project, call.path["upload_id"], part_ids=asked.part_ids, md5=asked.md5
    )
    return json_reply(upload_object(record, file))


async def cancel(uploads: UploadService, call: Call) -> Response:
    return json_reply(upload_object(await uploads.cancel(call.caller.project, call.path["upload_id"])))


def upload_object(record: UploadRecord, file: FileRecord | None = None) -> Upload:
    return Upload(
        id=record.id,
        bytes=record.bytes,
        created_at=int(record.created),
        expires_at=int(record.expires),
        filename=record.filename,
        purpose=record.purpose,
        status=record.status,
        file=None if file is None else file_object(file),
    )


def _refuse_field(name: str, value: str) -> None:
    shown = name[:SHOWN_CHARS]
    raise Refusal(f"Unknown field: {shown!r}; known is data", code="unknown_parameter", param=shown)
