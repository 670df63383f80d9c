"""Where a job keeps its files below the data directory."""

from __future__ import annotations

import shutil
from collections.abc import Container, Iterable
from pathlib import Path

import msgspec

from batchmill.datasets import sealing
from batchmill.jobs.part_file import PartFile
from batchmill.store.segments import sync_folder
from batchmill.wire.job_spec import JobSpec


class JobFiles:
    def __init__(self, data_dir: Path, job_id: str) -> None:
        self.data_dir = data_dir
        self.home = data_dir / "jobs" / job_id

    @property
    def spec(self) -> Path:
        return self.home / "job.json"

    @property
    def ending(self) -> Path:
        """The record of a job of which only the results are left."""
        return self.home / "ending.json"

    @property
    def dataset(self) -> Path:
        return self.home / "dataset"

    @property
    def segments(self) -> Path:
        return self.home / "segments"

    def plan(self, generation: int) -> Path:
        """The plan of a generation: the first runs every row, a later one those that failed."""
        return self.home / f"plan-{generation}"

    def write_spec(self, spec: JobSpec) -> None:
        """Make the folders and describe the job in them, durably."""
        is_first = not self.home.parent.exists()
        for folder in (self.dataset, self.segments, self.plan(0)):
            folder.mkdir(parents=True, exist_ok=True)
        with PartFile(self.spec, 0o600) as file:
            file.write(msgspec.json.encode(spec))
            file.publish()
        sync_folder(self.home.parent)
        if is_first:
            sync_folder(self.data_dir)

    def remove(self) -> None:
        """Leave nothing of a job that was never stored."""
        shutil.rmtree(self.home, ignore_errors=True)

    def is_untouched(self) -> bool:
        """Nothing was read or run for this job."""
        traces = (self.dataset / "seal.json", self.plan(0) / "plan.json")
        return not any(path.exists() for path in traces) and not any(self.segments.glob("*"))

    def clear_unsealed(self) -> None:
        """Remove what was written of a dataset that was never sealed: it is begun again, or not at all."""
        if not (self.dataset / "seal.json").exists():
            sealing.clear(self.dataset)

    def clear_refused(self) -> None:
        """Remove the dataset and plan of a job of which no row will run."""
        sealing.clear(self.dataset)
        for path in self.plan(0).glob("*"):
            path.unlink()

    def read_spec(self) -> JobSpec:
        return read_spec(self.spec.read_bytes())


def clear_unsealed(data_dir: Path, job_ids: Iterable[str]) -> None:
    """Remove what a kill left of datasets that were being unpacked."""
    for job_id in job_ids:
        JobFiles(data_dir, job_id).clear_unsealed()


def sweep_orphans(data_dir: Path, known: Container[str]) -> None:
    """Remove the folders of jobs that the ledger never knew: a crash came between the one and the other.

    One with work in it stays, whatever the ledger says: a lost ledger is rebuilt from it.
    """
    for home in (data_dir / "jobs").glob("job_*"):
        files = JobFiles(data_dir, home.name)
        if home.name not in known and files.is_untouched():
            files.remove()


def read_spec(data: bytes) -> JobSpec:
    """A job's description as it was written."""
    return msgspec.json.decode(data, type=JobSpec)
