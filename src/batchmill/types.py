"""The nouns of batchmill: frozen structs that cross module borders, and nothing that acts."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from msgspec import Struct, field


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


class Price(Struct, frozen=True, forbid_unknown_fields=True):
    """USD per million tokens. `cached` is the price of an input token that was cached; None: as `input`."""

    input: float = 0.0
    cached: float | None = None
    output: float = 0.0

    def cost(self, usage: Usage) -> float:
        """USD for `usage`."""
        cached = self.input if self.cached is None else self.cached
        fresh = usage.input_tokens - usage.cached_tokens
        return (fresh * self.input + usage.cached_tokens * cached + usage.output_tokens * self.output) / 1e6


class Limits(Struct, frozen=True, forbid_unknown_fields=True):
    """What a service or a worker may be asked for. None: no limit of ours."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    in_flight_max: int | None = None  # rows sent and not yet answered, per worker
    attempts_max: int = 5  # calls for one row, the first included; throttled ones do not count
    connect_timeout_s: float = 5.0
    attempt_timeout_s: float = 600.0  # one call, from the first byte sent to the last received
    memory_bytes: int | None = None  # address space of one worker


class Tensor(Struct, frozen=True, forbid_unknown_fields=True):
    """One input or output of a typed function."""

    name: str
    datatype: str | None = None  # of the Open Inference Protocol, or STRING: BYTES that are UTF-8; None: any JSON value
    shape: list[int] = field(default_factory=lambda: [1])  # [1]: one value, not a list; -1: any length
    required: bool = True
    example: Any = None  # JSON; None: there is none
    is_array: bool = False  # the function takes (returns) a numpy array


class Interface(Struct, frozen=True, forbid_unknown_fields=True):
    """What a function takes and returns, as its code or its schema says it."""

    inputs: list[Tensor] = []  # in the order of the function's own parameters
    outputs: list[Tensor] | None = None  # None: whatever it returns
    calls: str = "row"  # row: called for each; list: for many, a list for each parameter; frame: for many, a data frame
    takes: str = "arguments"  # arguments: by name or position; dict: one dict (Inferless); rows: a list of dicts
    has_schema: bool = False  # inputs are checked against it; otherwise types are what the hints say, and a hint
    takes_more: bool = False  # further arguments by any name
    is_async: bool = False
    streams: bool = False  # it is a generator, or sends its events itself
    batch_size: int = 0  # rows that go together in one call, as it was started; 0: not known
    batch_window_s: float = 0.0  # how long an idle worker waits for them
    summary: str = ""  # the first line of its docstring


class FunctionSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A version of a function as it was deployed: its code, and how it is called in a process of its own."""

    version: str  # "main/3"
    folder: str  # absolute: holds its code, and nothing writes there any more; `source` is relative to it
    digest: str  # sha256 of the code and of the environment
    interface: Interface = Interface()
    batch_size: int = 0  # rows of live requests and jobs that go together in one call; 0: as the function is marked
    batch_window_s: float = 0.0  # how long an idle worker waits for a batch to fill
    frame_columns: list[str] = []  # of a data-frame function
    is_idempotent: bool = False  # a call whose worker died may be made again
    environment: dict[str, str] = {}  # variables
    secrets: dict[str, str] = {}  # variable -> "env:NAME" or "file:PATH"
    gpus: int = 0  # of each worker
    received_shapes: bool = False  # a tensor of one element is a single value, whatever the schema says (Inferless)

    @property
    def number(self) -> str:
        """Which version of its branch it is: "3"."""
        return self.version.rpartition("/")[2]


class ModelSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A name that rows can be sent to, as the job saw it when it was submitted."""

    name: str
    engine: str  # a name of the engine table: function, function_process (deployed), llm (vllm), http (openai)
    source: str  # what the engine loads: FILE.py:NAME, a model directory or id, a remote model name
    adapters: dict[str, str] = {}  # name -> path or id
    base_url: str | None = None
    api_key: str | None = None  # "env:NAME" or "file:PATH"; a secret itself never lies in a spec
    engine_args: dict[str, str | int | float | bool | None] = {}  # flags of the engine, as its command line has them
    python: str | None = None  # interpreter of the environment the engine lives in; None: found
    workers: int = 1  # processes (function), replicas (llm)
    price: Price | None = None
    limits: Limits = Limits()
    allowed: list[str] | None = None  # of the model's own name and its adapters', those that rows may use; None: all
    function: FunctionSpec | None = None  # of the engine function_process

    @property
    def is_function(self) -> bool:
        """It calls Python code, of this installation or of a deployed version: not a language model."""
        return self.engine in ("function", "function_process")

    def targets(self) -> dict[str, str | None]:
        """Every value `body.model` may have for this model -> the adapter it means (None: the base)."""
        if self.function is not None and self.allowed is not None:
            return dict.fromkeys(self.allowed)  # the names that this version goes by: NAME, NAME@3, NAME@prod
        names: dict[str, str | None] = {self.name: None, self.source: None}
        names |= {adapter: adapter for adapter in self.adapters}
        return names if self.allowed is None else {name: names[name] for name in self.allowed}


