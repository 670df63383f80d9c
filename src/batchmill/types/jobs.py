"""Jobs: their datasets, orders and views, and the shards, leases and outcomes of their ledgers."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from batchmill.types.calls import Usage
from batchmill.types.models import ModelSpec, Price


class DatasetSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Where a job's rows come from."""

    paths: list[str]  # absolute files, in the order in which they count as one dataset
    format: str | None = None  # openai, jsonl, csv, parquet; None: detected from the name and the first row
    copy: bool = False  # copy the file to the job's folder; otherwise it is read in place
    line_bytes_max: int = 16 * 1024 * 1024
    depth_max: int = 128
    rows_max: int = 2**32 - 1  # the number of different row numbers
    unpacked_bytes_max: int = 2**40  # the size of the rows and their index, unpacked and converted
    unpacked_ratio_max: int = 1000  # the same per byte of the files; see datasets.orders.SizeLimits
    download_bytes_max: int = 2**37  # of inputs that are downloaded
    private_hosts: list[str] = []  # that they may be downloaded from: see models.addresses
    # What paths in cells of media columns are relative to; "": the folder of each file; None: cells may hold no paths.
    media_folder: str | None = None
    # "objects", "folder": the files that cells name are copied there for workers that do not see them: see
    # store.media_copies; "": they are read where they are.
    media_copies: str = ""
    media_bytes_max: int = 20 * 1024 * 1024  # of one image, recording or document
    media_row_bytes_max: int = 50 * 1024 * 1024  # of those of one row together


class MediaBounds(Struct, frozen=True):
    """How many bytes the media of rows may have."""

    bytes_max: int = 20 * 1024 * 1024  # of one image, recording or document
    row_bytes_max: int = 50 * 1024 * 1024  # of those of one row together
    copies: str = ""  # the folder of the copies of files, or what the names of their objects begin with


class SealedFile(Struct, frozen=True):
    """A file as it was when it was sealed."""

    path: str  # of an object: its URL
    size_bytes: int
    mtime_ns: int
    inode: int  # 0 for an object
    etag: str = ""  # of an object; another one is another content
    version: str = ""  # of an object in a bucket with versions


class Seal(Struct, frozen=True):
    """A sealed dataset: the facts that do not change once every row has been read. Written as `seal.json`."""

    rows: int
    bytes: int  # of the files as they are read
    digest: str  # BLAKE3 of the BLAKE3 digests of 8 MiB blocks of every source file, in order
    format: str  # openai, jsonl, csv, parquet
    columns: list[str]  # of a table, in order; empty for OpenAI rows
    files: list[SealedFile]  # the files that rows are read from: JSON lines, or Parquet
    sources: list[SealedFile]  # the files that the caller named
    rejected: int = 0  # rows that validation refused
    is_columnar: bool = False  # `files` are the Parquet files of the caller

    @property
    def is_remote(self) -> bool:
        """Whether rows are read from an object store."""
        return any("://" in file.path and not file.path.startswith("/") for file in self.files)


class Problem(Struct, frozen=True):
    """One problem that validation found."""

    code: str
    message: str
    line: int  # 1-based line, or row of a Parquet file
    path: str = ""
    row: int | None = None  # its number, if the line became a row


class Shard(Struct, frozen=True):
    """Plan positions lo <= p < hi, all of model number `model` of the job."""

    number: int
    lo: int
    hi: int
    model: int


class Lease(Struct, frozen=True):
    """The right to record outcomes for a shard. A higher epoch ends all lower ones."""

    job: str
    generation: int
    shard: int
    epoch: int


class SegmentRef(Struct, frozen=True):
    """Durable bytes of a segment: one or more whole blocks of one shard."""

    segment: str
    offset: int
    length: int


class SegmentObject(Struct, frozen=True, array_like=True):
    """An object with bytes of a segment, as it was seen."""

    start: int  # its first byte, counted in the segment
    end: int
    needed_end: int  # nobody reads the bytes from here on
    etag: str | None = None
    version: str | None = None


