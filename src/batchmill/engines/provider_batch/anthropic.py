"""Anthropic's message batches: all rows in one request, results as JSON lines.

A batch carries no name of ours, so every row's id begins with a mark of its submission: the first line of an ended
batch's results says whose it is. Source: Anthropic's API reference, Message Batches.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from batchmill.engines import clock
from batchmill.engines.connections import Connections, FileRange
from batchmill.engines.provider_batch.anthropic_chat import MAX_TOKENS, to_completion, to_messages, usage_of
from batchmill.engines.provider_batch.provider import (
    JobGone,
    JobRefused,
    Out,
    ProviderClient,
    ProviderRefusal,
    ProviderRow,
    RowReply,
    SignedCall,
    Upload,
    fields_of,
    row_error,
    row_id,
    row_number,
    with_remote_model,
)
from batchmill.engines.provider_batch.settings import Access, count, read_limits, text
from batchmill.errors import InvalidRow, SubmitUnknown
from batchmill.types import ModelSpec, RemoteJob, Request
from batchmill.wire.error_statuses import decode_error
from batchmill.wire.json_bytes import encode, shallow
from batchmill.wire.rows.forms import CHAT, MESSAGES

VERSION = "2023-06-01"
HEAD, ROW, BETWEEN, TAIL = b'{"requests":[', b'{"custom_id":"', b",\n", b"]}\n"
CHAT_LETTER = "c"  # the first letter of a chat row's id; other ids have the letter of `row_id`
MARK_CHARS = 20
NO_MARK = "b" + "0" * MARK_CHARS  # a placeholder of the mark's length, so that sizes stay correct
PAGE, PAGES_MAX = 100, 50
SKEW_S = 600.0  # how much our clock and the provider's may differ
COPY_BYTES = 1024 * 1024

_STATES = {"in_progress": "submitted", "canceling": "cancelling", "ended": "ended"}
_STATUSES = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}
_UNDONE_FROM = 429  # from this status on a retry may succeed, and nothing was charged


class _Counts(Struct, frozen=True):
    processing: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0

    @property
    def total(self) -> int:
        return self.processing + self.succeeded + self.errored + self.canceled + self.expired


class _Batch(Struct):
    id: str
    processing_status: str = ""
    request_counts: _Counts = _Counts()
    created_at: str = ""

    @property
    def created(self) -> float:
        """Seconds since the epoch; infinity if unknown, so that the batch counts as new."""
        try:
            return datetime.fromisoformat(self.created_at).timestamp()
        except ValueError:
            return math.inf


class _Page(Struct):
    data: list[_Batch] = []
    has_more: bool = False
    last_id: str | None = None


class _Result(Struct, gc=False):
    type: str
    message: Raw = Raw(b"null")
    error: Raw = Raw(b"null")


class _ResultLine(Struct, gc=False):
    custom_id: str
    result: _Result


_line = msgspec.json.Decoder(_ResultLine)


class AnthropicBatches:
    """Anthropic's batches. Engine arguments: `max_tokens` of chat rows without a limit (4096); `version` of the API."""

    arguments = frozenset({"max_tokens", "version"})

    def __init__(self, model: ModelSpec, connections: Connections) -> None:
        self.limits = read_limits(model, head=HEAD, between=BETWEEN, tail=TAIL)
        self._model = model
        self._access = Access(model, header="x-api-key", prefix="")
        self._headers = {"anthropic-version": text(model, "version", VERSION), "content-type": "application/json"}
        self._max_tokens = count(model, "max_tokens", MAX_TOKENS, least=1)
        self._url = _batches_url(self._access.base_url)
        self._calls = ProviderClient(connections, self._sign, renew=self._access.renew)

    async def _sign(self, out: Out) -> SignedCall:
        headers = {**self._headers, **self._access.headers(), **out.headers}
        return SignedCall(replace(out, headers=headers), self._access.secrets)

    def encode(self, number: int, request: Request) -> ProviderRow:
        name = row_id(number)
        if request.url == MESSAGES:
            params = with_remote_model(request.body, self._model)
        elif request.url == CHAT:
            message = to_messages(fields_of(request.body, self._model), max_tokens=self._max_tokens)
            name, params = CHAT_LETTER + name[1:], encode(message)
        else:
            way_out = f"rows of Anthropic's batches go to {MESSAGES} or {CHAT}"
            raise InvalidRow(f"`url` is {request.url[:100]!r}: {way_out}", code="invalid_url")
        return ProviderRow(ROW + f"{NO_MARK}-{name}".encode() + b'","params":' + params + b"}")

    async def upload(self, job: RemoteJob, upload: Upload) -> RemoteJob:
        return job

    async def create(self, job: RemoteJob, upload: Upload) -> RemoteJob:
        marked = upload.path.with_name(upload.path.name + ".marked")
        try:
            size = await asyncio.to_thread(_write_marked, upload.path, marked, mark_of(job.tag))
            answer = await self._calls.send(Out("POST", self._url, parts=[FileRange(marked, size)]))
        except ProviderRefusal as refusal:
            raise JobRefused(refusal.message) from None
        finally:
            marked.unlink(missing_ok=True)
        return _updated(replace(job, submitted=clock.now()), answer.read(_Batch))

    async def find(self, job: RemoteJob) -> RemoteJob | None:
        mark, unclear = mark_of(job.tag), []
        async for batch in self._since(job.created):
            if batch.request_counts.total != job.rows:
                continue
            if batch.processing_status != "ended":
                unclear.append(batch.id)
            elif await self._is_marked(batch.id, mark):
                return replace(job, id=batch.id, state="ended", remote_state=batch.processing_status)
        if job.id or not unclear:  # with a known id, only duplicates are searched
            return None
        raise SubmitUnknown(
            f"a batch of {job.rows:,} rows was about to be sent to Anthropic when batchmill was interrupted, and "
            f"batches of as many rows are running there: {', '.join(unclear[:20])}. Look in the Anthropic console "
            f"whether one of them is that of {job.tag}: its rows' ids begin with {mark}. Once they have ended "
            "batchmill can tell by itself: resume the job then"
        )

    async def refresh(self, job: RemoteJob) -> RemoteJob:
        return await self._ask(job, "GET", "")

    async def cancel(self, job: RemoteJob) -> RemoteJob:
        try:
            return await self._ask(job, "POST", "/cancel")
        except ProviderRefusal:  # a batch that has ended cannot be cancelled: report its state
            return await self.refresh(job)

    async def results(self, job: RemoteJob) -> AsyncIterator[list[tuple[int, RowReply]]]:
        mark = mark_of(job.tag)
        try:
            async for lines in self._calls.lines(f"{self._url}/{job.id}/results"):
                yield [_read(line, mark, int(job.submitted or job.created)) for line in lines]
        except ProviderRefusal as refusal:
            raise _gone(refusal, job) from None

    async def clean_up(self, job: RemoteJob) -> None:
        """Do nothing: the provider has only the batch and its results."""

    async def _ask(self, job: RemoteJob, method: str, path: str) -> RemoteJob:
        try:
            answer = await self._calls.call(method, f"{self._url}/{job.id}{path}")
        except ProviderRefusal as refusal:
            if refusal.status == 404:
                raise _gone(refusal, job) from None
            raise
        return _updated(job, answer.read(_Batch))

    async def _since(self, ours: float) -> AsyncIterator[_Batch]:
        """Batches created at or after this time of our clock, the newest first."""
        after = ""
        for _ in range(PAGES_MAX):
            answer = await self._calls.call("GET", f"{self._url}?limit={PAGE}{after}")
            page = answer.read(_Page)
            theirs = ours - SKEW_S - _ahead_s(answer.headers)
            for batch in page.data:
                if batch.created < theirs:
                    return
                yield batch
            if not page.has_more or not page.data:
                return
            after = f"&after_id={page.last_id or page.data[-1].id}"
        raise SubmitUnknown(f"Anthropic lists more than {PAGE * PAGES_MAX} batches since; look for ours in its console")

    async def _is_marked(self, id: str, mark: str) -> bool:
        """Whether an ended batch holds the rows of this submission."""
        lines = self._calls.lines(f"{self._url}/{id}/results")
        try:
            async for some in lines:
                return any(mark.encode() in line for line in some)
        finally:
            await lines.aclose()
        return False


