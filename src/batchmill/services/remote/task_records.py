"""Database rows of tasks, in the table `remote_tasks`. An order has one task, and a project has a limit of batches."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from batchmill.errors import Conflict, RateLimited, UnknownName
from batchmill.store.quotas import refuse_beyond
from batchmill.store.sql.compiled import CompiledStatement
from batchmill.store.sql.tables import remote_models, remote_tasks

BATCH_PREDICTION, REGISTER_MODEL, DEPLOY_MODEL = "BATCH_PREDICTION", "REGISTER_MODEL", "DEPLOY_MODEL"
CREATED, RUNNING, CANCELLING = "CREATED", "RUNNING", "CANCELLING"
COMPLETED, COMPLETED_WITH_ERROR, FAILED = "COMPLETED", "COMPLETED_WITH_ERROR", "FAILED"
CANCELLED, EXPIRED, UNREACHABLE = "CANCELLED", "EXPIRED", "UNREACHABLE"
UNDER_WAY = (CREATED, RUNNING)  # what the limit counts
ENDED = frozenset({COMPLETED, COMPLETED_WITH_ERROR, FAILED, CANCELLED, EXPIRED})
RETRY_AFTER_S = 60.0


class TooManyTasks(RateLimited):
    """The project has the maximum of batches under way."""

    code = "too_many_batch_tasks"


class TaskRecord(Struct, frozen=True):
    """A long-running operation on a remote model."""

    id: str
    project: str
    model: str
    type: str
    state: str
    created: float  # seconds since the epoch
    changed: float
    job: str | None = None  # the batchmill job that runs it, if its rows come from a dataset
    once: str | None = None
    remote_job: dict[str, Any] | None = None  # the provider's last reply about it
    error: str = ""
    fingerprint: str = ""  # of the order, if its caller gave an idempotency key
    is_unknown: bool = False  # it is unknown whether the provider accepted it
    has_dataset: bool = False  # a batchmill job runs its rows: `job`
    failures: int = 0  # failed polls in a row
    due: float | None = None  # time of the next poll

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
    """Insert a task. If the project has its maximum, the oldest ended tasks are deleted.

    Raises: OverQuota if no task has ended.
    """
    columns = remote_tasks.c
    task_count = db.execute(sa.select(sa.func.count()).where(columns.project == task.project)).scalar_one()
    if task_count >= quota:
        oldest = sa.select(columns.id).where(columns.project == task.project, columns.state.in_(ENDED))
        oldest = oldest.order_by(columns.created).limit(task_count - quota + 1)
        db.execute(remote_tasks.delete().where(columns.id.in_(oldest)))
        way_out = "cancel or delete some"
        refuse_beyond(db, remote_tasks, quota, quota="remote_tasks", project=task.project, way_out=way_out)
    db.execute(remote_tasks.insert().values(**_values(task)))


def ensure(db: sa.Connection, task: TaskRecord, quota: int) -> None:
    """Insert a task unless it exists."""
    if _find_first(db, remote_tasks.c.id == task.id) is None:
        insert(db, task, quota)


def insert_batch(db: sa.Connection, task: TaskRecord, tasks_max: int, quota: int) -> TaskRecord | None:
    """Insert the task of a batch. Returns the existing task if the same order was submitted before, else None.

    Raises: RateLimited if the project has too many batches under way; OverQuota.
    """
    existing = None if task.once is None else by_once(db, task.once)
    if existing is not None:
        return existing
    columns = remote_tasks.c
    is_under_way = (columns.project == task.project, columns.type == BATCH_PREDICTION, columns.state.in_(UNDER_WAY))
    if db.execute(sa.select(sa.func.count()).where(*is_under_way)).scalar_one() >= tasks_max:
        raise TooManyTasks(
            "Exceeded maximum limit for BATCH_PREDICTION tasks. To increase the limit, update the "
            "plugins.ml_commons.max_batch_inference_tasks setting.",
            retry_after_s=RETRY_AFTER_S,
        )
    model = db.execute(sa.select(remote_models.c.id).where(remote_models.c.id == task.model)).first()
    if model is None and not task.has_dataset:
        raise UnknownName(f"the model {task.model} was deleted", code="model_not_found")
    insert(db, task, quota)
    return None


def running_of(db: sa.Connection, models: Collection[str]) -> list[TaskRecord]:
    """The batches of some models that a provider has or may have, because they are not known to have ended.

    Tasks that run as a job are left out: a job contains its connector.
    """
    columns = remote_tasks.c
    where = (columns.type == BATCH_PREDICTION, columns.state.not_in(ENDED), columns.job.is_(None))
    query = sa.select(remote_tasks).where(*where, columns.model.in_(models)).order_by(columns.created, columns.id)
    tasks = [_record(row) for row in db.execute(query).mappings()]
    return [task for task in tasks if not task.has_dataset]


def refuse_running(db: sa.Connection, models: Collection[str], action: str) -> None:
    """Refuse an action after which running tasks of these models could not be polled or cancelled.

    Args:
        action: the refusal: "the model {} is not deleted".
    Raises: Conflict, with the id of a task.
    """
    tasks = running_of(db, models)
    if not tasks:
        return
    task, more = tasks[0], f" and {len(tasks) - 1} more" if len(tasks) > 1 else ""
    way_out = f"cancel it (POST /_plugins/_ml/tasks/{task.id}/_cancel) and wait until it has ended"
    if task.state == UNREACHABLE:
        way_out = "its provider could not be reached: look there, then delete the task"
    message = f"its task {task.id}{more} is {task.state} at the provider"
    raise Conflict(f"{action.format(task.model)}: {message}; {way_out}", code="task_running")


def update(db: sa.Connection, task: TaskRecord) -> None:
    """Update a task. A task that was deleted meanwhile stays deleted, and a forgotten order stays forgotten."""
    db.execute(remote_tasks.update().where(remote_tasks.c.id == task.id).values(**_changes(task)))


def update_unchanged(db: sa.Connection, task: TaskRecord, changed: float) -> None:
    """As `update`, unless the task was written since `changed`."""
    columns = remote_tasks.c
    where = (columns.id == task.id, columns.changed == changed)
    db.execute(remote_tasks.update().where(*where).values(**_changes(task)))


def _changes(task: TaskRecord) -> dict[str, Any]:
    return {name: value for name, value in _values(task).items() if name != "once"}


def by_once(db: sa.Connection, once: str) -> TaskRecord | None:
    return _find_first(db, remote_tasks.c.once == once)


def by_job(db: sa.Connection, job: str) -> TaskRecord | None:
    return _find_first(db, remote_tasks.c.job == job)


def find(db: sa.Connection, project: str, task_id: str) -> TaskRecord:
    """A task of the project. Raises: UnknownName."""
    task = _find_first(db, remote_tasks.c.id == task_id, remote_tasks.c.project == project)
    if task is None:
        raise UnknownName("Failed to find task", code="unknown_task")
    return task


def _find_first(db: sa.Connection, *where: sa.ColumnElement[bool]) -> TaskRecord | None:
    row = db.execute(sa.select(remote_tasks).where(*where)).mappings().first()
    return None if row is None else _record(row)


_MADE_A_TASK = CompiledStatement(sa.select(remote_tasks.c.id).where(remote_tasks.c.once == sa.bindparam("of_order")))


def forget_order(db: sa.Connection, once: str) -> None:
    """Let the same order make a new task from now on, unless the result of the first one is unknown."""
    if _MADE_A_TASK.row(db, {"of_order": once}) is None:
        return  # as each order of a job
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


def due(db: sa.Connection, now: float, limit: int, excluded_ids: Collection[str] = ()) -> list[tuple[str, str, str]]:
    """Tasks that are due for a poll, the longest overdue first: project, id and model of each.

    Args:
        excluded_ids: tasks that are being polled already.
    """
    columns = remote_tasks.c
    query = sa.select(columns.project, columns.id, columns.model).where(columns.due <= now).order_by(columns.due)
    rows = db.execute(query.limit(limit + len(excluded_ids))).all()
    return [(project, task_id, model) for project, task_id, model in rows if task_id not in excluded_ids][:limit]


def unsubmitted(db: sa.Connection) -> Sequence[TaskRecord]:
    """Batches that the server was about to submit when it crashed."""
    columns = remote_tasks.c
    query = sa.select(remote_tasks).where(columns.type == BATCH_PREDICTION, columns.state == CREATED)
    return [_record(row) for row in db.execute(query).mappings()]


def set_due(db: sa.Connection, task_id: str, due_at: float) -> None:
    """Set the time of a task's next poll."""
    db.execute(remote_tasks.update().where(remote_tasks.c.id == task_id).values(due=due_at))
