"""Finish: the end of a short job, stored in the transaction that counts its last rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import sqlalchemy as sa

from batchmill import faults
from batchmill.errors import InvalidTransition
from batchmill.jobs.ledger.files import HeldFile
from batchmill.jobs.ledger.ledger import Ledger
from batchmill.jobs.results.results import Manifest
from batchmill.states import JobState
from batchmill.store.file_log import FileLog


class Finish:
    """The end that a job has if a commit counts."""

    def __init__(self, ledger: Ledger, job_id: str, log: FileLog, held: Sequence[HeldFile], fields: dict[str, Any]):
        """Args: fields: of the job's record. held: its results."""
        self._ledger, self._job_id, self._fields = ledger, job_id, fields
        self._write = partial(write_held, log, tuple(held))
        self.is_stored = False  # once the transaction has been committed

    def store(self, *, is_counted: bool) -> None:
        """Within the transaction of the commit, which may be repeated."""
        self.is_stored = False
        if not is_counted:
            return
        try:
            self._ledger.move(
                self._job_id, JobState.COMPLETED, via=[JobState.FINALIZING], within=self._write, **self._fields
            )
        except (InvalidTransition, OSError):
            return  # it is being cancelled, or there is no room: its runner goes on by itself, and finds that out
        self.is_stored = True


def ended_fields(manifest: Manifest) -> dict[str, Any]:
    """The fields of a job that its results say."""
    return {
        "message": "", "errors": manifest.causes, "rows_ok": manifest.ok, "rows_failed": manifest.failed,
        "output": manifest.output.path,
        "errors_output": None if manifest.errors is None else manifest.errors.path,
    }  # fmt: skip


def write_held(log: FileLog, files: Sequence[HeldFile], db: sa.Connection) -> None:
    """Write results in the transaction that ends their job. Raises: OSError."""
    for file in files:
        log.write(db, file.path, file.data)
    faults.point("in_end")