def mark_of(tag: str) -> str:
    """The prefix of the ids of a submission's rows. Ids have at most 64 characters; a tag may be longer."""
    return "b" + hashlib.sha256(tag.encode()).hexdigest()[:MARK_CHARS]


def _ahead_s(headers: Mapping[str, str]) -> float:
    """How many seconds our clock is ahead of a reply's; 0 if the reply has no date."""
    try:
        return clock.now() - parsedate_to_datetime(headers.get("date", "")).timestamp()
    except ValueError:
        return 0.0


def _batches_url(base: str) -> str:
    for end in ("/v1/messages", "/v1"):
        base = base.removesuffix(end)
    return f"{base}{MESSAGES}/batches"


def _write_marked(source: Path, target: Path, mark: str) -> int:
    """Copy an upload with the mark in each row's id; return the copy's size in bytes."""
    old, new = ROW + NO_MARK.encode(), ROW + mark.encode()
    with source.open("rb") as read, target.open("wb") as write:
        head = read.read(len(HEAD))
        assert head == HEAD, "an upload begins with the head of its limits"
        write.write(head)
        while lines := read.readlines(COPY_BYTES):
            write.writelines(new + line[len(old) :] if line.startswith(old) else line for line in lines)
        return write.tell()


def _updated(job: RemoteJob, batch: _Batch) -> RemoteJob:
    """A job updated from its batch."""
    counts = batch.request_counts
    return replace(
        job,
        id=batch.id,
        state=_STATES.get(batch.processing_status, "submitted"),
        remote_state=batch.processing_status,
        completed=counts.succeeded,
        failed=counts.errored,
    )


