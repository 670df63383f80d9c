"""Finish: the end of a short job, stored in the transaction that counts its last rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import sqlalchemy as sa

from batchmill import faults
from batchmill.jobs.ledger.job_changes import Ending
from batchmill.jobs.results.results import Manifest
from batchmill.part_files import HeldFile
from batchmill.states import NEXT, JobState
from batchmill.store.file_log import FileLog
from batchmill.store.sql.transactions import Record


class EndListener(Protocol):
    """Stores something of its own with the end of a short job."""

    def store_end(self, db: sa.Connection, record: Record) -> None:
        """Within the transaction, which may be repeated or fail, and notes that the job's record has changed."""


class Finish:
    """The end that a job has if a commit counts."""

    def __init__(
        self, job_id: str, log: FileLog, held: Sequence[HeldFile], fields: dict[str, Any],
        listeners: Sequence[EndListener],
    ) -> None:  # fmt: skip
        """Args: fields: of the job's record. held: its results."""
        self._job_id, self._listeners = job_id, listeners
        columns = {"state": JobState.COMPLETED, **fields}
        errors, spent_s = columns.pop("errors", None), columns.pop("spent_s", 0.0)
        self._ending = Ending(columns, errors, spent_s)
        self._write = partial(write_held, log, tuple(held))
        self.is_stored = False  # once the transaction has been committed

    def write(self, db: sa.Connection, state: str, *, is_counted: bool) -> Ending | None:
        """As `JobEnd.write`. None also of a job that is being cancelled, or where there is no room: its runner goes on
        by itself, and finds that out.
        """
        self.is_stored = False
        if not is_counted or JobState.FINALIZING not in NEXT[JobState(state)]:
            return None
        try:
            self._write(db)
        except OSError:
            return None
        return self._ending

    def store(self, db: sa.Connection, record: Record) -> None:
        """As `JobEnd.store`."""
        for listener in self._listeners:
            listener.store_end(db, record)
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
