"""Reuse: which model a row's result comes from, and the messages to the child process that looks results up.

A row takes over the result of an earlier row if the digests of both requests are equal (`datasets.request_digests`) and
both went to the same target: the model as it was resolved, with its adapter and the form of the result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchmill.checksums import checksum, checksum_of
from batchmill.config.entries import ProjectEntry
from batchmill.datasets.layout import PIECE_BYTES, REQUESTS, TARGET
from batchmill.owned_files import OwnedFiles
from batchmill.types import JobOrder, ModelSpec, SegmentPlace, SegmentRef
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.rows.forms import OpenAIForm

KEEP = "batchmill.jobs.intake.reuse_lookup:keep_offloaded"
KEEP_SMALL = "batchmill.jobs.intake.reuse_lookup:keep_small_offloaded"
LOOK_UP = "batchmill.jobs.intake.reuse_lookup:look_up_offloaded"
NONE, DETERMINISTIC, ALL = "none", "deterministic", "all"
RESULTS = "results"  # beside an index: the parts of results that rows may take over, where they are nowhere else
INDEX = "index.json"  # of the results of a job
VERSION = 2  # of an index: one of another version is written anew
TARGET_KEYS = "requests.json"  # beside the digests of a dataset; written last


class EarlierJob(Struct, frozen=True):
    """An ended job whose results may be taken over."""

    spec: JobSpec
    data_dir: str
    generation: int
    finished: float  # seconds since the epoch
    segments: SegmentPlace
    committed: list[SegmentRef] | None = None  # of its first generation; None: an index is there
    is_reduced: bool = False  # retention has removed its segments
    scratch: str = ""  # of a small job: where its dataset is unpacked, in the folder of its owner's small jobs
    results: str = ""  # the published lines to index instead of the segments; RESULTS: a copy is made and indexed
    term: str = ""  # see `Term.path`: a successor may have removed the segments, and count on the index


class LookupOrder(Struct, frozen=True):
    """The sealed and planned rows of a job, and where to look for their results, the newest job first."""

    spec: JobSpec
    dataset: str
    plan: str
    earlier: list[EarlierJob]
    since: float  # no result that was made before is taken, in seconds since the epoch
    segments: str = ""  # the folder that results are written to; empty: they are only counted
    store: str = ""  # URL of the object store with segments that are not here
    part: int = 0  # of several children, each of which looks up its own rows
    parts: int = 1
    term: str = ""  # see `Term.path`: a successor may have adopted what it wrote under the same names


class Reused(Struct, frozen=True):
    """The result of a lookup."""

    rows: int  # that run or not: of those with equal requests, one
    runs: int = 0  # of rows that follow each other
    skipped: list[str] = []  # what was left out, and why: jobs that could not be read, servers that did not answer
    unsound: list[str] = []  # jobs whose index must be written anew: nothing was looked up yet


class TargetKeys(Struct, frozen=True):
    """`requests.json`: the key of each target of a dataset, and the checksums of the columns that go with them."""

    keys: list[str]
    deterministic: list[bool]  # of each target: see `is_deterministic`
    requests: int
    targets: int


class Section(Struct, frozen=True):
    """The results of one target, ascending by digest: `NUMBER.records`, and `NUMBER.table` of its blocks."""

    key: str  # see target_keys
    number: int
    rows: int
    table: int  # checksum of that file


class IndexHead(Struct, frozen=True):
    """`index.json`, written last. `sections` may be empty: nothing of the job can be taken over."""

    version: int  # VERSION
    job: str
    generation: int  # that the job had ended with
    files: list[str]  # with its results: see `JobIndex.paths`
    sections: list[Section]


def write_head(home: Path, head: IndexHead, owned: OwnedFiles) -> None:
    data = msgspec.json.encode(head)
    with owned.part(home / INDEX) as file:
        file.write(b"%08x\n" % checksum(data) + data)
        file.publish()


def read_head(home: Path, job_id: str, generation: int) -> IndexHead | None:
    """The head of a job's index; None if there is none, or not of this generation, or not what was written."""
    try:
        total, _, data = (home / INDEX).read_bytes().partition(b"\n")
        if total != b"%08x" % checksum(data):
            return None
        head = msgspec.json.decode(data, type=IndexHead)
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return head if (head.job, head.generation, head.version) == (job_id, generation, VERSION) else None