def _read(line: bytes, mark: str, created: int) -> tuple[int, RowReply]:
    try:
        answer = _line.decode(shallow(line))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return -1, RowReply(0, None, row_error("bad_response", f"a line cannot be read: {error}"), is_garbled=True)
    name = answer.custom_id.removeprefix(f"{mark}-")
    is_chat = name[:1] == CHAT_LETTER
    number = row_number(row_id(0)[0] + name[1:]) if is_chat else row_number(name)
    result = answer.result
    match result.type:
        case "succeeded":
            return number, _succeeded(bytes(result.message), is_chat, created)
        case "errored":
            return number, _errored(bytes(result.error))
        case kind:  # canceled, expired
            message = f"the batch ended before this row was run: it is {kind}"
            return number, RowReply(0, None, row_error(f"batch_{kind}", message), is_undone=True)


def _succeeded(message: bytes, is_chat: bool, created: int) -> RowReply:
    try:
        reply = msgspec.json.decode(message, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return RowReply(0, None, row_error("bad_response", "the row's message is no JSON object"), is_garbled=True)
    id = reply.get("id")
    body = encode(to_completion(reply, created=created)) if is_chat else message
    return RowReply(200, body, None, usage_of(reply), id if isinstance(id, str) else None)


def _errored(error: bytes) -> RowReply:
    """`{"type":"error","error":{"type":…,"message":…},"request_id":…}`"""
    decoded = decode_error(error)
    code, text = decoded.name or "unknown_error", decoded.message or "the row failed, and the provider gives no reason"
    status = _STATUSES.get(code, 500)
    is_undone = status >= _UNDONE_FROM
    return RowReply(status, error, row_error(code, text), None, decoded.request_id, is_undone=is_undone)


def _gone(refusal: ProviderRefusal, job: RemoteJob) -> JobGone:
    return JobGone(f"Anthropic has no batch {job.id}, or no longer has its results: {refusal.message}")
