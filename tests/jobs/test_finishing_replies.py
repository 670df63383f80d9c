"""The end of a short job whose transaction PostgreSQL does not answer."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from fakes.databases import POSTGRESQL, databases
from ledgered_job import LedgeredJob
from test_finishing import ROWS, Listener, finish_of, last_commit

from batchmill.states import JobState


@pytest.fixture
def job(tmp_path):
    databases.begin(POSTGRESQL)
    job = LedgeredJob(tmp_path, ROWS, ROWS)
    yield job
    job.ledger.close()
    databases.end()


@pytest.mark.parametrize("is_committed", [True, False])
async def test_an_end_whose_commit_gets_no_reply_counts_once(job, is_committed):
    """The connection is lost while it commits: a transaction counts if it was committed, and is repeated otherwise."""
    listener = Listener()
    finish, commit = finish_of(job, listener), last_commit(job)
    lost = []

    def lose_reply(connection: sa.Connection) -> None:
        if not lost:
            raw = connection.connection.dbapi_connection
            lost.append(raw)
            if is_committed:
                raw.commit()
            raw.close()

    sa.event.listen(job.ledger.database.writer.own._engine, "commit", lose_reply)
    assert await job.ledger.database.write(lambda _: job.ledger.commit([(commit, None)], {0: finish})) == ["counted"]
    assert lost and finish.is_stored
    record = job.ledger.job(job.id)
    assert (record["state"], record["rows_ok"]) == (JobState.COMPLETED, ROWS)
    assert (job.data_dir / "results.jsonl").read_bytes() == b"results\n"
    assert listener.states == [JobState.COMPLETED] * (1 if is_committed else 2)