class Row(Struct, gc=False):
    """One request on its way through a worker. `raw` is its canonical JSON object without the line end."""

    position: int  # place in the plan
    number: int  # 0..N-1 in the dataset
    raw: bytes
    form: Any  # a wire.forms.Form: how to read `raw` and how to write the result
    lease: Any = None  # the worker's own handle; an engine hands it back untouched
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


class Ask(Struct, frozen=True, gc=False):
    """A call of a deployed function that somebody waits for: one row or many in one body, answered in one piece."""

    id: int
    form: str  # a name of wire.call_forms: arguments, rows, tensors
    body: bytes
    head: bytes = b""  # what the form needs beside the body
    timeout_s: float | None = None  # from now on; None: the model's own limit


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


class EngineStats(Struct, frozen=True):
    """What an engine is doing now, for people who look."""

    in_flight: int = 0  # rows
    in_flight_limit: int = 0
    note: str = ""  # why it waits, if it does: "starting vLLM", "the service asked for 12 s of rest"
    live: int = 0  # live requests in flight
    kv_usage: float = 0.0  # 0..1, of an LLM's cache
    cached_share: float | None = None  # 0..1, prompt tokens that were found in the cache; None: not known


class Shard(Struct, frozen=True):
    """Plan positions lo <= p < hi, all of model number `model` of the job."""

    number: int
    lo: int
    hi: int
    model: int


class Lease(Struct, frozen=True):
    """The right to record outcomes for a shard; a higher epoch ends every lower one."""

    job: str
    generation: int
    shard: int
    epoch: int


class SegmentRef(Struct, frozen=True):
    """Bytes of a segment that are durable: one or more whole blocks of one shard."""

    segment: str
    offset: int
    length: int


class Commit(Struct, frozen=True):
    """What a worker asks the ledger to count. `done` packs the positions: see `store.segments.pack_positions`."""

    lease: Lease
    seq: int
    ref: SegmentRef
    done: bytes
    rows_ok: int
    rows_failed: int
    usage: Usage
    errors: dict[str, int] = {}  # error code -> rows
    samples: dict[str, str] = {}  # error code -> one message


class DatasetSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Where a job's rows come from."""

    paths: list[str]  # absolute files, in the order in which they count as one dataset
    format: str | None = None  # openai, jsonl, csv, parquet; None: seen from the name and the first row
    copy: bool = False  # keep a copy of the file with the job; otherwise it is used where it lies
    line_bytes_max: int = 16 * 1024 * 1024
    depth_max: int = 128


class SealedFile(Struct, frozen=True):
    """A file as it was when it was sealed."""

    path: str
    size_bytes: int
    mtime_ns: int
    inode: int


class Seal(Struct, frozen=True):
    """A sealed dataset: what never changes once every row has been read. Written as `seal.json`."""

    rows: int
    bytes: int  # of the files as they are read
    sha256: str  # over the sha256 digests of 8 MiB blocks of every source file, in order
    format: str  # openai, jsonl, csv, parquet
    columns: list[str]  # of a table, in order; empty for OpenAI rows
    files: list[SealedFile]  # what the rows' bytes are read from
    sources: list[SealedFile]  # what the caller named
    rejected: int = 0  # rows that validation refused


class Problem(Struct, frozen=True):
    """One thing that validation found."""

    code: str
    message: str
    line: int  # 1-based line, or row of a Parquet file
    path: str = ""
    row: int | None = None  # its number, where the line became a row


class Policy(Struct, frozen=True, forbid_unknown_fields=True):
    """How a job is to be run, apart from what it computes."""

    on_invalid: str = "fail"  # fail, skip
    dedupe: bool = False  # fold identical requests even where the answer is not deterministic
    budget: float | None = None  # USD
    priority: int = 0  # -100..100; jobs of a higher one go first
    deadline: float | None = None  # seconds since the epoch, UTC; what is not finished by then never runs
    on_engine_failure: str = "pause"  # pause, fail: what becomes of a job whose engine cannot be started


