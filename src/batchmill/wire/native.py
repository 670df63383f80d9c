"""The JSON bodies and queries of batchmill's own API under PREFIX, besides the structs of `types`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from batchmill.states import JobState
from batchmill.types import EstimateRange, Interface, JobView, Price, Problem, RemoteJob, Scope, Seal
from batchmill.wire.sampling import ROWS_MAX, SEED_MAX


class SealReport(Struct, frozen=True):
    """The result of sealing a dataset. `problems` are the first ones, in the order of the lines."""

    seal: Seal
    problems: list[Problem]
    problems_total: int
    rejected: int
    adapters: list[str] = []  # model hub ids that rows name; they are fetched before any row runs


class PlanGroup(Struct, frozen=True):
    """The rows of one model and adapter, for people to read."""

    model: str
    adapter: str | None
    rows: int  # that run
    folded: int
    shards: int  # of the model; shards may hold rows of several of its adapters
    tokens: int | None  # estimated: input and output of the rows that run
    prefix_groups: int  # runs of two or more rows with a prompt prefix in common
    shared_prefix: float | None  # share of input bytes in common with the previous row; None: unknown


class PlanSample(Struct, frozen=True):
    """The rows that run before all others."""

    rows: int
    run: int
    folded: int
    rejected: int
    shards: int  # with some of them
    seed: int | None  # with which they were drawn; None: the first rows


class Explanation(Struct, frozen=True):
    """A summary of a plan."""

    rows: int
    run: int
    folded: int
    rejected: int
    shards: int
    in_file_order: bool
    tokens: int | None
    shared_prefix: float | None
    groups: list[PlanGroup]
    sample: PlanSample | None = None
    notes: list[str] = []  # such as why routes were chosen, or how many requests a row may take
    reused: int = 0  # of `run`: rows that would take over the result of an earlier job, and call no model


class ModelEstimate(Struct, frozen=True):
    """The rows of one model."""

    model: str
    rows: int  # that run
    sampled: int
    input_tokens: EstimateRange | None  # None: the engine does not count tokens
    output_tokens: EstimateRange | None  # by `learned_from`, or if each row uses its whole limit
    cost: EstimateRange | None  # USD, of these tokens; None: no price is known
    cost_input: EstimateRange | None  # USD, of the input alone: the minimum, even for short answers
    counted_by: str  # the tokenizer or method that counted the tokens
    learned_from: list[str] = []  # jobs whose answers say how long these will be; empty: each uses its whole limit
    learned_rows: int = 0  # that these jobs ran
    cost_max: float | None = None  # USD, as in `Estimate`


class Estimate(Struct, frozen=True):
    """The estimated tokens, cost and time of a job. `notes`: sentences on what is unknown, and why."""

    rows: int
    run: int
    folded: int
    rejected: int
    sampled: int
    input_tokens: EstimateRange | None
    output_tokens: EstimateRange | None
    rows_unlimited: float  # share of sampled rows without a limit; each counts as OUTPUT_TOKENS_DEFAULT
    shared_prefix: float | None  # share of the input that a prefix cache may hold
    cost: EstimateRange | None
    cost_input: EstimateRange | None
    time_s: float | None  # at the rate measured before; None: unknown
    time_s_min: float | None  # the minimum by the limits per minute; None: there are no limits
    models: list[ModelEstimate]
    notes: list[str]
    cost_max: float | None = None  # USD, if all answers are asked for again; None: none is, or there is no upper bound


PREFIX = "/batchmill/v1"
FILES_MAX = 1000  # of one dataset
MODELS_MAX = 1000  # of one job
LABELS_MAX, LABEL_NAME_CHARS_MAX, LABEL_CHARS_MAX = 16, 64, 512
PAGE_MAX, PAGE_DEFAULT = 1000, 100
PRIORITY_MAX = 100
COMPLETION_S_MAX = EXPIRES_S_MAX = 10 * 365 * 86_400
FILENAME_CHARS_MAX = 512
INPUT_CHARS_MAX = 2048  # of a URL
WATCH_S_MIN, WATCH_S_MAX = 0.1, 60.0

Id = Annotated[str, Meta(min_length=1, max_length=64)]
Input = Annotated[str, Meta(min_length=1, max_length=INPUT_CHARS_MAX)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Priority = Annotated[int, Meta(ge=-PRIORITY_MAX, le=PRIORITY_MAX)]
MoreThanNothing = Annotated[float, Meta(gt=0)]
LabelName = Annotated[str, Meta(min_length=1, max_length=LABEL_NAME_CHARS_MAX)]
Label = Annotated[str, Meta(max_length=LABEL_CHARS_MAX)]
Labels = Annotated[dict[LabelName, Label], Meta(max_length=LABELS_MAX)]
OutputFormat = Literal["jsonl", "csv", "parquet", "jsonl.gz", "jsonl.zst", "csv.gz", "csv.zst"]
Format = Literal["openai", "jsonl", "csv", "parquet"]
SampleRows = Annotated[int, Meta(ge=1, le=ROWS_MAX)]
Seed = Annotated[int, Meta(ge=0, le=SEED_MAX)]
Flaw = Literal["truncated", "filtered", "refused", "empty", "repeating"]  # see wire.replies.FLAWS


class Work(Struct, frozen=True, forbid_unknown_fields=True):
    """The rows to run, and how. Several files are one dataset, in the given order."""

    files: Annotated[list[Input], Meta(min_length=1, max_length=FILES_MAX)]  # ids of uploads, or URLs
    models: Annotated[list[Name], Meta(max_length=MODELS_MAX)] = []  # the first is for rows without a model; empty: all
    format: Format | None = None  # None: detected from the name and the first row
    prompt: str | None = None  # a template for each row of a table, with {column}
    system: str | None = None
    template: str | None = None  # in the place of `prompt`: a template of Jinja2, for keys that may send one
    url: str | None = None  # the path that prompts go to
    params: dict[str, Any] = {}  # further fields of each request that a prompt makes
    schema: dict[str, Any] | None = None  # a JSON Schema, which answers of language models must fit
    validator: Name | None = None  # in the place of `schema`: NAME or NAME@VERSION of a deployed class
    schema_attempts: int = 2  # how often an answer that does not fit is asked for again
    field_prefix: str = ""  # of the columns that the fields of the schema become
    image_columns: list[str] = []  # whose cells, https:// or data: URLs or bytes of Parquet, go with the prompt
    audio_columns: list[str] = []
    document_columns: list[str] = []
    model_column: str | None = None  # of a table with a prompt: names the row's model; an empty cell: the first
    adapter_column: str | None = None  # names the row's adapter; an empty cell: none
    allow_constant_prompt: bool = False  # a prompt may name no column: every row makes the same request
    on_invalid: Literal["fail", "skip"] = "fail"  # with invalid rows: run none, or give them error results
    dedupe: bool = False  # run identical requests once even if their answers may vary
    reuse: bool | None = None  # take over results of earlier jobs with the same requests; null: as the project says
    limit: SampleRows | None = None  # only the first rows: then the job pauses (`sampled`), until it is resumed
    sample: SampleRows | None = None  # the same with so many rows that are drawn at random
    seed: Seed | None = None  # of the sample; null: 0
    deadline: MoreThanNothing | None = None  # seconds since the epoch, UTC: rows without a result by then never run


class NewJob(Work, frozen=True, forbid_unknown_fields=True):
    """A job to run. `deadline` and `completion_s` set the same deadline: give at most one of them."""

    budget: MoreThanNothing | None = None  # USD; the job pauses when it is spent
    priority: Priority = 0  # jobs of a higher priority go first
    completion_s: Annotated[float, Meta(gt=0, le=COMPLETION_S_MAX)] | None = None  # from now
    fail_on: list[Flaw] = []  # replies of language models that are errors of their rows
    labels: Labels = {}
    output_format: OutputFormat | None = (
        None  # None: jsonl, or as the name of `output` says; of parts: jsonl, csv, parquet
    )
    output: Input | None = None  # the URL of an object, or of a folder with a slash at its end; None: at the server
    part_rows: Annotated[int, Meta(ge=1)] | None = None  # of each part, if `output` is a folder
    overwrite: bool = False  # results that another job wrote to `output` may be replaced
    together: bool = False  # failed OpenAI rows go into the result file with the others, in the order of the input


class Change(Struct, frozen=True, forbid_unknown_fields=True):
    """A change of a job that has not ended. What is omitted or null stays."""

    priority: Priority | None = None
    deadline: MoreThanNothing | None = None  # seconds since the epoch, UTC
    budget: MoreThanNothing | None = None  # USD


class Accepted(Struct, frozen=True):
    """The result of creating a job. `how`: started, or repeated if it was accepted before."""

    how: str
    job: JobView


class ListJobs(Struct, frozen=True, forbid_unknown_fields=True):
    """Selects the jobs of a page."""

    state: JobState | None = None
    model: (
        Annotated[str, Meta(min_length=1, max_length=512, description="A model or an adapter of its rows")] | None
    ) = None
    since: Annotated[float, Meta(ge=0, description="Created then or later, in seconds since the epoch")] | None = None
    label: Annotated[str, Meta(max_length=600, description="NAME, or NAME=VALUE")] | None = None
    limit: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = PAGE_DEFAULT
    after: str | None = None


class WatchJob(Struct, frozen=True, forbid_unknown_fields=True):
    """How often a watched job is checked."""

    interval_s: Annotated[float, Meta(ge=WATCH_S_MIN, le=WATCH_S_MAX)] = 1.0


class ReadResults(Struct, frozen=True, forbid_unknown_fields=True):
    """Selects the results to read."""

    partial: bool = False  # the rows with an outcome so far, as JSON lines
    sampled: bool = False  # with `partial`: only the rows of the job's sample
    numbered: bool = False  # with `partial`: each line begins with the number of its row in the input and a tab


class JobPage(Struct, frozen=True):
    """Jobs, the newest first. `after` is the parameter for the next page; null: this is the last page."""

    jobs: list[JobView]
    after: str | None = None


class RemoteJobList(Struct, frozen=True):
    """The provider jobs with rows of one job, in the order in which they were created."""

    jobs: list[RemoteJob]


class Settlement(Struct, frozen=True, forbid_unknown_fields=True):
    """The real result of a submission whose result is unknown."""

    remote_id: Annotated[str, Meta(min_length=1, max_length=512)] | None  # the provider's id; null: it was not created


class FileInfo(Struct, frozen=True):
    """A file that a server stores."""

    id: str
    filename: str
    purpose: str
    bytes: int
    created: float  # seconds since the epoch, UTC, as every time here
    expires: float | None = None
    job: str | None = None  # of results: their job


class StoreFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The query of an upload."""

    filename: Annotated[str, Meta(min_length=1, max_length=FILENAME_CHARS_MAX)]  # its suffix gives the format
    expires_s: Annotated[float, Meta(gt=0, le=EXPIRES_S_MAX)] | None = None  # from now


