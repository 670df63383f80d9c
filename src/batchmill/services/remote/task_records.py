"""The records of tasks: what the table `remote_tasks` says. No two of one order, no more batches than there may be."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from batchmill.errors import Conflict, RateLimited, UnknownName
from batchmill.store.quotas import refuse_beyond
from batchmill.store.tables import remote_models, remote_tasks

BATCH_PREDICTION, REGISTER_MODEL, DEPLOY_MODEL = "BATCH_PREDICTION", "REGISTER_MODEL", "DEPLOY_MODEL"
CREATED, RUNNING, CANCELLING = "CREATED", "RUNNING", "CANCELLING"
COMPLETED, COMPLETED_WITH_ERROR, FAILED = "COMPLETED", "COMPLETED_WITH_ERROR", "FAILED"
CANCELLED, EXPIRED, UNREACHABLE = "CANCELLED", "EXPIRED", "UNREACHABLE"
UNDER_WAY = (CREATED, RUNNING)  # what the limit counts
ENDED = frozenset({COMPLETED, COMPLETED_WITH_ERROR, FAILED, CANCELLED, EXPIRED})
RETRY_AFTER_S = 60.0


class TooManyTasks(RateLimited):
    """As many batches of a project are under way as there may be."""

    code = "too_many_batch_tasks"


class TaskRecord(Struct, frozen=True):
    """Something that was asked of a remote model and takes its time."""

    id: str
    project: str
    model: str
    type: str
    state: str
    created: float  # seconds since the epoch
    changed: float
    job: str | None = None  # of batchmill, where its rows came from a dataset
    once: str | None = None
    remote_job: dict[str, Any] | None = None  # what the provider last said of it
    error: str = ""
    fingerprint: str = ""  # of the order, where its caller gave it a key
    is_unknown: bool = False  # nobody can say whether the provider took it
    has_dataset: bool = False  # its rows are batchmill's to hand over: `job`
    failures: int = 0  # looks in a row that failed
    due: float | None = None  # when to look again

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED


class _Details(Struct, frozen=True, omit_defaults=True):
    error: str = ""
    fingerprint: str = ""
    is_unknown: bool = False
    has_dataset: bool = False


_COLUMNS = ("id", "project", "model", "type", "state", "created", "changed", "job", "once", "failures", "due")


def _values(task: TaskRecord) -> dict[str, Any]:
    fields = {name: getattr(task, name) for name in _COLUMNS}
    remote = None if task.remote_job is None else msgspec.json.encode(task.remote_job)
    details = msgspec.json.encode(_Details(task.error, task.fingerprint, task.is_unknown, task.has_dataset))
    return fields | {"remote_job": remote, "details": details}


def _record(row: sa.RowMapping) -> TaskRecord:
    details = msgspec.json.decode(row["details"], type=_Details)
    remote = row["remote_job"]
    return TaskRecord(
        **{name: row[name] for name in _COLUMNS},
        remote_job=None if remote is None else msgspec.json.decode(remote, type=dict[str, Any]),
        **msgspec.structs.asdict(details),
    )


def insert(db: sa.Connection, task: TaskRecord, quota: int) -> None:
    """A task that is new. Of a project with as many as it may have, the oldest that have ended go.

    Raises: OverQuota where none has.
    """
    columns = remote_tasks.c
    kept = db.execute(sa.select(sa.func.count()).where(columns.project == task.project)).scalar_one()
    if kept >= quota:
        oldest = sa.select(columns.id).where(columns.project == task.project, columns.state.in_(ENDED))
        oldest = oldest.order_by(columns.created).limit(kept - quota + 1)
        db.execute(remote_tasks.delete().where(columns.id.in_(oldest)))
        way_out = "cancel or delete some"
        refuse_beyond(db, remote_tasks, quota, quota="remote_tasks", project=task.project, way_out=way_out)
    db.execute(remote_tasks.insert().values(**_values(task)))


def ensure(db: sa.Connection, task: TaskRecord, quota: int) -> None:
    """A task that may be there already."""
    if _first(db, remote_tasks.c.id == task.id) is None:
        insert(db, task, quota)


def insert_batch(db: sa.Connection, task: TaskRecord, tasks_max: int, quota: int) -> TaskRecord | None:
    """A batch that is new; the task itself where its order is one already, and None where it was inserted.

    Raises: RateLimited where the project has so many under way; OverQuota.
    """
    known = None if task.once is None else by_once(db, task.once)
    if known is not None:
        return known
    columns = remote_tasks.c
    mine = (columns.project == task.project, columns.type == BATCH_PREDICTION, columns.state.in_(UNDER_WAY))
    if db.execute(sa.select(sa.func.count()).where(*mine)).scalar_one() >= tasks_max:
        raise TooManyTasks(
            "Exceeded maximum limit for BATCH_PREDICTION tasks. To increase the limit, update the "
            "plugins.ml_commons.max_batch_inference_tasks setting.",
            retry_after_s=RETRY_AFTER_S,
        )
    known_model = db.execute(sa.select(remote_models.c.id).where(remote_models.c.id == task.model)).first()
    if known_model is None and not task.has_dataset:
        raise UnknownName(f"the model {task.model} has just been deleted", code="model_not_found")
    insert(db, task, quota)
    return None


def running_of(db: sa.Connection, models: Collection[str]) -> list[TaskRecord]:
    """The batches of some models that a provider has, or may have: those of which nobody knows that they have ended.

    What runs as a job is not among them: it has its connector with it.
    """
    columns = remote_tasks.c
    where = (columns.type == BATCH_PREDICTION, columns.state.not_in(ENDED), columns.job.is_(None))
    query = sa.select(remote_tasks).where(*where, columns.model.in_(models)).order_by(columns.created, columns.id)
    found = [_record(row) for row in db.execute(query).mappings()]
    return [task for task in found if not task.has_dataset]


def refuse_running(db: sa.Connection, models: Collection[str], what: str) -> None:
    """Raises: Conflict, naming a task of these models that runs: nobody could look at it or cancel it any more.

    Args: what: is not done: "the model {} is not deleted".
    """
    found = running_of(db, models)
    if not found:
        return
    task, more = found[0], f" and {len(found) - 1} more" if len(found) > 1 else ""
    way_out = f"cancel it (POST /_plugins/_ml/tasks/{task.id}/_cancel) and wait until it has ended"
    if task.state == UNREACHABLE:
        way_out = "its provider could not be asked: look there, then delete the task"
    message = f"the task {task.id}{more} of it is {task.state} at the provider"
    raise Conflict(f"{what.format(task.model)}: {message}; {way_out}", code="task_running")


def update(db: sa.Connection, task: TaskRecord) -> None:
    """Write what has become of a task; one that was deleted meanwhile stays so, and a forgotten order forgotten."""
    db.execute(remote_tasks.update().where(remote_tasks.c.id == task.id).values(**_changes(task)))


def update_unchanged(db: sa.Connection, task: TaskRecord, changed: float) -> None:
    """As `update`, unless somebody else has written it since."""
    columns = remote_tasks.c
    where = (columns.id == task.id, columns.changed == changed)
    db.execute(remote_tasks.update().where(*where).values(**_changes(task)))


def _changes(task: TaskRecord) -> dict[str, Any]:
    return {name: value for name, value in _values(task).items() if name != "once"}


def by_once(db: sa.Connection, once: str) -> TaskRecord | None:
    return _first(db, remote_tasks.c.once == once)


def by_job(db: sa.Connection, job: str) -> TaskRecord | None:
    return _first(db, remote_tasks.c.job == job)


def find(db: sa.Connection, project: str, task_id: str) -> TaskRecord:
    """Raises: UnknownName, also for another project's."""
    found = _first(db, remote_tasks.c.id == task_id, remote_tasks.c.project == project)
    if found is None:
        raise UnknownName("Failed to find task", code="unknown_task")
    return found


