"""OpenAI's Files and Batches, and every server that implements them.

Source: OpenAI's API reference, "Files" and "Batches"; the types of the openai package.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from batchmill.engines.connections import Connections, FileRange
from batchmill.engines.provider_batch import settings
from batchmill.engines.provider_batch.provider import (
    JobGone,
    JobRefused,
    Out,
    ProviderClient,
    ProviderRefusal,
    ProviderReply,
    ProviderRow,
    RowReply,
    SignedCall,
    TryAgain,
    Upload,
    remote_name,
    row_id,
    row_number,
)
from batchmill.engines.provider_batch.settings import Access
from batchmill.engines.retry import Reply, is_result, read_reply, redact
from batchmill.errors import InvalidRow, SubmitUnknown
from batchmill.models.paths import paths_of
from batchmill.types import ModelSpec, RemoteJob, Request, RowError
from batchmill.wire.error_statuses import error_in
from batchmill.wire.json_bytes import encode, shallow
from batchmill.wire.rows.forms import EMBEDDINGS, with_model

UNDONE = frozenset({"batch_expired", "batch_cancelled", "batch_canceled"})


class _Response(Struct, gc=False):
    status_code: int = 0
    request_id: str | None = None
    body: Raw = Raw(b"null")


class _Error(Struct, gc=False):
    code: str | None = None
    message: str | None = None


class _Line(Struct, gc=False):
    custom_id: str
    response: _Response | None = None
    error: _Error | None = None


_line = msgspec.json.Decoder(_Line)
_named = re.compile(rb'"custom_id"\s*:\s*"(r\d{1,11})"')


def read_line(line: bytes) -> tuple[int, RowReply]:
    """The row's number and its reply; the number is -1 if the line has none of our numbers."""
    try:
        answer = _line.decode(shallow(line))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        match = _named.search(line[:4096])
        number = row_number(match[1].decode()) if match else -1
        return number, _garbled(f"the provider's line for this row is not readable: {error}")
    number = row_number(answer.custom_id)
    response, error = answer.response, answer.error
    if response is not None and response.status_code:
        return number, _answered(response)
    if error is None:
        return number, _garbled("the provider's line for this row has neither a response nor an error")
    code = error.code or "provider_error"
    if code in UNDONE:
        return number, RowReply(0, None, RowError(code, error.message or code), is_undone=True)
    return number, RowReply(0, None, RowError(code[:100], redact(error.message or "the provider gives no reason")))


def _answered(response: _Response) -> RowReply:
    status = response.status_code
    reply = read_reply(status, bytes(response.body))
    if is_result(reply):
        return RowReply(status, reply.body, None, reply.usage, response.request_id)
    if status >= 400:
        is_undone = status == 429 or status >= 500  # a retry may succeed, and nothing was charged
        error = reply.row_error()
        return RowReply(status, reply.body, error, reply.usage, response.request_id, is_undone=is_undone)
    return _unusable(reply, response.request_id)


def _unusable(reply: Reply, request_id: str | None) -> RowReply:
    """The error of a reply with a success status that is not a result."""
    if reply.error is not None and reply.body is not None:
        return RowReply(500, reply.body, reply.row_error(), reply.usage, request_id)
    error = RowError("bad_response", f"the provider's reply is not one JSON object: it begins {reply.text[:100]!r}")
    return RowReply(0, None, error, None, request_id)


def _garbled(message: str) -> RowReply:
    return RowReply(0, None, RowError("bad_response", message), is_garbled=True)