class ListFiles(Struct, frozen=True, forbid_unknown_fields=True):
    """Selects the files of a page."""

    purpose: Annotated[str, Meta(max_length=64)] | None = None
    limit: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = PAGE_DEFAULT
    after: str | None = None


class FilePage(Struct, frozen=True):
    """Files, the newest first. `after` as in JobPage."""

    files: list[FileInfo]
    after: str | None = None


class PoolInfo(Struct, frozen=True):
    """The current workers of a model."""

    workers: int
    ready: int
    in_flight: int  # rows
    live: int  # live requests
    note: str = ""  # why it waits, if it waits


class ModelInfo(Struct, frozen=True):
    """A model that the caller may use, itself or through its adapters."""

    name: str
    engine: str
    adapters: list[str]  # names that rows and requests may use as their model
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
    interface: Interface | None = None  # once it is ready, as the next fields
    digest: str = ""
    workers: int = 1
    gpus: int = 0
    batch_size: int = 0  # 0: as the function's decorator says
    batch_window_s: float | None = None  # None: the function's own setting, 10 ms at most by default
    timeout_s: float | None = None
    memory_bytes: int | None = None
    is_idempotent: bool = False
    is_deterministic: bool = False  # equal rows have equal results: projects may reuse them
    packages: list[str] = []  # of its environment, from the lock: "numpy==2.1.0"
    project: str = ""  # the owner; empty: another project, which shares it; `source` and `error` are then empty too
    key: str | None = None  # the id of the key that deployed it; None: the user of the machine
    is_shared: bool = True  # other projects may call it
    schema: dict[str, Any] | None = None  # of a class that validates answers of jobs; None: a function

    @property
    def reference(self) -> str:
        return f"{self.name}@{self.branch}/{self.number}"


