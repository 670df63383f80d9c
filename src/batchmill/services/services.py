"""All services that a frontend can call, in one struct that the composition root gives to every dialect."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from batchmill.children.programs import Programs
    from batchmill.config import Config
    from batchmill.jobs.pools.tallies import ModelGauge
    from batchmill.ports.clock import Clock
    from batchmill.services.adapters.service import AdapterService
    from batchmill.services.directory.directory import ModelDirectory
    from batchmill.services.files.files import FileService
    from batchmill.services.files.uploads import UploadService
    from batchmill.services.functions.calls import FunctionCalls
    from batchmill.services.functions.late_replies import LateReplies
    from batchmill.services.functions.versions import ModelVersions
    from batchmill.services.keys import KeyService
    from batchmill.services.links import LinkService
    from batchmill.services.live_calls import LiveCalls
    from batchmill.services.llms.service import LlmService
    from batchmill.services.named_datasets import DatasetService
    from batchmill.services.project_jobs import ProjectJobs
    from batchmill.services.remote.connectors import ConnectorService
    from batchmill.services.remote.groups import ModelGroups
    from batchmill.services.remote.models import RemoteModels
    from batchmill.services.remote.tasks import RemoteTasks
    from batchmill.services.repeats import RepeatedOrders
    from batchmill.services.secrets.vault import Vault
    from batchmill.services.webhooks.endpoints import WebhookService


class Services(Struct, frozen=True):
    jobs: ProjectJobs
    repeats: RepeatedOrders
    files: FileService
    uploads: UploadService
    links: LinkService  # signed links
    datasets: DatasetService
    keys: KeyService
    directory: ModelDirectory
    live: LiveCalls
    functions: FunctionCalls
    versions: ModelVersions
    webhooks: WebhookService
    vault: Vault
    late: LateReplies
    connectors: ConnectorService
    groups: ModelGroups
    remote_models: RemoteModels
    remote_tasks: RemoteTasks
    programs: Programs  # work whose length callers control
    adapters: AdapterService
    llms: LlmService
    config: Config
    clock: Clock
    stopping: asyncio.Event  # set when the server begins to drain: endless replies end now
    gauges: Callable[[], Sequence[ModelGauge]] = list  # the workers of every model that has any
