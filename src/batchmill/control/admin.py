"""Handlers for jobs, keys, secrets, quotas and connectors of all projects, for the machine's user."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from batchmill.control import operations as own
from batchmill.control.app import Handler, OwnerCall
from batchmill.control.operations import (
    ChangeConnector,
    ConnectorFields,
    ConnectorList,
    DeleteConnector,
    LocalFile,
    LocalRetry,
    NewRemoteModel,
    Partial,
    PlannedRows,
    SecretList,
    SecretValue,
    ShowCluster,
)
from batchmill.errors import InvalidInput
from batchmill.ports.clock import Clock
from batchmill.ports.executors import ClusterExecutor, Executor
from batchmill.ports.jobs import Jobs
from batchmill.services.keys import KeyService, key_info
from batchmill.services.remote.connectors import unknown_connector
from batchmill.services.remote.remote_services import RemoteServices
from batchmill.services.remote.stored import ConnectorRecord, RemoteModel
from batchmill.services.secrets.shown import Rotated
from batchmill.services.secrets.vault import Vault
from batchmill.services.usage import usage
from batchmill.states import JobState, PauseReason
from batchmill.store.disk_room import DiskQuota
from batchmill.types import (
    Amendment,
    Caller,
    JobQuery,
    JobView,
    LedgerReport,
    RemoteJob,
    ReuseCount,
    Scope,
    Submitted,
    Wait,
)
from batchmill.types.cluster import ClusterView
from batchmill.wire import operations as table
from batchmill.wire.native import (
    Change,
    JobPage,
    KeyInfo,
    KeyList,
    ListJobs,
    MadeKey,
    NewKey,
    QuotaList,
    RemoteJobList,
    RevokeKey,
    Settlement,
    WatchJob,
)
from batchmill.wire.operations import Endpoint

NO_CLUSTER = (
    'the workers of this data directory are processes of its machine: for a cluster, set executor = "ray" in [cluster] '
    "of the configuration, and start the commands and the server that use the directory again"
)


class JobHandlers:
    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def handlers(self) -> Sequence[tuple[Endpoint[Any], Handler]]:
        jobs = self._jobs
        return (
            (own.RUN, self.run),
            (own.RETRY, self.retry),
            (own.PARTIAL, self.partial),
            (own.REBUILD, self.rebuild),
            (own.COUNT_REUSED, self.count_reused),
            (table.LIST_JOBS, self.list),
            (table.SHOW_JOB, self.show),
            (table.AMEND_JOB, self.amend),
            (table.EXPLAIN_JOB, self.explain),
            (table.LIST_REMOTE_JOBS, self.remote),
            (table.SETTLE_REMOTE_JOB, self.settle_remote),
            (table.VERIFY_JOB, self.verify),
            (table.REMOVE_JOB, self.remove),
            (table.WATCH_JOB, self.watch),
            *((endpoint, _steering(getattr(jobs, verb))) for verb, endpoint in table.STEERING.items()),
        )

    async def run(self, call: OwnerCall) -> Submitted:
        return await self._jobs.submit(call.body)

    async def retry(self, call: OwnerCall) -> JobView:
        body: LocalRetry = call.body
        return await self._jobs.retry(call.name, body.change, body.model, body.once)

    async def partial(self, call: OwnerCall) -> LocalFile:
        query: Partial = call.query
        path = await self._jobs.partial(call.name, is_numbered=query.is_numbered, sampled=query.sampled)
        return LocalFile(path)

    async def rebuild(self, call: OwnerCall) -> LedgerReport:
        return await self._jobs.rebuild(call.name)

    async def count_reused(self, call: OwnerCall) -> ReuseCount:
        planned: PlannedRows = call.body
        return await self._jobs.count_reused(planned.spec, planned.dataset, planned.plan)

    async def list(self, call: OwnerCall) -> JobPage:
        query: ListJobs = call.query
        job_query = JobQuery(
            project=call.project, state=query.state, model=query.model, since=query.since, after=query.after,
            limit=query.limit,
        )  # fmt: skip
        jobs = await self._jobs.list(job_query)
        return JobPage(jobs, jobs[-1].id if len(jobs) == query.limit else None)

    async def show(self, call: OwnerCall) -> JobView:
        return await self._jobs.show(call.name)

    async def amend(self, call: OwnerCall) -> JobView:
        change: Change = call.body
        return await self._jobs.amend(call.name, Amendment(**msgspec.structs.asdict(change)))

    async def explain(self, call: OwnerCall) -> Wait:
        return await self._jobs.explain(call.name)

    async def remote(self, call: OwnerCall) -> RemoteJobList:
        return RemoteJobList(await self._jobs.remote(call.name))

    async def settle_remote(self, call: OwnerCall) -> RemoteJob:
        body: Settlement = call.body
        return await self._jobs.settle_remote(call.names["job_id"], call.names["tag"], body.remote_id)

    async def verify(self, call: OwnerCall) -> LedgerReport:
        return await self._jobs.verify(call.name)

    async def remove(self, call: OwnerCall) -> JobView:
        return await self._jobs.remove(call.name)

    async def watch(self, call: OwnerCall) -> AsyncIterator[JobView]:
        """Watch a job. A job that the end of an earlier owner interrupted is resumed."""
        query: WatchJob = call.query
        view = await self._jobs.show(call.name)
        if view.state == JobState.PAUSED and view.reason == PauseReason.INTERRUPTED:
            await self._jobs.resume_interrupted(call.name)
        return self._jobs.watch(call.name, query.interval_s)


def _steering(change: Callable[[str], Awaitable[JobView]]) -> Handler:
    async def steer(call: OwnerCall) -> JobView:
        return await change(call.name)

    return steer


PROJECT = "default"


def user_of(project: str | None) -> Caller:
    """Return the machine's user as a caller of a project."""
    return Caller(project or PROJECT, Scope.ADMIN)


