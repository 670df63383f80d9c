"""The prefix of `[storage] objects` belongs to one database."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from fakes.faulty_objects import faulty_objects
from fakes.s3_server import bucket_client, s3_environment, s3_server

from batchmill.config import Config, StorageEntry
from batchmill.errors import BatchmillError, Conflict, InvalidConfig, InvalidInput, StorageFailed, Unavailable
from batchmill.object_store.store import ObjectStore
from batchmill.object_store.urls import parse_url
from batchmill.owner_term import ENDLESS, PrefixTerm, now_s, term_at
from batchmill.services.data_dirs.databases import describe
from batchmill.services.doctor import check_storage
from batchmill.store import prefix_owner
from batchmill.store.objects import StoreObjects
from batchmill.store.prefix_owner import (
    LEASE_S,
    NAME,
    RETRY_S,
    SETTLE_S,
    WATCH_S,
    WINDOW_S,
    PrefixClaim,
    PrefixOwner,
)
from batchmill.store.sql.database import Database

BUCKET = "owned"


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as url, bucket_client(url, BUCKET):
        yield url


@pytest.fixture(params=["file", "s3", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "s3":
        for name, value in s3_environment(request.getfixturevalue("s3")).items():
            monkeypatch.setenv(name, value)
        return f"s3://{BUCKET}/{tmp_path.name}"
    return f"file://{tmp_path}/store" if request.param == "file" else "memory:///store"


async def claim(folder: Path, url: str) -> str:
    """Claim a prefix as an owner of the database in `folder` does. Returns the id of its ledger."""
    return (await claimed(folder, url)).own.ledger


async def claimed(folder: Path, url: str, file: str = "") -> PrefixClaim:
    folder.mkdir(exist_ok=True)
    database = Database(folder / "batchmill.db")
    try:
        made = await prefix_owner.claim(database, url, f"the database of {folder.name}", file)
        assert await database.read(prefix_owner.find_ledger) == (made.own.ledger, url)
        return made
    finally:
        database.close()


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "batchmill.owner"]


def take_over(folder: Path, url: str, wait: Callable[[float], None] = lambda _: None) -> str:
    """Take a prefix over for the database in `folder`, as the command does."""
    engine = sa.create_engine(f"sqlite:///{folder / 'batchmill.db'}", poolclass=sa.pool.NullPool)
    return prefix_owner.take_over(url, engine, f"the database of {folder.name}", wait)


async def test_another_database_is_refused(tmp_path: Path, url: str) -> None:
    """Its message names the prefix, what it belongs to, and both ways out. The owner, also elsewhere, goes on."""
    first = await claim(tmp_path / "one", url)
    if url.startswith("memory"):  # each process has a store of its own
        return
    with pytest.raises(InvalidConfig) as refused:
        await claim(tmp_path / "two", url)
    assert refused.value.code == "other_storage_owner"
    for part in (url, first, "the database of one", "another prefix", "storage owner --take-over"):
        assert part in refused.value.message
    shutil.copytree(tmp_path / "one", tmp_path / "restored")
    assert await claim(tmp_path / "restored", url) == first == await claim(tmp_path / "one", url)
    assert await claim(tmp_path / "two", f"{url}/other") != first


async def test_a_prefix_that_is_taken_over(tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture) -> None:
    """If its owner does not renew it. The former one is refused; if it still runs, it changes no object any more, and
    says whose the prefix is, until it is given back.
    """
    if url.startswith("memory"):
        return
    former = await claimed(tmp_path / "one", url)
    with pytest.raises(InvalidConfig):
        await claim(tmp_path / "two", url)
    waits: list[float] = []
    assert take_over(tmp_path / "two", url, waits.append) == f"{url} belongs to this database now"
    assert waits == [WATCH_S, SETTLE_S]
    await claim(tmp_path / "two", url)
    assert take_over(tmp_path / "two", url, waits.append) == f"{url} belongs to this database already"
    with pytest.raises(InvalidConfig, match="the database of two"):
        await claim(tmp_path / "one", url)
    assert logged(caplog) == []
    before = prefix_owner.find_owner(former.store)
    objects, heard = StoreObjects(url, former.term), []
    former.term.listen(heard.append)
    objects.put("one", b"1")
    former.announce()
    former.renew()
    former.announce()
    assert "was taken over by another ledger" in caplog.text and "Stop the other server" in caplog.text
    assert prefix_owner.find_owner(former.store) == before
    for term in (former.term, term_at(former.term.path)):
        objects = StoreObjects(url, term)
        for change in (lambda: objects.put("two", b"2"), lambda: objects.delete(["one"])):  # noqa: B023 - called here
            with pytest.raises(StorageFailed, match=r"of the database of two.* Stop the other server and run"):
                change()
        assert objects.get("one") == b"1" and objects.find("two") is None
    assert [error.message for error in heard] == [former.term.refusal]
    caplog.clear()
    take_over(tmp_path / "one", url)
    former.renew()
    former.announce()
    assert logged(caplog) == [] and len(heard) == 1, "it got the prefix back: that is no copy of its database"
    for term in (former.term, term_at(former.term.path)):
        StoreObjects(url, term).delete(["one"])


async def test_what_is_not_renewed_may_be_another_databases(tmp_path: Path, url: str) -> None:
    """Objects are changed only for a while after a renewal, which ends before another process can have taken the prefix
    over: also by children and workers of an owner that is stopped.
    """
    made, now = await claimed(tmp_path / "one", url), now_s()
    assert now + 0.9 * LEASE_S < made.term.until_s <= now + LEASE_S < now + WATCH_S - 2 * RETRY_S
    worker, child = PrefixTerm(ENDLESS, 0.0), term_at(made.term.path)
    for each in (made.term, child):
        each.check()
    for until_s, is_over in ((now - 1.0, True), (now + LEASE_S, False)):
        made.term.renew(until_s)
        worker.renew(now + made.term.left_s(), made.term.refusal)
        for each in (made.term, child, worker):
            assert each.is_over() == is_over
            store = ObjectStore(parse_url(url), retry_s=0.0, term=each)
            if is_over:
                with pytest.raises(Unavailable, match="was not renewed in time"):
                    store.put("one", b"1", overwrite=True)
            else:
                store.put("one", b"1", overwrite=True)
    made.term.renew(now - 1.0)
    assert made.renew() and not made.term.is_over()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of owners, which a test changes."""
    now = [now_s()]
    monkeypatch.setattr(prefix_owner, "now_s", lambda: now[0])
    return now