class SegmentPlace(Struct, frozen=True):
    """Where the segments of a job are, for their readers."""

    folder: str  # of its segment files
    blocks: dict[str, list[tuple[int, bytes]]] = {}  # segment in the database -> (offset, bytes) of its blocks
    store: str = ""  # URL of the object store that holds the files, for a machine that does not see the folder
    objects: dict[str, list[SegmentObject]] = {}  # segment in the store -> its objects, in order


class Commit(Struct, frozen=True):
    """Rows that a worker commits to the ledger. `done` packs the positions: see `store.positions.pack_positions`."""

    lease: Lease
    seq: int
    ref: SegmentRef
    done: bytes
    rows_ok: int
    rows_failed: int
    usage: Usage
    errors: dict[str, int] = {}  # error code -> rows
    samples: dict[str, str] = {}  # error code -> one message
    warnings: dict[str, int] = {}  # of replies that count as results: name in wire.replies.WARNINGS -> replies
    blocks: bytes = b""  # those of `ref`, if it is durable only with the commit
    rows_reused: int = 0  # of rows_ok: their results are those of an earlier job
    misfits: dict[str, list[tuple[int, int]]] = {}  # tag of a RemoteJob -> what is added to its `misfits`


class LedgerReport(Struct, frozen=True):
    """The result of an audit of a job's ledger. `broken` is empty for a sound one."""

    job: str
    rows: int
    rows_done: int
    commits: int
    segments: int
    bytes: int
    adopted: int = 0  # rows that a rebuild found but the ledger did not have
    reopened: int = 0  # rows that the ledger counted but a rebuild could not read: they run again
    damaged: list[str] = []  # what a rebuild could not read
    broken: list[str] = []


class SalvagedTable(Struct, frozen=True):
    """The result for one table of a damaged database."""

    name: str
    rows: int  # that were readable
    from_backup: int = 0  # unreadable rows that a backup had
    is_damaged: bool = False
    from_leaves: int = 0  # readable rows below damaged pages
    rebuilt: int = 0  # rows that were made again from folders, plans and outcomes of jobs


class SalvageReport(Struct, frozen=True):
    """The result of the salvage of a damaged database."""

    is_sound: bool  # no salvage was needed
    tables: list[SalvagedTable] = []
    backup: str | None = None  # the backup that missing rows were taken from
    rebuilt: list[str] = []  # jobs whose ledger was rebuilt; they are paused
    reopened: dict[str, int] = {}  # of these, those with rows whose outcomes are lost, and how many
    reduced: list[str] = []  # ended jobs that keep only their results
    lost: list[str] = []  # small jobs without a record
    failed: list[str] = []  # jobs that could not be rebuilt, and why
    moved: list[str] = []  # files without a record
    damaged: str | None = None  # the folder with the files that were replaced


class Policy(Struct, frozen=True, forbid_unknown_fields=True):
    """How a job runs, apart from what it computes."""

    on_invalid: str = "fail"  # fail, skip
    dedupe: bool = False  # fold identical requests even if the reply is not deterministic
    budget: float | None = None  # USD
    priority: int = 0  # -100..100; jobs with a higher one run first
    deadline: float | None = None  # seconds since the epoch, UTC; unfinished rows do not run after it
    on_engine_failure: str = "pause"  # pause, fail: the state of a job whose engine cannot be started
    reuse: str | None = None  # rows that may take over earlier results: none, deterministic, all; None: as its project


class ReplyRules(Struct, frozen=True, forbid_unknown_fields=True):
    """Which replies of a language model count as results."""

    fail_on: list[str] = []  # names of wire.replies.FLAWS: such replies are errors of their rows


class PromptTemplate(Struct, frozen=True, forbid_unknown_fields=True):
    """A Jinja2 template that makes a prompt of each row of a table."""

    text: str
    name: str = "the template"  # in messages: its file


class MediaColumn(Struct, frozen=True, forbid_unknown_fields=True):
    """A column of a table whose cells are content parts of the user's message."""

    kind: str  # image, audio, document
    column: str


