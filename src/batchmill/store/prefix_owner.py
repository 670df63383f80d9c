"""Which database the prefix of `[storage] objects` belongs to: the object `owner.json` names the id of its ledger.

Two databases at one prefix would each remove what the other has named. The id is in the database, so a process that
opens it, on whatever machine or from a backup, owns the prefix too. Each such process writes an id of its own life, and
renews the object every minute: so one that opens a copy of the database is noticed, and a prefix whose owner lives is
not taken over. Objects are changed only for LEASE_S after a renewal (`PrefixTerm`): before another process can have
taken the prefix over.

A renewal reads the object and then replaces it. Many stores do not replace what was read alone, but whatever is there:
so an owner that is stopped in between, and replaced meanwhile, writes over the object of its successor. That neither
makes it the owner again nor ends its successor:

* A write counts at once only if it ended within WINDOW_S of the read, or within the lease. Within the lease nobody can
  have taken the prefix over. A take-over is not complete before SETTLE_S after its own write, and only if that is
  there still: a former owner that has read the object before it, and whose write counts, has ended it by then.
* After any other write, and one whose reply was lost past the lease, nothing is changed for WATCH_S, and then only if
  no other database's object is there: a successor that lives has renewed it before, since its lease is shorter. A store
  that refuses to replace what is not there any more needs no such time.
* Each take-over counts up `taken`. An owner within its lease writes over an object with a lower number: it is a late
  write of a former owner, which then finds that it was replaced. Past its lease it is refused by any other database's.

A copy of a database has the same id. One that is opened where a server has just renewed the object for another copy
waits for WATCH_S, and is refused if that server renews it again. An owner past its lease that finds it renewed for
another copy changes nothing until it has not been renewed for WATCH_S. A database that is the same one as before
(`PrefixOwner.file`) does not wait, since it has one owner at a time. A snapshot of a volume may be taken for the same
one: then two that live notice each other, and only say so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from datetime import UTC, datetime

import msgspec
import sqlalchemy as sa
from msgspec import Struct
from msgspec.structs import replace

from batchmill.errors import BatchmillError, Conflict, InputChanged, InvalidConfig, InvalidInput, Unavailable
from batchmill.object_store.store import REQUEST_S, ObjectStore
from batchmill.object_store.urls import ObjectInfo, parse_url
from batchmill.owner_term import PrefixTerm, Term, now_s
from batchmill.store.sql.database import Database
from batchmill.store.sql.tables import ledger

NAME = "owner.json"
RETRY_S = 10.0
RENEW_S = 60.0
LEASE_S = RENEW_S + 4 * RETRY_S  # so long after a renewal objects are changed
WINDOW_S = 10.0  # from the read of the object to the end of its replacement: longer ones do not count at once
WATCH_S = LEASE_S + REQUEST_S  # an object is watched before its owner is taken for dead: until its last request ends
SETTLE_S = 2 * WINDOW_S  # from a take-over's own write to its end
FRESH_S = 600.0  # an owner that renewed the object longer ago, by two clocks that may differ, has ended
OWNER_BYTES_MAX = 64 * 1024
READS_MAX = 5  # of an object that is replaced meanwhile

log = logging.getLogger("batchmill.owner")


class PrefixOwner(Struct, frozen=True):
    """The content of the object. `database` and `host`: where the database, and its owner, were, for people."""

    ledger: str
    database: str
    host: str = ""
    life: str = ""  # random: other processes that open the database have others; empty: a take-over wrote it
    renewed: float = 0.0  # seconds since the epoch, by the clock of that host: shown, and see FRESH_S
    taken: int = 0  # how often the prefix was taken over before
    file: str = ""  # which of all copies the database is; empty: unknown, or a take-over wrote it

    def __str__(self) -> str:
        """Where and when it was renewed."""
        if not self.renewed:
            return "never renewed"
        return f"renewed by {self.host} at {datetime.fromtimestamp(self.renewed, UTC):%Y-%m-%d %H:%M:%S} UTC"


class _Seen(Struct, frozen=True):
    """The object, as one read found it. `data`: empty where the object is empty or too large."""

    info: ObjectInfo
    data: bytes


class _ClaimTerm(Term):
    """That of the owner, until it gives the claim up."""

    def __init__(self, term: Term) -> None:
        self._term, self.is_given_up = term, False

    def left_s(self) -> float:
        return 0.0 if self.is_given_up else self._term.left_s()


class PrefixClaim:
    """A prefix that this database owns."""

    def __init__(self, url: str, own: PrefixOwner, term: Term) -> None:
        """Args: term: of the owner of the database."""
        self.own, self.is_written = own, False
        self._doubted_s: float | None = None  # when a write ended that may have replaced a successor's
        self._is_guarded: bool | None = None  # whether the store replaces what was read alone; None: not tried yet
        self._other: tuple[_Seen | None, float] | None = None  # another copy's object, and since when it is unchanged
        self._logged = ""  # the refusal that was logged last
        self._term = _ClaimTerm(term)
        self.term = PrefixTerm(term, 0.0)  # of all other objects
        self.store = ObjectStore(parse_url(url), retry_s=RETRY_S, term=self._term)

    @contextlib.asynccontextmanager
    async def renewing(self) -> AsyncIterator[None]:
        """Renew the object every minute meanwhile, in a thread that does nothing else: all others may be writing
        objects for minutes.
        """
        threads = ThreadPoolExecutor(1, thread_name_prefix="prefix-owner")
        task = asyncio.create_task(self._renew_always(threads))
        try:
            yield
        finally:
            self._term.is_given_up = True
            task.cancel()
            (ended,) = await asyncio.gather(task, return_exceptions=True)
            threads.shutdown(wait=False)
            if not isinstance(ended, asyncio.CancelledError):
                log.error("%s/%s was not renewed any more: %r", self.store.url, NAME, ended)

    async def wait_for_others(self) -> None:
        """Wait until no server on another copy of this database has renewed the object for WATCH_S. Where the store
        does not answer meanwhile, its renewals wait instead.

        Raises: InvalidConfig (`storage_copy_lives`) once one has.
        """
        until_s = now_s() + 2 * WATCH_S
        while self._other is not None and now_s() < until_s:
            await asyncio.sleep(RETRY_S)
            await asyncio.to_thread(self.renew)
            if self.term.refusal:
                raise InvalidConfig(self.term.refusal, code="storage_copy_lives")

    async def _renew_always(self, threads: Executor) -> None:
        loop, is_renewed = asyncio.get_running_loop(), self.is_written and self._doubted_s is None
        while True:
            due_s = now_s() + (RENEW_S if is_renewed else RETRY_S)
            while (left_s := due_s - now_s()) > 0:
                await asyncio.sleep(min(left_s, RETRY_S))  # it does not count the time in which a machine is suspended
            is_renewed = await loop.run_in_executor(threads, self.renew)
            self.announce()

    def announce(self) -> None:
        """Log why the prefix may not be used, once, and have its jobs pause."""
        if self.term.refusal not in ("", self._logged):
            log.error("%s", self.term.refusal)
        self._logged = self.term.refusal
        self.term.announce()

    def renew(self) -> bool:
        """Write that this process lives, and log what else uses the prefix. Once that is another database's, nothing
        is changed there, until a person gives the prefix back. Which of two copies of a database has to yield is for a
        person to decide, too.

        Returns: False: it should be tried again soon.
        """
        try:
            self._term.check()
            try:
                return self._renew()
            except Conflict:  # another process was faster
                return self._renew()
        except (BatchmillError, OSError) as error:
            log.warning("%s/%s could not be renewed: %s", self.store.url, NAME, error)
            return False

    def _renew(self) -> bool:
        read_s = now_s()
        owner = None if (seen := _find(self.store)) is None else self.read(seen)
        if owner is not None and owner.ledger != self.own.ledger:
            if owner.taken >= self.own.taken or self.term.is_over():
                self._doubted_s = None  # a take-over, which would give it back, waits for longer
                self.term.renew(0.0, _lost(self.store.url, owner))
                return True
            log.warning("%s/%s is renewed: a former owner has written it late (%s)", self.store.url, NAME, owner)
        if self.is_others(seen, owner) or not self._is_settled(seen):
            return False
        is_own = owner is not None and owner.ledger == self.own.ledger
        if is_own and self.is_written and owner.life not in ("", self.own.life):
            log.error(
                "%s is used by a copy of this database, too (of %s, %s): stop one of the two, since each removes "
                "objects of the other", self.store.url, owner.database, owner,
            )  # fmt: skip
        return self.write(seen, owner, read_s)

    def read(self, seen: _Seen) -> PrefixOwner:
        """The owner of a prefix that was this database's, which an object that cannot be understood leaves so."""
        try:
            return _decode(self.store, seen)
        except InvalidConfig as error:
            log.warning("%s. It is written anew, since the prefix is this database's", error.message)
            return self.own

    def write(self, seen: _Seen | None, owner: PrefixOwner | None, read_s: float) -> bool:
        """
        Args:
            seen, owner: what is replaced.
            read_s: when its read began, see `now_s`.

        Returns: False: it does not count yet. Raises: Conflict where another process was faster.
        """
        began_s = now_s()
        try:
            self._replace(seen, 0 if owner is None else owner.taken)
        except Unavailable:  # it may come to be written all the same
            self._doubted_s = now_s() if self.term.is_over() else None
            raise
        ended_s = now_s()
        if self._is_guarded or ended_s <= read_s + WINDOW_S or ended_s < self.term.until_s:
            self._doubted_s = self._other = None
            self.term.renew(began_s + LEASE_S)
            return ended_s < began_s + LEASE_S
        log.warning(
            "%s/%s was written %d s after it was read, and another database may have taken the prefix over meanwhile: "
            "nothing is written or removed there until it is certain that none has", self.store.url, NAME,
            ended_s - read_s,
        )  # fmt: skip
        self._doubted_s = ended_s
        return False

    def is_others(self, seen: _Seen | None, owner: PrefixOwner | None) -> bool:
        """Whether the object may be that of a server which runs on another copy of this database: it has renewed it not
        long ago. Nothing is changed then. Within the lease it can only be a late write.
        """
        if (
            owner is None or owner.ledger != self.own.ledger or owner.life in ("", self.own.life)
            or owner.file == self.own.file or not self.term.is_over()
        ):  # fmt: skip
            self._other = None
            return False
        if self._other is None:
            if not self.is_written and abs(time.time() - owner.renewed) >= FRESH_S:
                return False
            log.warning(
                "%s was renewed for another copy of this database (%s, %s): a server that still runs on it is "
                "waited for, for %d s", self.store.url, owner.database, owner, WATCH_S,
            )  # fmt: skip
        elif seen != self._other[0]:
            self.term.renew(0.0, _used(self.store.url, owner))
        else:
            return now_s() < self._other[1] + WATCH_S
        self._other = seen, now_s()
        return True

    def _replace(self, seen: _Seen | None, taken: int = 0) -> None:
        self.own = replace(self.own, renewed=time.time(), taken=max(self.own.taken, taken))
        _put(self.store, self.own, None if seen is None else seen.info)
        self.is_written = True

    def _is_settled(self, seen: _Seen | None) -> bool:
        """Whether no write of this process can have replaced a successor's object that is not there again."""
        if self._doubted_s is None or self._is_guarded:
            return True
        if self._is_guarded is None:
            try:
                self._replace(seen)
                self._is_guarded = _refuses_again(self.store, self.own, seen)
            finally:
                self._doubted_s = now_s()
            return False
        return now_s() >= self._doubted_s + WATCH_S


