"""Datasets, and downloads by link. A link works once, for an hour, and needs no key.

Source: the published client.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from batchmill.errors import InvalidInput
from batchmill.server.auth import base_of
from batchmill.server.operations import Call, Content, Operation, json_reply
from batchmill.server.replies import FileReply
from batchmill.services.files.files import FILENAME_CHARS_MAX
from batchmill.services.links import SIGNATURE_CHARS_MAX
from batchmill.services.named_datasets import CONNECTION, DatasetRecord, DatasetState, extension_of
from batchmill.services.services import Services
from batchmill.types import Problem, Scope

PATH = "/predibase/files/{file_id}"
DOWNLOAD = "the download of"  # the purpose in the link's signature
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
        """Return a new link to a file of a project, with the host name that the request used."""
        signature = self._links.sign(DOWNLOAD, file_id, project, LIFETIME_S)
        return f"{base_of(request)}{PATH.format(file_id=file_id)}?signature={signature}"

    async def fetch(self, call: Call) -> Response:
        """Send a linked file. A broken download may restart or continue as a range; a complete one uses the link up.

        Of several downloads at the same time, only one can complete.
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


UPLOAD = "/v2/datasets/upload"
UPLOAD_BYTES = "/predibase/uploads/{dataset_id}"
ONE = "/v2/datasets/{dataset_id}"
PROBLEMS_SHOWN = 5
MISSING, CONFLICT = 404, 409


class BeginUpload(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    file_name: Annotated[str, Meta(min_length=1, max_length=FILENAME_CHARS_MAX)]
    mime_type: Annotated[str, Meta(max_length=256)] = ""
    region: str | None = None  # refused: a server has no regions


class UploadBegun(Struct, frozen=True, rename="camel"):
    """Where to PUT the file. `requiredHeaders` is left out, because the published client cannot read it."""

    presigned_url: str
    upload_token: str


class NameUpload(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    name: str
    upload_token: Annotated[str, Meta(min_length=1, max_length=256)]


class Arrived(Struct, frozen=True):
    bytes: int


class ByName(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    connection_name: str = CONNECTION


class Connection(Struct, frozen=True):
    name: str
    type: Literal["file"] = "file"


class Dataset(Struct, frozen=True, rename="camel"):
    uuid: str
    name: str
    connection: Connection
    status: Literal["pending", "connected", "failed"]
    last_error: str | None
    file_name: str
    format: str  # openai, csv, parquet
    bytes: int
    rows: int | None  # None: not counted
    created_at: float  # seconds since the epoch


class DownloadLink(Struct, frozen=True, rename="camel"):
    url: str
    file_extension: str


class DatasetHandlers:
    def __init__(self, services: Services, downloads: Downloads) -> None:
        self._datasets, self._downloads = services.datasets, downloads
        self._bytes_max = services.config.server.file_bytes_max

    def operations(self) -> Sequence[Operation]:
        return (
            Operation(
                "beginDatasetUpload", "POST", UPLOAD, "Begin an upload: get a link to PUT the file to", Scope.SUBMIT,
                self.begin, body=BeginUpload, reply=UploadBegun, errors=(CONFLICT,),
            ),
            Operation(
                "putDataset", "PUT", UPLOAD_BYTES, "Send the bytes of an upload to its link", None, self.receive,
                query=Signed, body=Content("*/*"), reply=Arrived, errors=(403, MISSING, CONFLICT, GONE, 503),
                body_bytes_max=self._bytes_max,
            ),
            Operation(
                "nameDatasetUpload", "PUT", UPLOAD, "Name a complete upload; its rows are checked next",
                Scope.SUBMIT, self.name, body=NameUpload, reply=Dataset, errors=(MISSING, CONFLICT),
            ),
            Operation(
                "getDataset", "GET", "/v1/datasets/name/{name}", "Show a dataset by its name", Scope.READ, self.get,
                query=ByName, reply=Dataset, errors=(MISSING,),
            ),
            Operation(
                "linkDataset", "GET", f"{ONE}/download-link", "Get a link to a dataset's file, which works once",
                Scope.READ, self.link, reply=DownloadLink, errors=(MISSING,),
            ),
            Operation(
                "deleteDataset", "DELETE", ONE, "Delete a dataset", Scope.SUBMIT, self.delete, status=204,
                errors=(MISSING, CONFLICT),
            ),
        )  # fmt: skip

    async def begin(self, call: Call) -> Response:
        order: BeginUpload = call.body
        if order.region is not None:
            raise InvalidInput(
                f"the region {order.region[:64]!r} does not exist: this server has no regions; leave `region` out",
                code="unknown_region",
            )
        upload = await self._datasets.begin(call.caller.project, order.file_name, order.mime_type)
        url = f"{base_of(call.request)}{UPLOAD_BYTES.format(dataset_id=upload.id)}"
        return json_reply(UploadBegun(f"{url}?signature={upload.signature}", upload.id))

    async def receive(self, call: Call) -> Response:
        query: Signed = call.query
        file = await self._datasets.receive(
            call.path["dataset_id"], query.signature, call.request.stream(), call.belongs_to
        )
        return json_reply(Arrived(file.bytes))

    async def name(self, call: Call) -> Response:
        order: NameUpload = call.body
        return json_reply(dataset_of(await self._datasets.name(call.caller.project, order.upload_token, order.name)))

    async def get(self, call: Call) -> Response:
        query: ByName = call.query
        return json_reply(
            dataset_of(await self._datasets.get(call.caller.project, query.connection_name, call.path["name"]))
        )  # fmt: skip

    async def link(self, call: Call) -> Response:
        record = await self._datasets.by_id(call.caller.project, call.path["dataset_id"])
        async with self._datasets.hold(record) as file:
            url = self._downloads.url(call.request, call.caller.project, file.id)
        return json_reply(DownloadLink(url, extension_of(record.details.filename)))

    async def delete(self, call: Call) -> Response:
        await self._datasets.remove(call.caller.project, call.path["dataset_id"])
        return Response(None, 204)


def dataset_of(record: DatasetRecord) -> Dataset:
    details = record.details
    return Dataset(
        uuid=record.id,
        name=record.name or "",
        connection=Connection(record.connection),
        status=_status(record.state),
        last_error=why_failed(record),
        file_name=details.filename,
        format=details.format,
        bytes=details.bytes,
        rows=details.rows,
        created_at=record.created,
    )


def _status(state: str) -> Literal["pending", "connected", "failed"]:
    match DatasetState(state):
        case DatasetState.CONNECTED:
            return "connected"
        case DatasetState.FAILED:
            return "failed"
        case _:
            return "pending"


def why_failed(record: DatasetRecord) -> str | None:
    """Return why a dataset failed, with the first bad lines. The client shows this text."""
    if record.state != DatasetState.FAILED:
        return None
    return summary_of(record.details.problems, record.details.problems_total) or record.details.message


def summary_of(problems: Sequence[Problem], total: int) -> str:
    """Summarize the first bad lines, one phrase each; empty if there are none."""
    lines = [f"line {each.line}: {each.message}" for each in problems[:PROBLEMS_SHOWN]]
    more = total - len(lines)
    return "; ".join([*lines, f"and {more:,} more"] if more > 0 and lines else lines)
