"""Versions of deployed functions: made, checked, published, moved between and removed, by the process that owns them.

A version never changes once it is ready. What a name means now the directory tells.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import logging
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path

from msgspec.structs import replace

from batchmill.errors import BatchmillError, Conflict, Forbidden, InvalidInput, UnknownName
from batchmill.ports import Clock
from batchmill.services.directory import ModelDirectory
from batchmill.services.functions import calls as call_logs
from batchmill.services.functions import records
from batchmill.services.functions.deploying import VersionBuilder
from batchmill.services.functions.function import Function
from batchmill.services.functions.names import (
    LATEST,
    MAIN,
    SHOWN_CHARS,
    check_alias,
    check_branch,
    check_name,
    read_reference,
)
from batchmill.services.functions.records import BUILDING, FAILED, READY, REMOVED
from batchmill.services.model_rows import ModelKind, ModelRow
from batchmill.store.database import Database
from batchmill.types import Caller, ModelSpec, ProjectQuotas
from batchmill.wire.bundles import Backend, Deployed, DeployOrder, ModelVersion, Route
from batchmill.wire.native_models import LogPage, LogQuery

__all__ = ["ModelVersion", "ModelVersions"]

log = logging.getLogger("batchmill.models")

BACKENDS_MAX = 100
WEIGHT_MAX = 1e6
MACHINES = "default"  # the project of what whoever runs the machine deploys

Warm = Callable[[ModelSpec, ModelSpec], Awaitable[None]]


async def _stays_cold(old: ModelSpec, new: ModelSpec) -> None:
    """Where nothing runs, nothing has to be running before the newest version counts."""


class ModelVersions:
    """A function is the project's that brought it. `by` is who asks; None: whoever runs the machine, who may do all.

    Args:
        quotas: how many versions each project may have; whoever runs the machine is not held to them.
        warm: called with the version that was `latest` and the one that is to be; it returns once workers of the new
            one are up, if the old one has some. Raises: ModelFailed, and then the old one stays.
    """

    def __init__(
        self, database: Database, clock: Clock, directory: ModelDirectory, *, builder: VersionBuilder,
        quotas: ProjectQuotas = ProjectQuotas(), warm: Warm = _stays_cold,
    ) -> None:  # fmt: skip
        self._database, self._clock, self._directory, self._builder = database, clock, directory, builder
        self._quotas = quotas
        self._functions: dict[str, Function] = {}
        self._locks: dict[str, asyncio.Lock] = {}  # of names that are being deployed
        self._warm = warm

    async def load(self) -> None:
        """Read what there is. What an earlier owner left half made goes, and its version has failed."""
        await self._database.write(records.end_interrupted, self._clock.now())
        versions, routes = await self._database.read(records.read_all)
        by_name: dict[str, tuple[list[ModelVersion], list[Route]]] = {}
        for version in versions:
            by_name.setdefault(version.name, ([], []))[0].append(version)
        for route in routes:
            by_name.setdefault(route.name, ([], []))[1].append(route)
        self._put_all([Function(name, {}, {}).changed(*found) for name, found in by_name.items()])
        keep = [each for each in versions if each.state in (READY, FAILED)]
        await asyncio.to_thread(self._builder.sweep, keep)

    # -- looking ------------------------------------------------------------------------------------------------------

    def get(self, name: str) -> list[ModelVersion]:
        """Every version of a function, by branch and number; failed and removed ones too."""
        return self._function(name).all

    def all(self) -> list[ModelVersion]:
        """Every version that is ready."""
        return [each for name in sorted(self._functions) for each in self.get(name) if each.state == READY]

    def names(self) -> list[str]:
        """Functions of which a version is ready."""
        return sorted(self._directory.snapshot.functions)

    def show(self, name: str) -> tuple[list[ModelVersion], list[Route]]:
        """Its versions and routes. Raises: UnknownName for a function of which nothing is left."""
        found = self._function(name)
        if all(each.state == REMOVED for each in found.all):
            raise self._unknown(name, None, LATEST)
        return found.all, list(found.routes.values())

    def for_job(self, reference: str) -> ModelSpec | None:
        """The version that a text means now, as the model of a job; None: no function is called so.

        Raises: UnknownName for a version that the function does not have.
        """
        name, branch, version = read_reference(reference)
        found = self._directory.snapshot.functions.get(name)
        if found is None:
            return None
        target = self._directory.draw(found, branch, version)
        named = f"{name}@{target.branch}/{target.number}"
        return replace(target.model, allowed=list(dict.fromkeys((reference, name, named))))

    def is_hidden(self, name: str, project: str) -> bool:
        """It is another project's, which does not share it: to this one there is no such function."""
        found = self._function(name)
        return found.project is not None and not found.is_shared and found.project != project

    def own(self, name: str, by: Caller | None) -> list[ModelVersion]:
        """As `get`, of those versions that are the caller's business.

        Raises: UnknownName where none is; Forbidden for a function of another project that shares it.
        """
        function = self._function(name)
        found = [each for each in function.all if by is None or each.project == by.project]
        if not found or (by is not None and function.project not in (None, by.project)):
            if by is not None and function.is_shared:
                raise Forbidden(f"the function {name!r} is another project's: it may be called, and not changed")
            raise self._unknown(name, None, LATEST)
        return found

    def _function(self, name: str) -> Function:
        """One without versions where there is none."""
        return self._functions.get(name) or Function(name, {}, {})

    def _unknown(self, name: str, branch: str | None, version: str) -> UnknownName:
        """Why a name means nothing, with the nearest that does."""
        found = self._function(name)
        if found.is_ready:
            return found.unknown(branch, version)
        near = difflib.get_close_matches(name[:SHOWN_CHARS], self.names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return UnknownName(f"no model is called {name[:SHOWN_CHARS]!r}{hint}", code="model_not_found")

    def _put(
        self,
        name: str,
        versions: Iterable[ModelVersion] = (),
        routes: Iterable[Route] = (),
        dropped: Iterable[Route] = (),
    ) -> None:
        """Publish a change that was written down."""
        self._put_all([self._function(name).changed(versions, routes, dropped)])

    def _put_all(self, functions: Iterable[Function]) -> None:
        put = {each.name: each for each in functions}
        self._functions |= put
        self._directory.publish({(ModelKind.FUNCTION, name): _rows(each) for name, each in put.items()})

    async def log(
        self, name: str, branch: str | None = None, version: str = LATEST, *, by: Caller | None = None
    ) -> str:
        """What was printed while a version was made and checked: the newest that was tried, where it says `latest`."""
        return await asyncio.to_thread(self._builder.log, self._tried(name, branch, version, by))

    async def calls(self, name: str, query: LogQuery, *, by: Caller | None = None) -> LogPage:
        """What calls of a version printed and raised; of the caller's project alone."""
        found = self._tried(name, query.branch, query.version or LATEST, by)
        project = None if by is None else by.project
        return await asyncio.to_thread(call_logs.read, self._builder.folder(found), query, project)

    def _tried(self, name: str, branch: str | None, version: str, by: Caller | None) -> ModelVersion:
        """The version whose log is meant. Raises as `own`, and UnknownName for a version that there is not."""
        tried = [each for each in self.own(name, by) if each.branch == (branch or MAIN)]
        if version == LATEST and tried:
            return tried[-1]
        if version.isdigit():
            match = [each for each in tried if each.number == int(version)]
            if not match:
                raise self._unknown(name, branch, version)
            return match[0]
        target = self._directory.draw(self._function(name), branch, version)
        return self._function(name).ready(target.branch, target.number)

    # -- deploying ----------------------------------------------------------------------------------------------------

    def incoming(self) -> Path:
        """An empty file for an archive that is on its way here; whoever asked for it removes it."""
        return self._builder.incoming()

    async def deploy(
        self, bundle: Path, *, check: Callable[[str], None] | None = None, by: Caller | None = None
    ) -> Deployed:
        """Make a version of what lies in an archive of `wire.bundles`, check it, and let it be its branch's latest.

        `check` raises where whoever sent it may not use the name.

        Raises: Conflict (`name_taken`) for the name of another project's function; InvalidInput for an order or archive
        that is wrong; ModelFailed (`deploy_failed`) with the traceback where the code does not work: the version is
        then written down as failed, and the one before stays; OverQuota.
        """
        staged = await self._builder.stage(bundle)
        try:
            order = staged.order
            check_name(order.name)
            check_branch(order.branch)
            if check is not None:
                check(order.name)
            if by is not None and by.key is not None:
                self._builder.check_asked(order)
            staged = await self._builder.resolve(staged)
            async with self._alone(order.name):
                new = self._new(order, by)
                latest = self._latest(order.name, order.branch)
                if latest is not None and _digest(latest) == staged.digest:
                    return Deployed(latest, is_new=False)
                version = await self._begin(new, by)
                try:
                    spec = await self._builder.build(staged, version)
                    return Deployed(await self._publish(version, spec, latest), is_new=True)
                except BaseException as error:
                    await asyncio.shield(self._failed(version, error))
                    raise
        finally:
            await asyncio.to_thread(shutil.rmtree, staged.folder, ignore_errors=True)

    def _new(self, order: DeployOrder, by: Caller | None) -> ModelVersion:
        """What an order makes, its number still to be given. Raises: Conflict."""
        known = self._function(order.name)
        owner = known.project
        if by is not None and owner not in (None, by.project):
            raise Conflict(f"the name {order.name!r} is taken: choose another", code="name_taken")
        project = owner if owner is not None else MACHINES if by is None else by.project
        key, is_shared = None if by is None else by.key, order.is_shared
        if is_shared is None:
            is_shared = key is None if owner is None else known.is_shared
        return ModelVersion(
            order.name, order.branch, 0, BUILDING, self._clock.now(), source=order.source, project=project, key=key,
            is_shared=is_shared,
        )  # fmt: skip

    async def _begin(self, new: ModelVersion, by: Caller | None) -> ModelVersion:
        """A version with its number, that is being built. Raises: Conflict for a name that is taken; OverQuota."""
        most = None if by is None else self._quotas.of(new.project).functions
        with self._directory.claim(new.project, new.name, ModelKind.FUNCTION, is_shared=new.is_shared):
            version = await self._database.write(records.begin, new, most)
            self._put(version.name, [version])
        return version

    async def _publish(self, version: ModelVersion, spec: ModelSpec, old: ModelVersion | None) -> ModelVersion:
        """Where the old version has workers, the new one's are up before the first call goes there."""
        if old is not None and old.spec is not None:
            await self._warm(old.spec, spec)
        now = max(self._clock.now(), version.created)
        ready = replace(version, state=READY, finished=now, spec=spec)
        route = Route(version.name, version.branch, [Backend(version.branch, version.number)], [], now)
        await self._database.write(records.publish, ready, route)
        self._put(ready.name, [ready], [route])
        return ready

    async def _failed(self, version: ModelVersion, error: BaseException) -> None:
        message = error.message if isinstance(error, BatchmillError) else f"{type(error).__name__}: {error}"
        failed = replace(version, state=FAILED, finished=max(self._clock.now(), version.created), error=message)
        await self._database.write(records.fail, failed)
        self._put(failed.name, [failed])
        await asyncio.to_thread(self._builder.discard_code, version)

    @contextlib.asynccontextmanager
    async def _alone(self, name: str) -> AsyncIterator[None]:
        """One change of a function after another."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            yield

    @contextlib.asynccontextmanager
    async def _known(self, name: str, by: Caller | None) -> AsyncIterator[None]:
        """As `_alone`, for a function that there is and that is the caller's. Raises as `own`."""
        if not self.get(name):
            raise self._unknown(name, None, LATEST)
        async with self._alone(name):
            self.own(name, by)
            yield

    def _latest(self, name: str, branch: str) -> ModelVersion | None:
        return self._function(name).latest(branch)

    # -- what names stand for -----------------------------------------------------------------------------------------

    async def rollback(
        self, name: str, branch: str | None = None, number: int | None = None, *, by: Caller | None = None
    ) -> ModelVersion:
        """Let an earlier version be its branch's latest; without a number, the ready one before the present one.

        Raises: UnknownName; InvalidInput where there is none before.
        """
        branch = branch or MAIN
        async with self._known(name, by):
            present = self._latest(name, branch)
            if present is None:
                raise self._unknown(name, branch, LATEST)
            if number is None:
                before = [
                    each.number for each in self.get(name)
                    if each.branch == branch and each.state == READY and each.number < present.number
                ]  # fmt: skip
                if not before:
                    raise InvalidInput(
                        f"{present.reference} is the first that is there: nothing to go back to", code="no_version"
                    )
                number = before[-1]
            wanted = self._function(name).ready(branch, number)
            await self._move(wanted, present, Backend(branch, number))
            return wanted

    async def merge(self, name: str, source: str, into: str = MAIN, *, by: Caller | None = None) -> ModelVersion:
        """Make the latest of one branch a new version of another: the same code and environment under a new number."""
        return await self._again(name, source, check_branch(into), "merged", by=by)

    async def restart(self, name: str, branch: str | None = None, *, by: Caller | None = None) -> ModelVersion:
        """Make the latest again under a new number: its workers begin afresh before the first call goes there."""
        return await self._again(name, branch or MAIN, branch or MAIN, "restarted", by=by)

    async def _again(self, name: str, source: str, into: str, how: str, *, by: Caller | None) -> ModelVersion:
        async with self._known(name, by):
            found, latest = self._latest(name, source), self._latest(name, into)
            if found is None:
                raise self._unknown(name, source, LATEST)
            source_text = f"{found.source.partition(' (')[0]} ({how} from {found.branch}/{found.number})"
            key = None if by is None else by.key
            new = replace(
                found, branch=into, created=self._clock.now(), finished=None, source=source_text, spec=None, key=key
            )
            version = await self._begin(new, by)
            try:
                return await self._publish(version, await self._builder.copy(found, version), latest)
            except BaseException as error:
                await asyncio.shield(self._failed(version, error))
                raise

    async def _move(self, wanted: ModelVersion, present: ModelVersion, backend: Backend) -> None:
        assert wanted.spec is not None and present.spec is not None, "both are ready"
        if wanted != present:
            await self._warm(present.spec, wanted.spec)
        await self._route(Route(wanted.name, wanted.branch, [backend], [], self._clock.now()))

    async def _route(self, route: Route) -> Route:
        await self._database.write(records.set_route, route)
        self._put(route.name, routes=[route])
        return route

    async def set_alias(
        self, name: str, alias: str, backends: list[Backend], mirrors: list[Backend] | None = None, *,
        by: Caller | None = None,
    ) -> Route:  # fmt: skip
        """Let an alias stand for versions, by weight; `mirrors` get copies of its calls. Raises: UnknownName."""
        check_alias(alias)
        mirrors = mirrors or []
        if not 0 < len(backends) <= BACKENDS_MAX or len(mirrors) > BACKENDS_MAX:
            raise InvalidInput(f"an alias stands for 1 to {BACKENDS_MAX} versions", code="invalid_alias")
        for backend in (*backends, *mirrors):
            if not 0 < backend.weight <= WEIGHT_MAX:
                raise InvalidInput(
                    f"a weight is more than 0 and at most {WEIGHT_MAX:,.0f}, not {backend.weight}",
                    code="invalid_weight",
                )
        async with self._known(name, by):
            for backend in (*backends, *mirrors):
                self._function(name).ready(backend.branch, backend.number)
            return await self._route(Route(name, f"@{alias}", backends, mirrors, self._clock.now()))

    # -- removing -----------------------------------------------------------------------------------------------------

    async def remove(
        self, name: str, branch: str | None = None, version: str | None = None, *, by: Caller | None = None
    ) -> list[ModelVersion]:
        """Remove a version, a branch, or with neither said all of a function; returns the versions removed.

        Raises: UnknownName; Conflict for a version that an alias or an unfinished job uses, or a branch's latest.
        """
        async with self._known(name, by):
            gone, dropped = self._doomed(name, branch, version, by)
            used = await self._database.read(records.folders_in_use)
            for each in gone:
                if each.spec is not None and each.spec.function is not None and each.spec.function.folder in used:
                    raise Conflict(
                        f"{each.reference} is used by a job that has not ended: cancel it, or wait",
                        code="version_in_use",
                    )
            await self._database.write(records.remove, gone, [], dropped)
            removed = [replace(each, state=REMOVED) for each in gone]
            self._put(name, removed, dropped=dropped)
            for each in removed:
                await asyncio.to_thread(self._builder.discard, each)
            return removed

    async def remove_alias(self, name: str, alias: str, *, by: Caller | None = None) -> None:
        """Raises: UnknownName."""
        async with self._known(name, by):
            route = self._function(name).routes.get(f"@{alias}")
            if route is None:
                raise self._unknown(name, None, alias)
            await self._database.write(records.remove, [], [], [route])
            self._put(name, dropped=[route])

    def _doomed(
        self, name: str, branch: str | None, version: str | None, by: Caller | None
    ) -> tuple[list[ModelVersion], list[Route]]:
        """What goes, and the routes that go with it."""
        found = [each for each in self.own(name, by) if each.state in (READY, FAILED)]
        if version is not None:
            place = (branch or MAIN, version)
            found = [each for each in found if (each.branch, str(each.number)) == place]
        elif branch is not None:
            found = [each for each in found if each.branch == branch]
        if not found:
            raise self._unknown(name, branch, version or LATEST)
        places = {(each.branch, each.number) for each in found}
        rest = [each for each in self.get(name) if each.state == READY and (each.branch, each.number) not in places]
        dropped = []
        for route in self._function(name).routes.values():
            if not any((each.branch, each.number) in places for each in (*route.backends, *route.mirrors)):
                continue
            stays = any(each.branch == route.label for each in rest) or (route.label.startswith("@") and rest)
            if stays:
                what = f"the alias {route.label[1:]!r}" if route.label.startswith("@") else f"latest of {route.label}"
                raise Conflict(
                    f"{name}: {what} stands for it: let it stand for another version first", code="version_in_use"
                )
            dropped.append(route)
        return found, dropped


def _digest(version: ModelVersion) -> str:
    assert version.spec is not None and version.spec.function is not None, "it is ready"
    return version.spec.function.digest


def _rows(function: Function) -> list[ModelRow]:
    """A function has its name as long as a version of it is ready or being made."""
    if function.project is None:
        return []
    name = function.name
    return [ModelRow(name, ModelKind.FUNCTION, function.project, function=function, listed=(name,))]