async def test_an_owner_that_is_stopped_while_it_renews(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    """Between reading and writing, while another database takes the prefix over. It changes no object when it goes on,
    and its successor keeps the prefix: also where the store replaces whatever is there.
    """
    if url.startswith("memory"):
        return
    former = await claimed(tmp_path / "one", url)
    with pytest.raises(InvalidConfig):
        await claim(tmp_path / "two", url)
    clock[0] += WATCH_S
    find, successors = prefix_owner._find, list[PrefixClaim]()

    def stopped(store: ObjectStore) -> Any:
        seen = find(store)
        monkeypatch.setattr(prefix_owner, "_find", find)
        take_over(tmp_path / "two", url)
        clock[0] += SETTLE_S
        successors.append(asyncio.run(claimed(tmp_path / "two", url)))
        return seen

    monkeypatch.setattr(prefix_owner, "_find", stopped)
    former.term.renew(clock[0] - 1.0)
    await asyncio.to_thread(former.renew)
    assert former.term.until_s < clock[0]
    (successor,) = successors
    for _ in range(2):
        clock[0] += RETRY_S
        assert successor.renew() and not successor.term.refusal
        assert prefix_owner.find_owner(successor.store) == successor.own
        assert former.renew() and "the database of two" in former.term.refusal
    take_over(tmp_path / "one", url)
    assert successor.renew() and "the database of one" in successor.term.refusal
    assert former.renew() and not former.term.refusal and former.own.taken == 2


@pytest.mark.parametrize("is_lost", [False, True], ids=["slow", "no reply"])
async def test_a_renewal_that_may_have_replaced_a_successors(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, clock: list[float], *, is_lost: bool
) -> None:
    """Past the lease it counts once a successor would have renewed the prefix; at once where the store is seen to
    replace what was read alone.
    """
    if url.startswith("memory"):
        return
    owner = await claimed(tmp_path / "one", url)
    clock[0] = owner.term.until_s + 1.0
    owner.term.renew(0.0)
    put = prefix_owner._put

    def put_late(*words: Any) -> None:
        monkeypatch.setattr(prefix_owner, "_put", put)
        put(*words)
        clock[0] += WINDOW_S + 1.0
        if is_lost:
            raise Unavailable("no reply")

    monkeypatch.setattr(prefix_owner, "_put", put_late)
    assert not owner.renew() and owner.term.is_over()
    clock[0] += RETRY_S
    assert not owner.renew() and owner.term.is_over()
    clock[0] += RETRY_S if url.startswith("s3") else WATCH_S - 1.0
    assert owner.renew() == url.startswith("s3")
    clock[0] += RETRY_S
    assert owner.renew() and owner.term.until_s == clock[0] + LEASE_S


async def test_a_take_over_that_is_written_over(tmp_path: Path, url: str) -> None:
    """By an owner that has read the object before: it lives, and nothing is taken over."""
    if url.startswith("memory"):
        return
    former = await claimed(tmp_path / "one", url)
    with pytest.raises(InvalidConfig):
        await claim(tmp_path / "two", url)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            former.store.put(NAME, msgspec.json.encode(former.own), overwrite=True)

    with pytest.raises(Conflict, match="lives: renewed by"):
        take_over(tmp_path / "two", url, wait)
    assert former.renew() and not former.term.refusal


async def test_a_prefix_whose_owner_lives(tmp_path: Path, url: str) -> None:
    """It is not taken over: its owner renews it while it is watched, however its clock goes."""
    if url.startswith("memory"):
        return
    alive = await claimed(tmp_path / "one", url)
    before = prefix_owner.find_owner(alive.store)
    with pytest.raises(InvalidConfig):
        await claim(tmp_path / "two", url)
    with pytest.raises(Conflict, match=rf"the owner of .* lives: renewed by {socket.gethostname()}") as refused:
        take_over(tmp_path / "two", url, lambda _: alive.renew())
    assert refused.value.code == "storage_owner_lives"
    now = prefix_owner.find_owner(alive.store)
    assert before is not None and now is not None and now.renewed > before.renewed and now.life == before.life
    assert await claim(tmp_path / "one", url) == now.ledger


async def test_an_owner_that_is_renewed_while_it_is_read(tmp_path: Path, url: str, monkeypatch) -> None:
    """What is read is the object as it is then; one that is replaced again and again has an owner that lives."""
    if url.startswith("memory"):
        return
    alive = await claimed(tmp_path / "one", url)
    store, renewals = ObjectStore(parse_url(url)), [True]

    def renew_first(*words: Any) -> memoryview:
        if renewals and renewals.pop():
            alive.renew()
        return get_range(*words)

    get_range = store.get_range
    monkeypatch.setattr(store, "get_range", renew_first)
    assert prefix_owner.find_owner(store) == alive.own
    renewals.extend([True] * 10)
    with pytest.raises(Conflict, match="was replaced 5 times while it was read"):
        prefix_owner.find_owner(store)


async def test_a_take_over_without_an_owner_or_an_id(tmp_path: Path) -> None:
    """What no database owns needs none; a database that was never refused has no id; what is no owner is replaced."""
    url = f"file://{tmp_path}/store"
    with pytest.raises(InvalidInput, match="has no id yet"):
        prefix_owner.take_over(url, None, "")
    await claim(tmp_path / "one", url)
    (tmp_path / "store" / NAME).unlink()
    assert "has no owner: the next start claims it" in take_over(tmp_path / "one", url)
    (tmp_path / "store" / NAME).write_bytes(b"not JSON")
    assert "belongs to this database now" in take_over(tmp_path / "one", url)
    await claim(tmp_path / "one", url)


async def test_a_copy_of_the_database(tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Two owners with one id notice each other. One that follows another, which has ended, says nothing."""
    first = await claimed(tmp_path / "one", url)
    if url.startswith("memory"):
        return
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    second = await claimed(tmp_path / "copy", url)
    second.renew()
    assert logged(caplog) == []
    for owner, other in ((first, "copy"), (second, "one"), (first, "copy")):
        caplog.clear()
        owner.renew()
        (message,) = logged(caplog)
        assert "is used by a copy of this database, too" in message and f"the database of {other}" in message
    caplog.clear()
    first.renew()
    assert logged(caplog) == []


async def test_a_copy_is_opened(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    """It waits, and is refused while a server lives on the other copy. The same file, and a copy of which no server has
    lived for long, do not wait.
    """
    if url.startswith("memory"):
        return
    first = await claimed(tmp_path / "one", url, "file 1")
    assert not (await claimed(tmp_path / "one", url, "file 1")).term.is_over()
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    waited: list[float] = []

    async def sleep(delay_s: float) -> None:
        waited.append(delay_s)
        clock[0] += delay_s
        if first is not None and sum(waited) > WATCH_S / 2:
            await asyncio.to_thread(first.renew)

    monkeypatch.setattr(prefix_owner.asyncio, "sleep", sleep)
    with pytest.raises(InvalidConfig) as refused:
        await claimed(tmp_path / "copy", url, "file 2")
    assert refused.value.code == "storage_copy_lives" and sum(waited) < WATCH_S
    for part in (url, "another copy of this database", "the database of one", "Stop that server", "another prefix"):
        assert part in refused.value.message
    assert prefix_owner.find_owner(first.store) == first.own
    first = None
    waited.clear()
    copy = await claimed(tmp_path / "copy", url, "file 2")
    assert WATCH_S <= sum(waited) < WATCH_S + 2 * RETRY_S
    assert copy.term.until_s == clock[0] + LEASE_S and prefix_owner.find_owner(copy.store) == copy.own
    now = time.time() + prefix_owner.FRESH_S + 1.0
    monkeypatch.setattr(time, "time", lambda: now)
    waited.clear()
    assert not (await claimed(tmp_path / "one", url, "file 1")).term.is_over() and not waited


async def test_a_copy_is_opened_before_its_store_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    """The renewals wait, change nothing, and say whose the prefix is while a server lives on the other copy."""
    url = f"file://{tmp_path}/store"
    first = await claimed(tmp_path / "one", url, "file 1")
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    find = prefix_owner._find

    def fail(store: ObjectStore) -> Any:
        raise Unavailable("no reply")

    monkeypatch.setattr(prefix_owner, "_find", fail)
    copy = await claimed(tmp_path / "copy", url, "file 2")
    monkeypatch.setattr(prefix_owner, "_find", find)
    assert not copy.renew()
    clock[0] += WATCH_S - 1.0
    assert not copy.renew() and copy.term.is_over() and not copy.term.refusal
    assert first.renew() and not copy.renew() and "another copy of this database" in copy.term.refusal
    clock[0] += WATCH_S - 1.0
    assert not copy.renew() and copy.term.refusal and prefix_owner.find_owner(first.store) == first.own
    clock[0] += 1.0
    assert copy.renew() and copy.term.until_s == clock[0] + LEASE_S and not copy.term.refusal


async def test_a_server_that_was_stopped_while_a_copy_went_on(tmp_path: Path, url: str, clock: list[float]) -> None:
    """It changes nothing until that one renews the object no more: also where the store replaces whatever is there."""
    if url.startswith("memory"):
        return
    first = await claimed(tmp_path / "one", url, "file 1")
    shutil.copytree(tmp_path / "one", tmp_path / "copy")

    async def sleep(delay_s: float) -> None:
        clock[0] += delay_s

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(prefix_owner.asyncio, "sleep", sleep)
        copy = await claimed(tmp_path / "copy", url, "file 2")
    first.term.renew(0.0)  # its lease is over by then
    for _ in range(2):
        clock[0] += RETRY_S
        assert not first.renew() and first.term.is_over()
        assert prefix_owner.find_owner(first.store) == copy.own
        assert copy.renew() and not copy.term.refusal
    assert "the database of copy" in first.term.refusal
    clock[0] += RETRY_S
    assert not first.renew()
    clock[0] += WATCH_S
    assert first.renew() and not first.term.refusal


async def test_a_store_that_is_always_slow(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    """One that replaces what was read alone can be used all the same."""
    if not url.startswith("s3"):
        return
    owner, put = await claimed(tmp_path / "one", url), prefix_owner._put
    owner.term.renew(0.0)

    def put_late(*words: Any) -> None:
        put(*words)
        clock[0] += WINDOW_S + 1.0

    monkeypatch.setattr(prefix_owner, "_put", put_late)
    for is_renewed in (False, False, True):
        clock[0] += RETRY_S
        assert owner.renew() == is_renewed
        owner.term.renew(0.0)


async def test_a_renewal_that_fails(tmp_path: Path, s3: str, caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    """It is logged and tried again soon: an owner that lives is not taken for dead because of one. After the end of its
    owner nothing is renewed.
    """
    monkeypatch.setattr(prefix_owner, "RENEW_S", 0.01)
    with faulty_objects(s3) as plan:
        for name, value in s3_environment(plan.url).items():
            monkeypatch.setenv(name, value)
        owner = await claimed(tmp_path / "one", f"s3://{BUCKET}/{tmp_path.name}")
        before = owner.own.renewed
        plan.always["PUT"] = "denied"
        async with owner.renewing(), asyncio.timeout(30):
            while "could not be renewed" not in caplog.text:
                await asyncio.sleep(0.01)
            monkeypatch.setattr(prefix_owner, "RENEW_S", 3600.0)
            monkeypatch.setattr(prefix_owner, "RETRY_S", 0.01)
            while len(logged(caplog)) < 4:
                await asyncio.sleep(0.01)
            del plan.always["PUT"]
            while (found := prefix_owner.find_owner(owner.store)) is None or found.renewed <= before:
                await asyncio.sleep(0.01)
        caplog.clear()
        owner.renew()
        assert "may have another owner" in caplog.text


async def test_threads_that_write_objects_delay_no_renewal(tmp_path: Path, monkeypatch) -> None:
    """All threads of the loop may be waiting for the store for minutes."""
    monkeypatch.setattr(prefix_owner, "RENEW_S", 0.01)
    owner, is_over = await claimed(tmp_path / "one", f"file://{tmp_path}/store"), threading.Event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    writing = asyncio.create_task(asyncio.to_thread(is_over.wait))
    before = owner.own.renewed
    try:
        async with owner.renewing(), asyncio.timeout(30):
            while owner.own.renewed == before:
                await asyncio.sleep(0.01)
    finally:
        is_over.set()
        await writing


async def test_a_machine_that_was_suspended_renews_soon(tmp_path: Path, monkeypatch) -> None:
    """The clock by which the loop sleeps stands still meanwhile; the lease does not."""
    ahead_s = 0.0
    monkeypatch.setattr(prefix_owner, "now_s", lambda: now_s() + ahead_s)
    monkeypatch.setattr(prefix_owner, "RETRY_S", 0.01)
    owner = await claimed(tmp_path / "one", f"file://{tmp_path}/store")
    before = owner.own.renewed
    async with owner.renewing(), asyncio.timeout(30):
        await asyncio.sleep(0.05)
        assert owner.own.renewed == before
        ahead_s = 3600.0
        while owner.own.renewed == before:
            await asyncio.sleep(0.01)


async def test_a_start_that_cannot_renew(
    tmp_path: Path, s3: str, caplog: pytest.LogCaptureFixture, monkeypatch
) -> None:
    """It goes on, says why, and tries again soon: its last renewal was that of the process before it."""
    monkeypatch.setattr(prefix_owner, "RETRY_S", 0.01)
    url = f"s3://{BUCKET}/{tmp_path.name}"
    with faulty_objects(s3) as plan:
        for name, value in s3_environment(plan.url).items():
            monkeypatch.setenv(name, value)
        first = await claimed(tmp_path / "one", url)
        plan.fail("PUT", "changed")
        second = await claimed(tmp_path / "one", url)
        assert f"another process has written {url}/{NAME} meanwhile" in caplog.text
        async with second.renewing(), asyncio.timeout(30):
            while (found := prefix_owner.find_owner(first.store)) is None or found.life != second.own.life:
                await asyncio.sleep(0.01)


async def test_two_that_claim_it_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them has it: also where the store knows no conditional put, the one that it kept."""
    url = f"file://{tmp_path}/store"
    put = ObjectStore.put

    def put_after_another(store: ObjectStore, key: str, data: bytes, **options: Any) -> None:
        put(store, key, msgspec.json.encode(PrefixOwner("faster", "the database of another")))
        put(store, key, data, **options)

    monkeypatch.setattr(ObjectStore, "put", put_after_another)
    with pytest.raises(InvalidConfig, match="the database of another"):
        await claim(tmp_path / "one", url)
    (tmp_path / "store" / NAME).unlink()

    def put_before_another(store: ObjectStore, key: str, data: bytes, **_: Any) -> None:
        put(store, key, data, overwrite=True)
        put(store, key, msgspec.json.encode(PrefixOwner("later", "the database of another")), overwrite=True)

    monkeypatch.setattr(ObjectStore, "put", put_before_another)
    with pytest.raises(InvalidConfig, match="the database of another"):
        await claim(tmp_path / "one", url)


async def test_an_owner_that_cannot_be_read(tmp_path: Path) -> None:
    """Who owns it is not guessed: neither from what is no owner, nor from an empty object."""
    (tmp_path / "store").mkdir()
    for data in (b"", b"{}", b"not JSON"):
        (tmp_path / "store" / NAME).write_bytes(data)
        with pytest.raises(InvalidConfig, match="does not say whom"):
            await claim(tmp_path / "one", f"file://{tmp_path}/store")
        assert (tmp_path / "store" / NAME).read_bytes() == data


@pytest.mark.parametrize("data", [b"", b"not JSON"])
async def test_a_claimed_prefix_whose_object_is_damaged(data: bytes, tmp_path: Path) -> None:
    """A machine that lost its power left no content: its database goes on all the same, another is refused."""
    url, object = f"file://{tmp_path}/store", tmp_path / "store" / NAME
    await claim(tmp_path / "one", url)
    object.write_bytes(data)
    with pytest.raises(InvalidConfig, match="does not say whom"):
        await claim(tmp_path / "two", url)
    made = await claimed(tmp_path / "one", url)
    assert msgspec.json.decode(object.read_bytes(), type=PrefixOwner) == made.own
    object.write_bytes(data)
    assert made.renew()
    assert msgspec.json.decode(object.read_bytes(), type=PrefixOwner) == made.own


async def test_a_store_that_is_away(tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database that has claimed the prefix is opened without it; another one is not."""
    url = f"s3://{BUCKET}/{tmp_path.name}"
    with faulty_objects(s3) as plan:
        for name, value in s3_environment(plan.url).items():
            monkeypatch.setenv(name, value)
        first = await claim(tmp_path / "one", url)
        plan.always["GET"] = plan.always["HEAD"] = "denied"
        assert await claim(tmp_path / "one", url) == first
        with pytest.raises(BatchmillError):
            await claim(tmp_path / "two", url)


async def test_what_doctor_says(tmp_path: Path) -> None:
    """Whose the prefix is, as the next start would find it. It claims nothing."""

    def row(name: str) -> tuple[bool, str]:
        storage = StorageEntry(f"file://{tmp_path}/store")
        config = Config(tmp_path / name, tmp_path, key_file=tmp_path / "keys", storage=storage)
        assert str(tmp_path / name) in describe(config)
        (found,) = [each for each in check_storage(config) if each.name == "object store: owner"]
        return found.is_ok, found.message

    url = f"file://{tmp_path}/store"
    assert row("one")[0] and "no owner yet" in row("one")[1]
    assert not os.path.exists(tmp_path / "store" / NAME)
    await claim(tmp_path / "one", url)
    is_ok, message = row("one")
    assert is_ok and message.startswith(f"{url} belongs to this database, renewed by {socket.gethostname()} at ")
    is_ok, message = row("two")
    assert not is_ok and "the database of one" in message
    Database(tmp_path / "one" / "other.db").close()
    (tmp_path / "one" / "other.db").rename(tmp_path / "one" / "batchmill.db")
    assert not row("one")[0] and ObjectStore(parse_url(url)).find(NAME) is not None
