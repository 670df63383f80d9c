"""How much of each quota a project uses."""

from __future__ import annotations

import sqlalchemy as sa

from batchmill.services.adapters import records as adapter_records
from batchmill.services.files.uploads import PENDING
from batchmill.services.functions import records as functions
from batchmill.states import ENDED, JobState
from batchmill.store.disk_room import DiskQuota
from batchmill.store.sql.tables import (
    adapters,
    connectors,
    datasets,
    files,
    jobs,
    keys,
    late_calls,
    llm_deployments,
    model_groups,
    model_versions,
    remote_models,
    remote_tasks,
    secrets,
    uploads,
    used_links,
    webhook_endpoints,
)
from batchmill.types import Quotas
from batchmill.wire.native import QuotaInfo

COUNTED: dict[str, tuple[sa.Table, sa.ColumnElement[bool]]] = {
    "keys": (
        keys,
        sa.and_(keys.c.revoked.is_(None), sa.or_(keys.c.expires.is_(None), keys.c.expires > sa.bindparam("now"))),
    ),
    "secrets": (secrets, sa.true()),
    "connectors": (connectors, sa.true()),
    "remote_models": (remote_models, sa.true()),
    "model_groups": (model_groups, sa.true()),
    "remote_tasks": (remote_tasks, sa.true()),
    "unfinished_jobs": (jobs, jobs.c.state.in_([state for state in JobState if state not in ENDED])),
    "files": (files, files.c.job.is_(None)),
    "uploads": (uploads, uploads.c.status == PENDING),
    "datasets": (datasets, sa.true()),
    "adapters": (adapters, adapters.c.state != adapter_records.REMOVED),
    "llm_deployments": (llm_deployments, sa.true()),
    "functions": (model_versions, model_versions.c.state != functions.REMOVED),
    "webhook_endpoints": (webhook_endpoints, sa.true()),
    "late_calls": (late_calls, sa.true()),
    "used_links": (used_links, sa.true()),
}


async def usage(disk_quota: DiskQuota, project: str, now: float) -> list[QuotaInfo]:
    """Return each quota of a project: the amount in use and the limit."""
    quotas = disk_quota.quotas.of(project)
    counts = await disk_quota.database.read(_count, project, now)
    used, limit = await disk_quota.usage(project)
    quotas_used = [
        QuotaInfo(name, counts[name], getattr(quotas, name)) for name in Quotas.__struct_fields__ if name in counts
    ]
    return [*quotas_used, QuotaInfo("disk", used, limit)]


def _count(db: sa.Connection, project: str, now: float) -> dict[str, int]:
    counts = {}
    for name, (table, where) in COUNTED.items():
        query = sa.select(sa.func.count()).select_from(table).where(table.c.project == project, where)
        counts[name] = db.execute(query, {"now": now} if name == "keys" else {}).scalar_one()
    return counts
