"""Bedrock's model invocation jobs: records in one file in S3, records with outputs in others.

Source: Bedrock's API reference, CreateModelInvocationJob; "Format and upload your batch inference data".
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from batchmill.engines import clock
from batchmill.engines.connections import Connections
from batchmill.engines.provider_batch import anthropic_chat
from batchmill.engines.provider_batch.aws import ARGUMENTS, S3, Account, S3Object, Signed, read_uri
from batchmill.engines.provider_batch.provider import (
    JobGone,
    JobRefused,
    ProviderRefusal,
    ProviderReply,
    ProviderRow,
    RowReply,
    Upload,
    fields_of,
    row_error,
)
from batchmill.engines.provider_batch.sagemaker import name_of, short_name
from batchmill.engines.provider_batch.settings import count, read_limits
from batchmill.errors import InvalidRow
from batchmill.types import ModelSpec, RemoteJob, Request, Usage
from batchmill.wire.json_bytes import encode, shallow
from batchmill.wire.rows import forms
from batchmill.wire.rows.forms import CHAT, MESSAGES, counted

INPUT, OUTPUT = "input.jsonl", "output"
ANTHROPIC, ANTHROPIC_VERSION = "anthropic.", "bedrock-2023-05-31"
ROWS_MIN = 100  # of one job, by the default quota of an account
CHAT_LETTER, PLAIN_LETTER = "c", "r"  # before the row's number in a record's id
PAGE, PAGES_MAX = 100, 20
JOBS, JOB = "/model-invocation-jobs", "/model-invocation-job"

_RECORD = re.compile(r"([cr])([0-9]{10})")
_RUNNING = dict.fromkeys(("Submitted", "Validating", "Scheduled", "InProgress"), "submitted")
_ENDED = dict.fromkeys(("Completed", "PartiallyCompleted", "Failed", "Stopped", "Expired"), "ended")
_STATES = _RUNNING | _ENDED | {"Stopping": "cancelling"}
_RANKS = {"ended": 2, "submitted": 1, "cancelling": 0}


class _Job(Struct):
    jobArn: str
    status: str = ""
    jobName: str = ""
    message: str = ""
    successRecordCount: int = 0
    errorRecordCount: int = 0


class _Jobs(Struct):
    invocationJobSummaries: list[_Job] = []
    nextToken: str | None = None


class _Error(Struct, gc=False):
    errorCode: int = 0
    errorMessage: str = ""
    expired: bool = False
    retryable: bool = False


class _Record(Struct, gc=False):
    recordId: str
    modelOutput: Raw = Raw(b"null")
    error: _Error | None = None


_record = msgspec.json.Decoder(_Record)
_object = msgspec.json.Decoder(dict[str, Any])


class BedrockBatches:
    """Bedrock's batch inference. Engine arguments: `s3`, where files go; `role_arn`, with which Bedrock uses it;
    `rows_min`, `max_tokens`, `timeout_hours`."""

    arguments = ARGUMENTS | {"role_arn", "rows_min", "max_tokens", "timeout_hours"}

    def __init__(self, model: ModelSpec, connections: Connections) -> None:
        self.limits = read_limits(model)
        self._model = model
        self._account = Account(model)
        self._s3 = S3(self._account, connections)
        self._folder = read_uri(self._account.needed("s3", what="a location for files"))
        self._role = self._account.needed("role_arn", "roleArn", what="a role that may read and write there")
        self._rows_min = count(model, "rows_min", ROWS_MIN, least=1)
        self._max_tokens = count(model, "max_tokens", anthropic_chat.MAX_TOKENS, least=1)
        self._hours = count(model, "timeout_hours", 24, least=24)
        self._url = self._account.endpoint("bedrock", path=JOB)
        self._calls = Signed(self._account, "bedrock", connections).calls

    # -- rows ---------------------------------------------------------------------------------------------------------

    def encode(self, number: int, request: Request) -> ProviderRow:
        fields = fields_of(request.body, self._model)
        model = str(fields.pop("model"))
        is_anthropic = ANTHROPIC in model
        letter = PLAIN_LETTER
        if is_anthropic and request.url == CHAT:
            letter, fields = CHAT_LETTER, anthropic_chat.to_messages(fields, max_tokens=self._max_tokens)
        elif request.url == MESSAGES and not is_anthropic:
            raise InvalidRow(f"`url` is {MESSAGES}, which {model[:100]!r} does not take", code="invalid_url")
        if is_anthropic:
            fields = {"anthropic_version": ANTHROPIC_VERSION} | fields
        name = f"{letter}{number:010d}".encode()
        return ProviderRow(b'{"recordId":"' + name + b'","modelInput":' + encode(fields) + b"}", model)

    # -- jobs ---------------------------------------------------------------------------------------------------------

    async def find(self, job: RemoteJob) -> RemoteJob | None:
        name = name_of(job.tag)
        jobs = [_updated(job, each) async for each in self._named(name) if each.jobName == name]
        if jobs:
            jobs.sort(key=lambda each: _RANKS[each.state])
            for further in jobs[:-1]:
                if further.state == "submitted":
                    await self.cancel(further)
            return replace(jobs[-1], input=self._input(job).uri)
        is_there = await self._s3.has(self._input(job))
        return replace(job, input=self._input(job).uri) if is_there else None

    async def upload(self, job: RemoteJob, upload: Upload) -> RemoteJob:
        if upload.rows < self._rows_min:
            raise JobRefused(
                f"Bedrock requires at least {self._rows_min} rows in one job, and these are {upload.rows}: send them "
                "by another route of the model, or set rows_min where your account's quota is lower"
            )
        await self._s3.put(self._input(job), upload.path, upload.size_bytes)
        return replace(job, input=self._input(job).uri)

    async def create(self, job: RemoteJob, upload: Upload) -> RemoteJob:
        name = name_of(job.tag)
        order = {
            "jobName": name,
            "clientRequestToken": name,
            "roleArn": self._role,
            "modelId": upload.group,
            "inputDataConfig": {"s3InputDataConfig": {"s3InputFormat": "JSONL", "s3Uri": self._input(job).uri}},
            "outputDataConfig": {"s3OutputDataConfig": {"s3Uri": f"{self._output(job).uri}/"}},
            "timeoutDurationInHours": self._hours,
        }
        headers = {"Content-Type": "application/json"}
        try:
            answer = await self._calls.call("POST", self._url + JOB, encode(order), headers=headers)
        except ProviderRefusal as refusal:
            raise self._account.refused(refusal) from None
        id = answer.read(_Job).jobArn
        return replace(job, id=id, state="submitted", remote_state="Submitted", submitted=clock.now())

    async def refresh(self, job: RemoteJob) -> RemoteJob:
        return _updated(job, (await self._ask(job)).read(_Job))

    async def cancel(self, job: RemoteJob) -> RemoteJob:
        try:
            await self._calls.call("POST", f"{self._url}{JOB}/{_short(job)}/stop", b"")
        except ProviderRefusal:  # a job that has ended cannot be stopped; poll its state
            return await self.refresh(job)
        now = await self.refresh(job)
        return now if now.state == "ended" else replace(now, state="cancelling")

    async def results(self, job: RemoteJob) -> AsyncIterator[list[tuple[int, RowReply]]]:
        state = (await self._ask(job)).read(_Job)
        created = int(job.submitted or job.created)
        folder = self._output(job).below(_short(job))
        async for file in self._s3.list(S3Object(folder.bucket, f"{folder.key}/")):
            if file.key.endswith(".jsonl.out"):
                async for lines in self._s3.lines(file):
                    yield [_read(line, created) for line in lines]
        if state.status not in ("Completed", "PartiallyCompleted"):
            message = f": {state.message}" if state.message else ""
            raise JobRefused(f"the invocation job {_short(job)} is {state.status}{message}")

    async def clean_up(self, job: RemoteJob) -> None:
        await self._s3.delete(self._input(job))

    async def clean_results(self, job: RemoteJob) -> None:
        await self._s3.delete_below(self._folder.below(job.tag))

    # -- calls --------------------------------------------------------------------------------------------------------

    def _input(self, job: RemoteJob) -> S3Object:
        return self._folder.below(job.tag).below(INPUT)

    def _output(self, job: RemoteJob) -> S3Object:
        return self._folder.below(job.tag).below(OUTPUT)

    async def _ask(self, job: RemoteJob) -> ProviderReply:
        try:
            return await self._calls.call("GET", f"{self._url}{JOB}/{_short(job)}")
        except ProviderRefusal as refusal:
            if refusal.status == 404 or refusal.reason == "ResourceNotFoundException":
                raise JobGone(f"Bedrock has no invocation job {job.id!r}: {refusal.message}") from None
            raise

    async def _named(self, name: str) -> AsyncIterator[_Job]:
        """The jobs whose names contain this one."""
        query = {"nameContains": name, "maxResults": str(PAGE)}
        for _ in range(PAGES_MAX):
            answer = await self._calls.call("GET", f"{self._url}{JOBS}?{urlencode(query, quote_via=quote)}")
            page = answer.read(_Jobs)
            for each in page.invocationJobSummaries:
                yield each
            if not page.nextToken:
                return
            query["nextToken"] = page.nextToken


def _short(job: RemoteJob) -> str:
    """The id at the end of a job's ARN: calls accept both, and the id needs no encoding in a path."""
    return quote(short_name(job.id), safe="")


