"""/v1/files: upload, list, retrieve, delete, content. Source: OpenAI's API reference, "Files"."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal, get_args

from msgspec import Meta, Struct
from starlette.responses import Response

from batchmill.server.bodies import SHOWN_CHARS, Refusal
from batchmill.server.file_reply import FileReply
from batchmill.server.multipart import FORM_BYTES, MISSING, read_form
from batchmill.server.operations import Call, Content, Operation, json_reply
from batchmill.services.files import FileRecord, FileService
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
    """The text fields of an upload, each checked as it comes: a wrong one is refused before the file has arrived."""

    def __init__(self) -> None:
        self._fields: dict[str, str] = {}

    def take(self, name: str, value: str) -> None:
        shown = name[:SHOWN_CHARS]
        if name in self._fields:
            raise Refusal(f"the field {shown!r} stands there twice", code="repeated_parameter", param=shown)
        if name not in ("purpose", ANCHOR, SECONDS):
            raise Refusal(
                f"Unknown field: {shown!r}; known are file, purpose, {ANCHOR}, {SECONDS}",
                code="unknown_parameter",
                param=shown,
            )
        self._fields[name] = value
        if name == "purpose" and value not in get_args(Purpose):
            raise _invalid(name, value, f"one of {', '.join(get_args(Purpose))}")
        if name == ANCHOR and value != "created_at":
            raise _invalid(name, value, "created_at, the only anchor there is")
        if name == SECONDS and not (
            value.isascii() and value.isdigit() and EXPIRES_MIN_S <= int(value[:12]) <= EXPIRES_MAX_S
        ):
            raise _invalid(name, value, f"a whole number from {EXPIRES_MIN_S:,} to {EXPIRES_MAX_S:,}")

    @property
    def purpose(self) -> str:
        if "purpose" not in self._fields:
            raise Refusal("Missing required parameter: 'purpose'", code=MISSING, param="purpose")
        return self._fields["purpose"]

    @property
    def expires_s(self) -> int | None:
        """Seconds from its creation; None: not said."""
        seconds = self._fields.get(SECONDS)
        for one, other in ((ANCHOR, SECONDS), (SECONDS, ANCHOR)):
            if one in self._fields and other not in self._fields:
                raise Refusal(
                    f"Missing required parameter: {other!r}: {one} alone says nothing", code=MISSING, param=other
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
            "listFiles", "GET", "/v1/files", "Files of the project", Scope.READ, partial(page, files),
            query=ListFiles, reply=FilePage, errors=(404,),
        ),
        Operation(
            "retrieveFile", "GET", one, "One file", Scope.READ, partial(retrieve, files), reply=FileObject,
            errors=(404, 410),
        ),
        Operation(
            "deleteFile", "DELETE", one, "Delete a file", Scope.SUBMIT, partial(delete, files), reply=FileDeleted,
            errors=(404, 409, 410),
        ),
        Operation(
            "downloadFile", "GET", f"{one}/content", "The bytes of a file, whole or a range", Scope.READ,
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
            take_field=form.take,
            take_piece=writer.write,
        )
        if part.filename is None:
            raise Refusal("the field 'file' must be a file: its part has no filename", code=MISSING, param="file")
        record = await writer.commit(purpose=form.purpose, filename=part.filename, expires_s=form.expires_s)
    finally:
        await writer.discard()
    return json_reply(file_object(record))


async def page(files: FileService, call: Call) -> Response:
    query: ListFiles = call.query
    found, has_more = await files.list(
        call.caller.project,
        purpose=query.purpose,
        after=query.after,
        limit=query.limit,
        newest_first=query.order == "desc",
    )
    ids = [record.id for record in found] or [None]
    return json_reply(FilePage([file_object(record) for record in found], has_more, ids[0], ids[-1]))


async def retrieve(files: FileService, call: Call) -> Response:
    return json_reply(file_object(await files.get(call.caller.project, call.path["file_id"])))


async def delete(files: FileService, call: Call) -> Response:
    await files.delete(call.caller.project, call.path["file_id"], call.caller.in_words)
    return json_reply(FileDeleted(call.path["file_id"]))


async def download(files: FileService, call: Call) -> Response:
    record = await files.get(call.caller.project, call.path["file_id"])
    return FileReply(call.request, await files.open(record), filename=shown_name(record))


def file_object(record: FileRecord) -> FileObject:
    return FileObject(
        id=record.id,
        bytes=record.bytes,
        created_at=int(record.created),
        filename=shown_name(record),
        purpose=record.purpose,
        expires_at=None if record.expires is None else int(record.expires),
    )


def shown_name(record: FileRecord) -> str:
    """A result is named for its batch: here jobs are called so."""
    if record.job is None:
        return record.filename
    return f"batch_{record.filename.removeprefix('job_')}"


def _invalid(name: str, value: str, wanted: str) -> Refusal:
    return Refusal(
        f"Invalid value for {name!r}: {value[:SHOWN_CHARS]!r} is not {wanted}", code="invalid_value", param=name
    )
