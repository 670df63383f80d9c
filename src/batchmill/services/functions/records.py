"""Database rows of deployed functions. Each function here runs in its caller's transaction."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import Struct
from msgspec.structs import replace

from batchmill.errors import Conflict
from batchmill.services.functions.examples import curl_examples
from batchmill.services.functions.names import MAIN
from batchmill.states import ENDED
from batchmill.store.quotas import refuse_beyond
from batchmill.store.sql.tables import jobs, model_routes, model_versions
from batchmill.types import ModelSpec
from batchmill.wire.bundles import READY, SCHEMA, Backend, Deployed, ModelVersion, Route
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.native import AliasInfo, BackendInfo, DeployReply, FunctionDetail, VersionInfo

BUILDING, FAILED, REMOVED = "building", "failed", "removed"  # states, beside READY
PAGE = 1000  # specs of jobs that are read together
WAY_OUT = "remove unused versions"
INTERRUPTED = "the deployment was interrupted: deploy it again"


def begin(db: sa.Connection, new: ModelVersion, version_quota: int | None = None) -> ModelVersion:
    """Insert `new` with the next number of its branch. Numbers are never used again.

    Args:
        version_quota: versions that the project may have. None: no limit, for the operator of the machine.

    Raises: OverQuota.
    """
    if version_quota is not None:
        refuse_beyond(
            db, model_versions, version_quota, quota="functions", project=new.project, way_out=WAY_OUT,
            where=model_versions.c.state != REMOVED,
        )  # fmt: skip
    of_branch = (model_versions.c.name == new.name) & (model_versions.c.branch == new.branch)
    last = db.execute(sa.select(sa.func.max(model_versions.c.number)).where(of_branch)).scalar() or 0
    version = replace(new, number=last + 1, state=BUILDING)
    columns = ("name", "branch", "number", "state", "created", "source", "project", "key")
    values = {name: getattr(version, name) for name in columns}
    db.execute(model_versions.insert().values(values | {"shared": version.is_shared}))
    return version


def fail(db: sa.Connection, version: ModelVersion) -> None:
    """Record that the build of a version failed, and its error."""
    values = {"state": version.state, "finished": version.finished, "error": version.error}
    db.execute(model_versions.update().where(_is(version)).values(values))


def publish(db: sa.Connection, version: ModelVersion, route: Route) -> None:
    """Make the version ready and its branch's latest, in one transaction."""
    spec = msgspec.json.encode(version.spec)
    values = {"state": version.state, "finished": version.finished, "spec": spec}
    db.execute(model_versions.update().where(_is(version)).values(values))
    set_route(db, route)


def set_route(db: sa.Connection, route: Route) -> None:
    is_route = (model_routes.c.name == route.name) & (model_routes.c.label == route.label)
    db.execute(model_routes.delete().where(is_route))
    values: dict[str, Any] = {"name": route.name, "label": route.label, "changed": route.changed}
    values |= {"backends": msgspec.json.encode(route.backends), "mirrors": msgspec.json.encode(route.mirrors)}
    db.execute(model_routes.insert().values(values))


def remove(
    db: sa.Connection, versions: list[ModelVersion], routes: list[Route], dropped: list[Route],
    seen: Set[str] | None = None,
) -> None:  # fmt: skip
    """Mark versions as removed, replace `routes`, and delete the routes in `dropped`.

    Args:
        seen: jobs that have none of the versions, of classes without a name: no other job may have one, even if it has
            ended.

    Raises: Conflict for a version that an unfinished job uses.
    """
    _refuse_used(db, versions)
    if seen is not None:
        used = read_class_uses(db, seen).references
        if had := [each.reference for each in versions if each.reference in used]:
            raise Conflict(f"a job has {had[0]}", code="version_in_use")
    for version in versions:
        db.execute(model_versions.update().where(_is(version)).values(state=REMOVED))
    for route in routes:
        set_route(db, route)
    for route in dropped:
        is_route = (model_routes.c.name == route.name) & (model_routes.c.label == route.label)
        db.execute(model_routes.delete().where(is_route))


def end_interrupted(db: sa.Connection, now: float) -> None:
    """Mark the versions that a crashed owner was building as failed."""
    values = {"state": FAILED, "finished": now, "error": INTERRUPTED}
    db.execute(model_versions.update().where(model_versions.c.state == BUILDING).values(values))


def read_all(db: sa.Connection) -> tuple[list[ModelVersion], list[Route]]:
    order = (model_versions.c.name, model_versions.c.branch, model_versions.c.number)
    versions = [_version(row) for row in db.execute(sa.select(model_versions).order_by(*order)).mappings()]
    routes = [_route(row) for row in db.execute(sa.select(model_routes)).mappings()]
    return versions, routes


def _refuse_used(db: sa.Connection, versions: list[ModelVersion]) -> None:
    """Raises: Conflict for a version that an unfinished job uses, as a model or for its schema."""
    functions = [(each.reference, each.spec.function) for each in versions if each.spec is not None]
    folders = {function.folder: reference for reference, function in functions if function is not None}
    marks = [msgspec.json.encode(folder) for folder in folders]
    if not marks:
        return
    ended = [state.value for state in ENDED]
    for data in db.execute(sa.select(jobs.c.spec).where(jobs.c.state.not_in(ended))).scalars():
        text = bytes(data)
        if any(mark in text for mark in marks):  # few are decoded: nothing else is written meanwhile
            for folder in _folders_of(msgspec.json.decode(text, type=JobSpec)) & folders.keys():
                raise Conflict(
                    f"an unfinished job uses {folders[folder]}: cancel the job, or wait for it", code="version_in_use"
                )