def _updated(job: RemoteJob, remote: _Job) -> RemoteJob:
    return replace(
        job,
        id=remote.jobArn,
        state=_STATES.get(remote.status, "submitted"),
        remote_state=remote.status,
        completed=remote.successRecordCount,
        failed=remote.errorRecordCount,
        message=remote.message or job.message,
    )


def _read(line: bytes, created: int) -> tuple[int, RowReply]:
    try:
        record = _record.decode(shallow(line))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return -1, RowReply(0, None, row_error("bad_response", f"a record cannot be read: {error}"), is_garbled=True)
    match = _RECORD.fullmatch(record.recordId)
    number = -1 if match is None else int(match[2])
    if record.error is not None:
        return number, _failed(record.error)
    return number, _answered(bytes(record.modelOutput), match is not None and match[1] == CHAT_LETTER, created)


def _failed(error: _Error) -> RowReply:
    code = "batch_expired" if error.expired else f"http_{error.errorCode}" if error.errorCode else "row_failed"
    message = error.errorMessage or "the row failed, and Bedrock gives no reason"
    body = {"error": {"code": error.errorCode, "message": message}}
    is_undone = error.expired or error.retryable or error.errorCode == 429 or error.errorCode >= 500
    return RowReply(error.errorCode, encode(body), row_error(code, message), is_undone=is_undone)