async def claim(database: Database, url: str, place: str, file: str = "") -> PrefixClaim:
    """Make a prefix that has no owner this database's. Where the store or the object cannot be read, a prefix that was
    claimed before is taken for this database's still: a server starts without the store, and its jobs wait. A machine
    that loses its power may leave an empty object in a folder.

    Args: place, file: see `PrefixOwner`.

    Raises: InvalidConfig (`other_storage_owner`) for a prefix of another database, (`storage_copy_lives`) while a
        server runs on another copy of this one; StorageFailed, AuthRefused, Unavailable.
    """
    found = await database.read(find_ledger) or await database.write(_make_ledger)
    own_id, claimed = found
    own = PrefixClaim(url, replace(_own(own_id, place, secrets.token_hex(8)), file=file), database.term)
    store = own.store
    try:
        owner = await asyncio.to_thread(_claim, own, was_claimed=claimed == url)
    except InvalidConfig:
        raise
    except BatchmillError as error:
        if claimed != url:
            raise
        log.warning("%s could not be read: %s", f"{store.url}/{NAME}", error.message)
        return own
    if owner.ledger != own_id:
        raise InvalidConfig(refusal(store.url, owner), code="other_storage_owner")
    await own.wait_for_others()
    if claimed != url:
        await database.write(_note_claimed, url)
    return own


