"""What batchmill's own API and its clients say to each other, besides the nouns of `types`. JSON, under PREFIX."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from batchmill.states import JobState
from batchmill.types import Interface, JobView, Price, Problem, RemoteJob, Scope, Seal


class SealReport(Struct, frozen=True):
    """What sealing found. `problems` are the first ones, in the order of the lines."""

    seal: Seal
    problems: list[Problem]
    problems_total: int
    rejected: int
    adapters: list[str] = []  # ids of a model hub that rows name and that are fetched before any row runs


class PlanGroup(Struct, frozen=True):
    """The rows of one model and adapter, as people see them."""

    model: str
    adapter: str | None
    rows: int  # that run
    folded: int
    shards: int  # of the model; shards may hold rows of several of its adapters
    tokens: int | None  # estimated: input and output of the rows that run
    prefix_groups: int  # runs of two or more rows with a prompt prefix in common
    shared_prefix: float | None  # share of the input bytes that the row before has too; None: unknown


class Explanation(Struct, frozen=True):
    """What a plan is going to do."""

    rows: int
    run: int
    folded: int
    rejected: int
    shards: int
    in_file_order: bool
    tokens: int | None
    shared_prefix: float | None
    groups: list[PlanGroup]
    notes: list[str] = []  # why models that have several routes go the ways they go


class EstimateRange(Struct, frozen=True):
    """A figure out of a sample: in 8 of 10 samples it lies between `low` and `high`. Equal where all rows were read."""

    low: float
    mid: float
    high: float


class ModelEstimate(Struct, frozen=True):
    """The rows of one model."""

    model: str
    rows: int  # that run
    sampled: int
    input_tokens: EstimateRange | None  # None: the engine knows no tokens
    output_tokens: EstimateRange | None  # if each row used its whole limit; see `rows_unlimited`
    cost: EstimateRange | None  # USD, of these tokens; None: no price is known
    cost_input: EstimateRange | None  # USD, of the input alone: what is spent however short the answers are
    counted_by: str  # what tokens were counted with


class Estimate(Struct, frozen=True):
    """What a job is going to take. `notes`: sentences on what is not known, and why."""

    rows: int
    run: int
    folded: int
    rejected: int
    sampled: int
    input_tokens: EstimateRange | None
    output_tokens: EstimateRange | None
    rows_unlimited: float  # share of sampled rows that set no limit: they count as OUTPUT_TOKENS_DEFAULT
    shared_prefix: float | None  # share of the input that a prefix cache may hold
    cost: EstimateRange | None
    cost_input: EstimateRange | None
    time_s: float | None  # at the rate measured before; None: unknown
    time_s_min: float | None  # what the limits per minute alone ask for; None: there are none
    models: list[ModelEstimate]
    notes: list[str]


PREFIX = "/batchmill/v1"
FILES_MAX = 1000  # of one dataset
MODELS_MAX = 1000  # of one job
LABELS_MAX, LABEL_NAME_CHARS_MAX, LABEL_CHARS_MAX = 16, 64, 512
PAGE_MAX, PAGE_DEFAULT = 1000, 100
PRIORITY_MAX = 100
COMPLETION_S_MAX = EXPIRES_S_MAX = 10 * 365 * 86_400
FILENAME_CHARS_MAX = 512
WATCH_S_MIN, WATCH_S_MAX = 0.1, 60.0

Id = Annotated[str, Meta(min_length=1, max_length=64)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Priority = Annotated[int, Meta(ge=-PRIORITY_MAX, le=PRIORITY_MAX)]
MoreThanNothing = Annotated[float, Meta(gt=0)]
LabelName = Annotated[str, Meta(min_length=1, max_length=LABEL_NAME_CHARS_MAX)]
Label = Annotated[str, Meta(max_length=LABEL_CHARS_MAX)]
Labels = Annotated[dict[LabelName, Label], Meta(max_length=LABELS_MAX)]
OutputFormat = Literal["jsonl", "csv", "parquet", "jsonl.gz", "jsonl.zst", "csv.gz", "csv.zst"]
Format = Literal["openai", "jsonl", "csv", "parquet"]


class Work(Struct, frozen=True, forbid_unknown_fields=True):
    """What is to be run on which rows. Several files are one dataset, in the order in which they are named."""

    files: Annotated[list[Id], Meta(min_length=1, max_length=FILES_MAX)]  # ids of uploaded files
    models: Annotated[list[Name], Meta(max_length=MODELS_MAX)] = []  # the first is for rows that name none; empty: all
    format: Format | None = None  # None: seen from the name and the first row
    prompt: str | None = None  # of each row of a table, with {column} in it
    system: str | None = None
    url: str | None = None  # the path that prompts go to
    params: dict[str, Any] = {}  # further fields of each request that a prompt makes
    on_invalid: Literal["fail", "skip"] = "fail"  # with bad rows: run none, or give them error results
    dedupe: bool = False  # run identical requests once even where their answers may vary
    deadline: MoreThanNothing | None = None  # seconds since the epoch, UTC: what has no result by then never runs


class NewJob(Work, frozen=True, forbid_unknown_fields=True):
    """A job to be run. `deadline` and `completion_s` are two ways to say one thing: give one of them at most."""

    budget: MoreThanNothing | None = None  # USD; the job pauses when so much is spent
    priority: Priority = 0  # jobs of a higher one go first
    completion_s: Annotated[float, Meta(gt=0, le=COMPLETION_S_MAX)] | None = None  # from now
    labels: Labels = {}
    output_format: OutputFormat = "jsonl"
    together: bool = False  # OpenAI rows that failed stand among the others, in the order of the input


class Change(Struct, frozen=True, forbid_unknown_fields=True):
    """What is to be changed of a job that has not ended. Absent or null: it stays as it is."""

    priority: Priority | None = None
    deadline: MoreThanNothing | None = None  # seconds since the epoch, UTC
    budget: MoreThanNothing | None = None  # USD


class Accepted(Struct, frozen=True):
    """What became of a new job. `how`: started, or repeated for one that had been taken already."""

    how: str
    job: JobView


class ListJobs(Struct, frozen=True, forbid_unknown_fields=True):
    """Which jobs a page lists."""

    state: JobState | None = None
    model: (
        Annotated[str, Meta(min_length=1, max_length=512, description="A model or an adapter of its rows")] | None
    ) = None
    since: Annotated[float, Meta(ge=0, description="Created then or later, in seconds since the epoch")] | None = None
    label: Annotated[str, Meta(max_length=600, description="NAME, or NAME=VALUE")] | None = None
    limit: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = PAGE_DEFAULT
    after: str | None = None


class WatchJob(Struct, frozen=True, forbid_unknown_fields=True):
    """How often a job is looked at."""

    interval_s: Annotated[float, Meta(ge=WATCH_S_MIN, le=WATCH_S_MAX)] = 1.0


class ReadResults(Struct, frozen=True, forbid_unknown_fields=True):
    """Which results are read."""

    partial: bool = False  # the rows that have their outcome so far, as JSON lines


class JobPage(Struct, frozen=True):
    """Jobs, the newest first. `after` is what to ask for the next page with; null: there is none."""

    jobs: list[JobView]
    after: str | None = None


class RemoteJobList(Struct, frozen=True):
    """The jobs at providers that hold rows of one of ours, in the order of their making."""

    jobs: list[RemoteJob]


class Settlement(Struct, frozen=True, forbid_unknown_fields=True):
    """What became of a submission that nobody could tell of."""

    remote_id: Annotated[str, Meta(min_length=1, max_length=512)] | None  # of the provider; null: it never came to be


class FileInfo(Struct, frozen=True):
    """A file that a server keeps."""

    id: str
    filename: str
    purpose: str
    bytes: int
    created: float  # seconds since the epoch, UTC, as every time here
    expires: float | None = None
    job: str | None = None  # of results: the job they are of


class StoreFile(Struct, frozen=True, forbid_unknown_fields=True):
    """What an upload is."""

    filename: Annotated[str, Meta(min_length=1, max_length=FILENAME_CHARS_MAX)]  # its end says what the file holds
    expires_s: Annotated[float, Meta(gt=0, le=EXPIRES_S_MAX)] | None = None  # from now


class ListFiles(Struct, frozen=True, forbid_unknown_fields=True):
    """Which files a page lists."""

    purpose: Annotated[str, Meta(max_length=64)] | None = None
    limit: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = PAGE_DEFAULT
    after: str | None = None


class FilePage(Struct, frozen=True):
    """Files, the newest first. `after` as in JobPage."""

    files: list[FileInfo]
    after: str | None = None


class PoolInfo(Struct, frozen=True):
    """The workers of a model at this moment."""

    workers: int
    ready: int
    in_flight: int  # rows
    live: int  # live requests
    note: str = ""  # why it waits, if it does


class ModelInfo(Struct, frozen=True):
    """A model that the caller may use, or whose adapters it may use."""

    name: str
    engine: str
    adapters: list[str]  # names that rows and requests may have as their model
    price: Price | None = None
    pool: PoolInfo | None = None  # null: it is not loaded


class ModelList(Struct, frozen=True):
    models: list[ModelInfo]


class VersionInfo(Struct, frozen=True):
    """A version of a deployed function."""

    name: str
    branch: str
    number: int
    state: str  # building, ready, failed, removed
    created: float
    finished: float | None = None
    source: str = ""  # app.py:fn, a git address at its commit
    error: str | None = None  # why it failed: the traceback
    interface: Interface | None = None  # once it is ready, as what follows
    digest: str = ""
    workers: int = 1
    gpus: int = 0
    batch_size: int = 0  # 0: as the function is marked
    batch_window_s: float = 0.0
    timeout_s: float | None = None
    memory_bytes: int | None = None
    is_idempotent: bool = False
    packages: list[str] = []  # of its environment, from the lock: "numpy==2.1.0"
    project: str = ""  # whose it is; empty: another's, which shares it, and then `source` and `error` are too
    key: str | None = None  # the id of the key that brought it; None: whoever runs the machine
    is_shared: bool = True  # other projects may call it

    @property
    def reference(self) -> str:
        return f"{self.name}@{self.branch}/{self.number}"


class VersionList(Struct, frozen=True):
    """Versions, by branch and number."""

    versions: list[VersionInfo]


class BackendInfo(Struct, frozen=True, forbid_unknown_fields=True):
    """One of the versions that an alias stands for."""

    number: Annotated[int, Meta(ge=1)]
    branch: Name = "main"
    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0


class NewAlias(Struct, frozen=True, forbid_unknown_fields=True):
    """What an alias is to stand for: calls are split by weight, and mirrors get copies of them."""

    backends: Annotated[list[BackendInfo], Meta(min_length=1, max_length=100)]
    mirrors: Annotated[list[BackendInfo], Meta(max_length=100)] = []


class AliasInfo(Struct, frozen=True):
    """What an alias stands for."""

    name: str
    backends: list[BackendInfo]
    mirrors: list[BackendInfo] = []
    changed: float = 0.0


class FunctionDetail(Struct, frozen=True):
    """A deployed function: its versions, what its names stand for, and how it is called."""

    name: str
    latest: dict[str, int]  # branch -> number
    aliases: list[AliasInfo]
    versions: list[VersionInfo]
    interface: Interface | None = None  # of the latest of main, or of the newest branch
    examples: dict[str, str] = {}  # API -> a command line that calls it


class DeployReply(Struct, frozen=True):
    """What became of a deployment. `is_new` false: the latest version is this very code and these settings."""

    version: VersionInfo
    is_new: bool


class Rollback(Struct, frozen=True, forbid_unknown_fields=True):
    """Which version `latest` is to stand for; without a number, the one before."""

    branch: Name = "main"
    number: Annotated[int, Meta(ge=1)] | None = None


class Merge(Struct, frozen=True, forbid_unknown_fields=True):
    """Make the latest of one branch a new version of another."""

    source: Name
    into: Name = "main"


class Restart(Struct, frozen=True, forbid_unknown_fields=True):
    """Make the latest of a branch again, with workers of its own."""

    branch: Name = "main"


class VersionQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """Which versions of a function; absent: all of them, or of a log, the newest."""

    branch: Name | None = None
    version: Name | None = None


class NewKey(Struct, frozen=True, forbid_unknown_fields=True):
    """A key to be made. It reaches no further than the key that makes it."""

    name: Name
    scope: Scope
    project: Name | None = None  # null: the caller's own
    models: list[Name] | None = None  # null: all that the maker may use
    requests_per_minute: Annotated[int, Meta(gt=0)] | None = None
    expires: MoreThanNothing | None = None


class RevokeKey(Struct, frozen=True, forbid_unknown_fields=True):
    """How far a revocation reaches."""

    with_minted: bool = False  # end the keys that it minted too


class KeyInfo(Struct, frozen=True):
    """A key, without the key."""

    id: str
    name: str
    project: str
    scope: Scope
    models: list[str] | None = None
    requests_per_minute: int | None = None
    created: float = 0.0
    expires: float | None = None
    revoked: float | None = None
    last_used: float | None = None
    minted_by: list[str] = []  # ids of the keys that minted it, the first of them first: they pay for its requests too
    minted: list[str] = []  # told when it is revoked: ids of valid keys that it minted, or one of those did


class QuotaInfo(Struct, frozen=True):
    """One of a project's quotas: what it has, and what it may have."""

    quota: str  # as `[quotas]` of the configuration calls it; `disk` is in bytes
    used: int
    most: int


class QuotaList(Struct, frozen=True):
    quotas: list[QuotaInfo]


class MadeKey(Struct, frozen=True):
    """A new key, on the one occasion on which it is shown."""

    key: str
    record: KeyInfo


class KeyList(Struct, frozen=True):
    keys: list[KeyInfo]


class Planned(Struct, frozen=True):
    """What validation found, and the plan; null where the dataset was refused."""

    report: SealReport
    plan: Explanation | None = None


class Estimated(Struct, frozen=True):
    """What validation found, and the estimate; null where the dataset was refused."""

    report: SealReport
    estimate: Estimate | None = None


class ErrorDetail(Struct, frozen=True):
    """`code` is stable; `blame` is caller, model or system; `retryable`: the same request may succeed later."""

    code: str
    message: str
    blame: str = "system"
    retryable: bool = False
    request_id: str | None = None


class ErrorReply(Struct, frozen=True):
    error: ErrorDetail
