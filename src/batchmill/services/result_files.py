"""Results of jobs as files: which ids they get, what their records say, and how they share the job's bytes."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from batchmill.services.file_records import FileRecord
from batchmill.store.segments import sync_folder
from batchmill.types import JobView

OUTPUT = "batch_output"  # their purpose


def result_id(job_id: str, generation: int, which: str) -> str:
    """The id of a job's result file: the same for everybody who looks."""
    return f"file-{hashlib.sha256(f'{job_id}:{generation}:{which}'.encode()).hexdigest()[:24]}"


def result_record(view: JobView, file_id: str, suffixes: Sequence[str], size_bytes: int) -> FileRecord:
    which = "output" if file_id == result_id(view.id, view.generation, "output") else "errors"
    suffix = "".join(each for each in suffixes if each != ".errors")
    created = view.finished or view.created
    expires_s = (view.origin or {}).get("output_expires_s")
    return FileRecord(
        id=file_id, project=view.project, purpose=OUTPUT, filename=f"{view.id}_{which}{suffix}", bytes=size_bytes,
        sha256=None, created=created, expires=None if expires_s is None else created + expires_s, job=view.id,
    )  # fmt: skip


def link(source: Path, target: Path) -> int | None:
    """A second name for a file that never changes; its size, or None where it is not there (any more)."""
    with contextlib.suppress(FileNotFoundError):
        target.unlink()  # of a look that did not come to its end: it may be of an older generation
    try:
        os.link(source, target, follow_symlinks=False)
    except FileNotFoundError:
        return None
    sync_folder(target.parent)
    return target.stat().st_size


def unlink_same(path: Path, others: Sequence[Path]) -> None:
    """Remove those of `others` that are the file at `path` under another name."""
    with contextlib.suppress(FileNotFoundError):
        own = path.stat()
        for other in others:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(own, other.stat()):
                    other.unlink()
                    sync_folder(other.parent)