def refusal(url: str, owner: PrefixOwner) -> str:
    """Why a database may not use a prefix, and the way out."""
    return (
        f"{url} belongs to another ledger ({owner.ledger}, of {owner.database}, {owner}): set [storage] objects to "
        "another prefix. If that database is lost, or this one replaces it for good, `batchmill storage owner "
        "--take-over` gives the prefix to this one"
    )


def _lost(url: str, owner: PrefixOwner) -> str:
    """Why a database may not use its prefix any more, and the ways out."""
    return (
        f"{url} was taken over by another ledger ({owner.ledger}, of {owner.database}, {owner}): nothing is written or "
        "removed there any more, and jobs wait. Stop the other server and run `batchmill storage owner --take-over` "
        "here: they then go on. Or stop this one, copy the objects to another prefix, and set [storage] objects to it"
    )


def _used(url: str, owner: PrefixOwner) -> str:
    """Why a copy of a database may not use its prefix, and the ways out."""
    return (
        f"{url} is used by a server on another copy of this database ({owner.database}, {owner}): nothing is written "
        f"or removed there. Stop that server: {WATCH_S / 60:.0f} minutes later the prefix is this one's. Or stop this "
        "one, copy the objects to another prefix, and set [storage] objects to it"
    )


def find_ledger(db: sa.Connection) -> tuple[str, str | None] | None:
    """The id of the ledger, and the prefix that it has claimed; None: it has no id yet."""
    found = db.execute(sa.select(ledger.c.id, ledger.c.objects)).first()
    return None if found is None else (found.id, found.objects)