def _answered(output: bytes, is_chat: bool, created: int) -> RowReply:
    try:
        reply = _object.decode(output)
    except (msgspec.MsgspecError, RecursionError):
        return RowReply(0, None, row_error("bad_response", "the record has no output"), is_garbled=True)
    usage = usage_of(reply)
    id = reply.get("id")
    body = encode(anthropic_chat.to_completion(reply, created=created)) if is_chat else output
    return RowReply(200, body, None, usage, id if isinstance(id, str) else None)


def usage_of(reply: Mapping[str, Any]) -> Usage | None:
    """The tokens of a reply: each model family has its own fields."""
    if reply.get("type") == "message":
        return anthropic_chat.usage_of(reply)
    usage = reply.get("usage")
    if isinstance(usage, Mapping) and "inputTokens" in usage:  # Nova
        return counted(
            _count(usage, "inputTokens"), _count(usage, "cacheReadInputTokenCount"), _count(usage, "outputTokens")
        )
    if "prompt_token_count" in reply:  # Llama
        return counted(_count(reply, "prompt_token_count"), 0, _count(reply, "generation_token_count"))
    if "inputTextTokenCount" in reply:  # Titan
        results = reply.get("results")
        first = results[0] if isinstance(results, list) and results and isinstance(results[0], dict) else {}
        return counted(_count(reply, "inputTextTokenCount"), 0, _count(first, "tokenCount"))
    return forms.usage_of(dict(reply))


def _count(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    return value if type(value) is int else 0
