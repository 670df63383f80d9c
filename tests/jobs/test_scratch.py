"""Scratch folders: one for each owner, none of a dead one."""

import asyncio
import errno
import math
import os
import threading
from types import SimpleNamespace

import pytest
from fakes.terms import SetTerm

from batchmill.errors import TermOver
from batchmill.jobs.ledger import scratch
from batchmill.jobs.ledger.scratch import Scratch
from batchmill.owner_term import ENDLESS
from batchmill.types import DatasetSpec, Policy
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.rows.forms import OpenAIForm

SPEC = JobSpec(
    id="job_1", dataset=DatasetSpec(["/data/in.jsonl"]), models=[], form=OpenAIForm(), policy=Policy(), output=None,
    identity="same", code={}, created=1.0, is_small=True,
)  # fmt: skip

DATABASE = SimpleNamespace(term=ENDLESS)  # it is not read here


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """What stands for /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(scratch, "MEMORY", folder)
    return folder


def test_a_folder_is_made_when_it_is_needed_and_removed_with_its_owner(memory, tmp_path):
    owner = Scratch(tmp_path, DATABASE)
    assert list(memory.iterdir()) == []
    assert owner.home.parent == memory
    assert owner.home.stat().st_mode & 0o777 == 0o700
    owner.close()
    assert list(memory.iterdir()) == []


def test_folders_of_dead_owners_are_removed(memory, tmp_path):
    alive = Scratch(tmp_path, DATABASE)
    assert alive.home.exists()
    dead = Scratch(tmp_path / "dead", DATABASE)
    assert dead.home.exists()
    os.close(dead._folder[1])  # as its end would
    another = Scratch(tmp_path / "another", DATABASE)
    homes = {alive.home, another.home}
    assert set(memory.iterdir()) == homes
    another.close()
    alive.close()


def test_only_a_fresh_folder_may_have_no_lock(memory, tmp_path):
    fresh, old = (memory / f"batchmill-{os.getuid()}-{name}" for name in ("fresh", "old"))
    fresh.mkdir()
    old.mkdir()
    os.utime(old, (0, 0))
    owner = Scratch(tmp_path, DATABASE)
    homes = {fresh, owner.home}
    assert set(memory.iterdir()) == homes
    owner.close()


def test_a_machine_without_that_memory_uses_the_data_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch, "MEMORY", tmp_path / "missing")
    owner = Scratch(tmp_path, DATABASE)
    assert owner.home.parent == tmp_path
    owner.close()
    assert list(tmp_path.iterdir()) == []


async def test_where_memory_is_full_jobs_lie_on_the_disk(memory, tmp_path, monkeypatch):
    owner = Scratch(tmp_path, DATABASE)
    unpack = scratch.packed.unpack

    def fail_in_memory(home, data):
        if memory in home.parents:
            raise OSError(errno.ENOSPC, "no space left on device")
        unpack(home, data)

    monkeypatch.setattr(scratch.packed, "unpack", fail_in_memory)
    async with owner.use(SPEC, is_new=True) as files:
        assert files.dataset.is_dir()
        assert files.dataset.resolve().is_relative_to(tmp_path / "scratch")
    assert list((tmp_path / "scratch").iterdir()) == list((owner.home / "jobs").iterdir()) == []
    owner.close()


async def test_a_replaced_owner_leaves_what_its_successor_has_on_the_disk(memory, tmp_path, monkeypatch):
    """Both give the same names to small jobs that memory has no room for."""
    left = [math.inf]
    owner, unpack = Scratch(tmp_path, SimpleNamespace(term=SetTerm(lambda: left[0]))), scratch.packed.unpack
    theirs = tmp_path / scratch.ON_DISK / SPEC.id / "theirs"

    def fail_in_memory(home, data):
        if memory in home.parents:
            raise OSError(errno.ENOSPC, "no space left on device")
        unpack(home, data)

    monkeypatch.setattr(scratch.packed, "unpack", fail_in_memory)
    async with owner.use(SPEC, is_new=True):  # until another one has unpacked the job
        left[0] = 0.0
        theirs.touch()
    assert theirs.exists() and list((owner.home / "jobs").iterdir()) == []
    with pytest.raises(TermOver):
        async with owner.use(SPEC, is_new=True):
            pytest.fail("the folder is another owner's")
    late = Scratch(tmp_path, owner._database)
    assert late.home.exists() and theirs.exists()
    late.close()
    owner.close()


async def test_a_thread_is_waited_for_although_its_caller_is_cancelled(memory, tmp_path):
    """The folder of the job goes away with its last user: a thread must not write into it after that."""
    owner, may_end, begun = Scratch(tmp_path, DATABASE), threading.Event(), threading.Event()
    written = []

    def write():
        begun.set()
        may_end.wait()
        written.append(True)

    running = asyncio.create_task(owner.run(write, "default"))
    await asyncio.to_thread(begun.wait)
    running.cancel()
    await asyncio.sleep(0)
    assert not running.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert written == [True]
    owner.close()