class SchemaVersion(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The version of a deployed class that validates the answers of a job."""

    reference: str  # NAME@BRANCH/NUMBER
    folder: str = ""  # absolute path of its code, which does not change; clients do not see it
    python: str | None = None  # the interpreter of its environment; None: batchmill's own

    @property
    def key(self) -> tuple[str, str, int]:
        """Name, branch and number."""
        name, _, rest = self.reference.partition("@")
        branch, _, number = rest.rpartition("/")
        return name, branch, int(number)


class OutputSchema(Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON Schema that the answers of a language model must fit."""

    document: str  # the schema as JSON
    attempts: int = 2  # how often an answer that does not fit is asked for again
    prefix: str = ""  # of the columns that its fields become
    # FILE.py:NAME of the class that an answer must also fit; its code runs in a process of its own.
    validator: str = ""
    code: str = ""  # sha256 of that file and its imports; of a deployed class, of all its code and its environment
    version: SchemaVersion | None = None  # of a deployed class; None: the file is that of the user of this machine


class RetryChange(Struct, frozen=True, forbid_unknown_fields=True):
    """What a retry changes for the rows that it runs. Omitted: as the job has it."""

    params: dict[str, Any] = {}  # fields of requests, such as max_tokens, instead of those that rows have
    model: str | None = None  # a language model that answers the rows instead
    adapter: str | None = None  # the same for an adapter, of that model or of the job's


class Retried(RetryChange, frozen=True):
    """A retry that changed something."""

    generation: int = 0  # of the job's plan: 1 is the first retry


class Sample(Struct, frozen=True, forbid_unknown_fields=True):
    """Rows of a job that run before its others: the first ones, or with a `seed` so many drawn at random."""

    rows: Annotated[int, Meta(ge=1, le=2**32 - 1)]
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None


class EstimateRange(Struct, frozen=True):
    """An estimate from a sample: 8 of 10 samples are between `low` and `high`. Equal if all rows were read."""

    low: float
    mid: float
    high: float


class Outlook(Struct, frozen=True):
    """What a whole job will have used, as far as the rows tell that have run."""

    rows: int  # that run: without those that share or take over an outcome, and those that validation refused
    ran: int  # of them
    cost: EstimateRange | None  # USD; None: the price is unknown
    input_tokens: EstimateRange | None  # None: the engine counts no tokens
    output_tokens: EstimateRange | None
    time_s_max: float | None  # if no more rows run at once than in the sample; None: a provider decides


class ReuseCount(Struct, frozen=True):
    """How many rows would take over results of earlier jobs."""

    rows: int
    note: str = ""  # if not all earlier jobs were looked at


class JobView(Struct, frozen=True):
    """A job as users and clients see it, derived from committed records only."""

    id: str
    state: str  # a states.JobState
    project: str = "default"
    labels: dict[str, str] = {}
    origin: dict[str, Any] | None = None  # stored by the frontend that submitted the job
    priority: int = 0
    deadline: float | None = None
    reason: str | None = None  # a states.PauseReason, or an error's code
    message: str = ""
    input: list[str] = []
    output: str | None = None
    errors_output: str | None = None  # the error file, once there is one
    added_columns: list[str] = []  # of a table: those that its results may have besides the input's, in their order
    schema: OutputSchema | None = None  # of a table: its fields are columns; not in lists of jobs
    model: str = ""
    routing: list[str] = []  # why models with several routes use the routes that they use, now and before
    created: float = 0.0
    started: float | None = None
    finalizing: float | None = None  # when its results began to be written
    cancelling: float | None = None  # when it was cancelled, or its deadline passed
    finished: float | None = None
    generation: int = 0
    retries: list[Retried] = []  # those that changed something, the oldest first
    sample: Sample | None = None  # the rows after which the job pauses; None: all rows run
    outlook: Outlook | None = None  # of a sample that is paused
    work: str = ""  # equal for jobs that differ in nothing but input and output; "": not known
    rows: int = 0  # rows of the dataset; 0 while unknown
    rows_ok: int = 0
    rows_failed: int = 0
    rows_folded: int = 0  # of rows_ok and rows_failed: rows that share another row's outcome
    reuse_note: str = ""  # why not all earlier jobs were looked at for results
    rows_reused: int = 0  # of rows_ok: rows that took over the result of an earlier job, those of folded rows once
    rows_rejected: int = 0  # of rows_failed: refused by validation
    usage: Usage = Usage()
    cost: float | None = None  # USD; None: the price is unknown
    prices: dict[str, Price] = {}  # of the models that rows use, by name, if they have a price
    errors: dict[str, int] = {}  # code -> rows
    error_samples: dict[str, str] = {}  # code -> one message
    warnings: dict[str, int] = {}  # of rows_ok: name in wire.replies.WARNINGS -> replies, those of folded rows once
    # only while it runs
    elapsed_s: float = 0.0  # running time without pauses
    rows_per_s: float | None = None
    input_tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None
    remaining_s: float | None = None
    in_flight: int = 0
    notes: list[str] = []  # messages of the engines: why something waits
    progress: float | None = None  # 0..1 of the phase before any row runs (validating, planning) or after (finalizing)
    problems: list[Problem] = []  # at most the first 1,000
    problems_total: int = 0


class Once(Struct, frozen=True):
    """The identity of an order, by which a repetition is recognized: the caller's idempotency key, or the exact body.

    A `blind` order has no idempotency key. An identical order is a repetition only until the first reply was delivered.
    With `again_s`, the client marked its request as a retry: then it also repeats an order that was answered up to
    `again_s` ago.
    """

    key: str
    fingerprint: str  # sha256 of the request, as hexadecimal digits
    blind: bool = False
    again_s: float | None = None  # seconds since the first one was accepted
    arrived: float | None = None  # seconds since the epoch; a reply delivered after it was not yet known to its sender


class JobOrder(Struct, frozen=True, forbid_unknown_fields=True):
    """A request for a job. `JobService.submit` makes a JobSpec of it, or finds the job of a repeated order."""

    dataset: DatasetSpec
    models: list[ModelSpec]
    prompt: str | None = None  # the following five as in wire.rows.forms.TableForm
    system: str | None = None
    template: PromptTemplate | None = None  # in the place of `prompt`
    media: list[MediaColumn] = []  # beside the prompt, in this order
    url: str | None = None
    params: dict[str, Any] = {}
    schema: OutputSchema | None = None
    model_column: str | None = None  # of a table: the name of the row's model, and of its adapter
    adapter_column: str | None = None
    constant_prompt: bool = False  # a prompt may name no column, so that all rows make the same request
    sample: Sample | None = None  # run these rows, then pause; the same order without it runs the others
    policy: Policy = Policy()
    replies: ReplyRules = ReplyRules()
    output: str | None = None  # absolute
    together: bool = False  # the output holds failed OpenAI rows too, in the order of the input
    output_format: str = "jsonl"  # of results in the job's folder: jsonl, csv.zst …; of parts: jsonl, csv, parquet
    part_rows: int | None = None  # of each part, if the output is a folder
    endpoint: str | None = None  # the only `url` that OpenAI rows may have
    rows_max: int | None = None  # a larger dataset is refused
    default_model: bool = True  # rows without a model use models[0]; otherwise they are refused
    project: str = "default"
    labels: dict[str, str] = {}  # set by the caller
    origin: dict[str, Any] | None = None  # set by a server's frontend, for its own use: such a job is always a new one
    once: Once | None = None
    restart: bool = False  # start over even if an unfinished job exists
    overwrite: bool = False  # run again even if the job is finished
    update: bool = False  # where its output is out of date, write it anew


class Submitted(Struct, frozen=True):
    """The result of a submission."""

    id: str
    how: str  # started, resumed, joined (it is running already), finished (nothing left to do), repeated


class Amendment(Struct, frozen=True, forbid_unknown_fields=True):
    """Changes of a job. None: unchanged."""

    priority: int | None = None
    deadline: float | None = None
    budget: float | None = None


class JobQuery(Struct, frozen=True):
    """Which jobs to list, newest first. None: no filter."""

    project: str | None = None
    origin: str | None = None  # origin["frontend"] of the jobs
    state: str | None = None
    model: str | None = None  # a model or adapter that its rows use
    since: float | None = None  # seconds since the epoch: created then or later
    after: str | None = None  # the id of the job before the first one
    limit: int | None = None


class Wait(Struct, frozen=True):
    """Why a job is not faster, and which routes it uses, in sentences; empty if there is no reason."""

    job: str
    state: str
    reasons: list[str]
    ahead: int = 0  # jobs that get workers before it
