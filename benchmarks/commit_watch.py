"""When the last row of a run was committed, seen from outside: a thread that reads the job's counters in the database.

The command's own exit comes later, after results are gathered and workers ended; an endpoint's log ends earlier.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

LOOK_S = 0.01  # so late the end may be seen; it counts against batchmill
COUNT = "SELECT coalesce(sum(rows_ok + rows_failed), 0) FROM jobs"


class CommitWatch:
    """Waits for `rows` committed rows in a data directory."""

    def __init__(self, data_dir: Path, rows: int) -> None:
        self._database, self._rows = data_dir / "batchmill.db", rows
        self._stopped = threading.Event()
        self.last_commit: float | None = None  # seconds since the epoch

    def run(self) -> None:
        """Look until every row is committed or the watch is stopped."""
        while self.last_commit is None and not self._stopped.wait(LOOK_S):
            try:
                with closing(sqlite3.connect(f"file:{self._database}?mode=ro", uri=True)) as db:
                    self._follow(db)
            except sqlite3.OperationalError:
                continue  # not there yet, or without its tables

    def _follow(self, db: sqlite3.Connection) -> None:
        while not self._stopped.wait(LOOK_S):
            (rows,) = db.execute(COUNT).fetchone()
            if rows >= self._rows:
                self.last_commit = time.time()
                return

    def stop(self) -> None:
        """End the thread at its next look."""
        self._stopped.set()


@contextmanager
def watched_commits(data_dir: Path, rows: int) -> Iterator[CommitWatch]:
    """A watch in a thread of its own, ended with the block."""
    watch = CommitWatch(data_dir, rows)
    thread = threading.Thread(target=watch.run, name="commit-watch")
    thread.start()
    try:
        yield watch
    finally:
        watch.stop()
        thread.join()
