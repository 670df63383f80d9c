"""The description of a job, as stored in `job.json` and sent to the processes that work on it."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from batchmill.object_store.urls import is_object_url
from batchmill.types import DatasetSpec, ModelSpec, Policy, ReplyRules, Retried, Sample
from batchmill.wire.rows.forms import Form

NO_SAMPLE = "no_sample"  # the code of the error for rows of a sample that a job does not have
EXISTS = "output_exists"  # the code of the error for an output that is there, and not the job's
OUTDATED = "output_outdated"  # the code of the error for finished results of other rows, another prompt or model


class JobSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """The description of a job. It is written to `job.json` before any row runs."""

    id: str
    dataset: DatasetSpec
    models: list[ModelSpec]  # models[0] is the default
    form: Form
    policy: Policy
    output: str | None  # absolute path of the result file, None: kept with the job
    identity: str  # sha256 of all that identifies the job, except the bytes of input and code
    code: dict[str, str]  # model name -> sha256 of its function's source
    created: float  # seconds since the epoch, UTC
    endpoint: str | None = None  # this and the next fields are as in types.JobOrder
    rows_max: int | None = None
    default_model: bool = True
    project: str = "default"
    labels: dict[str, str] = {}
    origin: dict[str, Any] | None = None
    output_format: str = "jsonl"
    part_rows: int | None = None
    replaced_job: str | None = None  # whose manifest in the output folder this job's may replace
    used: list[str] = []  # names of the models and adapters of its rows; set when a frontend's job is planned
    is_small: bool = False  # its dataset, plans and outcomes lie in the database: see jobs/ledger/packed.py
    replies: ReplyRules = ReplyRules()
    retries: list[Retried] = []  # those that changed something, the oldest first
    sample: Sample | None = None  # the rows after which it pauses; no part of its identity
    work: str = ""  # sha256 as `identity`, without the output; of a sample, and of jobs of the machine's user
    may_overwrite: bool = False  # what is at its output: a sample looks again when it goes on
    reuse_note: str = ""  # why not all earlier jobs were looked at for results
    routing: dict[str, list[str]] = {}  # model name -> why its route was chosen; only of models with several routes

    def retried_fields(self, generation: int) -> dict[str, Any]:
        """The fields that requests of a retry have instead of their own."""
        last = self.retries[-1] if self.retries else None
        if last is None or last.generation != generation:
            return {}
        called = last.adapter or last.model
        return last.params if called is None else {**last.params, "model": called}

    @property
    def local_inputs(self) -> list[str]:
        """The files of its owner's machine that workers read rows from."""
        return [] if self.is_small else [path for path in self.dataset.paths if path.startswith("/")]

    @property
    def uses_stores(self) -> bool:
        """Whether its input, its results or the files that it names lie in an object store."""
        has_copies = self.dataset.media_copies == "objects"
        return has_copies or any(map(is_object_url, [*self.dataset.paths, self.output or ""]))
