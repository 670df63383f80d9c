"""The result files of ended jobs: their ids, their records, and which of them there are."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Self

from msgspec import Struct

from batchmill.services.files.records import FileRecord
from batchmill.store.removals import Removal
from batchmill.types import JobView

OUTPUT = "batch_output"  # the purpose of result files

Result = FileRecord | Removal | None


class ResultFiles(Struct, frozen=True):
    """The ids that the result files of an ended job have or will have, and the paths that they are adopted from."""

    output: tuple[str, str | None]
    errors: tuple[str, str | None]

    @classmethod
    def of(cls, view: JobView) -> Self:
        has_error_file = view.errors_output is not None  # else the output holds failed rows too
        output = view.output if view.rows_ok or not has_error_file else None
        ids = [result_id(view.id, view.generation, which) for which in ("output", "errors")]
        return cls((ids[0], output), (ids[1], view.errors_output))

    @property
    def ids(self) -> list[str]:
        return [self.output[0], self.errors[0]]

    def missing(self, found: Mapping[str, Result]) -> list[tuple[str, str]]:
        """(id, path) of the files that have no record."""
        return [(id_, path) for id_, path in (self.output, self.errors) if path is not None and id_ not in found]

    def chosen(self, found: Mapping[str, Result]) -> tuple[Result, Result]:
        return found.get(self.output[0]), found.get(self.errors[0])


class AdoptedResults(Struct, frozen=True):
    """The result files of a job in a state."""

    generation: int
    state: str
    results: tuple[Result, Result]

    def is_of(self, view: JobView) -> bool:
        return view.generation == self.generation and view.state == self.state


def result_id(job_id: str, generation: int, which: str) -> str:
    """Return the id of a job's result file. It follows from the job, so every caller computes the same one."""
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
