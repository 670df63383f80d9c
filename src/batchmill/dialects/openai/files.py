"""/v1/files and /v1/uploads: whole files, and uploads in parts. Source: OpenAI's API reference, "Files", "Uploads"."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal, get_args

from msgspec import Meta, Struct
from starlette.responses import Response

from batchmill.server.bodies import SHOWN_CHARS, InvalidField
from batchmill.server.multipart import FORM_BYTES, MISSING, read_form
from batchmill.server.operations import Call, Content, Operation, json_reply
from batchmill.server.replies import FileReply
from batchmill.services.files.files import FILENAME_CHARS_MAX, FileService
from batchmill.services.files.records import FileRecord
from batchmill.services.files.uploads import (
    MIME_CHARS_MAX,
    PART_BYTES_MAX,
    PARTS_MAX,
    NewUpload,
    UploadRecord,
    UploadService,
)
from batchmill.services.services import Services
from batchmill.types import Scope

Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
AnyPurpose = Literal[
    "assistants", "batch", "fine-tune", "vision", "user_data", "evals", "assistants_output", "batch_output",
    "fine-tune-results",
]  # fmt: skip
PAGE_MAX = 10_000
EXPIRES_MIN_S, EXPIRES_MAX_S = 3600, 2_592_000
ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"
FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "additionalProperties": False,
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": list(get_args(Purpose))},
        ANCHOR: {"type": "string", "enum": ["created_at"]},
        SECONDS: {"type": "integer", "minimum": EXPIRES_MIN_S, "maximum": EXPIRES_MAX_S},
    },
}


class ExpiresAfter(Struct, frozen=True, forbid_unknown_fields=True):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=EXPIRES_MIN_S, le=EXPIRES_MAX_S)]


class FileObject(Struct, frozen=True):
    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None
    object: Literal["file"] = "file"
    status: Literal["uploaded", "processed", "error"] = "processed"
    status_details: str | None = None


class FileDeleted(Struct, frozen=True):
    id: str
    deleted: bool = True
    object: Literal["file"] = "file"


class FilePage(Struct, frozen=True):
    data: list[FileObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class ListFiles(Struct, frozen=True, forbid_unknown_fields=True):
    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = PAGE_MAX
    order: Literal["asc", "desc"] = "desc"
    purpose: AnyPurpose | None = None


class FileForm:
    """The text fields of an upload. Each is checked at once, so a wrong field is refused before the file arrives."""

    def __init__(self) -> None:
        self._fields: dict[str, str] = {}

    def add(self, name: str, value: str) -> None:
        short_name = name[:SHOWN_CHARS]
        if name in self._fields:
            message = f"the field {short_name!r} occurs twice: send it once"
            raise InvalidField(message, code="repeated_parameter", param=short_name)
        if name not in ("purpose", ANCHOR, SECONDS):
            raise InvalidField(
                f"Unknown field: {short_name!r}; use file, purpose, {ANCHOR}, {SECONDS}",
                code="unknown_parameter",
                param=short_name,
            )
        self._fields[name] = value
        if name == "purpose" and value not in get_args(Purpose):
            raise _invalid(name, value, f"one of {', '.join(get_args(Purpose))}")
        if name == ANCHOR and value != "created_at":
            raise _invalid(name, value, "created_at, the only supported anchor")
        if name == SECONDS and not (
            value.isascii() and value.isdigit() and EXPIRES_MIN_S <= int(value[:12]) <= EXPIRES_MAX_S
        ):
            raise _invalid(name, value, f"a whole number from {EXPIRES_MIN_S:,} to {EXPIRES_MAX_S:,}")

    @property
    def purpose(self) -> str:
        if "purpose" not in self._fields:
            raise InvalidField("Missing required parameter: 'purpose'", code=MISSING, param="purpose")
        return self._fields["purpose"]

    @property
    def expires_s(self) -> int | None:
        """Seconds from the file's creation to its expiry; None: not set."""
        seconds = self._fields.get(SECONDS)
        for present, missing in ((ANCHOR, SECONDS), (SECONDS, ANCHOR)):
            if present in self._fields and missing not in self._fields:
                raise InvalidField(
                    f"Missing required parameter: {missing!r}: {present} needs it", code=MISSING, param=missing
                )
        return None if seconds is None else int(seconds)


def operations(services: Services) -> list[Operation]:
    files = services.files
    one = "/v1/files/{file_id}"
    return [
        Operation(
            "createFile", "POST", "/v1/files", "Upload a file", Scope.SUBMIT, partial(create, files),
            body=Content("multipart/form-data", FORM), reply=FileObject, errors=(415, 503),
            body_bytes_max=services.config.server.file_bytes_max + FORM_BYTES,
        ),
        Operation(
            "listFiles", "GET", "/v1/files", "List files of the project", Scope.READ, partial(page, files),
            query=ListFiles, reply=FilePage, errors=(404,),
        ),
        Operation(
            "retrieveFile", "GET", one, "Show a file", Scope.READ, partial(retrieve, files), reply=FileObject,
            errors=(404, 410),
        ),
        Operation(
            "deleteFile", "DELETE", one, "Delete a file", Scope.SUBMIT, partial(delete, files), reply=FileDeleted,
            errors=(404, 409, 410),
        ),
        Operation(
            "downloadFile", "GET", f"{one}/content", "Download a file, whole or a range", Scope.READ,
            partial(download, files), reply=Content("application/octet-stream"),
            also={206: Content("application/octet-stream"), 416: None}, errors=(404, 410),
        ),
    ]  # fmt: skip