def _first(db: sa.Connection, *where: sa.ColumnElement[bool]) -> TaskRecord | None:
    row = db.execute(sa.select(remote_tasks).where(*where)).mappings().first()
    return None if row is None else _record(row)


def forget_order(db: sa.Connection, once: str) -> None:
    """From now on the same order is another one; but not while nobody knows what became of the first."""
    task = by_once(db, once)
    if task is not None and not task.is_unknown:
        db.execute(remote_tasks.update().where(remote_tasks.c.id == task.id).values(once=None))


def delete(db: sa.Connection, task_id: str) -> None:
    db.execute(remote_tasks.delete().where(remote_tasks.c.id == task_id))


def all_of(db: sa.Connection, project: str) -> Sequence[TaskRecord]:
    """A project's tasks, the newest first."""
    columns = remote_tasks.c
    query = sa.select(remote_tasks).where(columns.project == project)
    return [_record(row) for row in db.execute(query.order_by(columns.created.desc(), columns.id)).mappings()]


def due(db: sa.Connection, now: float, limit: int, leave_out: Collection[str] = ()) -> list[tuple[str, str, str]]:
    """Tasks that want to be looked at, the longest overdue first: project, id and model of each.

    Args:
        leave_out: ids of tasks that are being looked at already.
    """
    columns = remote_tasks.c
    query = sa.select(columns.project, columns.id, columns.model).where(columns.due <= now).order_by(columns.due)
    found = db.execute(query.limit(limit + len(leave_out))).all()
    return [(project, name, model) for project, name, model in found if name not in leave_out][:limit]


def unsaid(db: sa.Connection) -> Sequence[TaskRecord]:
    """Batches that were about to be handed over when their server died."""
    columns = remote_tasks.c
    query = sa.select(remote_tasks).where(columns.type == BATCH_PREDICTION, columns.state == CREATED)
    return [_record(row) for row in db.execute(query).mappings()]


def hasten(db: sa.Connection, task_id: str, due_at: float) -> None:
    """Look at a task sooner."""
    db.execute(remote_tasks.update().where(remote_tasks.c.id == task_id).values(due=due_at))
