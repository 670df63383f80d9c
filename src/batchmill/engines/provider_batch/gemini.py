"""Gemini's batches: requests in a file of JSON lines, each with our key, and replies in another.

A batch carries our tag as its display name. Its replies are matched by their keys alone: their order is not reliable.
Source: the Gemini API's reference (v1beta), "Batch API" and "Files"; google.rpc.Code for the errors of rows.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit, urlunsplit

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from batchmill.engines import clock
from batchmill.engines.connections import Connections, FileRange
from batchmill.engines.provider_batch.gemini_chat import (
    TASK_TYPES,
    refuse,
    to_content_request,
    to_embed_request,
)
from batchmill.engines.provider_batch.gemini_replies import count_of, to_completion, to_embeddings, usage_of
from batchmill.engines.provider_batch.provider import (
    JobGone,
    JobRefused,
    Out,
    ProviderClient,
    ProviderRefusal,
    ProviderRow,
    RowReply,
    SignedCall,
    TryAgain,
    Upload,
    fields_of,
    row_error,
    row_id,
    row_number,
)
from batchmill.engines.provider_batch.settings import Access, argument, read_limits, text
from batchmill.engines.retry import redact
from batchmill.errors import AuthRefused, BatchmillError, InvalidRow, ModelFailed, SubmitUnknown
from batchmill.types import ModelSpec, RemoteJob, Request
from batchmill.wire.json_bytes import encode, shallow
from batchmill.wire.rows.forms import CHAT, EMBEDDINGS

VERSION = "v1beta"
CHAT_LETTER, EMBED_LETTER = "c", "e"  # the first letter of a row's key says how its reply is read
METHODS = {CHAT_LETTER: "batchGenerateContent", EMBED_LETTER: "asyncBatchEmbedContent"}
QUEUE_DELAY_S = 600.0  # before a batch that exceeded the account's capacity is submitted again
RETRY_DELAY_MAX_S = 3600.0  # longer waits that Gemini requests are shortened
FILE_POLL_S = 2.0  # between two polls of a file that Gemini processes
FILE_ID_CHARS_MAX = 40  # Gemini deletes no file with a longer id, and its own results have longer ones
PAGE, PAGES_MAX = 100, 100  # batches, or files, to search for a tag
JSON = {"Content-Type": "application/json"}

_SUCCESSES = frozenset({"SUCCEEDED", "PARTIALLY_SUCCEEDED"})
_ENDS = _SUCCESSES | {"FAILED", "CANCELLED", "EXPIRED"}
_MODEL = re.compile(r"(models|tunedModels)/[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_BATCH_ADDRESS = re.compile(r"(?:/(v[0-9][a-z0-9]*))?(?:/(?:models|tunedModels)/[^/]*|/batches)?/?$")
_key = re.compile(rb'"key"\s*:\s*"([ce]\d{1,11})"')

# The codes of google.rpc.Code: name and HTTP status.
_CODES = {
    1: ("cancelled", 499),
    2: ("unknown", 500),
    3: ("invalid_argument", 400),
    4: ("deadline_exceeded", 504),
    5: ("not_found", 404),
    6: ("already_exists", 409),
    7: ("permission_denied", 403),
    8: ("resource_exhausted", 429),
    9: ("failed_precondition", 400),
    10: ("aborted", 409),
    11: ("out_of_range", 400),
    12: ("unimplemented", 501),
    13: ("internal", 500),
    14: ("unavailable", 503),
    15: ("data_loss", 500),
    16: ("unauthenticated", 401),
}
_UNDONE = frozenset({408, 409, 429, 499, 500, 502, 503, 504})  # the row may be sent again


class _File(Struct, frozen=True):
    name: str
    displayName: str = ""
    state: str = ""
    error: Any = None


class _Uploaded(Struct):
    file: _File


class _Files(Struct):
    files: list[_File] = []
    nextPageToken: str = ""


class _Output(Struct, frozen=True):
    responsesFile: str = ""


class _Input(Struct, frozen=True):
    fileName: str = ""


class _Metadata(Struct, frozen=True):
    """A GenerateContentBatch or an EmbedContentBatch."""

    displayName: str = ""
    state: str = ""
    model: str = ""
    inputConfig: _Input = _Input()
    output: _Output = _Output()
    batchStats: dict[str, Any] = {}


class _Status(Struct, gc=False):
    """A google.rpc.Status: its code is one of google.rpc.Code, an HTTP status, or a name."""

    code: int | str = 0
    message: str = ""
    status: str = ""


class _Operation(Struct, frozen=True):
    name: str
    metadata: _Metadata = _Metadata()
    done: bool = False
    response: _Output | None = None
    error: _Status | None = None

    @property
    def state(self) -> str:
        """The state without its prefix, `BATCH_STATE_` or `JOB_STATE_`."""
        state = self.metadata.state.rpartition("_STATE_")[2]
        if not self.done or state in _ENDS:
            return state
        return "SUCCEEDED" if self.error is None else "FAILED"

    @property
    def results(self) -> str:
        """The name of the file with the replies; empty if there is none."""
        return (self.response or _Output()).responsesFile or self.metadata.output.responsesFile


class _Operations(Struct):
    operations: list[_Operation] = []
    nextPageToken: str = ""


class _Key(Struct, gc=False):
    key: str = ""


class _Line(Struct, gc=False):
    key: str = ""
    metadata: _Key | None = None
    response: Raw = Raw(b"null")
    error: Raw = Raw(b"null")


class _Failed(Struct, gc=False):
    error: _Status


_line = msgspec.json.Decoder(_Line)
_object = msgspec.json.Decoder(dict[str, Any])
_failed = msgspec.json.Decoder(_Failed)


class GeminiBatches:
    """Engine arguments: `version` of the API (v1beta); `task_type` of embeddings rows without one; `queue_rest_s`."""

    arguments = frozenset({"version", "task_type", "queue_rest_s"})

    def __init__(self, model: ModelSpec, connections: Connections) -> None:
        self.limits = read_limits(model)
        self._model = model
        self._task_type = text(model, "task_type", "")
        if self._task_type and self._task_type not in TASK_TYPES:
            names = ", ".join(TASK_TYPES)
            raise ModelFailed(f"task_type is {self._task_type!r}; it must be one of {names}", code="invalid_argument")
        self._queue_rest_s = argument(model, "queue_rest_s", QUEUE_DELAY_S, least=0.001)
        self._access = Access(model, header="x-goog-api-key", prefix="")
        if "key" in self._access.query:
            raise ModelFailed(
                "the address has a key in its query: Gemini's key goes into the header x-goog-api-key",
                code="invalid_base_url",
            )
        self._root, self._version = _place(self._access.base_url, text(model, "version", ""))
        self._calls = ProviderClient(connections, self._sign, renew=self._access.renew, classify=_classify)

    async def _sign(self, out: Out) -> SignedCall:
        headers = {**self._access.headers(), **out.headers}
        return SignedCall(replace(out, headers=headers), self._access.secrets)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def encode(self, number: int, request: Request) -> ProviderRow:
        fields = fields_of(request.body, self._model)
        model = _model_path(fields["model"])
        if request.url == CHAT:
            letter, content = CHAT_LETTER, to_content_request(fields)
        elif request.url == EMBEDDINGS:
            letter, content = EMBED_LETTER, to_embed_request(fields, task_type=self._task_type)
        else:
            way_out = f"rows of Gemini's batches go to {CHAT} or {EMBEDDINGS}"
            raise InvalidRow(f"`url` is {request.url[:100]!r}: {way_out}", code="invalid_url")
        key = letter + row_id(number)[1:]
        data = b'{"key":"' + key.encode() + b'","request":' + encode(content) + b"}"
        return ProviderRow(data, f"{letter} {model}")

    # -- jobs ---------------------------------------------------------------------------------------------------------

    async def find(self, job: RemoteJob) -> RemoteJob | None:
        found = [
            _updated(job, each)
            async for page in self._batches(job)
            for each in page
            if each.metadata.displayName == job.tag
        ]
        if found:
            found.sort(key=lambda each: (each.id == job.id, _rank(each)))
            for further in found[:-1]:
                if further.state == "submitted":
                    await self.cancel(further)
            return found[-1]
        file = await self._find_file(job.tag)
        return None if file is None else replace(job, input=file)

    async def upload(self, job: RemoteJob, upload: Upload) -> RemoteJob:
        begin = JSON | {
            "X-Goog-Upload-Protocol": "resumable",
            "X-Goog-Upload-Command": "start",
            "X-Goog-Upload-Header-Content-Length": str(upload.size_bytes),
            "X-Goog-Upload-Header-Content-Type": "application/jsonl",
        }
        finish = {"X-Goog-Upload-Offset": "0", "X-Goog-Upload-Command": "upload, finalize"}
        parts = [FileRange(upload.path, upload.size_bytes)]
        about = encode({"file": {"displayName": job.tag}})
        try:
            begun = await self._calls.call("POST", f"{self._root}/upload/{self._version}/files", about, headers=begin)
            session = self._own(begun.headers.get("x-goog-upload-url", ""))
            answer = await self._calls.send(Out("POST", session, headers=finish, parts=parts))
        except ProviderRefusal as refusal:
            raise JobRefused(refusal.message) from None
        return replace(job, input=answer.read(_Uploaded).file.name)

    async def create(self, job: RemoteJob, upload: Upload) -> RemoteJob:
        if not await self._is_ready(job):
            job = await self.upload(job, upload)  # the file has expired since
        letter, model = upload.group.split(" ", 1)
        order = {"batch": {"displayName": job.tag, "inputConfig": {"fileName": job.input}}}
        try:
            answer = await self._calls.call(
                "POST", self._url(f"{model}:{METHODS[letter]}"), encode(order), headers=JSON
            )
        except ProviderRefusal as refusal:
            raise JobRefused(refusal.message) from None
        created = _updated(replace(job, submitted=clock.now()), answer.read(_Operation))
        return replace(created, state="submitted")

    async def refresh(self, job: RemoteJob) -> RemoteJob:
        return _updated(job, await self._batch(job))

    async def cancel(self, job: RemoteJob) -> RemoteJob:
        try:
            await self._calls.call("POST", self._url(f"{_batch_path(job.id)}:cancel"), b"{}", headers=JSON)
        except ProviderRefusal:  # a batch that has ended cannot be cancelled; poll its state
            return await self.refresh(job)
        now = await self.refresh(job)
        return now if now.state == "ended" else replace(now, state="cancelling")

    async def results(self, job: RemoteJob) -> AsyncIterator[list[tuple[int, RowReply]]]:
        batch = await self._batch(job)
        model = batch.metadata.model.rpartition("/")[2] or self._model.source
        if batch.results:
            url = f"{self._root}/download/{self._version}/{_file_path(batch.results)}:download?alt=media"
            try:
                async for lines in self._calls.lines(url):
                    yield [_read(line, job, model) for line in lines]
            except ProviderRefusal as refusal:
                if refusal.status in (403, 404):
                    text = f"Gemini no longer has the results of {job.id}: {refusal.message}"
                    raise JobGone(text) from None
                raise
        if batch.state not in _SUCCESSES:
            error = batch.error or _Status()
            is_full = _meaning(error)[1] == 429
            message = f": {redact(error.message)}" if error.message else ""
            raise JobRefused(
                f"the batch {job.id} is {batch.state.lower()}{message}",
                retry_after_s=self._queue_rest_s if is_full else None,
            )

    async def clean_up(self, job: RemoteJob) -> None:
        if job.input:
            await self._delete(_file_path(job.input))

    async def clean_results(self, job: RemoteJob) -> None:
        try:
            results = (await self._batch(job)).results
        except JobGone:
            return
        if results and len(_file_path(results)) <= len("files/") + FILE_ID_CHARS_MAX:
            await self._delete(_file_path(results))
        await self._delete(_batch_path(job.id))

    # -- calls --------------------------------------------------------------------------------------------------------

    def _url(self, path: str, **query: str | int) -> str:
        parameters = f"?{urlencode(query)}" if query else ""
        return f"{self._root}/{self._version}/{path}{parameters}"

    def _own(self, session: str) -> str:
        """The address of an upload at our own base address, which may be a proxy's: the key goes nowhere else."""
        try:
            parts = urlsplit(session)
        except ValueError:
            parts = urlsplit("")
        if not parts.path.startswith("/") or not parts.query:
            raise TryAgain(f"Gemini's reply has no address for the upload, but {session[:200]!r}")
        root = urlsplit(self._root)
        return urlunsplit((root.scheme, root.netloc, parts.path, parts.query, ""))

    async def _batch(self, job: RemoteJob) -> _Operation:
        try:
            return (await self._calls.call("GET", self._url(_batch_path(job.id)))).read(_Operation)
        except ProviderRefusal as refusal:
            if refusal.status in (403, 404):
                raise JobGone(f"Gemini has no batch {job.id}: {refusal.message}") from None
            raise

    async def _batches(self, job: RemoteJob) -> AsyncIterator[list[_Operation]]:
        """All batches of the account; their order is not documented. Raises: SubmitUnknown if there are too many."""
        token: dict[str, str] = {}
        for _ in range(PAGES_MAX):
            page = (await self._calls.call("GET", self._url("batches", pageSize=PAGE, **token))).read(_Operations)
            yield page.operations
            if not page.nextPageToken:
                return
            token = {"pageToken": page.nextPageToken}
        raise SubmitUnknown(
            f"Gemini lists more than {PAGE * PAGES_MAX:,} batches: look for one with the name {job.tag!r}"
        )

    async def _find_file(self, tag: str) -> str | None:
        token: dict[str, str] = {}
        for _ in range(PAGES_MAX):
            page = (await self._calls.call("GET", self._url("files", pageSize=PAGE, **token))).read(_Files)
            for each in page.files:
                if each.displayName == tag:
                    return each.name
            if not page.nextPageToken:
                return None
            token = {"pageToken": page.nextPageToken}
        return None  # at worst an unused file remains, which Gemini deletes after 48 hours

    async def _is_ready(self, job: RemoteJob) -> bool:
        """Whether the uploaded file may be used; False: there is none. Raises: TryAgain while Gemini processes it."""
        try:
            file = (await self._calls.call("GET", self._url(_file_path(job.input)))).read(_File)
        except ProviderRefusal as refusal:
            if refusal.status in (403, 404):
                return False
            raise JobRefused(refusal.message) from None
        if file.state == "PROCESSING":
            raise TryAgain("Gemini is still processing the uploaded file", retry_after_s=FILE_POLL_S, is_unseen=True)
        if file.state == "FAILED":
            raise JobRefused(f"the uploaded file is refused: {redact(str(file.error or 'without a reason'))}")
        return True

    async def _delete(self, path: str) -> None:
        try:
            await self._calls.call("DELETE", self._url(path))
        except ProviderRefusal as refusal:
            if refusal.status not in (403, 404):  # it is already deleted
                raise