EMBEDDING_INPUTS_MAX = 50_000  # of one batch
PAGE, PAGES_MAX = 100, 100  # batches to search for a tag
FILES_PAGE = 10_000
SKEW_S = 3600.0  # how much our clock and the provider's may differ
QUEUE_DELAY_S = 600.0  # before a job that exceeded the provider's token queue is submitted again
OUTPUT_EXPIRES_MIN_S = 3600
QUEUE_FULL = frozenset({"token_limit_exceeded", "queue_limit_exceeded", "batch_limit_exceeded"})
JSON = {"Content-Type": "application/json"}
RESULT_FILES = ("output_file_id", "error_file_id")  # of a batch
EMPTY_MODEL = b'{"model":""'
FRAMES_MAX = 1024  # URLs and models whose templates are cached
TAG = "batchmill"  # the key of our entry in a batch's metadata

_STATES = {"cancelling": "cancelling"} | dict.fromkeys(("completed", "failed", "expired", "cancelled"), "ended")
_RANKS = {"ended": 2, "submitted": 1, "cancelling": 0}


class _Head(Struct, gc=False):
    model: str | None = None
    stream: bool | None = None
    input: Raw = Raw(b"null")


class _Frame(Struct, frozen=True):
    """The template of a line, for number and body, and the group of its rows."""

    line: bytes
    group: str


_head = msgspec.json.Decoder(_Head)
_inputs = msgspec.json.Decoder(list[Raw])


