"""The seam between the engine and the batch API of one provider: what each must be able to do, in its own way.

The engine decides when; a provider only knows how. It keeps nothing between calls but what its `RemoteJob` says.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec
from msgspec import Struct

from batchmill.errors import BatchmillError, InvalidRow
from batchmill.types import ModelSpec, RemoteJob, Request, RowError, Usage
from batchmill.wire.forms import with_model


class BatchLimits(Struct, frozen=True):
    """What one job at the provider may hold, and how its rows are joined in an upload."""

    rows_max: int
    bytes_max: int  # of the upload
    window_s: float  # within which the provider means to be done
    inputs_max: int | None = None  # of all rows together: see Line.inputs
    head: bytes = b""  # before the first line
    between: bytes = b"\n"
    tail: bytes = b"\n"  # after the last


class Line(Struct, frozen=True, gc=False):
    """One row as the provider takes it."""

    data: bytes  # without `BatchLimits.between`
    group: str = ""  # rows of different groups go in different jobs: another URL, another model
    inputs: int = 1  # counted against `BatchLimits.inputs_max`


class Upload(Struct, frozen=True):
    """A file that holds the lines of one job, in the order of `RemoteJob.runs`. All are of one group."""

    path: Path
    group: str
    rows: int
    size_bytes: int


class RowReply(Struct, frozen=True, gc=False):
    """What became of one row at the provider."""

    status: int = 200
    body: bytes | None = None  # the JSON of the reply, on one line
    error: RowError | None = None
    usage: Usage | None = None
    request_id: str | None = None
    is_undone: bool = False  # it was not run (its job expired, the provider was overloaded): it may be sent again
    is_garbled: bool = False  # what came is not readable: it may read better when it is downloaded again


class TryAgain(BatchmillError):
    """The call may succeed later. What it was to bring about may have happened, unless `is_unseen`."""

    code = "try_again"
    retryable = True

    def __init__(self, message: str, *, rest_s: float | None = None, is_unseen: bool = False) -> None:
        super().__init__(message)
        self.rest_s = rest_s  # how long the provider asks to be left alone
        self.is_unseen = is_unseen  # the provider never took it up: throttled, or no connection came about


class JobRefused(BatchmillError):
    """The provider will not run this job, or ended it without having run its rows. The message is the provider's."""

    code = "job_refused"

    def __init__(self, message: str, *, rest_s: float | None = None) -> None:
        super().__init__(message)
        self.rest_s = rest_s  # it may take the same job after so long: too much of ours is queued there


class JobGone(BatchmillError):
    """The provider knows no job of this id."""

    code = "job_gone"


class ProviderApi(Protocol):
    """One provider. Constructed as `Class(model: ModelSpec, connections: Connections)`.

    Rows go by `number`, their position in the plan: `RemoteJob.runs` lists the same numbers, ascending, in the order of
    the lines of the upload. Every method that calls the provider raises TryAgain, AuthRefused or QuotaExhausted;
    each returns the job with what it has learned (see `msgspec.structs.replace`).
    """

    limits: BatchLimits
    arguments: frozenset[str]  # engine arguments that it reads itself; others than these and the engine's are refused

    def encode(self, number: int, request: Request) -> Line:
        """A row as a line of the upload. Raises: InvalidRow for one that this provider cannot take."""

    async def find(self, job: RemoteJob) -> RemoteJob | None:
        """Whether the provider has a job with this `tag`: then with its `id`, and its `input` where it has one.

        A job that only has been uploaded comes back with its `input` and no `id`; None: provably neither is there.
        Where the provider has several jobs of this tag, all but the one that is furthest are cancelled.
        Raises: SubmitUnknown, saying what to check, where the provider cannot be asked.
        """

    async def upload(self, job: RemoteJob, upload: Upload) -> RemoteJob:
        """Bring the file there; the job with its `input`. A provider that takes rows in `create` returns it as it is.

        Raises: JobRefused.
        """

    async def create(self, job: RemoteJob, upload: Upload) -> RemoteJob:
        """Start the job; with its `id`, and state "submitted". Called once for a tag, unless it raises TryAgain.

        Raises: JobRefused; SubmitUnknown where a lost reply leaves open what happened and `find` could not tell.
        """

    async def look(self, job: RemoteJob) -> RemoteJob:
        """How the job is now: state "submitted", "cancelling" or "ended", `remote_state`, `completed`, `failed`.

        Raises: JobGone.
        """

    async def cancel(self, job: RemoteJob) -> RemoteJob:
        """Ask it to end; state "cancelling", or "ended" where it has ended before. Raises: JobGone."""

    def results(self, job: RemoteJob) -> AsyncIterator[list[tuple[int, RowReply]]]:
        """What the provider has of the rows of an ended job, in any order, some hundreds at a time.

        A row that the provider says nothing of is left out. One whose number cannot be read comes as number -1.
        Raises: JobRefused, after the rows it could still tell of, where the job was ended without running the others.
        """

    async def clean_up(self, job: RemoteJob) -> None:
        """Delete what was uploaded for an ended job, where the API can; never its results."""


@runtime_checkable
class CleansResults(Protocol):
    """A provider whose results can be deleted."""

    async def clean_results(self, job: RemoteJob) -> None:
        """Delete the results of a job whose rows all count."""


def row_id(number: int) -> str:
    """A row's name at the provider, where it takes one."""
    return f"r{number}"


def row_number(name: str) -> int:
    """The row of such a name; -1: it is no such name."""
    digits = name[1:]
    return int(digits) if name[:1] == "r" and digits.isascii() and digits.isdecimal() and len(digits) < 12 else -1


class _Head(Struct, gc=False):
    model: str | None = None
    stream: bool | None = None


_head = msgspec.json.Decoder(_Head)
_fields = msgspec.json.Decoder(dict[str, Any])


def remote_name(model: ModelSpec, named: str | None) -> str:
    """The provider's name for the model that a row names: nothing and batchmill's own name mean `source`."""
    own = model.name if model.name not in model.adapters else model.source
    return model.source if not named or named in (own, model.alias) else named


def addressed(body: bytes, model: ModelSpec) -> bytes:
    """The body as it is, but for the model's name. Raises: InvalidRow for a row that wants a stream."""
    head = _head.decode(body)
    _refuse_stream(head.stream)
    name = remote_name(model, head.model)
    return body if name == head.model else with_model(body, name)


def fields_of(body: bytes, model: ModelSpec) -> dict[str, Any]:
    """The members of a body, with the provider's name for the model. Raises: InvalidRow as `addressed`."""
    fields = _fields.decode(body)
    named = fields.get("model")
    _refuse_stream(fields.get("stream"))
    return fields | {"model": remote_name(model, named if isinstance(named, str) else None)}


def _refuse_stream(stream: Any) -> None:
    if stream:
        raise InvalidRow("a row is answered in one piece: leave `stream` out", code="unsupported_parameter")
