"""SageMaker's batch transform: rows' bodies as lines of one file in S3, replies as lines of another.

Answers carry no names: they come in the order of the rows, and count for nothing unless there are as many. Source:
SageMaker's API reference, CreateTransformJob; "Use batch transform".
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import chain, islice
from typing import IO, Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchmill.engines import clock
from batchmill.engines.connections import Connections
from batchmill.engines.provider_batch.aws import ARGUMENTS, S3, Account, JsonService, S3Object, Signed, read_uri
from batchmill.engines.provider_batch.provider import (
    LINES_MAX,
    JobGone,
    JobRefused,
    ProviderRefusal,
    ProviderRow,
    RowReply,
    TryAgain,
    Upload,
)
from batchmill.engines.provider_batch.settings import read_limits
from batchmill.errors import InvalidRow, ModelFailed
from batchmill.types import ModelSpec, RemoteJob, Request
from batchmill.wire.json_bytes import encode, shallow
from batchmill.wire.rows.forms import usage_of

INPUT, OUTPUT = "input.jsonl", "output"
JSON, JSON_LINES = "application/json", "application/jsonlines"
SINGLE = "SingleRecord"

_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}")
_STATES = {"InProgress": "submitted", "Stopping": "cancelling"} | dict.fromkeys(
    ("Completed", "Failed", "Stopped"), "ended"
)
_PARTS = ("ModelClientConfig", "Environment", "DataProcessing", "ExperimentConfig", "Tags")


class _Described(Struct):
    TransformJobName: str
    TransformJobStatus: str
    TransformJobArn: str = ""
    FailureReason: str = ""


class SageMakerBatches:
    """SageMaker's transform jobs. Engine arguments: `s3`, where files go; `instance_type`, `instance_count`; see
    `_order` for more."""

    arguments = ARGUMENTS | {
        "instance_type",
        "instance_count",
        "batch_strategy",
        "max_concurrent",
        "max_payload_mb",
        "content_type",
        "accept",
    }

    def __init__(self, model: ModelSpec, connections: Connections) -> None:
        self.limits = read_limits(model)
        self._model = model
        self._account = Account(model)
        self._s3 = S3(self._account, connections)
        self._folder = read_uri(self._place())
        self._base_order = self._order()
        url = self._account.endpoint("api.sagemaker", path="/CreateTransformJob")
        self._service = JsonService(Signed(self._account, "sagemaker", connections), f"{url}/", "SageMaker")

    # -- rows ---------------------------------------------------------------------------------------------------------

    def encode(self, number: int, request: Request) -> ProviderRow:
        body = msgspec.json.decode(request.body, type=dict[str, msgspec.Raw])
        if body.get("stream") == msgspec.Raw(b"true"):
            raise InvalidRow("a row's answer cannot be streamed: leave `stream` out", code="unsupported_parameter")
        return ProviderRow(request.body)

    # -- jobs ---------------------------------------------------------------------------------------------------------

    async def find(self, job: RemoteJob) -> RemoteJob | None:
        try:
            return await self._describe(replace(job, id=name_of(job.tag), input=self._input(job).uri))
        except JobGone:
            is_there = await self._s3.has(self._input(job))
            return replace(job, input=self._input(job).uri) if is_there else None

    async def upload(self, job: RemoteJob, upload: Upload) -> RemoteJob:
        await self._s3.put(self._input(job), upload.path, upload.size_bytes)
        return replace(job, input=self._input(job).uri)

    async def create(self, job: RemoteJob, upload: Upload) -> RemoteJob:
        name, folder = name_of(job.tag), self._folder.below(job.tag)
        order = self._base_order | {"TransformJobName": name}
        order["TransformInput"] = self._base_order["TransformInput"] | {
            "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": folder.below(INPUT).uri}},
            "SplitType": "Line",
        }
        order["TransformOutput"] = self._base_order["TransformOutput"] | {
            "S3OutputPath": folder.below(OUTPUT).uri,
            "AssembleWith": "Line",
        }
        try:
            reply = await self._service.call("CreateTransformJob", order)
        except ProviderRefusal as refusal:
            if refusal.reason == "ResourceInUse":  # the name is unique: the job was created and the reply was lost
                return await self._describe(replace(job, id=name))
            raise self._account.refused(refusal) from None
        arn = _decoded(reply, dict[str, Any]).get("TransformJobArn")
        return replace(job, id=str(arn or name), state="submitted", remote_state="InProgress", submitted=clock.now())

    async def refresh(self, job: RemoteJob) -> RemoteJob:
        return await self._describe(job)

    async def cancel(self, job: RemoteJob) -> RemoteJob:
        try:
            await self._service.call("StopTransformJob", {"TransformJobName": short_name(job.id)})
        except ProviderRefusal:  # a job that has ended cannot be stopped; poll its state
            return await self.refresh(job)
        return replace(await self.refresh(job), state="cancelling") if job.state != "ended" else job

    async def results(self, job: RemoteJob) -> AsyncIterator[list[tuple[int, RowReply]]]:
        described = await self._ask(job)
        status, reason = described.TransformJobStatus, described.FailureReason
        output = self._folder.below(job.tag).below(OUTPUT).below(f"{INPUT}.out")
        if status != "Completed" and not await self._s3.has(output):
            raise JobRefused(f"the transform job {short_name(job.id)} is {status}{f': {reason}' if reason else ''}")
        with tempfile.TemporaryFile() as spool:
            count = 0
            async for lines in self._s3.lines(output):
                count += len(lines)
                await asyncio.to_thread(spool.write, b"\n".join(lines) + b"\n")
            if count != job.rows:
                raise JobRefused(
                    f"{output.uri} has {count:,} lines for {job.rows:,} rows, so they cannot be assigned: "
                    "the model must answer each line with one line"
                )
            spool.seek(0)
            numbers = positions(job)
            while some := await asyncio.to_thread(_take, spool, numbers):
                yield some

    async def clean_up(self, job: RemoteJob) -> None:
        await self._s3.delete(self._input(job))

    async def clean_results(self, job: RemoteJob) -> None:
        await self._s3.delete_below(self._folder.below(job.tag))

    # -- calls --------------------------------------------------------------------------------------------------------

    def _input(self, job: RemoteJob) -> S3Object:
        return self._folder.below(job.tag).below(INPUT)

    async def _describe(self, job: RemoteJob) -> RemoteJob:
        remote = await self._ask(job)
        state = _STATES.get(remote.TransformJobStatus, "submitted")
        return replace(
            job,
            id=remote.TransformJobArn or job.id,
            state=state,
            remote_state=remote.TransformJobStatus,
            completed=job.rows if remote.TransformJobStatus == "Completed" else 0,
            message=remote.FailureReason or job.message,
        )

    async def _ask(self, job: RemoteJob) -> _Described:
        name = short_name(job.id)
        try:
            reply = await self._service.call("DescribeTransformJob", {"TransformJobName": name})
        except ProviderRefusal as refusal:
            if refusal.reason.startswith("ResourceNotFound") or "could not find" in refusal.message.lower():
                raise JobGone(f"SageMaker has no transform job {name!r}: {refusal.message}") from None
            raise
        return _decoded(reply, _Described)

    def _place(self) -> str:
        location = self._account.argument("s3")
        output = self._parameter("TransformOutput").get("S3OutputPath")
        return location or (str(output) if output else self._account.needed("s3", what="a location for files"))

    def _order(self) -> dict[str, Any]:
        """The part of the order that all jobs share, from the engine's arguments or the connector's parameters."""
        account = self._account
        resources = self._parameter("TransformResources")
        kind = account.argument("instance_type") or resources.get("InstanceType")
        if not kind:
            raise ModelFailed("sagemaker needs an instance_type, such as ml.m5.xlarge", code="missing_argument")
        count = account.argument("instance_count") or resources.get("InstanceCount") or 1
        strategy = account.argument("batch_strategy", "BatchStrategy") or SINGLE
        kind_of_rows = JSON if strategy == SINGLE else JSON_LINES
        given, output = self._parameter("TransformInput"), self._parameter("TransformOutput")
        order: dict[str, Any] = {
            "ModelName": account.argument("ModelName") or self._model.source,
            "TransformResources": resources | {"InstanceType": kind, "InstanceCount": _whole(count, "instance_count")},
            "BatchStrategy": strategy,
            "TransformInput": {
                "ContentType": account.argument("content_type") or given.get("ContentType") or kind_of_rows
            },
            "TransformOutput": {"Accept": account.argument("accept") or output.get("Accept") or kind_of_rows},
        }
        for name, ours in (("MaxConcurrentTransforms", "max_concurrent"), ("MaxPayloadInMB", "max_payload_mb")):
            if (value := account.argument(ours, name)) is not None:
                order[name] = _whole(value, ours)
        return order | {name: value for name in _PARTS if (value := self._parameter(name))}

    def _parameter(self, name: str) -> dict[str, Any]:
        """A connector parameter with a JSON object."""
        connector = self._model.connector
        if connector is None or name not in connector.parameters:
            return {}
        try:
            return msgspec.json.decode(connector.parameters[name], type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise ModelFailed(f"the parameter {name} is not a JSON object: {error}", code="invalid_argument") from None


def name_of(tag: str) -> str:
    """The name of a job at AWS for a tag: the tag itself if AWS allows it, else its digest."""
    return tag if _NAME.fullmatch(tag) else "batchmill-" + hashlib.sha256(tag.encode()).hexdigest()[:40]


def short_name(id: str) -> str:
    """The name at the end of an ARN; a plain name is unchanged."""
    return id.rpartition("/")[2]


def positions(job: RemoteJob) -> Iterator[int]:
    """The numbers of a job's rows, in the order of its upload."""
    return chain.from_iterable(range(first, first + count) for first, count in job.runs)


def _take(spool: IO[bytes], numbers: Iterable[int]) -> list[tuple[int, RowReply]]:
    """The replies of the next rows."""
    return [(number, _reply(line)) for line, number in zip(islice(spool, LINES_MAX), numbers, strict=False)]


def _reply(line: bytes) -> RowReply:
    """A line of the output: JSON as it is, any other text as the value of `response`."""
    line = line.strip()
    try:
        value = msgspec.json.decode(shallow(line))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return RowReply(200, encode({"response": line.decode(errors="replace")}))
    return RowReply(200, line, None, usage_of(value) if isinstance(value, dict) else None)


def _whole(value: Any, name: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ModelFailed(f"{name} must be a whole number, not {value!r}", code="invalid_argument") from None


def _decoded(data: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(shallow(data), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TryAgain(f"SageMaker's reply has an unexpected shape: {error}") from None