class VersionList(Struct, frozen=True):
    """Versions, by branch and number."""

    versions: list[VersionInfo]


class BackendInfo(Struct, frozen=True, forbid_unknown_fields=True):
    """One version behind an alias."""

    number: Annotated[int, Meta(ge=1)]
    branch: Name = "main"
    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0


class NewAlias(Struct, frozen=True, forbid_unknown_fields=True):
    """The new versions of an alias: calls are split by weight, and mirrors get copies of them."""

    backends: Annotated[list[BackendInfo], Meta(min_length=1, max_length=100)]
    mirrors: Annotated[list[BackendInfo], Meta(max_length=100)] = []


class AliasInfo(Struct, frozen=True):
    """The versions behind an alias."""

    name: str
    backends: list[BackendInfo]
    mirrors: list[BackendInfo] = []
    changed: float = 0.0


class FunctionDetail(Struct, frozen=True):
    """A deployed function: its versions and aliases, and how it is called."""

    name: str
    latest: dict[str, int]  # branch -> number
    aliases: list[AliasInfo]
    versions: list[VersionInfo]
    interface: Interface | None = None  # of the latest of main, or of the newest branch
    examples: dict[str, str] = {}  # API -> a command line that calls it


class DeployReply(Struct, frozen=True):
    """The result of a deployment. `is_new` false: the latest version has the same code and settings."""

    version: VersionInfo
    is_new: bool


