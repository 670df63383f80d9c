"""Deploys, publishes, rolls back and removes versions of functions, in the process that owns the data directory.

A ready version never changes. `ModelDirectory` resolves names to versions.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Set
from pathlib import Path
from weakref import WeakValueDictionary

from msgspec.structs import replace

from batchmill.errors import BatchmillError, Conflict, Forbidden, InvalidInput, ModelFailed, TermOver, UnknownName
from batchmill.executors.validators.validators import ValidatorFailed
from batchmill.owned_files import discard
from batchmill.ports.clock import Clock
from batchmill.services.directory.directory import ModelDirectory
from batchmill.services.directory.rows import ModelKind, ModelRow
from batchmill.services.functions import calls as call_logs
from batchmill.services.functions import records, schema_classes
from batchmill.services.functions.deploying import VersionBuilder
from batchmill.services.functions.function import Function
from batchmill.services.functions.names import (
    LATEST,
    MAIN,
    SHOWN_CHARS,
    check_alias,
    check_branch,
    check_name,
    is_unnamed,
    read_reference,
)
from batchmill.services.functions.records import BUILDING, FAILED, REMOVED
from batchmill.store.sql.database import Database
from batchmill.types import Caller, ModelSpec, OutputSchema, ProjectQuotas
from batchmill.wire.bundles import READY, SCHEMA, Backend, Deployed, DeployOrder, ModelVersion, Route
from batchmill.wire.native_models import LogPage, LogQuery

__all__ = ["ModelVersion", "ModelVersions"]

log = logging.getLogger("batchmill.models")

BACKENDS_MAX = 100
WEIGHT_MAX = 1e6
OPERATOR_PROJECT = "default"  # of functions that the operator of the machine deploys

Warm = Callable[[ModelSpec, ModelSpec], Awaitable[None]]


async def _no_warm_up(old: ModelSpec, new: ModelSpec) -> None:
    """Do nothing: without running workers, a new version needs no warm-up."""


class ModelVersions:
    """The versions of all functions. A function belongs to the project that deployed it first.

    In each method, `by` is the caller. None is the operator of the machine, who may do everything.

    Args:
        quotas: how many versions each project may have. They do not limit the operator.
        warm: called with the old and the new `latest`. It returns once workers of the new version are up, if the old
            one has workers. Raises: ModelFailed; the old version stays the latest then.
        runs_openly: whether code of projects would run on nodes that others use, and not isolated.
    """

    def __init__(
        self, database: Database, clock: Clock, directory: ModelDirectory, *, builder: VersionBuilder,
        quotas: ProjectQuotas = ProjectQuotas(), warm: Warm = _no_warm_up, runs_openly: Callable[[], bool] = bool,
    ) -> None:  # fmt: skip
        self._database, self._clock, self._directory, self._builder = database, clock, directory, builder
        self._quotas = quotas
        self._functions: dict[str, Function] = {}
        self._locks = WeakValueDictionary[str, asyncio.Lock]()  # by function name, while it is held or waited for
        self._warm, self._runs_openly = warm, runs_openly

    async def load(self) -> None:
        """Read all versions. The ones that a crashed owner left half built fail, and their files are deleted."""
        await self._database.write(records.end_interrupted, self._clock.now())
        versions, routes = await self._database.read(records.read_all)
        by_name: dict[str, tuple[list[ModelVersion], list[Route]]] = {}
        for version in versions:
            by_name.setdefault(version.name, ([], []))[0].append(version)
        for route in routes:
            by_name.setdefault(route.name, ([], []))[1].append(route)
        self._put_all([Function(name, {}, {}).changed(*parts) for name, parts in by_name.items()])
        keep = [each for each in versions if each.state in (READY, FAILED)]
        with contextlib.suppress(TermOver):  # the next owner does it
            await asyncio.to_thread(self._builder.sweep, keep)

    # -- lookup -------------------------------------------------------------------------------------------------------

    def get(self, name: str) -> list[ModelVersion]:
        """Every version of a function, sorted by branch and number, failed and removed ones included."""
        return self._function(name).all

    def all(self) -> list[ModelVersion]:
        """Every ready version."""
        return [each for name in sorted(self._functions) for each in self.get(name) if each.state == READY]

    def callable(self) -> list[ModelVersion]:
        """Every ready version of a function: those of classes are called as no model."""
        return [each for each in self.all() if not self._function(each.name).is_schema]

    def names(self) -> list[str]:
        """Names of functions with a ready version."""
        return sorted(self._directory.snapshot.functions)

    def show(self, name: str) -> tuple[list[ModelVersion], list[Route]]:
        """The versions and routes of a function. Raises: UnknownName if all versions were removed."""
        function = self._function(name)
        if all(each.state == REMOVED for each in function.all):
            raise self._unknown(name, None, LATEST)
        return function.all, list(function.routes.values())

    def for_job(self, reference: str) -> ModelSpec | None:
        """The model of a job for a reference such as `NAME@3`; None if no function has this name.

        Raises: UnknownName for a version that the function does not have.
        """
        name, branch, version = read_reference(reference)
        function = self._directory.snapshot.functions.get(name)
        if function is None:
            return None
        target = self._directory.draw(function, branch, version)
        full_name = f"{name}@{target.branch}/{target.number}"
        return replace(target.model, allowed=list(dict.fromkeys((reference, name, full_name))))

    def is_hidden(self, name: str, project: str) -> bool:
        """Whether the function belongs to another project and is not shared. `project` may not learn that it exists."""
        function = self._function(name)
        return function.project is not None and not function.is_shared and function.project != project

    def own(self, name: str, by: Caller | None) -> list[ModelVersion]:
        """As `get`, but only the versions that the caller may change.

        Raises: UnknownName if there are none; Forbidden for a shared function of another project.
        """
        function = self._function(name)
        versions = [each for each in function.all if by is None or each.project == by.project]
        if not versions or (by is not None and function.project not in (None, by.project)):
            if by is not None and function.is_shared:
                raise Forbidden(f"the function {name!r} belongs to another project: you may call it, but not change it")
            raise self._unknown(name, None, LATEST)
        return versions

    def _function(self, name: str) -> Function:
        """The function, or an empty one if there is none."""
        return self._functions.get(name) or Function(name, {}, {})

    def _unknown(self, name: str, branch: str | None, version: str) -> UnknownName:
        """The error for an unknown function or version, with the closest name."""
        function = self._function(name)
        if function.is_ready or function.is_schema:
            return function.unknown(branch, version)
        close_names = difflib.get_close_matches(name[:SHOWN_CHARS], self.names(), n=1)
        hint = f"; did you mean {close_names[0]!r}?" if close_names else ""
        return UnknownName(f"no model is called {name[:SHOWN_CHARS]!r}{hint}", code="model_not_found")

    def _put(
        self,
        name: str,
        versions: Iterable[ModelVersion] = (),
        routes: Iterable[Route] = (),
        dropped: Iterable[Route] = (),
    ) -> None:
        """Publish a change that was committed."""
        self._put_all([self._function(name).changed(versions, routes, dropped)])

    def _put_all(self, functions: Iterable[Function]) -> None:
        changed = {each.name: each for each in functions}
        self._functions |= changed
        self._directory.publish({(ModelKind.FUNCTION, name): _rows(each) for name, each in changed.items()})

    async def log(
        self, name: str, branch: str | None = None, version: str = LATEST, *, by: Caller | None = None
    ) -> str:
        """What was printed while a version was made and checked: the newest that was tried, where it says `latest`."""
        return await self._builder.log(self._logged_version(name, branch, version, by))

    async def calls(self, name: str, query: LogQuery, *, by: Caller | None = None) -> LogPage:
        """A page of a version's call log: what its calls printed and raised, of the caller's project only."""
        logged = self._logged_version(name, query.branch, query.version or LATEST, by)
        project = None if by is None else by.project
        return await asyncio.to_thread(call_logs.read, self._builder.folder(logged), query, project)

    def _logged_version(self, name: str, branch: str | None, version: str, by: Caller | None) -> ModelVersion:
        """The version whose log is requested. Raises as `own`, and UnknownName for a version that does not exist."""
        versions = [each for each in self.own(name, by) if each.branch == (branch or MAIN)]
        if version == LATEST and versions:
            return versions[-1]
        if version.isdigit():
            matches = [each for each in versions if each.number == int(version)]
            if not matches:
                raise self._unknown(name, branch, version)
            return matches[0]
        target = self._directory.draw(self._function(name), branch, version)
        return self._function(name).ready(target.branch, target.number)

    # -- deploying ----------------------------------------------------------------------------------------------------

    def incoming(self) -> Path:
        """Create an empty file for an uploaded archive. The caller removes it."""
        return self._builder.incoming()

    async def deploy(
        self, bundle: Path, *, check: Callable[[str], None] | None = None, by: Caller | None = None
    ) -> Deployed:
        """Build a version from an archive of `wire.bundles`, test it, and make it its branch's latest.

        Args:
            check: raises if the sender may not use the function's name.

        Raises: Conflict (`name_taken`) for the name of another project's function; InvalidInput for an invalid order
        or archive; ModelFailed (`deploy_failed`) with the traceback if the code fails: the version is then stored as
        failed, and the latest version does not change; OverQuota.
        """
        staged = await self._builder.stage(bundle)
        try:
            order = staged.order
            if order.kind == SCHEMA:
                schema_classes.check_settings(order)
            if order.kind == SCHEMA and not order.name:
                project = OPERATOR_PROJECT if by is None else by.project
                order = schema_classes.named(order, project, staged.digest)
                staged = replace(staged, order=order)
            else:
                self._check_named(order, check)
            if by is not None and by.key is not None:
                self._builder.check_allowed(order)
            staged = await self._builder.resolve(staged)
            async with self._lock(order.name):
                new = self._draft(order, by)
                latest = self._latest(order.name, order.branch)
                if latest is not None and _digest(latest) == staged.digest:
                    return Deployed(await self._touched(latest), is_new=False)
                await self.remove_unused()
                version = await self._begin(new, by)
                try:
                    spec = await self._builder.build(staged, version)
                    return Deployed(await self._publish(version, spec, latest), is_new=True)
                except BaseException as error:
                    await asyncio.shield(self._record_failure(version, error))
                    raise
        finally:
            await asyncio.to_thread(discard, staged.folder)

    @staticmethod
    def _check_named(order: DeployOrder, check: Callable[[str], None] | None) -> None:
        """Raises: InvalidInput; as `check`."""
        check_name(order.name)
        check_branch(order.branch)
        if check is not None:
            check(order.name)

    def _draft(self, order: DeployOrder, by: Caller | None) -> ModelVersion:
        """The version for a deploy order, still without a number. Raises: Conflict."""
        function = self._function(order.name)
        owner = function.project
        if by is not None and owner not in (None, by.project):
            raise Conflict(f"the name {order.name!r} is taken: choose another", code="name_taken")
        if function.is_ready and order.kind == SCHEMA or function.is_schema and order.kind != SCHEMA:
            here, there = ("a function", "a schema class") if function.is_ready else ("a schema class", "a function")
            raise Conflict(
                f"{order.name!r} is the name of {here}, and {order.target} is deployed as {there}: choose another name",
                code="name_taken",
            )
        project = owner if owner is not None else OPERATOR_PROJECT if by is None else by.project
        key, is_shared = None if by is None else by.key, order.is_shared
        if is_shared is None:
            is_shared = key is None if owner is None else function.is_shared
        return ModelVersion(
            order.name, order.branch, 0, BUILDING, self._clock.now(), source=order.source, project=project, key=key,
            is_shared=is_shared,
        )  # fmt: skip

    async def _begin(self, new: ModelVersion, by: Caller | None) -> ModelVersion:
        """Store the version as being built, and give it a number. Raises: Conflict for a name that is taken;
        OverQuota."""
        version_quota = None if by is None else self._quotas.of(new.project).functions
        with self._directory.claim(new.project, new.name, ModelKind.FUNCTION, is_shared=new.is_shared):
            version = await self._database.write(records.begin, new, version_quota)
            self._put(version.name, [version])
        return version

    async def _publish(self, version: ModelVersion, spec: ModelSpec, old: ModelVersion | None) -> ModelVersion:
        """Make the version its branch's latest. If the old one has workers, wait until the new one has some too."""
        if old is not None and old.spec is not None:
            await self._warm(old.spec, spec)
        now = max(self._clock.now(), version.created)
        ready = replace(version, state=READY, finished=now, spec=spec)
        route = Route(version.name, version.branch, [Backend(version.branch, version.number)], [], now)
        await self._database.write(records.publish, ready, route)
        self._put(ready.name, [ready], [route])
        return ready

    async def _record_failure(self, version: ModelVersion, error: BaseException) -> None:
        if is_unnamed(version.name):  # the reply said why, and it has no name to be found by
            removed = replace(version, state=REMOVED, source="")
            await self._database.write(records.remove, [removed], [], [])
            await self._database.write(records.forget, removed)
            self._put(removed.name, [removed])
            await self._builder.discard(version)
            return
        message = error.message if isinstance(error, BatchmillError) else f"{type(error).__name__}: {error}"
        failed = replace(version, state=FAILED, finished=max(self._clock.now(), version.created), error=message)
        await self._database.write(records.fail, failed)
        self._put(failed.name, [failed])
        await self._builder.discard_failed(version)

    @contextlib.asynccontextmanager
    async def _lock(self, name: str) -> AsyncIterator[None]:
        """Allow one change of a function at a time."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            yield

    @contextlib.asynccontextmanager
    async def _lock_owned(self, name: str, by: Caller | None) -> AsyncIterator[None]:
        """As `_lock`, for an existing function of the caller. Raises as `own`."""
        if not self.get(name):
            raise self._unknown(name, None, LATEST)
        async with self._lock(name):
            self.own(name, by)
            yield

    def _latest(self, name: str, branch: str) -> ModelVersion | None:
        return self._function(name).latest(branch)

    # -- classes without a name ---------------------------------------------------------------------------------------

    async def _touched(self, version: ModelVersion) -> ModelVersion:
        """A version that was deployed once more: one without a name of its own stays for a while."""
        if not is_unnamed(version.name):
            return version
        touched = replace(version, finished=max(self._clock.now(), version.created))
        await self._database.write(records.touch, touched)
        self._put(touched.name, [touched])
        return touched

    async def remove_unused(self) -> None:
        """Remove the classes without a name of their own that no job has any more, and nobody deployed lately."""
        before = self._clock.now() - schema_classes.KEPT_S
        unnamed = [each for name in self._functions if is_unnamed(name) for each in self.get(name)]
        old = [each for each in unnamed if each.state in (READY, FAILED) and (each.finished or before) < before]
        if not old:
            return
        uses = await self._database.read(records.read_class_uses)
        for each in old:
            if self._function(each.name).versions.get((each.branch, each.number)) != each:
                continue  # another deployment has removed or used it meanwhile
            if each.reference not in uses.references and not self._locks.setdefault(each.name, asyncio.Lock()).locked():
                with contextlib.suppress(Conflict, UnknownName):  # a job has got it; it was removed meanwhile
                    (removed,) = await self._remove(each.name, each.branch, str(each.number), seen=uses.jobs)
                    await self._database.write(records.forget, removed)
                    self._put(removed.name, [replace(removed, spec=None, source="", error=None)])

    # -- classes of jobs ----------------------------------------------------------------------------------------------

    def schema_class(self, caller: Caller, reference: str) -> OutputSchema:
        """The schema of a class, with the version that a reference means now. Raises: UnknownName."""
        return schema_classes.schema_of(self._directory.schema_class(caller, reference))

    async def bring(self, schema: OutputSchema) -> None:
        """As `jobs.intake.schema_code.SchemaCode`."""
        version = schema.version
        if version is None:
            return
        name, branch, number = read_reference(version.reference)
        found = self._function(name).versions.get((branch or MAIN, int(number)))
        if found is None or found.state != READY or found.spec is None or _digest(found) != schema.code:
            raise ValidatorFailed(
                f"the class {version.reference}, which validates the answers of this job, was removed: deploy it "
                "again, and submit a new job with it"
            )
        if self._runs_openly():
            raise ValidatorFailed(
                'classes of projects run on the nodes of a cluster only isolated: set functions.isolate = "bubblewrap"'
            )
        try:
            await self._builder.restore(found.spec)
        except ModelFailed as error:
            raise ValidatorFailed(f"the environment of {version.reference} cannot be built: {error.message}") from None

    # -- routes -------------------------------------------------------------------------------------------------------

    async def rollback(
        self, name: str, branch: str | None = None, number: int | None = None, *, by: Caller | None = None
    ) -> ModelVersion:
        """Make an earlier version its branch's latest; without a number, the last ready one before the current one.

        Raises: UnknownName; InvalidInput if there is no earlier one.
        """
        branch = branch or MAIN
        async with self._lock_owned(name, by):
            current = self._latest(name, branch)
            if current is None:
                raise self._unknown(name, branch, LATEST)
            if number is None:
                earlier = [
                    each.number for each in self.get(name)
                    if each.branch == branch and each.state == READY and each.number < current.number
                ]  # fmt: skip
                if not earlier:
                    raise InvalidInput(
                        f"{current.reference} is the first ready version: there is none to roll back to",
                        code="no_version",
                    )
                number = earlier[-1]
            target = self._function(name).ready(branch, number)
            await self._switch(target, current, Backend(branch, number))
            return target

    async def merge(self, name: str, source: str, into: str = MAIN, *, by: Caller | None = None) -> ModelVersion:
        """Copy the latest of one branch to a new version of another, with the same code and environment."""
        return await self._redeploy(name, source, check_branch(into), "merged", by=by)

    async def restart(self, name: str, branch: str | None = None, *, by: Caller | None = None) -> ModelVersion:
        """Copy the latest to a new number. Its new workers start before the first call goes there."""
        return await self._redeploy(name, branch or MAIN, branch or MAIN, "restarted", by=by)

    async def _redeploy(self, name: str, source: str, into: str, action: str, *, by: Caller | None) -> ModelVersion:
        async with self._lock_owned(name, by):
            original, latest = self._latest(name, source), self._latest(name, into)
            if original is None:
                raise self._unknown(name, source, LATEST)
            source_text = f"{original.source.partition(' (')[0]} ({action} from {original.branch}/{original.number})"
            key = None if by is None else by.key
            new = replace(
                original, branch=into, created=self._clock.now(), finished=None, source=source_text, spec=None, key=key
            )
            version = await self._begin(new, by)
            try:
                return await self._publish(version, await self._builder.copy(original, version), latest)
            except BaseException as error:
                await asyncio.shield(self._record_failure(version, error))
                raise

    async def _switch(self, target: ModelVersion, current: ModelVersion, backend: Backend) -> None:
        assert target.spec is not None and current.spec is not None, "both are ready"
        if target != current:
            await self._warm(current.spec, target.spec)
        await self._route(Route(target.name, target.branch, [backend], [], self._clock.now()))

    async def _route(self, route: Route) -> Route:
        await self._database.write(records.set_route, route)
        self._put(route.name, routes=[route])
        return route

    async def set_alias(
        self, name: str, alias: str, backends: list[Backend], mirrors: list[Backend] | None = None, *,
        by: Caller | None = None,
    ) -> Route:  # fmt: skip
        """Point an alias at versions, by weight. `mirrors` get copies of its calls. Raises: UnknownName."""
        check_alias(alias)
        mirrors = mirrors or []
        if not 0 < len(backends) <= BACKENDS_MAX or len(mirrors) > BACKENDS_MAX:
            raise InvalidInput(
                f"an alias has 1 to {BACKENDS_MAX} versions and at most {BACKENDS_MAX} mirrors", code="invalid_alias"
            )
        for backend in (*backends, *mirrors):
            if not 0 < backend.weight <= WEIGHT_MAX:
                raise InvalidInput(
                    f"a weight is more than 0 and at most {WEIGHT_MAX:,.0f}, not {backend.weight}",
                    code="invalid_weight",
                )
        async with self._lock_owned(name, by):
            for backend in (*backends, *mirrors):
                self._function(name).ready(backend.branch, backend.number)
            return await self._route(Route(name, f"@{alias}", backends, mirrors, self._clock.now()))

    # -- removing -----------------------------------------------------------------------------------------------------

    async def remove(
        self, name: str, branch: str | None = None, version: str | None = None, *, by: Caller | None = None
    ) -> list[ModelVersion]:
        """Remove a version, a branch, or with neither the whole function. Returns the removed versions.

        Raises: UnknownName; Conflict for a version that an alias or an unfinished job uses, or a branch's latest.
        """
        return await self._remove(name, branch, version, by=by)

    async def _remove(
        self, name: str, branch: str | None, version: str | None, *,
        by: Caller | None = None, seen: Set[str] | None = None,
    ) -> list[ModelVersion]:  # fmt: skip
        """As `remove`. Args: seen: as of `records.remove`."""
        async with self._lock_owned(name, by):
            versions, dropped = self._select_removals(name, branch, version, by)
            await self._database.write(records.remove, versions, [], dropped, seen)
            removed = [replace(each, state=REMOVED) for each in versions]
            self._put(name, removed, dropped=dropped)
            for each in removed:
                await self._builder.discard(each)
            return removed

    async def remove_alias(self, name: str, alias: str, *, by: Caller | None = None) -> None:
        """Remove an alias. Raises: UnknownName."""
        async with self._lock_owned(name, by):
            route = self._function(name).routes.get(f"@{alias}")
            if route is None:
                raise self._unknown(name, None, alias)
            await self._database.write(records.remove, [], [], [route])
            self._put(name, dropped=[route])

    def _select_removals(
        self, name: str, branch: str | None, version: str | None, by: Caller | None
    ) -> tuple[list[ModelVersion], list[Route]]:
        """The versions to remove, and the routes that only they serve. Raises: UnknownName, Conflict."""
        versions = [each for each in self.own(name, by) if each.state in (READY, FAILED)]
        if version is not None:
            key = (branch or MAIN, version)
            versions = [each for each in versions if (each.branch, str(each.number)) == key]
        elif branch is not None:
            versions = [each for each in versions if each.branch == branch]
        if not versions:
            raise self._unknown(name, branch, version or LATEST)
        keys = {(each.branch, each.number) for each in versions}
        remaining = [each for each in self.get(name) if each.state == READY and (each.branch, each.number) not in keys]
        dropped = []
        for route in self._function(name).routes.values():
            if not any((each.branch, each.number) in keys for each in (*route.backends, *route.mirrors)):
                continue
            is_needed = any(each.branch == route.label for each in remaining) or (
                route.label.startswith("@") and remaining
            )
            if is_needed:
                role = f"the alias {route.label[1:]!r}" if route.label.startswith("@") else f"latest of {route.label}"
                raise Conflict(
                    f"{name}: {role} points at this version: point it at another one first", code="version_in_use"
                )
            dropped.append(route)
        return versions, dropped


def _digest(version: ModelVersion) -> str:
    assert version.spec is not None and version.spec.function is not None, "it is ready"
    return version.spec.function.digest


def _rows(function: Function) -> list[ModelRow]:
    """The directory rows of a function. It has its name while a version is ready or being built."""
    if function.project is None:
        return []
    name = function.name
    return [ModelRow(name, ModelKind.FUNCTION, function.project, function=function, listed=(name,))]