def find_owner(store: ObjectStore) -> PrefixOwner | None:
    """The owner of a prefix; None: it has none. Raises: InvalidConfig for one that cannot be understood."""
    return None if (seen := _find(store)) is None else _decode(store, seen)


def _find(store: ObjectStore) -> _Seen | None:
    """Raises: Conflict (`storage_owner_lives`) where it is replaced again and again."""
    for _ in range(READS_MAX):
        if (info := store.find(NAME)) is None:
            return None
        is_right = 0 < info.size_bytes <= OWNER_BYTES_MAX
        with contextlib.suppress(InputChanged):  # its owner has renewed it between the two requests
            return _Seen(info, bytes(store.get_range(info, 0, info.size_bytes)) if is_right else b"")
    raise Conflict(f"{store.url}/{NAME} was replaced {READS_MAX} times while it was read", code="storage_owner_lives")


def take_over(url: str, engine: sa.Engine | None, place: str, wait: Callable[[float], None] = time.sleep) -> str:
    """Give a prefix to this database, unless its owner renews it meanwhile. Returns what was done.

    Args: engine: as of `examine`. wait: for some seconds.

    Raises: InvalidInput (`no_ledger`) for a database without an id; Conflict (`storage_owner_lives`).
    """
    try:
        own = None if engine is None else _own_ledger(engine)
    except sa.exc.SQLAlchemyError as error:
        raise InvalidConfig(f"the database cannot be read: {getattr(error, 'orig', error)}") from None
    if own is None:
        raise InvalidInput(
            "this database has no id yet: start batchmill once with this configuration, which is refused, and then "
            "take the prefix over",
            code="no_ledger",
        )
    store = ObjectStore(parse_url(url), retry_s=RETRY_S)
    if (before := _find(store)) is None:
        return f"{url} has no owner: the next start claims it for this database"
    taken = 0
    with contextlib.suppress(InvalidConfig):  # for one that cannot be understood
        if (former := _decode(store, before)).ledger == own[0]:
            return f"{url} belongs to this database already"
        taken = former.taken
    wait(WATCH_S)
    if (now := _find(store)) != before:
        raise _alive(store)
    made = replace(_own(own[0], place, ""), taken=taken + 1)
    _put(store, made, now.info)
    wait(SETTLE_S)
    if (now := _find(store)) is None or now.data != _encoded(made):
        raise _alive(store)
    return f"{url} belongs to this database now"


def _alive(store: ObjectStore) -> Conflict:
    return Conflict(
        f"the owner of {store.url} lives: {find_owner(store) or 'it was removed meanwhile'}. Stop it first",
        code="storage_owner_lives",
    )