class Rollback(Struct, frozen=True, forbid_unknown_fields=True):
    """The version that `latest` should become; without a number, the previous one."""

    branch: Name = "main"
    number: Annotated[int, Meta(ge=1)] | None = None


class Merge(Struct, frozen=True, forbid_unknown_fields=True):
    """Makes the latest version of one branch a new version of another."""

    source: Name
    into: Name = "main"


class Restart(Struct, frozen=True, forbid_unknown_fields=True):
    """Makes the latest version of a branch again, with new workers."""

    branch: Name = "main"


class VersionQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """Selects versions of a function; absent: all of them, or for a log, the newest."""

    branch: Name | None = None
    version: Name | None = None


class NewKey(Struct, frozen=True, forbid_unknown_fields=True):
    """A key to create. Its rights are at most those of the key that creates it."""

    name: Name
    scope: Scope
    project: Name | None = None  # null: the caller's own
    models: list[Name] | None = None  # null: all that the creator may use
    requests_per_minute: Annotated[int, Meta(gt=0)] | None = None
    expires: MoreThanNothing | None = None


class RevokeKey(Struct, frozen=True, forbid_unknown_fields=True):
    """The options of a revocation."""

    with_minted: bool = False  # also revoke the keys that it minted


class KeyInfo(Struct, frozen=True):
    """A key's record, without the secret."""

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
    minted_by: list[
        str
    ] = []  # ids of the keys that minted it, the first one first; its requests count for their limits too
    minted: list[str] = []  # only after a revocation: ids of valid keys that it minted, directly or indirectly


class QuotaInfo(Struct, frozen=True):
    """One quota of a project: the use and the limit."""

    quota: str  # its name in `[quotas]` of the configuration; `disk` is in bytes
    used: int
    most: int


class QuotaList(Struct, frozen=True):
    quotas: list[QuotaInfo]


class MadeKey(Struct, frozen=True):
    """A new key. The secret is shown only here."""

    key: str
    record: KeyInfo


class KeyList(Struct, frozen=True):
    keys: list[KeyInfo]


class Planned(Struct, frozen=True):
    """The result of validation, and the plan; null if the dataset was refused."""

    report: SealReport
    plan: Explanation | None = None


class Estimated(Struct, frozen=True):
    """The result of validation, and the estimate; null if the dataset was refused."""

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
