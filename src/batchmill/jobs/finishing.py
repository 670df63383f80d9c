"""Finish: the end of a short job, stored in the transaction that counts its last rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import sqlalchemy as sa

from batchmill import faults
from batchmill.errors import InvalidTransition
from batchmill.jobs.ledger.ledger import move
from batchmill.jobs.results.results import Manifest
from batchmill.part_files import HeldFile
from batchmill.states import JobState
from batchmill.store.file_log import FileLog


class EndListener(Protocol):
    """Stores something of its own with the end of a short job."""

    def store_end(self, db: sa.Connection, record: sa.RowMapping) -> None:
        """Within the transaction, which may be repeated or fail. In the thread that writes the database."""

    def ended(self, job_id: str) -> None:
        """The transaction has been committed. On the event loop."""


class Finish:
    """The end that a job has if a commit counts."""

    def __init__(
        self, job_id: str, log: FileLog, held: Sequence[HeldFile], fields: dict[str, Any],
        listeners: Sequence[EndListener],
    ) -> None:  # fmt: skip
        """Args: fields: of the job's record. held: its results."""
        self._job_id, self._fields, self._listeners = job_id, fields, listeners
        self._write = partial(write_held, log, tuple(held))
        self.is_stored = False  # once the transaction has been committed

    def store(self, db: sa.Connection, *, is_counted: bool) -> None:
        """Within the transaction of the commit, which may be repeated."""
        self.is_stored = False
        if not is_counted:
            return
        try:
            via = [JobState.FINALIZING]
            record = move(db, self._job_id, JobState.COMPLETED, via=via, within=self._write, **self._fields)
        except (InvalidTransition, OSError):
            return  # it is being cancelled, or there is no room: its runner goes on by itself, and finds that out
        assert record is not None, "a job that was moved has a record"
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