class KeyHandlers:
    def __init__(self, keys: KeyService, disk_quota: DiskQuota, clock: Clock) -> None:
        self._keys, self._disk_quota, self._clock = keys, disk_quota, clock

    def handlers(self) -> Sequence[tuple[Endpoint[Any], Handler]]:
        return (
            (table.CREATE_KEY, self.create),
            (table.LIST_KEYS, self.list),
            (table.REVOKE_KEY, self.revoke),
            (table.LIST_QUOTAS, self.quotas),
        )

    async def create(self, call: OwnerCall) -> MadeKey:
        body: NewKey = call.body
        key = await self._keys.create(
            name=body.name, project=body.project or PROJECT, scope=body.scope,
            models=None if body.models is None else frozenset(body.models),
            requests_per_minute=body.requests_per_minute, expires=body.expires,
        )  # fmt: skip
        return MadeKey(key.key, key_info(key.record))

    async def list(self, call: OwnerCall) -> KeyList:
        return KeyList([key_info(each) for each in await self._keys.list(call.project)])

    async def revoke(self, call: OwnerCall) -> KeyInfo:
        query: RevokeKey = call.query
        revoked = await self._keys.revoke(call.name, call.project, with_minted=query.with_minted)
        return replace(key_info(revoked.record), minted=revoked.minted)

    async def quotas(self, call: OwnerCall) -> QuotaList:
        return QuotaList(await usage(self._disk_quota, call.project or PROJECT, self._clock.now()))


class ClusterHandlers:
    """Handlers for the cluster on which workers run."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def handlers(self) -> Sequence[tuple[Endpoint[Any], Handler]]:
        return ((own.SHOW_CLUSTER, self.show),)

    async def show(self, call: OwnerCall) -> ClusterView:
        if not isinstance(self._executor, ClusterExecutor):
            raise InvalidInput(NO_CLUSTER, code="no_cluster")
        query: ShowCluster = call.query
        return await self._executor.view(brief=query.brief)


class SecretHandlers:
    """Handlers for secrets. No reply contains a secret's value."""

    def __init__(self, vault: Vault) -> None:
        self._vault = vault

    def handlers(self) -> Sequence[tuple[Endpoint[Any], Handler]]:
        return (
            (own.LIST_SECRETS, self.list),
            (own.PUT_SECRET, self.put),
            (own.REMOVE_SECRET, self.remove),
            (own.ROTATE_SECRETS, self.rotate),
        )

    async def list(self, call: OwnerCall) -> SecretList:
        return SecretList(await self._vault.list())

    async def put(self, call: OwnerCall) -> None:
        secret: SecretValue = call.body
        await self._vault.put(call.name, secret.value)

    async def remove(self, call: OwnerCall) -> None:
        await self._vault.remove(call.name)

    async def rotate(self, call: OwnerCall) -> Rotated:
        return await self._vault.rotate()


class ConnectorHandlers:
    """Handlers for connectors. Those that the machine's user creates are trusted: they may call any address."""

    def __init__(self, remote: RemoteServices) -> None:
        self._connectors, self._models, self._forced = remote.connectors, remote.models, remote.forced

    def handlers(self) -> Sequence[tuple[Endpoint[Any], Handler]]:
        return (
            (own.CREATE_CONNECTOR, self.create),
            (own.LIST_CONNECTORS, self.list),
            (own.SHOW_CONNECTOR, self.show),
            (own.CHANGE_CONNECTOR, self.change),
            (own.DELETE_CONNECTOR, self.delete),
            (own.REGISTER_MODEL, self.register),
        )

    async def create(self, call: OwnerCall) -> ConnectorRecord:
        body: ConnectorFields = call.body
        return await self._connectors.create(user_of(call.project), body.fields, is_trusted=True)

    async def list(self, call: OwnerCall) -> ConnectorList:
        connectors = [each for each in self._connectors.list_all() if call.project in (None, each.project)]
        return ConnectorList(connectors, self._models.list_all())

    async def show(self, call: OwnerCall) -> ConnectorRecord:
        return self._connectors.get(self._owner(call.name), call.name)

    async def change(self, call: OwnerCall) -> ConnectorRecord:
        body: ConnectorFields = call.body
        query: ChangeConnector = call.query
        caller = self._owner(call.name)
        undeployed = [each for each in self._models_of(call.name) if query.redeploy and each.is_deployed]
        try:
            for model in undeployed:
                await self._models.undeploy(caller, model.id)
            return await self._connectors.update(caller, call.name, body.fields, is_trusted=True)
        finally:
            for model in undeployed:
                await self._models.deploy(caller, model.id)

    async def delete(self, call: OwnerCall) -> ConnectorRecord:
        query: DeleteConnector = call.query
        caller = self._owner(call.name)
        for model in self._models_of(call.name) if query.with_models else ():
            await self._forced.cancel_all(model)
            await self._models.undeploy(caller, model.id)
            await self._models.delete(caller, model.id)
        return await self._connectors.delete(caller, call.name)

    async def register(self, call: OwnerCall) -> RemoteModel:
        body: NewRemoteModel = call.body
        fields = {"name": body.name, "function_name": "remote", "connector_id": call.name}
        return await self._models.register(self._owner(call.name), fields, deploy=True)

    def _models_of(self, connector_id: str) -> list[RemoteModel]:
        return [each for each in self._models.list_all() if each.connector == connector_id]

    def _owner(self, connector_id: str) -> Caller:
        """Return the machine's user as a caller of the connector's project."""
        for record in self._connectors.list_all():
            if record.id == connector_id:
                return user_of(record.project)
        raise unknown_connector(connector_id)