def settled(order: JobOrder, projects: Mapping[str, ProjectEntry]) -> JobOrder:
    """The order with what its project says about reuse, unless it says that itself."""
    if order.policy.reuse is not None:
        return order
    reuse = DETERMINISTIC if projects.get(order.project, ProjectEntry()).reuse else NONE
    return replace(order, policy=replace(order.policy, reuse=reuse))


def targets(models: list[ModelSpec]) -> list[tuple[int, str | None]]:
    """Every (model number, adapter) that rows can go to: the index is the target's number."""
    return [(number, adapter) for number, model in enumerate(models) for adapter in (None, *model.adapters)]


def target_keys(spec: JobSpec, *, is_current: bool = False) -> list[str]:
    """What a result depends on besides its request, for each target; empty for one of which that is not known.

    Args: is_current: the files that models and adapters are read from are now what they are for this job.
    """
    form = _form_of(spec)
    return [
        _target_key(spec, spec.models[number], adapter, form, is_current) for number, adapter in targets(spec.models)
    ]


def _form_of(spec: JobSpec) -> list[Any]:
    form, schema = spec.form, spec.form.schema
    # Without its blanks. Engines write answers in the order of its fields.
    document: Any = None if schema is None else msgspec.json.encode(msgspec.json.decode(schema.document)).decode()
    if schema is not None and schema.validator:
        document = [document, schema.validator, schema.code]
    if isinstance(form, OpenAIForm):
        return ["openai", document]
    is_function = not form.makes_requests
    return ["table", document, None if schema is None else schema.prefix, is_function, is_function and form.is_text]


def _target_key(spec: JobSpec, model: ModelSpec, adapter: str | None, form: list[Any], is_current: bool) -> str:
    identity = _identity(spec, model, is_current)
    place = "" if adapter is None else model.adapters[adapter]
    weights = _weights_of(place)
    if identity is None or (weights is not None and not is_current):
        return ""
    target = [form, identity, adapter, place, weights]
    return hashlib.sha256(msgspec.json.encode(target, order="deterministic")).hexdigest()


def _identity(spec: JobSpec, model: ModelSpec, is_current: bool) -> list[Any] | None:
    """A model apart from its name, price and limits. A model with several routes is all of them."""
    routes = [_identity(spec, route, is_current) for route in model.routes] if model.needs_route else []
    code, weights = spec.code.get(model.name), _weights_of(model.source)
    if None in routes or code == UNREADABLE or (weights is not None and not is_current):
        return None
    function = None if model.function is None else [model.function.version, model.function.digest]
    return [
        model.engine, model.source, model.base_url, model.engine_args, function, code, model.connector, model.provider,
        sorted(map(msgspec.json.encode, routes)), weights,
    ]  # fmt: skip


def _weights_of(source: str) -> str | None:
    """The names, sizes and times of the files below a folder of this machine; None for anything else."""
    folder = Path(source)
    if not folder.is_absolute() or not folder.is_dir():
        return None
    found = [
        (path.relative_to(folder).as_posix(), stat.st_size, stat.st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and (stat := path.stat())
    ]
    return hashlib.sha256(msgspec.json.encode(found)).hexdigest()


UNREADABLE = "unreadable"  # in the place of the digest of a file that is gone


def is_deterministic(model: ModelSpec) -> bool:
    """Whether a model is declared to return equal results for equal requests, whatever they say."""
    routes = model.routes if model.needs_route else []
    return model.is_deterministic or bool(routes) and all(map(is_deterministic, routes))


def write_keys(spec: JobSpec, dataset: Path, owned: OwnedFiles) -> None:
    """Write the keys of a sealed dataset with digests: later its job's models may be others."""
    sums = [sum_of(dataset / name) for name in (REQUESTS, TARGET)]
    with owned.part(dataset / TARGET_KEYS) as file:
        deterministic = [is_deterministic(spec.models[number]) for number, _ in targets(spec.models)]
        keys = target_keys(spec, is_current=True)
        file.write(msgspec.json.encode(TargetKeys(keys, deterministic, *sums)))
        file.publish()


def read_keys(dataset: Path) -> TargetKeys | None:
    """What `write_keys` wrote; None if nothing can be read."""
    try:
        return msgspec.json.decode((dataset / TARGET_KEYS).read_bytes(), type=TargetKeys)
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def sum_of(path: Path) -> int:
    """The checksum of a file."""
    with open(path, "rb") as file:
        return checksum_of(iter(lambda: file.read(PIECE_BYTES), b""))
