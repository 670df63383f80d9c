"""Rows, live calls and their results."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
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


class EarlierAnswer(Struct, frozen=True, gc=False):
    """An answer that did not fit the job's schema."""

    text: str
    problems: list[str]
    usage: Usage


class LoadedPart(Struct, frozen=True, gc=False):
    """An image, a recording or a document whose bytes are here."""

    type: str  # image/png
    data: str  # its bytes as base64


class FetchedPart(Struct, frozen=True, gc=False, array_like=True):
    """What a URL of a row led to when the row was sent, and what its server said of it."""

    digest: str  # BLAKE3 of the bytes
    etag: str = ""
    last_modified: str = ""


class Row(Struct, gc=False):
    """One row in a worker. `raw` is its canonical JSON object without the line end."""

    position: int  # in the plan
    number: int  # 0..N-1 in the dataset
    raw: bytes
    form: Any  # a wire.rows.forms.Form: how to read `raw` and how to write the result
    lease: Any = None  # a ports.engines.LeaseHandle; an engine returns it unchanged
    custom_id: bytes | None = None  # as JSON; set by the form when it reads the row
    earlier: tuple[EarlierAnswer, ...] = ()  # answers that did not fit the job's schema: it is asked for again
    media: tuple[LoadedPart, ...] | None = None  # of its media columns; set while its request is made
    fetched: tuple[FetchedPart, ...] = ()  # of its URLs, in the order of its parts


class RowBlock(Struct, frozen=True, eq=False):
    """Rows of one lease together, without an object for each: from the feed to an engine.

    `lines` has a line for each row with its JSON object, perhaps between spaces, and ends with a newline.
    """

    lines: bytes
    positions: Sequence[int]  # of each row, in the plan
    numbers: Sequence[int]  # of each row, in the dataset
    form: Any  # as in Row
    lease: Any

    def __len__(self) -> int:
        return len(self.numbers)

    def rows(self) -> list[Row]:
        """The rows one by one."""
        raws = map(bytes.strip, self.lines[:-1].split(b"\n"))
        found = zip(self.positions, self.numbers, raws, strict=True)
        return [Row(position, number, raw, self.form, self.lease) for position, number, raw in found]


class ColumnBlock(Struct, frozen=True, eq=False):
    """Rows of one lease as the columns that an engine asked for."""

    data: bytes | memoryview  # an Arrow stream of one record batch
    positions: Sequence[int]  # of each row, in the plan
    numbers: Sequence[int]  # of each row, in the dataset; ascending
    form: Any  # as in Row
    lease: Any
    read_rows: Callable[[Sequence[int]], Awaitable[list[bytes]]]  # whole rows by number; [] if the input has changed

    def __len__(self) -> int:
        return len(self.numbers)

    async def read(self) -> list[Row]:
        """The rows one by one, with all of their columns; none if the input has changed: then their job pauses."""
        found = zip(self.positions, self.numbers, await self.read_rows(self.numbers), strict=False)
        return [Row(position, number, raw, self.form, self.lease) for position, number, raw in found]


class Request(Struct, frozen=True, gc=False):
    """A row as a call of an OpenAI-style path."""

    url: str  # "/v1/chat/completions"
    body: bytes  # the original JSON object; its `model` may be empty or absent
    custom_id: str | None = None


class RowError(Struct, frozen=True, gc=False):
    """Why a row has no result: a stable code, and a message with the offending value."""

    code: str
    message: str


class ResultBlock(Struct, frozen=True, eq=False):
    """Results of rows of one lease as finished lines of the output file."""

    lines: bytes  # one for each row; each ends with a newline
    positions: Sequence[int]  # of each row, in the plan
    numbers: Sequence[int]  # of each row, in the dataset
    lease: Any  # that of their RowBlock
    usage: Usage = Usage()


class ColumnResultBlock(Struct, frozen=True, eq=False):
    """Results of rows of one lease as columns."""

    columns: bytes  # an Arrow stream of one record batch, with a row for each row
    positions: Sequence[int]  # of each row, in the plan
    numbers: Sequence[int]  # of each row, in the dataset
    lease: Any  # that of their ColumnBlock
    usage: Usage = Usage()


