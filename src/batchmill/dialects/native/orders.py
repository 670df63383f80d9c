"""Between this API's words and ours: orders from what is asked for, and jobs as it shows them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from batchmill.errors import InvalidInput
from batchmill.services.files import FileRecord
from batchmill.services.path_redaction import Places
from batchmill.services.project_jobs import NO_RESULTS, ResultIds
from batchmill.services.services import Services
from batchmill.types import (
    Caller,
    DatasetSpec,
    JobOrder,
    JobView,
    LedgerReport,
    ModelSpec,
    Once,
    Policy,
    RemoteJob,
    Wait,
)
from batchmill.wire.bundles import ModelVersion
from batchmill.wire.native import FileInfo, NewJob, SealReport, Work

FRONTEND = "native"


class Shown:
    """What is told to clients of a server whose files lie in `data_dir`."""

    def __init__(self, data_dir: Path) -> None:
        self.text = Places(data_dir).hide

    def job(self, view: JobView, results: ResultIds = NO_RESULTS) -> JobView:
        """`input`, `output` and `errors_output` are ids of files; of `origin` what is no frontend's own business."""
        origin = view.origin or {}
        return replace(
            view,
            input=[Path(path).name for path in view.input],
            output=results.output,
            errors_output=results.errors,
            origin=_shown_origin(origin),
            message=self.text(view.message),
            notes=[self.text(note) for note in view.notes],
            routing=[self.text(sentence) for sentence in view.routing],
            problems=[
                replace(each, path=Path(each.path).name, message=self.text(each.message)) for each in view.problems
            ],
            error_samples={code: self.text(sample) for code, sample in view.error_samples.items()},
        )

    def version(self, version: ModelVersion) -> ModelVersion:
        """A traceback leads through files of this server."""
        return version if version.error is None else replace(version, error=self.text(version.error))

    def wait(self, wait: Wait) -> Wait:
        return replace(wait, reasons=[self.text(reason) for reason in wait.reasons])

    def remote(self, job: RemoteJob) -> RemoteJob:
        return replace(job, message=self.text(job.message))

    def ledger(self, report: LedgerReport) -> LedgerReport:
        return replace(
            report,
            damaged=[self.text(each) for each in report.damaged],
            broken=[self.text(each) for each in report.broken],
        )

    def report(self, report: SealReport) -> SealReport:
        """What validation found. Paths are ids of files here too."""
        seal = report.seal
        return replace(
            report,
            seal=replace(
                seal,
                files=[replace(each, path=Path(each.path).name) for each in seal.files],
                sources=[replace(each, path=Path(each.path).name) for each in seal.sources],
            ),
            problems=[
                replace(each, path=Path(each.path).name, message=self.text(each.message)) for each in report.problems
            ],
        )


def _shown_origin(origin: dict) -> dict:
    """The frontend a job came through, and for one of this API's what its files were called."""
    return {
        name: origin[name] for name in ("frontend", "files") if name in origin and origin["frontend"] == FRONTEND
    } or {"frontend": origin.get("frontend", "cli")}


def file_info(record: FileRecord) -> FileInfo:
    return FileInfo(
        id=record.id, filename=record.filename, purpose=record.purpose, bytes=record.bytes, created=record.created,
        expires=record.expires, job=record.job,
    )  # fmt: skip


READABLE = ("batch", "batch_output")  # purposes of files that may be run: results are rows too
FORMATS = {".csv": "csv", ".parquet": "parquet"}
CODECS = (".gz", ".zst")