async def create(files: FileService, call: Call) -> Response:
    form = FileForm()
    writer = await files.writer(call.caller.project)
    try:
        part = await read_form(
            call.request.stream(),
            call.request.headers.get("content-type", ""),
            file_field="file",
            take_field=form.add,
            take_piece=writer.write,
        )
        if part.filename is None:
            raise InvalidField("the field 'file' must be a file: its part has no filename", code=MISSING, param="file")
        record = await writer.commit(purpose=form.purpose, filename=part.filename, expires_s=form.expires_s)
    finally:
        await writer.discard()
    return json_reply(file_object(record))


async def page(files: FileService, call: Call) -> Response:
    query: ListFiles = call.query
    records, has_more = await files.list(
        call.caller.project,
        purpose=query.purpose,
        after=query.after,
        limit=query.limit,
        newest_first=query.order == "desc",
    )
    ids = [record.id for record in records] or [None]
    return json_reply(FilePage([file_object(record) for record in records], has_more, ids[0], ids[-1]))


async def retrieve(files: FileService, call: Call) -> Response:
    return json_reply(file_object(await files.get(call.caller.project, call.path["file_id"])))


async def delete(files: FileService, call: Call) -> Response:
    await files.delete(call.caller.project, call.path["file_id"], call.caller.in_words)
    return json_reply(FileDeleted(call.path["file_id"]))


async def download(files: FileService, call: Call) -> Response:
    record = await files.get(call.caller.project, call.path["file_id"])
    return FileReply(call.request, await files.open(record), filename=display_name(record))


def file_object(record: FileRecord) -> FileObject:
    return FileObject(
        id=record.id,
        bytes=record.bytes,
        created_at=int(record.created),
        filename=display_name(record),
        purpose=record.purpose,
        expires_at=None if record.expires is None else int(record.expires),
    )


def display_name(record: FileRecord) -> str:
    """Return the name of a file. A result is named after its batch, because this API calls a job a batch."""
    if record.job is None:
        return record.filename
    return f"batch_{record.filename.removeprefix('job_')}"


def _invalid(name: str, value: str, expected: str) -> InvalidField:
    return InvalidField(
        f"Invalid value for {name!r}: {value[:SHOWN_CHARS]!r} is not {expected}", code="invalid_value", param=name
    )


PART_FORM = {
    "type": "object",
    "required": ["data"],
    "additionalProperties": False,
    "properties": {"data": {"type": "string", "format": "binary"}},
}


class CreateUpload(Struct, frozen=True, forbid_unknown_fields=True):
    bytes: Annotated[int, Meta(ge=1, le=2**53)]
    filename: Annotated[str, Meta(min_length=1, max_length=FILENAME_CHARS_MAX)]
    mime_type: Annotated[str, Meta(min_length=1, max_length=MIME_CHARS_MAX, description="Stored; it has no effect.")]
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


def upload_operations(services: Services) -> list[Operation]:
    uploads = services.uploads
    one = "/v1/uploads/{upload_id}"
    return [
        Operation(
            "createUpload", "POST", "/v1/uploads", "Begin an upload in parts", Scope.SUBMIT,
            partial(create_upload, uploads), body=CreateUpload, reply=Upload,
        ),
        Operation(
            "addUploadPart", "POST", f"{one}/parts", "Add a part", Scope.SUBMIT, partial(add_part, uploads),
            body=Content("multipart/form-data", PART_FORM), reply=UploadPart, errors=(404, 409, 415, 503),
            body_bytes_max=PART_BYTES_MAX + FORM_BYTES,
        ),
        Operation(
            "completeUpload", "POST", f"{one}/complete", "Join the parts into a file", Scope.SUBMIT,
            partial(complete, uploads), body=CompleteUpload, reply=Upload, errors=(404, 409, 503),
        ),
        Operation(
            "cancelUpload", "POST", f"{one}/cancel", "Cancel an upload", Scope.SUBMIT, partial(cancel, uploads),
            reply=Upload, errors=(404, 409),
        ),
    ]  # fmt: skip


async def create_upload(uploads: UploadService, call: Call) -> Response:
    body: CreateUpload = call.body
    expires = body.expires_after
    new = NewUpload(
        purpose=body.purpose,
        filename=body.filename,
        mime_type=body.mime_type,
        bytes=body.bytes,
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
    body: CompleteUpload = call.body
    record, file = await uploads.complete(
        call.caller.project, call.path["upload_id"], part_ids=body.part_ids, md5=body.md5
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
    short_name = name[:SHOWN_CHARS]
    raise InvalidField(f"Unknown field: {short_name!r}; use data", code="unknown_parameter", param=short_name)
