"""Jobs: their datasets, orders and views, and the shards, leases and outcomes of their ledgers."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from batchmill.types.calls import Usage
from batchmill.types.models import ModelSpec, Price


class DatasetSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Where a job's rows come from."""

    paths: list[str]  # absolute files, in the order in which they count as one dataset
    format: str | None = None  # openai, jsonl, csv, parquet; None: seen from the name and the first row
    copy: bool = False  # keep a copy of the file with the job; otherwise it is used where it lies
    line_bytes_max: int = 16 * 1024 * 1024
    depth_max: int = 128
    rows_max: int = 2**32 - 1  # that a row's number can tell apart
    unpacked_bytes_max: int = 2**40  # what the rows and their index come to, unpacked and converted
    unpacked_ratio_max: int = 1000  # the same, for each byte of the files; see datasets.allowance


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


class SalvagedTable(Struct, frozen=True):
    """What became of one table of a database that was damaged."""

    name: str
    rows: int  # that could be read
    from_backup: int = 0  # rows that could not, and that a backup had
    is_damaged: bool = False


class SalvageReport(Struct, frozen=True):
    """What was made of a damaged database."""

    is_sound: bool  # nothing had to be done
    tables: list[SalvagedTable] = []
    backup: str | None = None  # the one that rows were taken from, if any were missing
    rebuilt: list[str] = []  # jobs whose ledger was made anew; they are paused
    failed: list[str] = []  # jobs that could not be had: which, and why
    moved: list[str] = []  # what lay on the disk without a record
    damaged: str | None = None  # the folder with the files that were replaced


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
    origin: dict[str, Any] | None = None  # what the frontend that took the job keeps with it
    priority: int = 0
    deadline: float | None = None
    reason: str | None = None  # a states.PauseReason, or an error's code
    message: str = ""
    input: list[str] = []
    output: str | None = None
    errors_output: str | None = None  # the error file, once there is one
    model: str = ""
    routing: list[str] = []  # why models with several ways go the ways they go, and went before
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
    prices: dict[str, Price] = {}  # of the models that rows go to, by name, where they have one
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
    together: bool = False  # OpenAI rows that failed stand among the others, in the order of the input
    output_format: str = "jsonl"  # of results that stay with the job: jsonl, csv, parquet, jsonl.gz, csv.zst …
    endpoint: str | None = None  # the one `url` that OpenAI rows may have
    rows_max: int | None = None  # a dataset with more is refused
    default_model: bool = True  # rows that name no model go to models[0]; otherwise they are refused
    project: str = "default"
    labels: dict[str, str] = {}  # the caller's own words about the job
    origin: dict[str, Any] | None = None  # set by a server's frontend, for its own use: such a job is always a new one
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
    origin: str | None = None  # origin["frontend"] of those wanted
    state: str | None = None
    model: str | None = None  # a name that rows of it go to, of a model or an adapter
    since: float | None = None  # seconds since the epoch: created then or later
    after: str | None = None  # the id of the job before the first one wanted
    limit: int | None = None


class Wait(Struct, frozen=True):
    """Why a job is not going faster than it does, and by which ways it goes, in sentences; empty: nothing to tell."""

    job: str
    state: str
    reasons: list[str]
    ahead: int = 0  # jobs that get workers before it
