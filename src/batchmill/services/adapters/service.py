"""Adapters by name and version: registered, fetched in the background, removed once no job uses them.

The process that owns the data directory holds the one AdapterService, and all records in memory. A folder appears
whole; what was being fetched when an owner died is fetched again by the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec
from msgspec.structs import replace

from batchmill import faults
from batchmill.children.fair_semaphore import FairSemaphore
from batchmill.children.offload import Children
from batchmill.config import Config, DeploymentsEntry
from batchmill.errors import (
    BatchmillError,
    Conflict,
    Forbidden,
    InvalidInput,
    OverQuota,
    StorageFull,
    Unavailable,
    UnknownName,
)
from batchmill.jobs.ledger.files import full_disk_named
from batchmill.models import secrets
from batchmill.models.adapters import fetching
from batchmill.models.adapters.fetching import FetchOrder, FetchReport, kind_of
from batchmill.models.adapters.reading import RANK_MAX, read_adapter, settled_room
from batchmill.models.secrets import KINDS, NAME
from batchmill.models.worker_environment import FETCHERS
from batchmill.ports import Clock
from batchmill.services.adapters import records
from batchmill.services.adapters.records import FAILED, FETCHING, READY, REMOVED, SHOWN_CHARS, AdapterRecord, check_name
from batchmill.services.directory import ModelDirectory
from batchmill.services.incoming import FULL
from batchmill.services.model_rows import ModelKind, ModelRow
from batchmill.services.remote.changes import new_id
from batchmill.services.secrets.vault import Vault
from batchmill.store.database import Database
from batchmill.store.disk_room import DiskQuota
from batchmill.types import Caller, ModelSpec, Scope
from batchmill.wire import adapter_bundles

WORK = "batchmill.models.adapters.fetching:run"
FETCHES_MAX = 4  # at once
ATTEMPTS_MAX = 3
WAIT_S = 2.0  # before the second attempt; twice as long before the third
FETCH_S_MAX = 6 * 3600.0
SECRET = "secret:"
FETCH_SHOWN_CHARS = 200
SOURCE_CHARS_MAX = 1000


def check_source(source: str, entry: DeploymentsEntry, *, is_trusted: bool) -> str:
    """The source, a folder by its real path. Raises: InvalidInput for a text that is none; Forbidden."""
    if len(source) > SOURCE_CHARS_MAX or not source.isprintable():
        raise InvalidInput(f"a source is {SOURCE_CHARS_MAX:,} printable characters at most", code="invalid_source")
    kind = kind_of(source)
    place = os.path.realpath(Path(source).expanduser()) if kind == "folder" else source
    if is_trusted:
        return place
    patterns = entry.adapter_sources + (entry.adapter_patterns if kind == "hub" else [])
    if not any(_fits(place, pattern) for pattern in patterns):
        raise Forbidden(
            f"adapters from {source[:FETCH_SHOWN_CHARS]} are not accepted over the API: the operator lists "
            "allowed sources in deployments.adapter_sources; an adapter's own folder can be uploaded "
            "(`batchmill adapters add`)"
        )
    return place


def _fits(place: str, pattern: str) -> bool:
    """A pattern, or the beginning of a place up to one of its slashes."""
    return fnmatchcase(place, pattern) or place.startswith(pattern.rstrip("/") + "/") or place == pattern.rstrip("/")


def check_token(token: str | None, *, is_trusted: bool) -> str | None:
    """A reference to a token of a model hub. The text is not repeated: it may be the token. Raises: InvalidInput."""
    if token is None:
        return None
    kind, _, name = token.partition(":")
    if (kind == "secret" and NAME.fullmatch(name)) or (is_trusted and token.startswith(KINDS) and name):
        return token
    allowed = '"secret:NAME", "env:NAME" or "file:PATH"' if is_trusted else '"secret:NAME"'
    raise InvalidInput(f"the token is given as {allowed}, never itself", code="invalid_secret")


class Fetches:
    def __init__(self, clock: Clock, vault: Vault) -> None:
        self._clock, self._vault = clock, vault
        self._children = Children(more=FETCHERS)
        self._places = FairSemaphore(FETCHES_MAX)

    async def fetch(self, project: str, order: FetchOrder, token: str | None) -> FetchReport:
        """What became of an order of a project. Cancelling it ends the child that works on it.

        Args: token: where the token for a model hub lies.

        Raises: BatchmillError, with what is wrong.
        """
        async with self._places.place(project):
            order = replace(order, token=await self._reveal(token))
            for attempt in range(ATTEMPTS_MAX):
                try:
                    return await self._once(order)
                except Unavailable:
                    if attempt + 1 == ATTEMPTS_MAX:
                        raise
                await self._clock.sleep(WAIT_S * 2**attempt)
            raise AssertionError("the last attempt returns or raises")

    async def _once(self, order: FetchOrder) -> FetchReport:
        try:
            async with asyncio.timeout(FETCH_S_MAX):
                answer = await self._children.offload(WORK, msgspec.json.encode(order), lambda _: None)
        except TimeoutError:
            raise Unavailable(f"{order.source} did not arrive within {FETCH_S_MAX / 3600:g} h") from None
        return msgspec.json.decode(answer, type=FetchReport)

    async def _reveal(self, token: str | None) -> str | None:
        if token is None:
            return None
        if token.startswith(SECRET):
            return await self._vault.reveal(token.removeprefix(SECRET))
        return (await asyncio.to_thread(secrets.resolve, token)).reveal()

    async def close(self) -> None:
        await self._children.close()


__all__ = ["AdapterRecord", "AdapterService"]

log = logging.getLogger("batchmill.adapters")

UPLOAD = "upload"  # the source of an adapter that was sent here
FOLDER = "adapters"  # in the data directory
REMOVED_S = 600.0  # the files of a removed adapter stay so long: a job that names it may be on its way in


class AdapterService:
    """Raises, everywhere: UnknownName (`unknown_adapter`) for an adapter of another project, or of none."""

    def __init__(
        self, database: Database, clock: Clock, directory: ModelDirectory, *, config: Config, vault: Vault,
        room: DiskQuota | None = None,
    ) -> None:  # fmt: skip
        """Its folder in the data directory is written to by nobody else; `load` comes next."""
        self._room = room or DiskQuota(database, config.data_dir, config.project_quotas)
        self._database, self._clock, self._home = database, clock, config.data_dir / FOLDER
        self._directory = directory
        self._entry, self._quotas = config.deployments, config.project_quotas
        self._records: dict[str, AdapterRecord] = {}  # by id; none that was removed
        self._fetches = Fetches(clock, vault)
        self._tasks: dict[str, asyncio.Task[None]] = {}  # of versions that are being fetched
        self._settling: set[str] = set()  # of versions that were sent here and are being looked at
        self._resumes = False
        self._changing = asyncio.Lock()

    async def load(self, *, resumes: bool = True) -> None:
        """Read what there is, and remove what a crash left.

        Args: resumes: what was being fetched is fetched again.
        """
        self._put(await self._database.read(records.read_all))
        await asyncio.to_thread(shutil.rmtree, self._home / fetching.STAGING, ignore_errors=True)
        self._resumes = resumes
        await self.sweep()

    async def close(self) -> None:
        """What is being fetched goes on with the next owner."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._fetches.close()

    # -- looking ------------------------------------------------------------------------------------------------------

    def list(self, project: str, base: str | None = None) -> list[AdapterRecord]:
        """The versions of a project, by name and number; those for one base model."""
        found = [each for each in self._records.values() if each.project == project and base in (None, each.base)]
        return sorted(found, key=lambda each: (each.name, each.version))

    def every(self) -> list[AdapterRecord]:
        """Those of all projects, for whoever runs the machine."""
        return sorted(self._records.values(), key=lambda each: (each.project, each.name, each.version))

    def get(self, project: str, name: str, version: int | None = None) -> AdapterRecord:
        """A version; without a number the newest that is ready, or else the newest."""
        found = [each for each in self._versions(project, name) if version in (None, each.version)]
        if not found:
            raise unknown_adapter(name, version)
        return ([each for each in found if each.state == READY] or found)[-1]

    def _versions(self, project: str, name: str) -> Sequence[AdapterRecord]:
        """The oldest first."""
        return [each for each in self.list(project) if each.name == name]

    def adapted(self, project: str, model: ModelSpec) -> ModelSpec:
        """A model of the configuration with the adapters that a project registered for it."""
        return self._directory.adapted(project, model, model.name, is_own=True)

    # -- publishing ---------------------------------------------------------------------------------------------------

    def _put(self, records: Iterable[AdapterRecord]) -> None:
        """Publish what was written down."""
        put = {each.id: each for each in records}
        self._records |= put
        self._publish(put.values())

    def _drop(self, records: Iterable[AdapterRecord]) -> None:
        for record in (gone := list(records)):
            self._records.pop(record.id, None)
        self._publish(gone)

    def _publish(self, changed: Iterable[AdapterRecord]) -> None:
        names = {(each.project, each.name) for each in changed}
        versions: dict[tuple[str, str], list[AdapterRecord]] = {each: [] for each in names}
        for record in self._records.values():
            if (named := versions.get((record.project, record.name))) is not None:
                named.append(record)
        self._directory.publish({(ModelKind.ADAPTER, *named): _rows(found) for named, found in versions.items()})

    # -- changing -----------------------------------------------------------------------------------------------------

    async def register(
        self, caller: Caller, base: str, name: str, source: str,
        *, token: str | None = None, is_trusted: bool = False,
    ) -> AdapterRecord:  # fmt: skip
        """Give an adapter a name and its next version, and begin to fetch it; `wait` waits for it.

        Args:
            source: the absolute path of a folder, an id of a model hub, or s3://BUCKET/PREFIX, gs://, az://.
            token: for a model hub: "secret:NAME".
            is_trusted: whoever runs the machine asks: any place is taken.

        Raises: UnknownName for the base, Forbidden for a source that callers may not name, Conflict for a name that
        something else has, InvalidInput.
        """
        model = self._base(caller, base, name)
        place = check_source(source, self._entry, is_trusted=is_trusted)
        reference = check_token(token, is_trusted=is_trusted)
        record = await self._begin(self._new(caller.project, model.name, name, place, reference))
        faults.point("after_adapter_record")
        self._start(record, model)
        return record

    async def take(self, caller: Caller, base: str, name: str, bundle: Path) -> AdapterRecord:
        """As `register`, of an archive that was sent here; the version is ready, or has failed, when this returns.

        Raises: InvalidInput also for an archive that holds no adapter: then there is no version.
        """
        model = self._base(caller, base, name)
        staging = self._home / fetching.STAGING
        await asyncio.to_thread(staging.mkdir, parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=staging) as folder:
            with _report_full_disk():
                staged = await asyncio.to_thread(_unpack, bundle, Path(folder))
            settling = asyncio.create_task(
                self._settle(self._new(caller.project, model.name, name, UPLOAD, None), staged, model)
            )
            try:
                return await asyncio.shield(settling)
            finally:
                await asyncio.wait({settling})  # whoever sent it may have gone: what has begun is brought to its end

    async def _settle(self, record: AdapterRecord, staged: Path, model: ModelSpec) -> AdapterRecord:
        """A version of what was unpacked and checked."""
        self._settling.add(record.id)
        try:
            return await self._settled(await self._begin(record), staged, model)
        finally:
            self._settling.discard(record.id)

    async def _settled(self, record: AdapterRecord, staged: Path, model: ModelSpec) -> AdapterRecord:
        faults.point("after_adapter_record")
        try:
            with full_disk_named(self._home):
                fetched = await asyncio.to_thread(fetching.settle, staged, self._home / record.id)
            faults.point("after_adapter")
            report = await asyncio.to_thread(fetching.described, fetched, model.source, _rank_max(model))
            await self._see_room(record, report)
        except (BatchmillError, OSError) as error:
            await self._write(replace(record, state=FAILED, message=str(error)))
            raise
        return await self._end(record, report)

    def incoming(self) -> Path:
        """An empty file for an archive that is on its way here; whoever asked for it removes it."""
        staging = self._home / fetching.STAGING
        staging.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, path = tempfile.mkstemp(dir=staging, suffix=".tar.gz")
        open(handle, "wb").close()
        return Path(path)

    async def receive(self, project: str, bundle: Path, pieces: AsyncIterator[bytes]) -> None:
        """Write an archive that arrives piece by piece. Raises: StorageFull, OverQuota."""
        writing, size_bytes = await self._room.begin(project), 0
        try:
            with _report_full_disk(), bundle.open("wb") as file:
                async for piece in pieces:
                    size_bytes += len(piece)
                    writing.grew_to(size_bytes)
                    await asyncio.to_thread(file.write, piece)
        finally:
            writing.end()

    async def wait(self, record: AdapterRecord) -> AdapterRecord:
        """The record once it is ready, or has failed."""
        task = self._tasks.get(record.id)
        if task is not None:
            await asyncio.wait({task})
            if not task.cancelled():
                task.result()
        async with self._changing:  # it may be being removed
            return self._records.get(record.id) or replace(record, state=REMOVED)

    async def ensure(
        self, project: str, base: str, hub_ids: Sequence[str], *, token: str | None = None
    ) -> dict[str, AdapterRecord]:
        """The adapters of a model hub that rows name, registered under their ids and fetched: ready or failed.

        Args: token: where the token lies that the hub is shown; None: that of the base.

        Cancelling it leaves what was begun to itself.
        """
        caller = Caller(project, Scope.ADMIN)
        try:
            model = self._directory.base(caller, base)
        except UnknownName:  # a model of the job's own: whoever asks knows what the adapters are to fit
            model = None
        if token is None and model is not None:
            token = model.secrets.get("HF_TOKEN")
        found: dict[str, AdapterRecord] = {}
        for hub_id in dict.fromkeys(hub_ids):
            try:
                found[hub_id] = await self._ensure(self._new(project, base, hub_id, hub_id, token), model)
            except (Conflict, InvalidInput, OverQuota) as error:
                found[hub_id] = replace(
                    self._new(project, base, hub_id, hub_id, None), version=1, state=FAILED, message=error.message
                )
        return {
            hub_id: await self.wait(record) if record.state == FETCHING else record for hub_id, record in found.items()
        }

    async def _ensure(self, wanted: AdapterRecord, model: ModelSpec | None) -> AdapterRecord:
        check_name(wanted.name)
        async with self._changing:
            versions = self._versions(wanted.project, wanted.name)
            record = next((each for each in reversed(versions) if each.base == wanted.base), None)
            if record is None:
                record = await self._written(wanted)
                self._start(record, model)
            elif record.state == FAILED:  # it may be there now, or for this token
                token = wanted.token if record.source == wanted.source else record.token
                record = await self._write(replace(record, state=FETCHING, message="", token=token))
                self._start(record, model)
        return record

    async def remove(self, project: str, name: str, version: int | None = None) -> list[AdapterRecord]:
        """Remove one version, or all. Jobs that were given it keep it until they end."""
        async with self._changing:
            gone = [each for each in self._versions(project, name) if version in (None, each.version)]
            if not gone:
                raise unknown_adapter(name, version)
            now = self._clock.now()
            removed = [replace(each, state=REMOVED, changed=now) for each in gone]
            for record in gone:
                if (task := self._tasks.get(record.id)) is not None:
                    task.cancel()
                    await asyncio.wait({task})
                    await asyncio.to_thread(self._discard, self._home / fetching.STAGING / record.id)
            await self._database.write(records.update, removed)
            self._drop(removed)
        return removed

    async def sweep(self) -> None:
        """Go on with what nobody fetches: on a full disk it could not be written down that it had failed. Remove the
        files of adapters that nobody has any more and no job that has not ended uses."""
        for record in self.every() if self._resumes else ():
            if record.state == FETCHING and record.id not in self._tasks and record.id not in self._settling:
                self._start(record)
        if not self._home.is_dir():
            return
        known = {*self._records, fetching.STAGING}
        folders = [path for path in self._home.iterdir() if path.name not in known]
        if not folders:
            return
        before = self._clock.now() - REMOVED_S
        late = await self._database.read(records.removed_after, [path.name for path in folders], before)
        used = await self._database.read(records.used_folders)
        for path in folders:
            if path.name not in late and str(path) not in used and path.name not in self._records:
                await asyncio.to_thread(shutil.rmtree, path)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _base(self, caller: Caller, base: str, name: str) -> ModelSpec:
        """The model that an adapter of this name may be for."""
        check_name(name)
        model = self._directory.base(caller, base)
        if not model.traits.loads_adapters:
            raise InvalidInput(
                f"the model {base[:SHOWN_CHARS]!r} takes no adapters: those of the engine vllm do", code="no_adapters"
            )
        self._directory.refuse_taken(caller.project, name, ModelKind.ADAPTER)
        return model

    def _new(self, project: str, base: str, name: str, source: str, token: str | None) -> AdapterRecord:
        now = self._clock.now()
        return AdapterRecord(new_id(), project, name, 0, base, source, created=now, changed=now, token=token)

    async def _begin(self, record: AdapterRecord) -> AdapterRecord:
        await self._room.check(record.project)
        async with self._changing:
            return await self._written(record)

    async def _written(self, record: AdapterRecord) -> AdapterRecord:
        """A new version, written down and published. Raises: Conflict for a name that is taken; OverQuota."""
        with self._directory.claim(record.project, record.name, ModelKind.ADAPTER):
            record = await self._database.write(records.begin, record, self._quotas.of(record.project).adapters)
            self._put([record])
        return record

    def _start(self, record: AdapterRecord, model: ModelSpec | None = None) -> None:
        task = self._tasks[record.id] = asyncio.create_task(self._bring(record, model))
        task.add_done_callback(lambda done: self._ended(record, done))

    def _ended(self, record: AdapterRecord, task: asyncio.Task[None]) -> None:
        self._tasks.pop(record.id, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("the adapter %s could not be written down: %s", record.own_name, error)

    async def _bring(self, record: AdapterRecord, model: ModelSpec | None) -> None:
        """Fetch a version and write down what became of it."""
        home = self._home / record.id
        try:
            if record.source == UPLOAD and not home.is_dir():
                raise InvalidInput("its upload did not arrive whole: send it again", code="invalid_bundle")
            model = model or self._known_base(record)
            source, rank = ("", RANK_MAX) if model is None else (model.source, _rank_max(model))
            order = FetchOrder(record.source, str(home), base_source=source, rank_max=rank)
            report = await self._fetches.fetch(record.project, order, record.token)
            await self._see_room(record, report)
        except BatchmillError as error:
            log.warning("the adapter %s of %s failed: %s", record.own_name, record.project, error.message)
            await self._write(replace(record, state=FAILED, message=error.message))
            return
        faults.point("after_adapter")
        await self._end(record, report)

    async def _see_room(self, record: AdapterRecord, report: FetchReport) -> None:
        """Raises: OverQuota where the project has no room for what was fetched: it goes."""
        try:
            await self._room.check(record.project, report.fetched.bytes)
        except OverQuota:
            await asyncio.to_thread(self._discard, Path(report.fetched.folder))
            raise

    def _known_base(self, record: AdapterRecord) -> ModelSpec | None:
        try:
            return self._directory.base(Caller(record.project, Scope.ADMIN), record.base)
        except UnknownName:
            return None

    async def _end(self, record: AdapterRecord, report: FetchReport) -> AdapterRecord:
        """A version that is here: ready, or not fit for its base; then its files go."""
        fetched = report.fetched
        if report.flaw:
            await asyncio.to_thread(self._discard, Path(fetched.folder))
        record = replace(
            record, state=FAILED if report.flaw else READY, digest=fetched.digest, rank=report.rank,
            message=f"it does not fit {record.base}: {report.flaw}" if report.flaw else "", bytes=fetched.bytes,
            folder="" if report.flaw else fetched.folder, trained_for=report.base or "",
        )  # fmt: skip
        return await self._write(record)

    @staticmethod
    def _discard(folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)  # what stays is swept

    async def _write(self, record: AdapterRecord) -> AdapterRecord:
        """Write down what became of a version; one that was removed meanwhile stays so."""
        record = replace(record, changed=max(self._clock.now(), record.changed))
        await self._database.write(records.update, [record])
        if record.id not in self._records:
            return replace(record, state=REMOVED)
        self._put([record])
        return record


@contextlib.contextmanager
def _report_full_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise StorageFull("there is no room left on the server's disk; nothing of the adapter was kept") from error


def _unpack(bundle: Path, folder: Path) -> Path:
    staged = folder / "adapter"
    staged.mkdir()
    with bundle.open("rb") as file:
        adapter_bundles.read(file, staged)
    read_adapter(staged)
    return staged


def _rank_max(model: ModelSpec) -> int:
    """The room for ranks that somebody has settled for an engine, or what any may have."""
    return settled_room(model.engine_args) or RANK_MAX


def unknown_adapter(name: str, version: int | None) -> UnknownName:
    shown = name if version is None else f"{name}/{version}"
    return UnknownName(
        f"there is no adapter {shown[:SHOWN_CHARS]!r}: `batchmill adapters list` lists them", code="unknown_adapter"
    )


def _rows(versions: Sequence[AdapterRecord]) -> list[ModelRow]:
    """What the versions of one adapter are called. A name is held from the first of them on, ready or not."""
    ready = sorted((each for each in versions if each.state == READY), key=lambda each: each.version)
    if not ready:
        return [
            ModelRow(each.name, ModelKind.ADAPTER, each.project, base=each.base, listed=(each.name,))
            for each in versions[:1]
        ]
    return [_row(ready[-1], ready[-1].name), *(_row(each, each.own_name) for each in ready)]


def _row(record: AdapterRecord, name: str) -> ModelRow:
    return ModelRow(
        name, ModelKind.ADAPTER, record.project, base=record.base, listed=tuple(dict.fromkeys((record.name, name))),
        created=record.created, number=record.version, own_name=record.own_name, folder=record.folder,
        rank=record.rank,
    )  # fmt: skip