class OpenAIBatches:
    """OpenAI's batches. A batch has rows of one URL and model; `find` uses its metadata and its file's name."""

    arguments = frozenset({"completion_window", "inputs_max", "output_expires_after_s", "queue_rest_s"})

    def __init__(self, model: ModelSpec, connections: Connections) -> None:
        inputs_max = settings.count(model, "inputs_max", EMBEDDING_INPUTS_MAX, least=1)
        self.limits = settings.read_limits(model, inputs_max=inputs_max)
        self._model = model
        self._paths = paths_of(model) or frozenset()
        self._frames: dict[tuple[str, str], _Frame] = {}
        self._window = settings.text(model, "completion_window", "24h")
        self._output_expires_s = settings.count(model, "output_expires_after_s", 0, least=OUTPUT_EXPIRES_MIN_S)
        self._queue_rest_s = settings.argument(model, "queue_rest_s", QUEUE_DELAY_S, least=0)
        self._access = self._open(model)
        self._base = self._access.base_url
        self._calls = ProviderClient(connections, self._sign, renew=self._access.renew)

    @staticmethod
    def _open(model: ModelSpec) -> Access:
        return Access(model)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def encode(self, number: int, request: Request) -> ProviderRow:
        url, body = request.url, request.body
        head = _head.decode(body)
        if head.stream:
            raise InvalidRow("a row's answer cannot be streamed: leave `stream` out", code="unsupported_parameter")
        model = remote_name(self._model, head.model)
        if model != head.model or body.count(b'"model"') != 1 or b"\\u00" in body:  # the name may occur twice
            body = _addressed(body, model)
        frame = self._frames.get((url, model)) or self._make_frame(url, model)
        inputs = _count_inputs(head.input) if url == EMBEDDINGS else 0
        return ProviderRow(frame.line % (number, body), frame.group, inputs)

    def _make_frame(self, url: str, model: str) -> _Frame:
        """The template for rows of one URL and model. Raises: InvalidRow."""
        if url not in self._paths:
            raise InvalidRow(f"`url` is {url[:100]!r}, which this model's batches do not take", code="invalid_url")
        target = encode(self._endpoint(url)).replace(b"%", b"%%")
        name = row_id(0)[:-1].encode()
        frame = _Frame(
            b'{"custom_id":"' + name + b'%d","method":"POST","url":' + target + b',"body":%b}', f"{url} {model}"
        )
        if len(self._frames) < FRAMES_MAX:
            self._frames[url, model] = frame
        return frame

    def _endpoint(self, url: str) -> str:
        """A row's URL in the upload's lines and in the batch."""
        return url

    # -- jobs ---------------------------------------------------------------------------------------------------------

    async def find(self, job: RemoteJob) -> RemoteJob | None:
        batches = await self._find_batches(job)
        if batches:
            batches.sort(key=lambda each: _RANKS[each.state])
            for further in batches[:-1]:
                if further.state == "submitted":
                    await self.cancel(further)
            return batches[-1]
        file = await self._find_file(job)
        return None if file is None else replace(job, input=file)

    async def upload(self, job: RemoteJob, upload: Upload) -> RemoteJob:
        boundary = f"{job.tag}-end-of-part"
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{boundary}\r\n'
            f'Content-Disposition: form-data; name="file"; filename="{_file_name(job)}"\r\n'
            "Content-Type: application/jsonl\r\n\r\n"
        ).encode()
        parts = [head, FileRange(upload.path, upload.size_bytes), f"\r\n--{boundary}--\r\n".encode()]
        headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        answer = await self._ask(self._calls.send(Out("POST", self._url("/files"), headers=headers, parts=parts)))
        return replace(job, input=_text(answer.json(), "id"))

    async def create(self, job: RemoteJob, upload: Upload) -> RemoteJob:
        order: dict[str, Any] = {
            "input_file_id": job.input,
            "endpoint": self._endpoint(upload.group.partition(" ")[0]),
            "completion_window": self._window,
            "metadata": {TAG: job.tag},
        }
        if self._output_expires_s:
            order["output_expires_after"] = {"anchor": "created_at", "seconds": self._output_expires_s}
        headers = JSON | {"Idempotency-Key": job.tag}
        answer = await self._ask(self._calls.call("POST", self._url("/batches"), encode(order), headers=headers))
        reply = answer.json()
        return _seen(replace(job, id=_text(reply, "id")), reply)

    async def refresh(self, job: RemoteJob) -> RemoteJob:
        return _seen(job, await self._batch(job))

    async def cancel(self, job: RemoteJob) -> RemoteJob:
        url = self._url(f"/batches/{quote(job.id, safe='')}/cancel")
        try:
            answer = await self._calls.call("POST", url, b"", headers=JSON)
        except ProviderRefusal:  # a batch that has ended cannot be cancelled; poll its state
            return await self.refresh(job)
        except TryAgain:  # so does status 409, which elsewhere means that a retry may succeed
            seen = await self.refresh(job)
            if seen.state == "ended":
                return seen
            raise
        return _seen(job, answer.json())

    async def results(self, job: RemoteJob) -> AsyncIterator[list[tuple[int, RowReply]]]:
        batch = await self._batch(job)
        for name in RESULT_FILES:
            file = batch.get(name)
            if isinstance(file, str) and file:
                async for lines in self._lines(file):
                    yield [read_line(line) for line in lines]
        errors = _errors_of(batch)
        if named := _rows_named(job, errors):
            yield named
        status = batch.get("status")
        if status != "completed":
            codes = {str(each.get("code")) for each in errors}
            rest = self._queue_rest_s if codes & QUEUE_FULL else None
            raise JobRefused(f"the batch {job.id} has {status}{_errors_text(errors)}", retry_after_s=rest)

    async def clean_up(self, job: RemoteJob) -> None:
        if job.input:
            await self._delete(job.input)

    async def clean_results(self, job: RemoteJob) -> None:
        batch = await self._batch(job)
        for name in RESULT_FILES:
            file = batch.get(name)
            if isinstance(file, str) and file:
                await self._delete(file)

    async def _delete(self, file: str) -> None:
        try:
            await self._calls.call("DELETE", self._url(f"/files/{quote(file, safe='')}"))
        except ProviderRefusal as refusal:
            if refusal.status != 404:  # it is already deleted
                raise

    # -- calls --------------------------------------------------------------------------------------------------------

    def _url(self, path: str, **query: str | int) -> str:
        parameters = {**self._access.query, **query}
        return self._base + path + (f"?{urlencode(parameters)}" if parameters else "")

    async def _sign(self, out: Out) -> SignedCall:
        headers = {**self._access.headers(), **out.headers}
        return SignedCall(replace(out, headers=headers), self._access.secrets)

    @staticmethod
    async def _ask(call: Awaitable[ProviderReply]) -> ProviderReply:
        """The reply to a call that submits something."""
        try:
            return await call
        except ProviderRefusal as refusal:
            raise JobRefused(refusal.message) from None

    async def _lines(self, file: str) -> AsyncIterator[list[bytes]]:
        try:
            async for lines in self._calls.lines(self._url(f"/files/{quote(file, safe='')}/content")):
                yield lines
        except ProviderRefusal as refusal:
            if refusal.status == 404:
                raise JobGone(f"the provider no longer has the results {file}: {refusal.message}") from None
            raise

    async def _get(self, url: str) -> dict[str, Any]:
        return (await self._calls.call("GET", url)).json()

    async def _batch(self, job: RemoteJob) -> dict[str, Any]:
        try:
            return await self._get(self._url(f"/batches/{quote(job.id, safe='')}"))
        except ProviderRefusal as refusal:
            if refusal.status == 404:
                raise JobGone(f"the provider has no batch {job.id}: {refusal.message}") from None
            raise

    async def _find_batches(self, job: RemoteJob) -> list[RemoteJob]:
        """The batches with the job's tag that are not older than the job."""
        jobs: list[RemoteJob] = []
        after: dict[str, str] = {}
        for _ in range(PAGES_MAX):
            page = await self._get(self._url("/batches", limit=PAGE, **after))
            batches = [each for each in page.get("data") or [] if isinstance(each, dict)]
            for each in batches:
                metadata = each.get("metadata")
                if isinstance(metadata, dict) and metadata.get(TAG) == job.tag:
                    file = each.get("input_file_id")
                    jobs.append(_seen(replace(job, id=_text(each, "id"), input=str(file or "")), each))
            # Newest first: batches older than the job cannot be the job's.
            is_past = bool(batches) and all(_created(each) < job.created - SKEW_S for each in batches)
            if not batches or is_past or page.get("has_more") is False:
                return jobs
            after = {"after": _text(batches[-1], "id")}
        if jobs:
            return jobs
        raise SubmitUnknown(
            f"more than {PAGE * PAGES_MAX:,} batches were created since: look for one with the metadata "
            f"{TAG} = {job.tag!r}"
        )

    async def _find_file(self, job: RemoteJob) -> str | None:
        after: dict[str, str] = {}
        for _ in range(PAGES_MAX):
            page = await self._get(self._url("/files", purpose="batch", limit=FILES_PAGE, order="desc", **after))
            files = [each for each in page.get("data") or [] if isinstance(each, dict)]
            for each in files:
                if each.get("filename") == _file_name(job):
                    return _text(each, "id")
            is_past = bool(files) and all(_created(each) < job.created - SKEW_S for each in files)
            if not files or is_past or page.get("has_more") is not True:
                return None
            after = {"after": _text(files[-1], "id")}
        return None  # at worst an unused file remains, which costs nothing


