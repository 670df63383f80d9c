"""Adapters by name and version: registers them, fetches them in the background, removes them once no job uses them.

The process that owns the data directory has the only AdapterService, with all records in memory. A folder appears only
when it is complete. After a crash, the next owner repeats unfinished fetches.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
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
    DatabaseUnavailable,
    Forbidden,
    InvalidInput,
    OverQuota,
    StorageFull,
    TermOver,
    Unavailable,
    UnknownName,
)
from batchmill.models import secrets
from batchmill.models.adapters import fetching
from batchmill.models.adapters.fetching import FetchOrder, FetchReport, kind_of
from batchmill.models.adapters.reading import RANK_MAX, configured_rank, read_adapter
from batchmill.models.secrets import KINDS, NAME
from batchmill.models.worker_environment import FETCHERS
from batchmill.owned_files import OwnedFiles
from batchmill.part_files import full_disk_named, make_folder
from batchmill.ports.clock import Clock
from batchmill.services.adapters import records
from batchmill.services.adapters.records import FAILED, FETCHING, READY, REMOVED, SHOWN_CHARS, AdapterRecord, check_name
from batchmill.services.directory.directory import ModelDirectory
from batchmill.services.directory.rows import ModelKind, ModelRow
from batchmill.services.files.incoming import FULL
from batchmill.services.remote.changes import new_id
from batchmill.services.secrets.vault import Vault
from batchmill.store.disk_room import DiskQuota
from batchmill.store.sql.database import Database
from batchmill.store.stored_files import LocalFiles, StoredFiles, using
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
    """Return the source, with the real path of a folder. Raises: InvalidInput for an invalid text; Forbidden."""
    if len(source) > SOURCE_CHARS_MAX or not source.isprintable():
        raise InvalidInput(f"a source has at most {SOURCE_CHARS_MAX:,} printable characters", code="invalid_source")
    kind = kind_of(source)
    location = os.path.realpath(Path(source).expanduser()) if kind == "folder" else source
    if is_trusted:
        return location
    patterns = entry.adapter_sources + (entry.adapter_patterns if kind == "hub" else [])
    if not any(_fits(location, pattern) for pattern in patterns):
        raise Forbidden(
            f"adapters from {source[:FETCH_SHOWN_CHARS]} are not accepted over the API: the operator lists "
            "allowed sources in deployments.adapter_sources; an adapter's own folder can be uploaded "
            "(`batchmill adapters add`)"
        )
    return location


def _fits(location: str, pattern: str) -> bool:
    """Tell whether a source matches a pattern, or lies below it as a path."""
    return (
        fnmatchcase(location, pattern)
        or location.startswith(pattern.rstrip("/") + "/")
        or location == pattern.rstrip("/")
    )


def check_token(token: str | None, *, is_trusted: bool) -> str | None:
    """Return a reference to a token of a model hub. Raises: InvalidInput, without the text: it may be the token."""
    if token is None:
        return None
    kind, _, name = token.partition(":")
    if (kind == "secret" and NAME.fullmatch(name)) or (is_trusted and token.startswith(KINDS) and name):
        return token
    allowed = '"secret:NAME", "env:NAME" or "file:PATH"' if is_trusted else '"secret:NAME"'
    raise InvalidInput(f"give the token as a reference, {allowed}, never the token itself", code="invalid_secret")


class Fetches:
    def __init__(self, clock: Clock, vault: Vault) -> None:
        self._clock, self._vault = clock, vault
        self._children = Children(more=FETCHERS)
        self._semaphore = FairSemaphore(FETCHES_MAX)

    async def fetch(self, project: str, order: FetchOrder, token: str | None) -> FetchReport:
        """Run a fetch order of a project. Cancelling it ends its child process.

        Args: token: the reference to the token for a model hub.

        Raises: BatchmillError, with the problem.
        """
        async with self._semaphore.slot(project):
            order = replace(order, token=await self._reveal(token))
            for attempt in range(ATTEMPTS_MAX):
                try:
                    return await self._fetch_once(order)
                except Unavailable:
                    if attempt + 1 == ATTEMPTS_MAX:
                        raise
                await self._clock.sleep(WAIT_S * 2**attempt)
            raise AssertionError("the last attempt returns or raises")

    async def _fetch_once(self, order: FetchOrder) -> FetchReport:
        try:
            async with asyncio.timeout(FETCH_S_MAX):
                report = await self._children.offload(WORK, msgspec.json.encode(order), lambda _: None)
        except TimeoutError:
            raise Unavailable(f"{order.source} did not arrive within {FETCH_S_MAX / 3600:g} h") from None
        return msgspec.json.decode(report, type=FetchReport)

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

UPLOAD = "upload"  # the source of an uploaded adapter
FOLDER = "adapters"  # in the data directory
REMOVED_S = 600.0  # files of a removed adapter stay so long, for live calls and jobs that are being prepared


class AdapterService:
    """Raises, everywhere: UnknownName (`unknown_adapter`) for an adapter that the project does not have."""

    def __init__(
        self, database: Database, clock: Clock, directory: ModelDirectory, *, config: Config, vault: Vault,
        disk_quota: DiskQuota | None = None, stored: StoredFiles = LocalFiles(),
    ) -> None:  # fmt: skip
        """Only this service writes to its folder in the data directory. Call `load` next."""
        self._disk_quota = disk_quota or DiskQuota(database, config.data_dir, config.project_quotas)
        self._database, self._clock, self._home = database, clock, config.data_dir / FOLDER
        self._owned = OwnedFiles(database.term)  # what it does not remove, a sweep removes
        self._directory, self._stored = directory, stored
        self._deployments, self._quotas = config.deployments, config.project_quotas
        self._records: dict[str, AdapterRecord] = {}  # by id, without removed ones
        self._fetches = Fetches(clock, vault)
        self._tasks: dict[str, asyncio.Task[None]] = {}  # fetches, by version id
        self._settling: set[str] = set()  # ids of uploaded versions that are being checked
        self._resumes = False
        self._changing = asyncio.Lock()

    async def load(self, *, resumes: bool = True) -> None:
        """Read all adapters, and remove what a crash left.

        Args: resumes: repeat unfinished fetches.
        """
        self._put(await self._database.read(records.read_all))
        with contextlib.suppress(TermOver):  # the next owner does it
            await asyncio.to_thread(self._owned.remove_tree, self._home / fetching.STAGING)
        self._resumes = resumes
        await self.sweep()

    async def close(self) -> None:
        """Cancel running fetches. The next owner repeats them."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._fetches.close()

    # -- read ---------------------------------------------------------------------------------------------------------

    def list(self, project: str, base: str | None = None) -> list[AdapterRecord]:
        """Return the versions of a project, by name and number. `base`: only those for this base model."""
        versions = [each for each in self._records.values() if each.project == project and base in (None, each.base)]
        return sorted(versions, key=lambda each: (each.name, each.version))

    def list_all(self) -> list[AdapterRecord]:
        """Return the versions of all projects, for the operator."""
        return sorted(self._records.values(), key=lambda each: (each.project, each.name, each.version))

    def get(self, project: str, name: str, version: int | None = None) -> AdapterRecord:
        """Return a version. Without a number it is the newest ready version, or else the newest."""
        versions = [each for each in self._versions(project, name) if version in (None, each.version)]
        if not versions:
            raise unknown_adapter(name, version)
        return ([each for each in versions if each.state == READY] or versions)[-1]

    def _versions(self, project: str, name: str) -> Sequence[AdapterRecord]:
        """Return the versions of an adapter, oldest first."""
        return [each for each in self.list(project) if each.name == name]

    def adapted(self, project: str, model: ModelSpec) -> ModelSpec:
        """Return a model of the configuration with the adapters that a project registered for it."""
        return self._directory.adapted(project, model, model.name, is_own=True)

    # -- publishing ---------------------------------------------------------------------------------------------------

    def _put(self, records: Iterable[AdapterRecord]) -> None:
        """Record and publish stored records."""
        by_id = {each.id: each for each in records}
        self._records |= by_id
        self._publish(by_id.values())

    def _drop(self, records: Iterable[AdapterRecord]) -> None:
        for record in (dropped := list(records)):
            self._records.pop(record.id, None)
        self._publish(dropped)

    def _publish(self, changed: Iterable[AdapterRecord]) -> None:
        names = {(each.project, each.name) for each in changed}
        versions: dict[tuple[str, str], list[AdapterRecord]] = {each: [] for each in names}
        for record in self._records.values():
            if (of_adapter := versions.get((record.project, record.name))) is not None:
                of_adapter.append(record)
        self._directory.publish({(ModelKind.ADAPTER, *key): _rows(of_adapter) for key, of_adapter in versions.items()})

    # -- change -------------------------------------------------------------------------------------------------------

    async def register(
        self, caller: Caller, base: str, name: str, source: str,
        *, token: str | None = None, is_trusted: bool = False,
    ) -> AdapterRecord:  # fmt: skip
        """Register the next version of an adapter, and start to fetch it. `wait` waits for the result.

        Args:
            source: the absolute path of a folder, an id of a model hub, or s3://BUCKET/PREFIX, gs://, az://.
            token: for a model hub: "secret:NAME".
            is_trusted: the operator asks, so that every source is allowed.

        Raises: UnknownName for the base, Forbidden for a source that callers may not use, Conflict for a name that
        something else has, InvalidInput.
        """
        model = self._base(caller, base, name)
        location = check_source(source, self._deployments, is_trusted=is_trusted)
        reference = check_token(token, is_trusted=is_trusted)
        record = await self._begin(self._new(caller.project, model.name, name, location, reference))
        faults.point("after_adapter_record")
        self._start(record, model)
        return record

    async def upload(self, caller: Caller, base: str, name: str, bundle: Path) -> AdapterRecord:
        """As `register`, for an uploaded archive. The version is ready or has failed when this returns.

        Raises: InvalidInput also for an archive without an adapter: then no version is created.
        """
        model = self._base(caller, base, name)
        staging = self._home / fetching.STAGING
        await asyncio.to_thread(staging.mkdir, parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=staging) as folder:
            with _report_full_disk():
                staged = await asyncio.to_thread(_unpack, bundle, Path(folder))
            task = asyncio.create_task(
                self._create_uploaded(self._new(caller.project, model.name, name, UPLOAD, None), staged, model)
            )
            try:
                return await asyncio.shield(task)
            finally:
                await asyncio.wait({task})  # finish it, even if the caller is cancelled

    async def _create_uploaded(self, record: AdapterRecord, staged: Path, model: ModelSpec) -> AdapterRecord:
        """Create a version from an unpacked and checked adapter."""
        self._settling.add(record.id)
        try:
            return await self._store_upload(await self._begin(record), staged, model)
        finally:
            self._settling.discard(record.id)

    async def _store_upload(self, record: AdapterRecord, staged: Path, model: ModelSpec) -> AdapterRecord:
        faults.point("after_adapter_record")
        try:
            with full_disk_named(self._home):
                fetched = await asyncio.to_thread(fetching.settle, staged, self._home / record.id)
            faults.point("after_adapter")
            report = await asyncio.to_thread(fetching.describe, fetched, model.source, _rank_max(model))
            await self._check_space(record, report)
        except (BatchmillError, OSError) as error:
            await self._write(replace(record, state=FAILED, message=str(error)))
            raise
        return await self._store_fetched(record, report)

    def incoming(self) -> Path:
        """Return an empty file for an archive that is about to be received. The caller removes it."""
        staging = self._home / fetching.STAGING
        make_folder(staging)
        handle, path = tempfile.mkstemp(dir=staging, suffix=".tar.gz")
        open(handle, "wb").close()
        return Path(path)

    async def receive(self, project: str, bundle: Path, pieces: AsyncIterator[bytes]) -> None:
        """Write an incoming archive piece by piece. Raises: StorageFull, OverQuota."""
        writing, size_bytes = await self._disk_quota.begin(project), 0
        try:
            with _report_full_disk(), bundle.open("wb") as file:
                async for piece in pieces:
                    size_bytes += len(piece)
                    writing.grew_to(size_bytes)
                    await asyncio.to_thread(file.write, piece)
        finally:
            writing.end()

    async def wait(self, record: AdapterRecord) -> AdapterRecord:
        """Wait until an adapter is ready or has failed. Returns its record."""
        task = self._tasks.get(record.id)
        if task is not None:
            await asyncio.wait({task})
            if not task.cancelled():
                task.result()
        async with self._changing:  # a removal may be running
            return self._records.get(record.id) or replace(record, state=REMOVED)

    async def ensure(
        self, project: str, base: str, hub_ids: Sequence[str], *, token: str | None = None
    ) -> dict[str, AdapterRecord]:
        """Register and fetch adapters of a model hub that rows name, under their ids. Returns them ready or failed.

        Args: token: the reference to the token for the hub; None: the token of the base.

        Cancelling it does not cancel the fetches.
        """
        caller = Caller(project, Scope.ADMIN)
        try:
            model = self._directory.base(caller, base)
        except UnknownName:  # a model that the job defines: the caller checks that the adapters fit
            model = None
        if token is None and model is not None:
            token = model.secrets.get("HF_TOKEN")
        by_hub_id: dict[str, AdapterRecord] = {}
        for hub_id in dict.fromkeys(hub_ids):
            try:
                by_hub_id[hub_id] = await self._ensure(self._new(project, base, hub_id, hub_id, token), model)
            except (Conflict, InvalidInput, OverQuota) as error:
                by_hub_id[hub_id] = replace(
                    self._new(project, base, hub_id, hub_id, None), version=1, state=FAILED, message=error.message
                )
        return {
            hub_id: await self.wait(record) if record.state == FETCHING else record
            for hub_id, record in by_hub_id.items()
        }

    async def _ensure(self, new: AdapterRecord, model: ModelSpec | None) -> AdapterRecord:
        check_name(new.name)
        async with self._changing:
            versions = self._versions(new.project, new.name)
            record = next((each for each in reversed(versions) if each.base == new.base), None)
            if record is None:
                record = await self._store_new(new)
                self._start(record, model)
            elif record.state == FAILED:  # it may succeed now, or with this token
                token = new.token if record.source == new.source else record.token
                record = await self._write(replace(record, state=FETCHING, message="", token=token))
                self._start(record, model)
        return record

    async def remove(self, project: str, name: str, version: int | None = None) -> list[AdapterRecord]:
        """Remove one version, or all. Jobs that use it keep it until they end."""
        async with self._changing:
            versions = [each for each in self._versions(project, name) if version in (None, each.version)]
            if not versions:
                raise unknown_adapter(name, version)
            now = self._clock.now()
            removed = [replace(each, state=REMOVED, changed=now) for each in versions]
            for record in versions:
                if (task := self._tasks.get(record.id)) is not None:
                    task.cancel()
                    await asyncio.wait({task})
                    await asyncio.to_thread(self._owned.remove_tree, self._home / fetching.STAGING / record.id)
            await self._database.write(records.update, removed)
            self._drop(removed)
        return removed

    async def sweep(self) -> None:
        """Restart fetches without a task, whose failure could not be stored on a full disk. Remove the files of removed
        adapters that no unfinished job uses."""
        for record in self.list_all() if self._resumes else ():
            if record.state == FETCHING and record.id not in self._tasks and record.id not in self._settling:
                self._start(record)
        kept_names = {*self._records, fetching.STAGING}
        names = {path.name for path in self._home.iterdir()} if self._home.is_dir() else set()
        names.update(await self._stored.names_in(self._home))
        folders = [self._home / name for name in sorted(names - kept_names)]
        if not folders:
            return
        before = self._clock.now() - REMOVED_S
        recently_removed = await self._database.read(records.removed_after, [path.name for path in folders], before)
        folders_in_use = await self._database.read(records.used_folders)
        for path in folders:
            if path.name not in recently_removed and str(path) not in folders_in_use and path.name not in self._records:
                await asyncio.to_thread(self._owned.remove_tree, path)
                await self._stored.remove(path)

    # -- private ------------------------------------------------------------------------------------------------------

    def _base(self, caller: Caller, base: str, name: str) -> ModelSpec:
        """Return the base model, if an adapter of this name can be registered for it."""
        check_name(name)
        model = self._directory.base(caller, base)
        if not model.traits.loads_adapters:
            raise InvalidInput(
                f"the model {base[:SHOWN_CHARS]!r} does not support adapters; models of the engine vllm do",
                code="no_adapters",
            )
        self._directory.refuse_taken(caller.project, name, ModelKind.ADAPTER)
        return model

    def _new(self, project: str, base: str, name: str, source: str, token: str | None) -> AdapterRecord:
        now = self._clock.now()
        return AdapterRecord(new_id(), project, name, 0, base, source, created=now, changed=now, token=token)

    async def _begin(self, record: AdapterRecord) -> AdapterRecord:
        await self._disk_quota.check(record.project)
        async with self._changing:
            return await self._store_new(record)

    async def _store_new(self, record: AdapterRecord) -> AdapterRecord:
        """Store and publish a new version. Raises: Conflict for a name in use; OverQuota."""
        with self._directory.claim(record.project, record.name, ModelKind.ADAPTER):
            record = await self._database.write(records.begin, record, self._quotas.of(record.project).adapters)
            self._put([record])
        return record

    def _start(self, record: AdapterRecord, model: ModelSpec | None = None) -> None:
        task = self._tasks[record.id] = asyncio.create_task(self._fetch(record, model))
        task.add_done_callback(lambda done: self._on_fetch_done(record, done))

    def _on_fetch_done(self, record: AdapterRecord, task: asyncio.Task[None]) -> None:
        self._tasks.pop(record.id, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("the adapter %s could not be stored: %s", record.own_name, error)

    async def _fetch(self, record: AdapterRecord, model: ModelSpec | None) -> None:
        """Fetch a version and store the result."""
        home = self._home / record.id
        try:
            async with using(self._stored, home):
                if record.source == UPLOAD and not home.is_dir():
                    raise InvalidInput("its upload is not complete: upload it again", code="invalid_bundle")
                model = model or self._find_base(record)
                source, rank = ("", RANK_MAX) if model is None else (model.source, _rank_max(model))
                order = FetchOrder(record.source, str(home), base_source=source, rank_max=rank)
                report = await self._fetches.fetch(record.project, order, record.token)
            await self._check_space(record, report)
        except DatabaseUnavailable:
            raise  # a sweep of the owner repeats the fetch
        except BatchmillError as error:
            log.warning("the adapter %s of %s failed: %s", record.own_name, record.project, error.message)
            await self._write(replace(record, state=FAILED, message=error.message))
            return
        faults.point("after_adapter")
        await self._store_fetched(record, report)

    async def _check_space(self, record: AdapterRecord, report: FetchReport) -> None:
        """Raises: OverQuota if the project has no space for the fetched files, which are then removed."""
        try:
            await self._disk_quota.check(record.project, report.fetched.bytes)
        except OverQuota:
            # A successor may have found room, and uses these files.
            await asyncio.to_thread(self._owned.remove_tree, Path(report.fetched.folder))
            raise

    def _find_base(self, record: AdapterRecord) -> ModelSpec | None:
        try:
            return self._directory.base(Caller(record.project, Scope.ADMIN), record.base)
        except UnknownName:
            return None

    async def _store_fetched(self, record: AdapterRecord, report: FetchReport) -> AdapterRecord:
        """Store a fetched version as ready. If it does not fit its base, it fails and its files are removed."""
        fetched = report.fetched
        if report.flaw:
            # To a successor, with another base, they may have none.
            await asyncio.to_thread(self._owned.remove_tree, Path(fetched.folder))
        else:
            await self._stored.publish(Path(fetched.folder))
        record = replace(
            record, state=FAILED if report.flaw else READY, digest=fetched.digest, rank=report.rank,
            message=f"it does not fit {record.base}: {report.flaw}" if report.flaw else "", bytes=fetched.bytes,
            folder="" if report.flaw else fetched.folder, trained_for=report.base or "",
        )  # fmt: skip
        return await self._write(record)

    async def _write(self, record: AdapterRecord) -> AdapterRecord:
        """Store the state of a version. A version that was removed meanwhile stays removed."""
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
        raise StorageFull("the server's disk is full: no part of the adapter was kept") from error


def _unpack(bundle: Path, folder: Path) -> Path:
    staged = folder / "adapter"
    staged.mkdir()
    with bundle.open("rb") as file:
        adapter_bundles.read(file, staged)
    read_adapter(staged)
    return staged


def _rank_max(model: ModelSpec) -> int:
    """Return the largest adapter rank of an engine: the configured one, or the general maximum."""
    return configured_rank(model.engine_args) or RANK_MAX


def unknown_adapter(name: str, version: int | None) -> UnknownName:
    shown = name if version is None else f"{name}/{version}"
    return UnknownName(
        f"there is no adapter {shown[:SHOWN_CHARS]!r}: `batchmill adapters list` lists them", code="unknown_adapter"
    )


def _rows(versions: Sequence[AdapterRecord]) -> list[ModelRow]:
    """Return the rows for the versions of one adapter. Its name is reserved even while no version is ready."""
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