def _decode(store: ObjectStore, seen: _Seen) -> PrefixOwner:
    try:
        if not seen.data:
            raise msgspec.ValidationError(f"it has {seen.info.size_bytes:,} bytes")
        return msgspec.json.decode(seen.data, type=PrefixOwner)
    except msgspec.MsgspecError as error:
        raise InvalidConfig(
            f"{store.url}/{NAME} does not say whom the prefix belongs to ({error}): set [storage] objects to another "
            "prefix, or, if nothing else uses this one, take it over with `batchmill storage owner --take-over`",
            code="other_storage_owner",
        ) from None


def examine(url: str, engine: sa.Engine | None) -> tuple[str, bool, str]:
    """What `batchmill doctor` says: label, whether it is right, and what was found. Changes nothing.

    Args: engine: of the database; None: there is none yet.
    """
    label = "object store: owner"
    store = ObjectStore(parse_url(url), retry_s=RETRY_S)
    try:
        if (owner := find_owner(store)) is None:
            return label, True, f"{url} has no owner yet: the next start claims it for this database"
        own = None if engine is None else _own_ledger(engine)
    except sa.exc.SQLAlchemyError as error:
        return label, False, f"the database that {url} may belong to cannot be read: {getattr(error, 'orig', error)}"
    except BatchmillError as error:
        return label, False, error.message
    if own is None or own[0] != owner.ledger:
        return label, False, refusal(store.url, owner)
    return label, True, f"{url} belongs to this database, {owner}"


def _claim(claimed: PrefixClaim, *, was_claimed: bool) -> PrefixOwner:
    """The owner of a prefix, which is `claimed.own` if there was none. Args: was_claimed: by this database, before."""
    store, read_s = claimed.store, now_s()
    if (seen := _find(store)) is None:
        owner = None
    else:
        owner = claimed.read(seen) if was_claimed else _decode(store, seen)
    if owner is None:
        with contextlib.suppress(Conflict):  # another database was faster
            claimed.write(None, None, read_s)
        owner = find_owner(store)  # also where a store has no conditional put: the last one that was written counts
    elif owner.ledger == claimed.own.ledger and not claimed.is_others(seen, owner):
        try:
            claimed.write(seen, owner, read_s)
        except BatchmillError as error:  # the prefix is this database's all the same
            log.warning("%s/%s could not be renewed: %s", store.url, NAME, error.message)
    return claimed.own if owner is None else owner


def _put(store: ObjectStore, owner: PrefixOwner, seen: ObjectInfo | None) -> None:
    """Args: seen: what is replaced. Raises: Conflict if that is not there any more, where the store can know."""
    data = _encoded(owner)
    try:
        store.put(NAME, data, replaced=seen)
    except Conflict:
        raise Conflict(
            f"another process has written {store.url}/{NAME} meanwhile", code="storage_owner_lives"
        ) from None
    except InvalidInput as error:
        if error.code != "store_unsupported" or seen is None:
            raise
        store.put(NAME, data, overwrite=True)


def _refuses_again(store: ObjectStore, owner: PrefixOwner, seen: _Seen | None) -> bool:
    """Whether a store refuses to replace what was replaced before."""
    try:
        store.put(NAME, _encoded(replace(owner, renewed=0.0)), replaced=None if seen is None else seen.info)
    except Conflict:
        return True
    except InvalidInput as error:
        if error.code != "store_unsupported":
            raise
    return False


def _encoded(owner: PrefixOwner) -> bytes:
    return msgspec.json.encode(owner)


def _own(own_id: str, place: str, life: str) -> PrefixOwner:
    return PrefixOwner(own_id, place, socket.gethostname(), life, time.time())


def _own_ledger(engine: sa.Engine) -> tuple[str, str | None] | None:
    with engine.connect() as db:
        return find_ledger(db) if sa.inspect(db).has_table(ledger.name) else None


def _make_ledger(db: sa.Connection) -> tuple[str, str | None]:
    """As `find_ledger`; gives it an id. The transaction may be repeated."""
    if (found := find_ledger(db)) is not None:
        return found
    own_id = secrets.token_hex(16)
    db.execute(ledger.insert().values(id=own_id))
    return own_id, None


def _note_claimed(db: sa.Connection, url: str) -> None:
    db.execute(ledger.update().values(objects=url))