class Outcome(Struct, frozen=True, gc=False):
    """The final result of a row.

    ok:     `body` is the JSON of the reply's body and `error` is None.
    error:  `error` is set; `body` is the JSON of the service's reply, or None without a reply. With a status below 400
            the reply is a result that was not accepted.
    """

    row: Row
    body: bytes | None = None
    error: RowError | None = None
    status: int = 200  # HTTP status of the reply; 0 without a reply
    usage: Usage | None = None
    request_id: str | None = None
    warnings: tuple[str, ...] = ()  # of a result: names of wire.replies.WARNINGS
    answer: bytes | None = None  # of a result of a job with a schema: the JSON that fits it


class LiveRequest(Struct, frozen=True):
    """A live call. It takes precedence over rows of jobs."""

    url: str  # "/v1/chat/completions"
    body: bytes  # the original JSON object
    stream: bool = False  # reply with server-sent events
    form: str = "arguments"  # how a function reads `body`: a name of wire.call_forms
    head: bytes = b""  # what that form needs besides the body
    adapter: str | None = None  # the own name of the adapter that `body` names
    adapter_place: str = ""  # its folder
    project: str = ""  # the project that calls
    is_admitted: bool = False  # the frontend has already applied the rate limit of its model
    request: str = ""  # the id of the HTTP request


class FunctionRequest(Struct, frozen=True, gc=False):
    """A live call of a deployed function, with one or more rows in one body and a single reply."""

    id: int
    form: str  # a name of wire.call_forms: arguments, rows, tensors
    body: bytes  # in a worker, a large one is a memoryview
    head: bytes = b""  # what the form needs besides the body
    timeout_s: float | None = None  # from now on; None: the model's own limit
    project: str = ""  # the project that calls
    request: str = ""  # the id of the HTTP request
    place: tuple[int, int] | None = None  # begin and size of a large body in shared memory, on its way


class BatchTimes(Struct, frozen=True, gc=False):
    """Calls of user code with this batch size, and their total times."""

    batch_size: int
    executions: int
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0


class CallStats(Struct, frozen=True):
    """Totals of the calls of one function. `rows` counts rows of live requests and of jobs."""

    rows: int = 0
    executions: int = 0
    succeeded: int = 0  # requests; the rows of jobs count as one each
    succeeded_ns: int = 0  # from their arrival at the worker to their reply
    failed: int = 0
    failed_ns: int = 0
    queue_ns: int = 0  # waiting time of requests before their rows were called
    batches: list[BatchTimes] = []  # by size
    last_at: float = 0.0  # seconds since the epoch

    def __add__(self, other: CallStats) -> CallStats:
        sizes = {each.batch_size: each for each in self.batches}
        for each in other.batches:
            total = sizes.get(each.batch_size, BatchTimes(each.batch_size, 0))
            sizes[each.batch_size] = BatchTimes(
                each.batch_size,
                total.executions + each.executions,
                total.input_ns + each.input_ns,
                total.infer_ns + each.infer_ns,
                total.output_ns + each.output_ns,
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
    """The head of a reply to a live request. Its body follows in pieces of bytes."""

    status: int
    content_type: str = "application/json"


class AdapterStats(Struct, frozen=True):
    """Totals of the rows and live requests of one adapter in one engine, since the engine started."""

    name: str  # its own name; "other" for all beyond the first 100
    rows: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    hits: int = 0  # rows for which it was loaded already
    loads: int = 0  # times it was loaded
    busy_s: float = 0.0  # with at least one row in flight


class EngineStats(Struct, frozen=True):
    """The current state of an engine, for views."""

    in_flight: int = 0  # rows
    in_flight_limit: int = 0
    note: str = ""  # why it waits, if it does: "starting vLLM"
    live: int = 0  # live requests in flight
    kv_usage: float = 0.0  # 0..1, of an LLM's cache
    cached_share: float | None = None  # 0..1, the share of prompt tokens found in the cache; None: unknown
    adapters: list[AdapterStats] = []
    adapters_loaded: int = 0