def _folders_of(spec: JobSpec) -> set[str]:
    """The code folders that a job uses."""
    used = [model for model in spec.models if not spec.used or model.name in spec.used]
    folders = {model.function.folder for model in used if model.function is not None}
    if (schema := spec.form.schema) is not None and schema.version is not None:
        folders.add(schema.version.folder)
    return folders


class ClassUses(Struct, frozen=True):
    """Jobs, and the versions without a name of their own that they validate with."""

    jobs: Set[str]
    references: Set[str]


def read_class_uses(db: sa.Connection, seen: Set[str] = frozenset()) -> ClassUses:
    """Of all jobs but those in `seen`, also jobs that have ended."""
    mark, found = f'"reference":"{SCHEMA}_'.encode(), set[str]()
    new = [job for job in db.execute(sa.select(jobs.c.id)).scalars() if job not in seen]
    for first in range(0, len(new), PAGE):
        page = sa.select(jobs.c.spec).where(jobs.c.id.in_(new[first : first + PAGE]))
        for data in db.execute(page).scalars():
            if mark in bytes(data):
                schema = msgspec.json.decode(data, type=JobSpec).form.schema
                if schema is not None and schema.version is not None:
                    found.add(schema.version.reference)
    return ClassUses(frozenset(new), found)


def forget(db: sa.Connection, version: ModelVersion) -> None:
    """Keep nothing but the number of a removed version."""
    db.execute(model_versions.update().where(_is(version)).values(spec=None, source="", error=None))


def touch(db: sa.Connection, version: ModelVersion) -> None:
    """Store when a version was deployed the last time."""
    db.execute(model_versions.update().where(_is(version)).values(finished=version.finished))


def _is(version: ModelVersion) -> sa.ColumnElement[bool]:
    table = model_versions.c
    return (table.name == version.name) & (table.branch == version.branch) & (table.number == version.number)


def _version(row: sa.RowMapping) -> ModelVersion:
    spec = None if row["spec"] is None else msgspec.json.decode(row["spec"], type=ModelSpec)
    columns = ("name", "branch", "number", "state", "created", "finished", "source", "error", "project", "key")
    return ModelVersion(**{name: row[name] for name in columns}, spec=spec, is_shared=row["shared"])


def _route(row: sa.RowMapping) -> Route:
    backends = msgspec.json.decode(row["backends"], type=list[Backend])
    mirrors = msgspec.json.decode(row["mirrors"], type=list[Backend])
    return Route(row["name"], row["label"], backends, mirrors, row["changed"])


def version_info(version: ModelVersion) -> VersionInfo:
    info = VersionInfo(
        version.name, version.branch, version.number, version.state, version.created, version.finished,
        version.source, version.error, project=version.project, key=version.key, is_shared=version.is_shared,
    )  # fmt: skip
    spec = version.spec
    if spec is None or spec.function is None or version.state != READY:
        return info
    function, limits = spec.function, spec.limits
    schema = function.schema
    return replace(
        info,
        interface=function.interface if schema is None else None,
        schema=None if schema is None else msgspec.json.decode(schema.document),
        digest=function.digest, workers=spec.workers, gpus=function.gpus,
        batch_size=function.batch_size, batch_window_s=function.batch_window_s, timeout_s=limits.attempt_timeout_s,
        memory_bytes=limits.memory_bytes, is_idempotent=function.is_idempotent, is_deterministic=spec.is_deterministic,
        packages=function.packages,
    )  # fmt: skip


def deploy_reply(deployed: Deployed) -> DeployReply:
    return DeployReply(version_info(deployed.version), deployed.is_new)


def alias_info(route: Route) -> AliasInfo:
    return AliasInfo(route.label[1:], _backends(route.backends), _backends(route.mirrors), route.changed)


def backends_of(backends: Sequence[BackendInfo]) -> list[Backend]:
    return [Backend(each.branch, each.number, each.weight) for each in backends]


def _backends(backends: Sequence[Backend]) -> list[BackendInfo]:
    return [BackendInfo(each.number, each.branch, each.weight) for each in backends]


def detail(name: str, versions: list[ModelVersion], routes: list[Route], url: str) -> FunctionDetail:
    """All details of a function. `url` is the address of the server in its examples."""
    latest = {each.label: each.backends[0].number for each in routes if not each.label.startswith("@")}
    branch = MAIN if MAIN in latest or not latest else next(iter(latest))
    shown = [each for each in versions if (each.branch, each.number) == (branch, latest.get(branch))]
    interface = version_info(shown[0]).interface if shown else None
    return FunctionDetail(
        name,
        latest,
        [alias_info(each) for each in routes if each.label.startswith("@")],
        [version_info(each) for each in versions],
        interface,
        {} if interface is None else curl_examples(name, branch, interface, url),
    )