def _place(base: str, version: str) -> tuple[str, str]:
    """The address before the version, and the version, of an address that may go on to a model's method."""
    parts = urlsplit(base)
    found = _BATCH_ADDRESS.search(parts.path)
    assert found is not None, "the pattern matches an empty end"
    root = urlunsplit((parts.scheme, parts.netloc, parts.path[: found.start()], "", ""))
    return root, version or found[1] or VERSION


def _model_path(name: Any) -> str:
    """`models/NAME` or `tunedModels/NAME`. Raises: InvalidRow."""
    path = name if "/" in name else f"models/{name}"
    if not _MODEL.fullmatch(path):
        raise refuse(f"`model` {name[:100]!r}", "it is a name such as gemini-2.5-flash", code="invalid_row")
    return path


def _batch_path(id: str) -> str:
    return "batches/" + _segment(id.removeprefix("batches/"))


def _file_path(name: str) -> str:
    return "files/" + _segment(name.removeprefix("files/"))


def _segment(name: str) -> str:
    """The last segment of a resource's name, which must not change where a path leads."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,200}", name):
        raise JobGone(f"{name[:100]!r} is no name of a batch or a file at Gemini")
    return name


def _classify(status: int, headers: Mapping[str, str], data: bytes) -> BatchmillError | None:
    """Errors whose status means something else at Google than elsewhere."""
    try:
        error = _object.decode(shallow(data)).get("error")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(error, dict):
        return None
    message = redact(str(error.get("message") or "Gemini gives no reason"))
    details = error.get("details")
    details = [each for each in details if isinstance(each, dict)] if isinstance(details, list) else []
    if status == 400 and any(each.get("reason") == "API_KEY_INVALID" for each in details):
        return AuthRefused(message)
    if status == 403 and "may not exist" in message:  # a file that is not there, or is another account's
        return ProviderRefusal(status, "permission_denied", message)
    if status == 429 and (delay_s := _retry_delay_s(details)):
        return TryAgain(message, retry_after_s=delay_s, is_unseen=True)
    return None


def _retry_delay_s(details: list[dict[str, Any]]) -> float | None:
    """The wait that a google.rpc.RetryInfo requests, such as "33.5s"."""
    for each in details:
        found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)s", str(each.get("retryDelay", "")))
        if found:
            return min(float(found[1]), RETRY_DELAY_MAX_S)
    return None


def _updated(job: RemoteJob, batch: _Operation) -> RemoteJob:
    """A job updated from its batch."""
    stats = batch.metadata.batchStats
    state = {"CANCELLING": "cancelling"}.get(batch.state, "ended" if batch.state in _ENDS else "submitted")
    return replace(
        job,
        id=batch.name,
        input=batch.metadata.inputConfig.fileName or job.input,
        state=state,
        remote_state=batch.state.lower()[:100],
        completed=count_of(stats.get("successfulRequestCount")),
        failed=count_of(stats.get("failedRequestCount")),
    )


def _rank(job: RemoteJob) -> int:
    """How far a batch is: one with results before one that runs before one that ended without them."""
    if job.state == "ended":
        return 3 if job.remote_state.upper() in _SUCCESSES else 0
    return 2 if job.state == "submitted" else 1


def _read(line: bytes, job: RemoteJob, model: str) -> tuple[int, RowReply]:
    try:
        answer = _line.decode(shallow(line))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        found = _key.search(line[:4096])
        return _number(found[1].decode() if found else ""), _garbled(f"a line cannot be read: {error}")
    key = answer.key or (answer.metadata or _Key()).key
    number = _number(key)
    if not key:  # its place in the file is no proof of whose it is
        return number, _garbled("a line has no key")
    if bytes(answer.error) != b"null":
        return number, _errored(b'{"error":' + bytes(answer.error) + b"}")
    try:
        reply = _object.decode(answer.response)
    except (msgspec.MsgspecError, RecursionError):
        return number, _garbled("the line has neither a response nor an error")
    if isinstance(reply.get("error"), dict):
        return number, _errored(bytes(answer.response))
    return number, _answered(reply, key, job, model)


def _number(key: str) -> int:
    return row_number(row_id(0)[0] + key[1:]) if key[:1] in METHODS else -1


def _answered(reply: dict[str, Any], key: str, job: RemoteJob, model: str) -> RowReply:
    if key[:1] == EMBED_LETTER:
        answer, missing = to_embeddings(reply, model=model), "vector"
    else:
        id = f"{job.tag}-{key}"
        answer = to_completion(reply, model=model, id=id, created=int(job.submitted or job.created))
        missing = "candidate"
    id = reply.get("responseId")
    request_id = id if isinstance(id, str) else None
    if answer is None:
        error = row_error("bad_response", f"Gemini's reply has no {missing}")
        return RowReply(0, None, error, usage_of(reply), request_id)
    return RowReply(200, encode(answer), None, usage_of(reply), request_id)


def _errored(body: bytes) -> RowReply:
    """A row that Gemini did not answer."""
    try:
        error = _failed.decode(body).error
    except (msgspec.MsgspecError, RecursionError):
        error = _Status()
    name, status = _meaning(error)
    message = error.message or "the row failed, and Gemini gives no reason"
    return RowReply(status, body, row_error(name, message), is_undone=status in _UNDONE)


def _meaning(error: _Status) -> tuple[str, int]:
    """The name and the HTTP status of a row's error."""
    if isinstance(error.code, int) and error.code in _CODES:
        return _CODES[error.code]
    named = (error.status or (error.code if isinstance(error.code, str) else "")).lower()
    status = next((status for name, status in _CODES.values() if name == named), 500)
    if isinstance(error.code, int) and 400 <= error.code <= 599:
        status = error.code
    return named or f"http_{status}", status


def _garbled(message: str) -> RowReply:
    return RowReply(0, None, row_error("bad_response", message), is_garbled=True)