def _file_name(job: RemoteJob) -> str:
    return f"{job.tag}.jsonl"


def _seen(job: RemoteJob, batch: dict[str, Any]) -> RemoteJob:
    """The job, updated from the provider's batch object."""
    counts = batch.get("request_counts")
    counts = counts if isinstance(counts, dict) else {}
    status = str(batch.get("status") or "")
    return replace(
        job,
        state=_STATES.get(status, "submitted"),
        remote_state=status[:100],
        completed=_number(counts.get("completed")),
        failed=_number(counts.get("failed")),
    )


def _number(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0


def _created(item: dict[str, Any]) -> float:
    """When a batch or file was created; infinity if unknown, so that it counts as new."""
    value = item.get("created_at")
    return float(value) if isinstance(value, int | float) else float("inf")


def _text(reply: dict[str, Any], name: str) -> str:
    value = reply.get(name)
    if not isinstance(value, str) or not value:
        raise TryAgain(f"the provider's reply has no {name!r}")
    return value


def _addressed(body: bytes, model: str) -> bytes:
    """Set the model's name in a body without one or with an empty one. Splices where the first member allows it."""
    named = body.count(b'"model"')
    if named == 0 and body[1:2] == b'"' and b"\\u" not in body:  # an escaped letter may hide the name
        return b'{"model":' + encode(model) + b"," + body[1:]
    if named == 1 and body.startswith(EMPTY_MODEL):
        return b'{"model":' + encode(model) + body[len(EMPTY_MODEL) :]
    return with_model(body, model)


def _count_inputs(value: Raw) -> int:
    """The number of texts in a row of embeddings. A list of token numbers is one text."""
    if not bytes(value).startswith(b"["):
        return 1
    items = _inputs.decode(value)
    return len(items) if items and bytes(items[0]).startswith((b'"', b"[")) else 1


def _errors_of(batch: dict[str, Any]) -> list[dict[str, Any]]:
    errors = batch.get("errors")
    data = errors.get("data") if isinstance(errors, dict) else errors
    return [each for each in data if isinstance(each, dict)] if isinstance(data, list) else []


def _rows_named(job: RemoteJob, errors: list[dict[str, Any]]) -> list[tuple[int, RowReply]]:
    """The rows that a refused batch blames: its errors count the upload's lines from 1."""
    named: dict[int, RowReply] = {}
    for each in errors:
        line = each.get("line")
        number = _nth(job.runs, line - 1) if type(line) is int and line > 0 else None
        if number is not None and number not in named:
            error = error_in(each)
            refused = RowError(error.name or "invalid_request", error.message or "the row is refused")
            named[number] = RowReply(400, None, refused)
    return list(named.items())


def _nth(runs: list[tuple[int, int]], n: int) -> int | None:
    """The n-th number of these runs, from 0."""
    for first, count in runs:
        if n < count:
            return first + n
        n -= count
    return None


def _errors_text(errors: list[dict[str, Any]]) -> str:
    """The provider's error messages, shortened."""
    words = [error.message or error.name for error in map(error_in, errors[:3])]
    return f": {'; '.join(word for word in words if word)}"[:1000] if any(words) else ""


FILE_POLL_S = 2.0  # between two polls of a file that the provider processes
_READING = frozenset({"pending", "running", "uploading", "notRunning"})
_BROKEN = frozenset({"error", "failed", "deleted", "canceled"})


class AzureBatches(OpenAIBatches):
    """`https://NAME.openai.azure.com/openai/v1`, or `https://NAME.openai.azure.com/openai` with `api_version`.

    A row's `model` is the name of a batch deployment.
    """

    arguments = OpenAIBatches.arguments | {"api_version"}

    def __init__(self, model: ModelSpec, connections: Connections) -> None:
        super().__init__(model, connections)
        self._version = settings.text(model, "api_version", self._access.query.get("api-version", ""))
        if self._version and not self._base.endswith("/openai"):
            self._base += "/openai"
        if self._version:
            self._access.query["api-version"] = self._version

    @staticmethod
    def _open(model: ModelSpec) -> Access:
        return Access(model, header="api-key", prefix="")

    def _endpoint(self, url: str) -> str:
        return url.removeprefix("/v1") if self._version else url

    async def create(self, job: RemoteJob, upload: Upload) -> RemoteJob:
        """Create the batch as at OpenAI, once the file is processed. Azure refuses a batch before."""
        file = await self._get(self._url(f"/files/{quote(job.input, safe='')}"))
        status = file.get("status")
        if status in _READING:
            raise TryAgain(
                "the provider is still processing the uploaded file", retry_after_s=FILE_POLL_S, is_unseen=True
            )
        if status in _BROKEN:
            raise JobRefused(f"the uploaded file is refused: {file.get('status_details') or status}")
        return await super().create(job, upload)
