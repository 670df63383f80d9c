"""The files of a job below the data directory."""

from __future__ import annotations

import functools
import os
from collections.abc import Container, Iterable
from pathlib import Path

import msgspec

from batchmill.datasets import layout, sealing
from batchmill.datasets.folders import DiskFolder
from batchmill.object_store.urls import is_object_url, open_store, parse_url
from batchmill.owned_files import OwnedFiles
from batchmill.part_files import make_folder, sync_folder
from batchmill.store.media_copies import FOLDER as MEDIA
from batchmill.store.media_copies import prefix_of, remove_copies, shared_home
from batchmill.types import MediaBounds, SegmentPlace
from batchmill.wire.job_spec import JobSpec

RESULTS = "results"  # the folder of the results of small jobs
REUSE = "reuse"  # in the folder of a job
PARTIAL = "partial"  # the folder of results of unfinished jobs, which their readers remove
MANIFEST_NAME = "manifest.json"  # of results in a folder

REMEMBERED_BYTES_MAX = 8 * 1024  # of a description; longer ones are read each time

_specs = msgspec.json.Decoder(JobSpec)


def is_folder(output: str) -> bool:
    """Whether results are written as parts into a folder: its path or URL ends with a slash."""
    return output.endswith("/")


def result_exists(path: str) -> bool:
    """Whether a result file, an object, or the manifest of a folder is there.

    Raises: AuthRefused, Unavailable, InvalidInput.
    """
    if is_folder(path):
        path += MANIFEST_NAME
    if not is_object_url(path):
        return os.path.exists(path)
    url = parse_url(path)
    return open_store(url.root).find(url.key) is not None


class JobFiles:
    """The paths of a job.

    Args: scratch: where the files of a small job are while it is used; None: it is not small.
    """

    def __init__(self, data_dir: Path, job_id: str, scratch: Path | None = None) -> None:
        self.data_dir, self.scratch, self._job_id = data_dir, scratch, job_id
        self.home = (scratch or data_dir).joinpath("jobs", job_id)

    @property
    def spec(self) -> Path:
        return self.home / "job.json"

    @property
    def ending(self) -> Path:
        """The record of a job that keeps only its results."""
        return self.home / "ending.json"

    @functools.cached_property
    def dataset(self) -> Path:
        return self.home / "dataset"

    @property
    def media(self) -> Path:
        """Copies of the files that cells name, where workers do not see these: see `store.media_copies`."""
        return self.home / MEDIA

    def shared_media(self, project: str) -> Path:
        """The further names of the copies of a project's jobs."""
        return shared_home(self.data_dir, project)

    def media_bounds(self, spec: JobSpec) -> MediaBounds:
        kind = spec.dataset.media_copies
        assert kind in ("", "folder", "objects"), f"{kind!r} is no place of copies"
        copies = str(self.media) if kind == "folder" else prefix_of(spec.id) if kind else ""
        return MediaBounds(spec.dataset.media_bytes_max, spec.dataset.media_row_bytes_max, copies)

    @functools.cached_property
    def segments(self) -> Path:
        return self.data_dir.joinpath("jobs", self._job_id, "segments")

    @property
    def reuse(self) -> Path:
        """The index of the results by their requests, after the first lookup, and what stays of them for later ones."""
        return self.data_dir / "jobs" / self._job_id / REUSE

    @functools.cached_property
    def segment_place(self) -> SegmentPlace:
        return SegmentPlace(str(self.segments))

    def plan(self, generation: int) -> Path:
        """The plan of a generation: the first runs every row, a later one those that failed."""
        return self.home / f"plan-{generation}"

    def output(self, name: str) -> Path:
        """Where the results stay if the caller names no place. Those of small jobs share a folder."""
        return self.home / name if self.scratch is None else Path(f"{self.results_folder}/{self._job_id}.{name}")

    @property
    def results_folder(self) -> str:
        """Of the results of small jobs."""
        return f"{self.data_dir}/{RESULTS}"

    def partial(self, name: str) -> Path:
        """Where results that are asked for before the end are until they have been read."""
        return self.data_dir / PARTIAL / f"{self._job_id}.{name}"

    def write_spec(self, spec: JobSpec, owned: OwnedFiles) -> None:
        """Create the job's folders and write `job.json`, durably. That of a small job is in the database alone."""
        if spec.is_small:
            return
        make_folder(self.home.parent)
        for folder in (self.dataset, self.segments, self.plan(0)):
            folder.mkdir(parents=True, exist_ok=True)
        with owned.part(self.spec) as file:
            file.write(msgspec.json.encode(spec))
            file.publish()
        sync_folder(self.home.parent)

    def is_untouched(self) -> bool:
        """Whether nothing was read or run for this job."""
        traces = (self.dataset / "seal.json", self.plan(0) / "plan.json")
        return not any(path.exists() for path in traces) and not any(self.segments.glob("*"))

    def clear_unsealed(self, owned: OwnedFiles) -> None:
        """Remove an unsealed dataset: sealing starts again, or not at all."""
        if not (self.dataset / "seal.json").exists():
            sealing.clear(DiskFolder(self.dataset, owned.term))

    def clear_refused(self, project: str, owned: OwnedFiles) -> None:
        """Remove the dataset and the plan of a job that will run no row."""
        sealing.clear(DiskFolder(self.dataset, owned.term))
        for path in self.dataset.glob(layout.FETCHED):
            owned.remove_tree(path) if path.is_dir() else owned.remove(path)
        owned.remove(*self.plan(0).glob("*"))
        remove_copies(self.media, self.shared_media(project), owned)

    def read_spec(self) -> JobSpec:
        return read_spec(self.spec.read_bytes())


def clear_unsealed(data_dir: Path, job_ids: Iterable[str], owned: OwnedFiles) -> None:
    """Remove what a kill left of datasets that were being unpacked."""
    for job_id in job_ids:
        JobFiles(data_dir, job_id).clear_unsealed(owned)


def sweep_orphans(data_dir: Path, known: Container[str], owned: OwnedFiles) -> None:
    """Remove the folders of jobs that are not in the ledger, after a crash between the two steps.

    One with work in it stays, whatever the ledger says: a lost ledger is rebuilt from it.
    """
    for home in (data_dir / "jobs").glob("job_*"):
        files = JobFiles(data_dir, home.name)
        if home.name not in known and files.is_untouched():
            owned.remove_tree(files.home)


def read_spec(data: bytes) -> JobSpec:
    """Read `job.json`, which many requests about one job ask for. Nobody changes what its lists hold."""
    return _read_short(data) if len(data) <= REMEMBERED_BYTES_MAX else _specs.decode(data)


@functools.lru_cache(maxsize=256)
def _read_short(data: bytes) -> JobSpec:
    return _specs.decode(data)
