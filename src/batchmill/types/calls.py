"""Rows, calls that somebody waits for, and what becomes of them."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class Usage(Struct, frozen=True, gc=False):
    """Tokens of one row, or summed over many. `input_tokens` includes `cached_tokens`."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens + other.input_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
        )


class Row(Struct, gc=False):
    """One request on its way through a worker. `raw` is its canonical JSON object without the line end."""

    position: int  # place in the plan
    number: int  # 0..N-1 in the dataset
    raw: bytes
    form: Any  # a wire.forms.Form: how to read `raw` and how to write the result
    lease: Any = None  # a ports.LeaseHandle; an engine hands it back untouched
    custom_id: bytes | None = None  # as JSON; the form leaves it here when it has read it


class Request(Struct, frozen=True, gc=False):
    """A row read as a call of an OpenAI-style path."""

    url: str  # "/v1/chat/completions"
    body: bytes  # the JSON object as it was written; its `model` may be empty or absent
    custom_id: str | None = None


class RowError(Struct, frozen=True, gc=False):
    """Why a row has no result: a stable code and a sentence with the offending value."""

    code: str
    message: str


class Outcome(Struct, frozen=True, gc=False):
    """The one terminal result of a row.

    ok:     `body` is the JSON of the reply's body and `error` is None.
    error:  `error` is set; `body` is the JSON a service replied with, or None where no reply came.
    """

    row: Row
    body: bytes | None = None
    error: RowError | None = None
    status: int = 200  # HTTP status of the reply, or 0 where none came
    usage: Usage | None = None
    request_id: str | None = None


class LiveRequest(Struct, frozen=True):
    """A call that somebody waits for; it goes ahead of every row."""

    url: str  # "/v1/chat/completions"
    body: bytes  # the JSON object as it came
    stream: bool = False  # answer in pieces, as server-sent events
    form: str = "arguments"  # how a function reads `body`: a name of wire.call_forms
    head: bytes = b""  # what that form needs beside the body
    adapter: str | None = None  # the own name of the adapter that `body` asks for, and
    adapter_place: str = ""  # where it lies
    project: str = ""  # whose call it is
    is_admitted: bool = False  # the rate that its model sets was kept where it came in
    request: str = ""  # the id of the request that it answers


class FunctionRequest(Struct, frozen=True, gc=False):
    """A call of a deployed function that somebody waits for: one row or many in one body, answered in one piece."""

    id: int
    form: str  # a name of wire.call_forms: arguments, rows, tensors
    body: bytes
    head: bytes = b""  # what the form needs beside the body
    timeout_s: float | None = None  # from now on; None: the model's own limit
    project: str = ""  # whose call it is
    request: str = ""  # the id of the request that it answers


class BatchTimes(Struct, frozen=True, gc=False):
    """Calls of user code with this many rows in each, and what they took, summed."""

    batch_size: int
    executions: int
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0


class CallStats(Struct, frozen=True):
    """What became of the calls of one function. Sums; `rows` counts rows, of live requests and of jobs."""

    rows: int = 0
    executions: int = 0
    succeeded: int = 0  # requests; the rows of jobs count as one each
    succeeded_ns: int = 0  # from their arrival at the worker to their answer
    failed: int = 0
    failed_ns: int = 0
    queue_ns: int = 0  # that requests waited before their rows were called
    batches: list[BatchTimes] = []  # by size
    last_at: float = 0.0  # seconds since the epoch

    def __add__(self, other: CallStats) -> CallStats:
        sizes = {each.batch_size: each for each in self.batches}
        for each in other.batches:
            had = sizes.get(each.batch_size, BatchTimes(each.batch_size, 0))
            sizes[each.batch_size] = BatchTimes(
                each.batch_size,
                had.executions + each.executions,
                had.input_ns + each.input_ns,
                had.infer_ns + each.infer_ns,
                had.output_ns + each.output_ns,
            )
        return CallStats(
            self.rows + other.rows,
            self.executions + other.executions,
            self.succeeded + other.succeeded,
            self.succeeded_ns + other.succeeded_ns,
            self.failed + other.failed,
            self.failed_ns + other.failed_ns,
            self.queue_ns + other.queue_ns,
            [sizes[size] for size in sorted(sizes)],
            max(self.last_at, other.last_at),
        )


class LiveHead(Struct, frozen=True):
    """How the answer to a live request begins; its body follows in pieces of bytes."""

    status: int
    content_type: str = "application/json"


class AdapterStats(Struct, frozen=True):
    """What became of the rows and live requests of one adapter in one engine, since it started. Sums."""

    name: str  # its own name; "other" sums those beyond the first 100
    rows: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    hits: int = 0  # rows that found it in the engine
    loads: int = 0  # times it was put there
    busy_s: float = 0.0  # while at least one row of it was in flight


class EngineStats(Struct, frozen=True):
    """What an engine is doing now, for people who look."""

    in_flight: int = 0  # rows
    in_flight_limit: int = 0
    note: str = ""  # why it waits, if it does: "starting vLLM", "the service asked for 12 s of rest"
    live: int = 0  # live requests in flight
    kv_usage: float = 0.0  # 0..1, of an LLM's cache
    cached_share: float | None = None  # 0..1, prompt tokens that were found in the cache; None: not known
    adapters: list[AdapterStats] = []
    adapters_loaded: int = 0
