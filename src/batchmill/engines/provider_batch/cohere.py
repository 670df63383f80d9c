"""Cohere's embed jobs: texts in a dataset, vectors in another.

Source: Cohere's API reference, "Datasets" and "Embed Jobs".
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from itertools import chain, islice
from typing import IO, Any
from urllib.parse import quote, urlencode

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchmill.engines import clock
from batchmill.engines.connections import Connections, FileRange
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
    fields_of,
    row_error,
    row_id,
    row_number,
)
from batchmill.engines.provider_batch.settings import Access, read_limits, text
from batchmill.errors import InvalidRow, RouteFailed
from batchmill.optional import require
from batchmill.types import ModelSpec, RemoteJob, Request
from batchmill.wire.json_bytes import encode, shallow
from batchmill.wire.rows.forms import EMBEDDINGS

AVRO_READER = "batchmill.engines.provider_batch.cohere_avro:read"
AVRO = b"Obj\x01"
RECORDS_MAX = 200  # yielded at a time; one may be a vector of thousands of numbers
PART_BYTES_MAX = 16 * 1024**3

_object = msgspec.json.Decoder(dict[str, Any])
Records = Iterator[dict[str, Any]]


async def records(pieces: AsyncIterator[bytes]) -> AsyncIterator[list[dict[str, Any]]]:
    """The records of a part, some hundreds at a time. The part is on disk, not in memory.

    Raises: TryAgain for a part that cannot be read; RouteFailed where it is Avro and fastavro is not installed.
    """
    with tempfile.TemporaryFile() as file:
        size = 0
        async for piece in pieces:
            size += len(piece)
            if size > PART_BYTES_MAX:
                raise RouteFailed(f"a part of the results is larger than {PART_BYTES_MAX // 2**30} GiB")
            await asyncio.to_thread(file.write, piece)
        file.seek(0)
        is_avro = file.read(len(AVRO)) == AVRO
        file.seek(0)
        records = require(AVRO_READER, "reading Cohere's results", RouteFailed)(file) if is_avro else _json_lines(file)
        while some := await asyncio.to_thread(_take, records):
            yield some


def _take(records: Records) -> list[dict[str, Any]]:
    try:
        return list(islice(records, RECORDS_MAX))
    except (ValueError, EOFError, IndexError, KeyError, TypeError, msgspec.MsgspecError) as error:
        raise TryAgain(f"a part of the results cannot be read: {error or type(error).__name__}") from None


def _json_lines(file: IO[bytes]) -> Records:
    for line in file:
        if line.strip():
            yield _object.decode(shallow(line))


INPUT_TYPES = ("search_document", "search_query", "classification", "clustering")
TRUNCATE = ("START", "END")
EMBEDDING_TYPES = ("float", "int8", "uint8", "binary", "ubinary")
VALIDATION_POLL_S = 2.0  # between two polls of a dataset that Cohere validates
PAGE, PAGES_MAX = 100, 50
BOUNDARY = "end-of-part-of-a-batchmill-upload"

_STATES = {"processing": "submitted", "cancelling": "cancelling"} | dict.fromkeys(
    ("complete", "cancelled", "failed"), "ended"
)
_RANKS = {"ended": 2, "submitted": 1, "cancelling": 0}
_FIELDS = frozenset({"model", "input", "input_type", "truncate", "encoding_format"})


class _Job(Struct):
    job_id: str
    status: str = ""
    name: str | None = None
    model: str = ""
    input_dataset_id: str | None = None
    output_dataset_id: str | None = None


class _Jobs(Struct):
    embed_jobs: list[_Job] = []


class _Part(Struct):
    url: str
    num_rows: int | None = None


class _Dataset(Struct):
    id: str
    name: str = ""
    validation_status: str = ""
    validation_error: str | None = None
    dataset_parts: list[_Part] = []


class _Held(Struct):
    dataset: _Dataset


class _Datasets(Struct):
    datasets: list[_Dataset] = []


class CohereBatches:
    """Engine arguments: `input_type` (search_document), `truncate` (END), `embedding_type` (float)."""

    arguments = frozenset({"input_type", "truncate", "embedding_type"})

    def __init__(self, model: ModelSpec, connections: Connections) -> None:
        self.limits = read_limits(model)
        self._model = model
        self._input_type = text(model, "input_type", INPUT_TYPES[0])
        self._truncate = text(model, "truncate", "END")
        self._type = text(model, "embedding_type", EMBEDDING_TYPES[0])
        self._access = Access(model)
        base = self._access.base_url
        for end in ("/embed-jobs", "/v1", "/v2"):
            base = base.removesuffix(end)
        self._base = f"{base}/v1"
        self._calls = ProviderClient(connections, self._sign, renew=self._access.renew)
        self._open = ProviderClient(connections, _unsigned)  # for files, whose URLs are signed

    async def _sign(self, out: Out) -> SignedCall:
        headers = {**self._access.headers(), "Accept": "application/json", **out.headers}
        return SignedCall(replace(out, headers=headers), self._access.secrets)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def encode(self, number: int, request: Request) -> ProviderRow:
        if request.url != EMBEDDINGS:
            raise InvalidRow(
                f"`url` is {request.url[:100]!r}: rows of Cohere's embed jobs go to {EMBEDDINGS}", code="invalid_url"
            )
        fields = fields_of(request.body, self._model)
        for name, value in fields.items():
            if name not in _FIELDS and value is not None:
                raise InvalidRow(
                    f"`{name[:100]}` is not supported by Cohere's embed jobs", code="unsupported_parameter"
                )
        if fields.get("encoding_format") not in (None, "float"):
            raise InvalidRow(
                "`encoding_format` must be float: Cohere's embed jobs give numbers", code="unsupported_parameter"
            )
        kind = _one_of(fields.get("input_type") or self._input_type, INPUT_TYPES, "input_type")
        truncate = _one_of(fields.get("truncate") or self._truncate, TRUNCATE, "truncate")
        data = b'{"id":"' + row_id(number).encode() + b'","text":' + encode(_text_of(fields.get("input"))) + b"}"
        return ProviderRow(data, f"{fields['model']} {kind} {truncate}")

    # -- jobs ---------------------------------------------------------------------------------------------------------

    async def find(self, job: RemoteJob) -> RemoteJob | None:
        jobs = (await self._calls.call("GET", f"{self._base}/embed-jobs")).read(_Jobs).embed_jobs
        matching = [_updated(job, each) for each in jobs if each.name == job.tag]
        if matching:
            matching.sort(key=lambda each: _RANKS[each.state])
            for further in matching[:-1]:
                if further.state == "submitted":
                    await self.cancel(further)
            return matching[-1]
        dataset = await self._find_dataset(job.tag)
        return None if dataset is None else replace(job, input=dataset.id)

    async def upload(self, job: RemoteJob, upload: Upload) -> RemoteJob:
        query = urlencode({"name": job.tag, "type": "embed-input", "keep_fields": "id"})
        head = (
            f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="data"; filename="{job.tag}.jsonl"\r\n'
            "Content-Type: application/jsonl\r\n\r\n"
        ).encode()
        parts = [head, FileRange(upload.path, upload.size_bytes), f"\r\n--{BOUNDARY}--\r\n".encode()]
        content_type = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
        out = Out("POST", f"{self._base}/datasets?{query}", headers=content_type, parts=parts)
        try:
            answer = await self._calls.send(out)
        except ProviderRefusal as refusal:
            raise JobRefused(refusal.message) from None
        return replace(job, input=answer.read(_Dataset).id)

    async def create(self, job: RemoteJob, upload: Upload) -> RemoteJob:
        await self._check_valid(job)
        model, kind, truncate = upload.group.rsplit(" ", 2)
        order = {
            "model": model,
            "dataset_id": job.input,
            "input_type": kind,
            "name": job.tag,
            "embedding_types": [self._type],
            "truncate": truncate,
        }
        content_type = {"Content-Type": "application/json"}
        try:
            answer = await self._calls.call("POST", f"{self._base}/embed-jobs", encode(order), headers=content_type)
        except ProviderRefusal as refusal:
            raise JobRefused(refusal.message) from None
        id = answer.read(_Job).job_id
        return replace(job, id=id, state="submitted", remote_state="processing", submitted=clock.now())

    async def refresh(self, job: RemoteJob) -> RemoteJob:
        return _updated(job, await self._ask(job))

    async def cancel(self, job: RemoteJob) -> RemoteJob:
        try:
            await self._calls.call("POST", self._job_url(job, "/cancel"), b"")
        except ProviderRefusal:  # a job that has ended cannot be cancelled; poll its state
            return await self.refresh(job)
        now = await self.refresh(job)
        return now if now.state == "ended" else replace(now, state="cancelling")

    async def results(self, job: RemoteJob) -> AsyncIterator[list[tuple[int, RowReply]]]:
        remote = await self._ask(job)
        if remote.status != "complete" or not remote.output_dataset_id:
            raise JobRefused(f"the embed job {job.id} is {remote.status} and has no results for some of its rows")
        parts = (await self._dataset(remote.output_dataset_id)).dataset_parts
        counts = [part.num_rows for part in parts]
        # Without the texts' ids, the order assigns vectors to rows if no vector is missing.
        is_whole = all(type(count) is int for count in counts) and sum(filter(None, counts)) == job.rows
        order = chain.from_iterable(range(first, first + count) for first, count in job.runs) if is_whole else None
        for part in parts:
            async for some in records(self._open.pieces(part.url)):
                yield [self._read(record, remote.model, order) for record in some]

    async def clean_up(self, job: RemoteJob) -> None:
        if job.input:
            await self._delete(job.input)

    async def clean_results(self, job: RemoteJob) -> None:
        output = (await self._ask(job)).output_dataset_id
        if output:
            await self._delete(output)

    # -- calls --------------------------------------------------------------------------------------------------------

    def _job_url(self, job: RemoteJob, path: str = "") -> str:
        return f"{self._base}/embed-jobs/{quote(job.id, safe='')}{path}"

    async def _ask(self, job: RemoteJob) -> _Job:
        try:
            return (await self._calls.call("GET", self._job_url(job))).read(_Job)
        except ProviderRefusal as refusal:
            if refusal.status == 404:
                raise JobGone(f"Cohere has no embed job {job.id}: {refusal.message}") from None
            raise

    async def _dataset(self, id: str) -> _Dataset:
        answer: ProviderReply = await self._calls.call("GET", f"{self._base}/datasets/{quote(id, safe='')}")
        return answer.read(_Held).dataset

    async def _delete(self, dataset: str) -> None:
        try:
            await self._calls.call("DELETE", f"{self._base}/datasets/{quote(dataset, safe='')}")
        except ProviderRefusal as refusal:
            if refusal.status != 404:  # it is already deleted
                raise

    async def _find_dataset(self, name: str) -> _Dataset | None:
        for page in range(PAGES_MAX):
            query = urlencode({"datasetType": "embed-input", "limit": PAGE, "offset": page * PAGE})
            datasets = (await self._calls.call("GET", f"{self._base}/datasets?{query}")).read(_Datasets).datasets
            for each in datasets:
                if each.name == name:
                    return each
            if len(datasets) < PAGE:
                return None
        return None  # at worst an unused dataset remains, which costs nothing

    async def _check_valid(self, job: RemoteJob) -> None:
        """Raises: TryAgain while Cohere validates the texts, JobRefused if they are invalid."""
        dataset = await self._dataset(job.input)
        status = dataset.validation_status
        if status == "failed":
            raise JobRefused(f"the dataset {dataset.id} is not valid: {dataset.validation_error}")
        if status not in ("validated", "skipped"):
            text = f"the dataset {dataset.id} is still being validated: {status}"
            raise TryAgain(text, retry_after_s=VALIDATION_POLL_S, is_unseen=True)

    def _read(self, record: dict[str, Any], model: str, order: Any) -> tuple[int, RowReply]:
        name = record.get("id")
        if isinstance(name, str):
            number = row_number(name)
        else:
            number = -1 if order is None else next(order, -1)
        vector = _vector(record, self._type)
        if vector is None:
            error = row_error("bad_response", f"Cohere's result has no {self._type} vector")
            return number, RowReply(0, None, error, is_garbled=True)
        reply = {
            "object": "list",
            "data": [{"object": "embedding", "index": 0, "embedding": vector}],
            "model": model,
        }
        return number, RowReply(200, encode(reply))


async def _unsigned(out: Out) -> SignedCall:
    return SignedCall(out)


def _updated(job: RemoteJob, remote: _Job) -> RemoteJob:
    return replace(
        job,
        id=remote.job_id,
        input=remote.input_dataset_id or job.input,
        state=_STATES.get(remote.status, "submitted"),
        remote_state=remote.status,
        completed=job.rows if remote.status == "complete" else 0,
    )


def _text_of(value: Any) -> str:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, str) and value:
        return value
    raise InvalidRow(
        "`input` of a row for Cohere's embed jobs is one text: write a row for each of several", code="invalid_row"
    )


def _one_of(value: Any, allowed: tuple[str, ...], name: str) -> str:
    if value not in allowed:
        raise InvalidRow(f"`{name}` is {str(value)[:100]!r}, and not one of {', '.join(allowed)}", code="invalid_row")
    return str(value)


def _vector(record: dict[str, Any], kind: str) -> list[Any] | None:
    """The vector of a type from `embeddings`, which is a plain list in older results."""
    vector = record.get("embeddings", record.get("embedding"))
    if isinstance(vector, dict):
        vector = vector.get(kind, vector.get(f"{kind}_"))
    if isinstance(vector, list) and len(vector) == 1 and isinstance(vector[0], list):
        vector = vector[0]
    return vector if isinstance(vector, list) and vector and not isinstance(vector[0], list) else None