class JobView(Struct, frozen=True):
    """A job as people and clients see it: derived from committed records only."""

    id: str
    state: str  # a states.JobState
    project: str = "default"
    labels: dict[str, str] = {}
    origin: dict[str, Any] | None = None  # what the door that took the job keeps with it
    priority: int = 0
    deadline: float | None = None
    reason: str | None = None  # a states.PauseReason, or an error's code
    message: str = ""
    input: list[str] = []
    output: str | None = None
    errors_output: str | None = None  # the error file, once there is one
    model: str = ""
    created: float = 0.0
    started: float | None = None
    finalizing: float | None = None  # when its results began to be written
    cancelling: float | None = None  # when it was asked to end early, or its deadline passed
    finished: float | None = None
    generation: int = 0
    rows: int = 0  # N of the dataset; 0 while it is not known
    rows_ok: int = 0
    rows_failed: int = 0
    rows_folded: int = 0  # of rows_ok and rows_failed: share another row's outcome
    rows_rejected: int = 0  # of rows_failed: refused by validation
    usage: Usage = Usage()
    cost: float | None = None  # USD; None: no price is known
    errors: dict[str, int] = {}  # code -> rows
    error_samples: dict[str, str] = {}  # code -> one message
    # only while it runs
    elapsed_s: float = 0.0  # time spent running, pauses left out
    rows_per_s: float | None = None
    input_tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None
    remaining_s: float | None = None
    in_flight: int = 0
    notes: list[str] = []  # what the engines say: why something waits
    progress: float | None = None  # 0..1 of the phase before any row runs (validating, planning) or after (finalizing)
    problems: list[Problem] = []  # at most the first 1,000
    problems_total: int = 0


class Once(Struct, frozen=True):
    """How an order that arrives again is known: by the caller's own key, or by being the same to the byte.

    A `blind` one has no key of the caller's: it is the same order only until its first reply has been delivered. With
    `again_s` its client says that it has asked before: it is then also the order that was answered less long ago.
    """

    key: str
    fingerprint: str  # sha256 of what was asked, as hexadecimal digits
    blind: bool = False
    again_s: float | None = None  # seconds since the first one was taken
    arrived: float | None = None  # seconds since the epoch; who sent it had no reply that was delivered later


class JobOrder(Struct, frozen=True, forbid_unknown_fields=True):
    """What a caller asks for. `JobService.submit` turns it into a JobSpec, or finds the job it already is."""

    dataset: DatasetSpec
    models: list[ModelSpec]
    prompt: str | None = None  # the following four as in wire.forms.TableForm
    system: str | None = None
    url: str | None = None
    params: dict[str, Any] = {}
    policy: Policy = Policy()
    output: str | None = None  # absolute
    output_format: str = "jsonl"  # of results that stay with the job: jsonl, csv, parquet, jsonl.gz, csv.zst …
    endpoint: str | None = None  # the one `url` that OpenAI rows may have
    rows_max: int | None = None  # a dataset with more is refused
    default_model: bool = True  # rows that name no model go to models[0]; otherwise they are refused
    project: str = "default"
    labels: dict[str, str] = {}  # the caller's own words about the job
    origin: dict[str, Any] | None = None  # set by a server's door, for its own use: such a job is always a new one
    once: Once | None = None
    restart: bool = False  # start over although an unfinished job exists
    overwrite: bool = False  # run again although the job is finished


class Submitted(Struct, frozen=True):
    """What became of an order."""

    id: str
    how: str  # started, resumed, joined (it is running already), finished (nothing left to do), repeated


class Amendment(Struct, frozen=True, forbid_unknown_fields=True):
    """What may be changed of a job that has not ended. None: as it is."""

    priority: int | None = None
    deadline: float | None = None
    budget: float | None = None


class JobQuery(Struct, frozen=True):
    """Which jobs to list, the newest first. None: no restriction."""

    project: str | None = None
    origin: str | None = None  # origin["door"] of those wanted
    after: str | None = None  # the id of the job before the first one wanted
    limit: int | None = None


class Wait(Struct, frozen=True):
    """Why a job is not going faster than it does, in sentences; empty for one that has what it can use."""

    job: str
    state: str
    reasons: list[str]
    ahead: int = 0  # jobs that get workers before it


class Scope(StrEnum):
    """What a key may be used for. Each holds those before it."""

    READ = "read"  # look at files, jobs, results and models
    SUBMIT = "submit"  # upload, run, steer one's own jobs, call models
    ADMIN = "admin"  # keys, webhooks, and everything of every project's server


class Caller(Struct, frozen=True):
    """Who is asking: a project by one of its keys, or anybody on this machine where there are no keys."""

    project: str
    scope: Scope
    key: str | None = None  # its public id
    models: frozenset[str] | None = None  # names it may use; None: all that the project may
    requests_per_minute: int | None = None

    def may(self, scope: Scope) -> bool:
        order = list(Scope)
        return order.index(self.scope) >= order.index(scope)


class LedgerReport(Struct, frozen=True):
    """What an audit of a job's ledger found. `broken` is empty for a sound one."""

    job: str
    rows: int
    rows_done: int
    commits: int
    segments: int
    bytes: int
    adopted: int = 0  # rows that a rebuild found and the ledger did not know
    reopened: int = 0  # rows that the ledger counted and a rebuild could not read: they run again
    damaged: list[str] = []  # what a rebuild could not read
    broken: list[str] = []
