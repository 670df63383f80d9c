"""A worker begins work only while its owner surely owns the database."""

from __future__ import annotations

import asyncio

import pytest

from batchmill.errors import DatabaseUnavailable
from batchmill.executors.leases import OwnerTerm
from batchmill.wire.messages import Renewed


async def test_work_begins_only_within_the_term():
    """Before the first reply, and once the owner is silent for longer than its term, nothing begins; the term counts
    from when the worker sent its heartbeat, however late the reply is.
    """
    now = 10.0
    term = OwnerTerm(lambda: now, is_limited=True)
    waiting = asyncio.create_task(term.until_valid())
    await asyncio.sleep(0)
    assert term.is_over() and not waiting.done()
    now = 12.0
    assert not term.renew(Renewed(at=8.0, left_s=3.0))  # it was on its way for too long
    assert term.renew(Renewed(at=11.0, left_s=3.0)) and not term.is_over()
    await waiting
    assert not term.renew(Renewed(at=11.5, left_s=3.0))  # it was valid before
    now = 14.4
    assert not term.is_over()
    term.check()
    now = 14.5
    assert term.is_over()
    with pytest.raises(DatabaseUnavailable, match="may have another owner"):
        term.check()
    assert term.renew(Renewed(at=14.4, left_s=2.5))


def test_an_owner_of_a_file_has_no_term():
    """The lock of a data directory ends with its owner, and so does the worker."""
    term = OwnerTerm(lambda: 1e12, is_limited=False)
    term.check()
    assert not term.is_over()
