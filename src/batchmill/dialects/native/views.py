"""Jobs as this API shows them: types.JobView with the ids of files in place of where they lie on the server."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from batchmill.services.files import FileRecord
from batchmill.services.job_desk import NO_RESULTS, ResultIds
from batchmill.services.places import Places
from batchmill.types import JobView, LedgerReport, RemoteJob, Wait
from batchmill.wire.deploys import ModelVersion
from batchmill.wire.native import FileInfo
from batchmill.wire.previews import SealReport

DOOR = "native"


class Shown:
    """What is told to clients of a server whose files lie in `data_dir`."""

    def __init__(self, data_dir: Path) -> None:
        self.text = Places(data_dir).hide

    def job(self, view: JobView, results: ResultIds = NO_RESULTS) -> JobView:
        """`input`, `output` and `errors_output` are ids of files; of `origin` what is no door's own business."""
        origin = view.origin or {}
        return replace(
            view,
            input=[Path(path).name for path in view.input],
            output=results.output,
            errors_output=results.errors,
            origin=_told(origin),
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


def _told(origin: dict) -> dict:
    """The door a job came through, and for one of this API's what its files were called."""
    return {name: origin[name] for name in ("door", "files") if name in origin and origin["door"] == DOOR} or {
        "door": origin.get("door", "cli")
    }


def file_info(record: FileRecord) -> FileInfo:
    return FileInfo(
        id=record.id, filename=record.filename, purpose=record.purpose, bytes=record.bytes, created=record.created,
        expires=record.expires, job=record.job,
    )  # fmt: skip
