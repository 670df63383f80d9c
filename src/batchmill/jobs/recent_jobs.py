"""RecentJobs: the records of jobs as the last transaction left them, so that clients that poll do not ask the database.

What a transaction has changed is replaced or forgotten before anybody learns of its commit (`JoiningTransactions`), so
no request sees an older record than one that was acknowledged.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from batchmill.jobs import views
from batchmill.jobs.ledger import records
from batchmill.store.sql.database import Database
from batchmill.store.sql.transactions import Changes, Record
from batchmill.types import JobView

RECENT_MAX = 2000  # jobs
RECORD_BYTES_MAX = 32 * 1024  # a job with a longer description and list of refused lines is read each time


class RecentJobs:
    """Concurrency: the thread that writes the database changes it; the event loop reads it."""

    def __init__(self, database: Database) -> None:
        self._database, self._term = database, database.term
        self._lock = threading.Lock()
        self._records: OrderedDict[str, Record | JobView] = OrderedDict()  # the view once it was asked for
        self._reading: dict[str, object] = {}  # job -> its newest read that no change has overtaken
        database.writer.listen(self._changed)

    def get(self, job_id: str) -> JobView | None:
        """The stored part of a job's view, by its whole id; None: call `read`."""
        if self._term.is_over():
            return None  # another process may own the database, and have changed it
        record = self._records.get(job_id)
        if record is None or isinstance(record, JobView):
            return record
        view = views.view_of(record, {})
        with self._lock:
            if self._records.get(job_id) is record:
                self._records[job_id] = view
        return view

    async def read(self, job_id: str) -> JobView:
        """Read a job by its id or a unique prefix of it. Raises: UnknownName."""
        token = self._reading[job_id] = object()
        try:
            record, errors = await self._database.read(records.find_with_errors, job_id)
            view = views.view_of(record, errors)
            with self._lock:
                is_newest = self._reading.get(job_id) is token and view.id == job_id
                if is_newest and _is_short(record):
                    self._put(job_id, view)
        finally:
            if self._reading.get(job_id) is token:
                del self._reading[job_id]
        return view

    def _changed(self, changes: Changes) -> None:
        with self._lock:
            for job_id, record in changes.items():
                self._reading.pop(job_id, None)
                self._records.pop(job_id, None)
                # Errors by cause lie in another table.
                if record is not None and not record["rows_failed"] and _is_short(record):
                    self._put(job_id, record)

    def _put(self, job_id: str, record: Record | JobView) -> None:
        self._records[job_id] = record
        self._records.move_to_end(job_id)
        if len(self._records) > RECENT_MAX:
            self._records.popitem(last=False)


def _is_short(record: Record) -> bool:
    return len(record["spec"]) + len(record["problems"] or b"") <= RECORD_BYTES_MAX
