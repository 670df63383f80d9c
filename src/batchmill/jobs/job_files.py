"""Where a job keeps its files below the data directory."""

from __future__ import annotations

from pathlib import Path

import msgspec

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
        for folder in (self.dataset, self.segments, self.plan(0)):
            folder.mkdir(parents=True, exist_ok=True)
        with PartFile(self.spec, 0o600) as file:
            file.write(msgspec.json.encode(spec))
            file.publish()
        for folder in (self.home.parent, self.home.parent.parent):
            sync_folder(folder)

    def read_spec(self) -> JobSpec:
        return read_spec(self.spec.read_bytes())


def read_spec(data: bytes) -> JobSpec:
    """A job's description as it was written."""
    return msgspec.json.decode(data, type=JobSpec)
