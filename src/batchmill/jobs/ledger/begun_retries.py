"""Retries that may have written files and are not stored. What is left of one goes, with the next owner at the latest.

A retry of a job with a folder replaces `job.json` and makes the folder of its plan before the transaction that stores
it. Until it is stored, the empty file `retries/JOB.GENERATION` says so. A retry of a small job writes no files.
"""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from batchmill.jobs.ledger.files import JobFiles
from batchmill.owned_files import OwnedFiles
from batchmill.part_files import sync_folder
from batchmill.wire.job_spec import JobSpec

FOLDER = "retries"


def begin(data_dir: Path, job_id: str, generation: int, owned: OwnedFiles) -> None:
    """Note durably that a retry is about to write files. Raises: TermOver, OSError."""
    path = _path(data_dir, job_id, generation)
    is_first = not path.parent.exists()
    owned.make_folder(path.parent)
    owned.create(path, b"")
    sync_folder(path.parent)
    if is_first:
        sync_folder(data_dir)


def undo(files: JobFiles, stored: JobSpec, generation: int, owned: OwnedFiles) -> None:
    """Remove the files of a retry that is not stored. Args: stored: the spec of the job. Raises: TermOver, OSError."""
    if files.spec.exists():  # the data directory may be the cache of an object store
        files.write_spec(replace(stored, is_small=False), owned)  # the job has a folder: see `RestingJob._begin_again`
    owned.remove_tree(files.plan(generation))


def forget(data_dir: Path, job_id: str, generation: int, owned: OwnedFiles) -> None:
    """The retry is stored, or nothing is left of it. Raises: TermOver, OSError."""
    owned.remove(_path(data_dir, job_id, generation))


def left_in(data_dir: Path) -> list[tuple[str, int]]:
    """(job, generation) of those that an earlier owner began."""
    found = (path.name.rpartition(".") for path in (data_dir / FOLDER).glob("job_*.*"))
    return sorted((job_id, int(generation)) for job_id, _, generation in found)


def _path(data_dir: Path, job_id: str, generation: int) -> Path:
    return data_dir / FOLDER / f"{job_id}.{generation}"