class Orders:
    """Raises: UnknownName for a file or model that is not the caller's; InvalidInput for what does not fit."""

    def __init__(self, services: Services) -> None:
        self._services = services

    @contextlib.asynccontextmanager
    async def inputs(self, caller: Caller, work: Work) -> AsyncIterator[list[FileRecord]]:
        """The files of an order, which nobody deletes before it is stored."""
        repeated = [file_id for at, file_id in enumerate(work.files) if file_id in work.files[:at]]
        if repeated:
            raise InvalidInput(f"the file {repeated[0]!r} is named twice", code="duplicate_file")
        async with contextlib.AsyncExitStack() as held:
            records = []
            for file_id in work.files:
                record = await held.enter_async_context(self._services.files.hold(caller.project, file_id))
                if record.purpose not in READABLE:
                    raise InvalidInput(
                        f"the file {record.id} has the purpose {record.purpose!r}; what is run has "
                        f"{' or '.join(READABLE)}",
                        code="wrong_purpose",
                    )
                records.append(record)
            yield records

    def work(self, caller: Caller, work: Work, records: Sequence[FileRecord]) -> JobOrder:
        """What is computed, without how."""
        config = self._services.config
        models = self._models(caller, work)
        if not work.models and (work.prompt is not None or self._format(work, records) in ("csv", "parquet")):
            raise InvalidInput(
                "the rows of a table name no model: say in `models` which runs them, one of "
                f"{', '.join(model.name for model in models) or 'none that this key may use'}",
                code="no_model",
            )
        return JobOrder(
            dataset=DatasetSpec(
                [str(self._services.files.path(record)) for record in records],
                format=self._format(work, records),
                **msgspec.structs.asdict(config.limits),
            ),
            models=models,
            prompt=work.prompt,
            system=work.system,
            url=work.url,
            params=work.params,
            policy=Policy(
                on_invalid=work.on_invalid,
                dedupe=work.dedupe,
                deadline=self._checked(work.deadline),
                on_engine_failure="fail",
            ),
            rows_max=config.server.rows_max,
            default_model=bool(work.models),
            project=caller.project,
        )

    def job(self, caller: Caller, job: NewJob, records: Sequence[FileRecord], once: Once) -> JobOrder:
        """A job to be run."""
        base = self.work(caller, job, records)
        policy = Policy(
            on_invalid=job.on_invalid,
            dedupe=job.dedupe,
            budget=job.budget,
            priority=job.priority,
            deadline=self._deadline(job),
            on_engine_failure="fail",
        )
        origin = {
            "frontend": FRONTEND,
            "input_file_ids": [record.id for record in records],
            "files": {record.id: record.filename for record in records},
            "key": caller.key,
        }
        fields = {
            "policy": policy, "labels": job.labels, "output_format": job.output_format, "together": job.together,
        }  # fmt: skip
        return replace(base, origin=origin, once=once, **fields)

    def _deadline(self, job: NewJob) -> float | None:
        now = self._services.clock.now()
        if job.deadline is not None and job.completion_s is not None:
            raise InvalidInput("deadline and completion_s are two ways to say one thing: leave one out")
        return self._checked(job.deadline) if job.completion_s is None else now + job.completion_s

    def _checked(self, deadline: float | None) -> float | None:
        if deadline is not None and deadline <= self._services.clock.now():
            raise InvalidInput("the deadline lies in the past", code="invalid_deadline")
        return deadline

    def _models(self, caller: Caller, work: Work) -> list[ModelSpec]:
        """The models named, with the names that the caller's rows may use; all of the caller's where none is named."""
        directory = self._services.directory
        chosen: list[ModelSpec] = []
        for name in work.models:
            served = directory.find(caller, name)
            if served.adapter is not None:
                raise InvalidInput(
                    f"{name!r} is an adapter of {served.model.name!r}: name that model, and let rows (or for a prompt "
                    'params: {"model": "' + name + '"}) name the adapter',
                    code="adapter_as_model",
                )
            spec = directory.for_job(caller, name)
            if spec in chosen:
                raise InvalidInput(f"the model {name!r} is named twice", code="duplicate_model")
            chosen.append(spec)
        return directory.each_once(caller, chosen) if chosen else directory.specs(caller)

    @staticmethod
    def _format(work: Work, records: Sequence[FileRecord]) -> str | None:
        """A file here has no name of its own: what its uploaded name says is said for it."""
        if work.format is not None:
            return work.format
        found = {_format_of(record.filename) for record in records}
        if len(found) > 1:
            named = ", ".join(record.filename for record in records[:10])
            raise InvalidInput(f"the files of a dataset must have one format: {named}", code="format_mismatch")
        # Only OpenAI rows can name a model: where none is named for all, lines of JSON are nothing else.
        return found.pop() or (None if work.models else "openai")


def _format_of(filename: str) -> str | None:
    """csv or parquet; None for lines of JSON, whose first row says what they are."""
    suffixes = [suffix.lower() for suffix in Path(filename).suffixes]
    if suffixes and suffixes[-1] in CODECS:
        suffixes.pop()
    return FORMATS.get(suffixes[-1]) if suffixes else None
