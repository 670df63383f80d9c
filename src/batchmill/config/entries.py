"""One frozen Config: file < environment < flags. Paths in a file are relative to the file.

The file is `batchmill.toml` in the working directory, or what BATCHMILL_CONFIG or `--config` names:

| key                          | meaning                                                                   |
| ---------------------------- | ------------------------------------------------------------------------- |
| data_dir                     | where jobs are kept (BATCHMILL_DATA_DIR, `--data-dir`)                     |
| limits.line_bytes_max        | the longest line of an input file, in bytes                               |
| limits.depth_max             | how deep a line's JSON may nest                                           |
| limits.rows_max              | the most rows of one dataset                                              |
| limits.unpacked_bytes_max    | what a dataset may come to when it is unpacked and converted, in bytes    |
| limits.unpacked_ratio_max    | the same for each byte of its files, beyond the first GiB                 |
| limits.download_bytes_max    | what the inputs of one dataset may come to that are downloaded, in bytes  |
| limits.media_bytes_max       | the largest image, recording or document of a cell, in bytes              |
| limits.media_row_bytes_max   | what those of one row may come to together                                |
| models.NAME.engine           | function, vllm, openai, connector, PROVIDER-batch or routes               |
| models.NAME.source           | FILE.py:NAME, a model directory or id, a remote model's name, the file of |
|                              | a connector; of routes: nothing                                           |
| models.NAME.routes           | of the engine routes: the models that are ways to this one                |
| models.NAME.adapters         | adapter name -> its directory or id                                       |
| models.NAME.engine_args      | flags of the engine, as its command line has them                         |
| models.NAME.paths            | paths that rows and calls may have besides those of every such model      |
| models.NAME.features         | what callers of a server may have a service do besides answer: background, |
|                              | stored, hosted_tools, priority_tier, other_models                         |
| models.NAME.base_url         | the service's address, up to and with its /v1                             |
| models.NAME.api_key          | "env:NAME", "file:PATH" or "secret:NAME", never the key itself            |
| models.NAME.python           | the interpreter of the environment the engine lives in                    |
| models.NAME.workers          | processes of a function; copies of an engine server                       |
| models.NAME.replicas         | the same, under its other name                                            |
| models.NAME.replicas_min     | copies that stay whether anybody uses them or not; instead of `workers`   |
| models.NAME.replicas_max     | the most copies                                                           |
| models.NAME.cooldown_s       | a replica that is not needed ends after so long                             |
| models.NAME.scale_up_requests | another copy starts above so many requests and rows a copy               |
| models.NAME.memory           | what one copy takes of the machine's, bytes or "12GiB"                    |
| models.NAME.gpus             | how many GPUs one copy takes                                              |
| models.NAME.secrets          | variable of the engine's environment -> "env:NAME", "file:PATH" or        |
|                              | "secret:NAME"                                                             |
| models.NAME.price            | USD per million tokens: `input`, `cached` (as `input` if absent), `output` |
|                              | or one number for all of them                                             |
| models.NAME.limits           | the fields of types.Limits                                                |
| models.NAME.deterministic    | equal requests have equal results, so they may be taken over              |
| models.NAME.cpus             | cores of a cluster that one copy takes                                    |
| models.NAME.resources        | custom resources of a cluster's nodes that one copy takes                 |
| cluster.executor             | "ray": workers are Ray actors; none: processes of this machine            |
| cluster.address              | "auto", "HOST:6379" of Ray's head, or "local": one is started here        |
| cluster.python               | the interpreter with batchmill[ray]; none: batchmill's own                |
| cluster.cache                | folder of each node for copies of objects, with storage.objects           |
| cluster.trusted_network      | nobody else reaches the cluster: secrets go there without token and TLS   |
| machine.memory               | what models take together, bytes or "24GiB"; none: no limit               |
| machine.gpus                 | how many GPUs they share, or their ids; none: those that are visible      |
| server.host, server.port     | where `batchmill serve` listens (`--host`, `--port`)                       |
| server.grpc_port             | where tensors are taken over gRPC (`--grpc-port`); none: nowhere           |
| server.body_bytes_max        | the largest request that is not an upload                                 |
| server.body_memory_bytes_max | what bodies may take of the memory together, and half of it of a project   |
| server.body_timeout_s        | how long a body that is not an upload may take to arrive                  |
| server.body_rate_min         | bytes a second that any body has to come at, at least                     |
| server.connections_max       | how many connections are open at once                                     |
| server.trusted_proxies       | addresses and networks whose X-Forwarded-For and -Proto are believed      |
| server.file_bytes_max        | the largest file                                                          |
| server.rows_max              | the most rows of one batch                                                |
| server.file_expires_s        | when an uploaded batch file goes if its upload does not say; none: never  |
| server.requests_per_minute   | of one key that has no limit of its own; none: no limit                   |
| server.idle_unload_s         | a model that was not used for so long is unloaded                         |
| server.allowed_hosts         | values of the Host header besides the address it listens on; "*": any     |
| server.private_hosts         | names, addresses and networks outside the public internet that inputs,    |
|                              | and connectors made over the API, may reach                               |
| server.worker_environment    | variables of the server's environment that its workers get besides those  |
|                              | that their engine heeds: names, or beginnings like "ACME_*"               |
| server.otlp_endpoint         | where traces are sent (OTEL_EXPORTER_OTLP_ENDPOINT); none: nowhere         |
| database.url                 | the PostgreSQL database of jobs and models; none: SQLite in data_dir       |
| database.password            | "env:NAME" or "file:PATH": its password, where libpq finds none itself    |
| secrets.key_file             | what secrets in the database are encrypted with                           |
|                              | (BATCHMILL_SECRETS_KEY_FILE); none: secrets.key in data_dir                |
| storage.objects              | the URL of the object store that keeps what the data directory holds; the  |
|                              | data directory is its cache then; none: the data directory                 |
| storage.cache                | what copies of objects take of the data directory's disk, bytes or "20GiB" |
| projects.NAME.weight         | its share of the workers beside other projects, 1 if it is not said        |
| projects.NAME.models         | the models it may use; none: all                                          |
| projects.NAME.functions      | the deployed functions it may use; none: all, or as `models` says         |
| projects.NAME.objects        | folders of object stores that its jobs may use; none: no objects          |
| projects.NAME.templates      | whether all its keys may send templates of Jinja2; those that deploy may  |
| projects.NAME.reuse          | rows with deterministic requests take over results of earlier jobs        |
| projects.NAME.reuse_age_s    | of jobs that ended at most so long ago                                    |
| projects.NAME.reuse_jobs_max | the newest ended jobs of the project that a lookup looks at               |
| projects.NAME.quotas         | its own, in the place of those in `quotas`                                |
| quotas                       | the fields of types.Quotas: what each project may have                    |
| functions.isolate            | "bubblewrap": deployed functions see nothing of the machine but the       |
|                              | system and themselves; "none"                                             |
| functions.network            | whether isolated functions, and pip for them, have the network            |
| functions.readable           | folders and files that isolated functions may read besides                |
| functions.pythons            | interpreters that keys may name for isolated functions                    |
| functions.secrets            | patterns of references that keys may name for isolated functions          |
| webhooks.url                 | of each of the `[[webhooks]]`: where events are sent                      |
| webhooks.secret              | "env:NAME" or "file:PATH": what they are signed with                      |
| webhooks.events, .project, .name | which events, of whose batches, and a name for people                  |
| quarantine.deaths_per_hour   | engine deaths of a project in an hour, beyond which it runs last and alone |
| quarantine.expires_s         | a request that an engine died of is refused for so long                    |
| quarantine.entries_max       | so many such requests are known                                           |
| deployments.hub_models       | patterns of ids of a model hub that may be deployed over the API          |
| deployments.base_models.NAME | what callers may deploy as NAME: a model directory or id                  |
| deployments.adapter_patterns | patterns of ids of a model hub that rows may name as adapters             |
| deployments.adapter_sources  | patterns of places that adapters may be registered from over the API      |
| deployments.default_price    | the price of language models that have none of their own                  |
| ml_commons.trusted_connector_endpoints | expressions, one of which the whole URL of a connector made over    |
|                              | the API must match; none: any that may be reached                         |
| ml_commons.max_batch_inference_tasks | batches at providers that a project has under way; 0: none            |
| ml_commons.offline_batch_inference_enabled | whether batches are taken at all                                |
| ml_commons.model_auto_deploy | whether a call of a model deploys it                                      |
| ml_commons.strict_polling    | whether a task that has ended is looked at again when it is asked for     |
| ml_commons.poll_s            | seconds between two looks at a batch that runs at a provider              |
| ml_commons.status_field      | members of a provider's reply that hold a batch's status                  |
| ml_commons.status_regex.STATE | an expression for cancelling, cancelled, completed, expired and failed   |
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

from msgspec import Struct
from msgspec.structs import fields

from batchmill.errors import InvalidConfig
from batchmill.types import DatasetSpec, Limits, Price, ProjectQuotas, Quotas
from batchmill.types.cluster import ClusterEntry
from batchmill.types.isolation import FunctionsEntry
from batchmill.types.machines import MachineEntry, ReplicaEntry, size_of

URL_SCHEMES = ("postgresql+psycopg://", "postgresql://")  # of database.url
KEY_FILE = "secrets.key"  # in the data directory, unless secrets.key_file says where
_DATASET = {each.name: each.default for each in fields(DatasetSpec)}


class InputLimits(Struct, frozen=True):
    """What one line of an input file may be, and what a file may become when it is unpacked."""

    line_bytes_max: int = _DATASET["line_bytes_max"]
    depth_max: int = _DATASET["depth_max"]
    rows_max: int = _DATASET["rows_max"]
    unpacked_bytes_max: int = _DATASET["unpacked_bytes_max"]
    unpacked_ratio_max: int = _DATASET["unpacked_ratio_max"]
    download_bytes_max: int = _DATASET["download_bytes_max"]
    media_bytes_max: int = _DATASET["media_bytes_max"]
    media_row_bytes_max: int = _DATASET["media_row_bytes_max"]


class ModelEntry(ReplicaEntry, frozen=True):
    """`[models.NAME]` as it is written: paths are not resolved yet."""

    engine: str
    source: str = ""
    routes: list[str] = []
    adapters: dict[str, str] = {}
    engine_args: dict[str, str | int | float | bool] = {}
    paths: list[str] = []
    features: list[str] = []
    base_url: str | None = None
    api_key: str | None = None
    python: str | None = None
    workers: int = 1
    replicas: int | None = None  # None once read: `workers` has it
    secrets: dict[str, str] = {}
    price: Price | float | None = None
    limits: Limits = Limits()
    deterministic: bool = False  # equal requests have equal results


class ServerEntry(Struct, frozen=True):
    """`[server]`: what `batchmill serve` listens on and how much it takes."""

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None
    body_bytes_max: int = 64 * 1024 * 1024
    body_memory_bytes_max: int | None = None
    body_timeout_s: float = 300.0
    body_rate_min: int = 1024
    connections_max: int | None = None
    trusted_proxies: list[str] = []
    file_bytes_max: int = 100 * 1024**3
    rows_max: int = 100_000_000
    file_expires_s: int | None = None
    requests_per_minute: int | None = None
    idle_unload_s: float = 600.0
    allowed_hosts: list[str] = []
    private_hosts: list[str] = []
    otlp_endpoint: str | None = None
    worker_environment: list[str] = []


class ProjectEntry(Struct, frozen=True):
    """`[projects.NAME]`."""

    weight: float = 1.0
    models: list[str] | None = None
    functions: list[str] | None = None
    objects: list[str] = []  # URLs of folders: "s3://bucket/team-a/"
    templates: bool = False
    reuse: bool = False  # deterministic rows take over results of earlier jobs
    reuse_age_s: float = 30 * 86_400.0  # at most so old
    reuse_jobs_max: int = 1000  # of the newest ended jobs
    quotas: dict[str, int | str] = {}


class WebhookEntry(Struct, frozen=True):
    """One of `[[webhooks]]`. `events` empty: all there are."""

    url: str
    secret: str
    events: list[str] = []
    project: str = "default"
    name: str = ""


class SecretsEntry(Struct, frozen=True):
    """`[secrets]`."""

    key_file: str | None = None


class DatabaseEntry(Struct, frozen=True):
    """`[database]`. `url` None: SQLite in the data directory."""

    url: str | None = None
    password: str | None = None  # "env:NAME" or "file:PATH"

    def check(self) -> None:
        """Raises: InvalidConfig. The URL may hold a password, so that messages never repeat it."""
        if self.url is None:
            if self.password is not None:
                raise InvalidConfig("database.password is set without database.url: the file SQLite has no password")
            return
        if not self.url.startswith(URL_SCHEMES):
            raise InvalidConfig(
                'database.url must begin with "postgresql+psycopg://", like postgresql+psycopg://USER@HOST/NAME'
            )
        place = self.url.partition("://")[2].partition("?")[0]
        authority = place.partition("/")[0]
        if ":" in authority.rpartition("@")[0] or re.search(r"(?<![a-z])password=", self.url, re.IGNORECASE):
            raise InvalidConfig(
                'database.url holds a password: write it to database.password as "env:NAME" or "file:PATH", or let '
                "libpq find it (PGPASSWORD, ~/.pgpass, a service)"
            )
        if not {";", "="}.isdisjoint(place):
            raise InvalidConfig(
                'database.url has ";" or "=" in its host or name: parameters follow a "?" and are separated by "&", '
                "like postgresql+psycopg://USER@HOST/NAME?sslmode=require"
            )
        if self.password is not None and not self.password.startswith(("env:", "file:")):
            raise InvalidConfig('database.password is "env:NAME" or "file:PATH", never the password itself')


class StorageEntry(Struct, frozen=True):
    """`[storage]`: where what a data directory holds is durable. `objects` None: in the data directory."""

    objects: str | None = None
    cache: int | str = "20GiB"

    @property
    def cache_bytes(self) -> int:
        """Raises: InvalidConfig."""
        return size_of(self.cache, "storage.cache")


class StatusRegex(Struct, frozen=True):
    """`[ml_commons.status_regex]`: what a provider's whole word for a state must match, in any case."""

    cancelling: str = "stopping|cancell?ing"
    cancelled: str = "stopped|cancell?ed"
    completed: str = "complete|completed|partiallyCompleted"
    expired: str = "expired|timeout"
    failed: str = "failed"


class MlCommonsEntry(Struct, frozen=True):
    """`[ml_commons]`: the dialect of OpenSearch ML Commons."""

    trusted_connector_endpoints: list[str] = []
    max_batch_inference_tasks: int = 100
    offline_batch_inference_enabled: bool = True
    model_auto_deploy: bool = True
    strict_polling: bool = False
    poll_s: float = 60.0
    status_field: tuple[str, ...] = ("status", "Status", "TransformJobStatus")
    status_regex: StatusRegex = StatusRegex()


class QuarantineEntry(Struct, frozen=True):
    """`[quarantine]`: requests that engines of language models died of."""

    deaths_per_hour: int = 3
    expires_s: float = 86_400.0
    entries_max: int = 10_000


class BackupsEntry(Struct, frozen=True):
    """`[backups]`: copies of the database. `keep` 0: none are made."""

    interval_s: float = 86_400.0
    keep: int = 3


class RetentionEntry(Struct, frozen=True):
    """`[retention]`: how long after its end something of a job stays. `jobs_s` None: until it is removed."""

    jobs_s: float | None = None
    retry_s: float = 7 * 86_400.0
    intermediate_s: float = 3600.0


class DeploymentsEntry(Struct, frozen=True):
    """`[deployments]`: what callers may have batchmill serve."""

    hub_models: list[str] = []
    base_models: dict[str, str] = {}
    adapter_patterns: list[str] = []
    adapter_sources: list[str] = []
    default_price: Price | float | None = None

    def offers(self, name: str) -> bool:
        """A base model of this name may be deployed, by its alias or its id."""
        return name in self.base_models or any(fnmatchcase(name, pattern) for pattern in self.hub_models)


class File(Struct, frozen=True):
    data_dir: str | None = None
    limits: InputLimits = InputLimits()
    models: dict[str, ModelEntry] = {}
    server: ServerEntry = ServerEntry()
    projects: dict[str, ProjectEntry] = {}
    quotas: Quotas = Quotas()
    functions: FunctionsEntry = FunctionsEntry()
    webhooks: list[WebhookEntry] = []
    ml_commons: MlCommonsEntry = MlCommonsEntry()
    deployments: DeploymentsEntry = DeploymentsEntry()
    secrets: SecretsEntry = SecretsEntry()
    database: DatabaseEntry = DatabaseEntry()
    storage: StorageEntry = StorageEntry()
    machine: MachineEntry = MachineEntry()
    cluster: ClusterEntry = ClusterEntry()
    quarantine: QuarantineEntry = QuarantineEntry()
    backups: BackupsEntry = BackupsEntry()
    retention: RetentionEntry = RetentionEntry()


class Config(Struct, frozen=True):
    """The settings of batchmill. `base` is the folder that paths in `models` are relative to."""

    data_dir: Path
    base: Path
    file: Path | None = None
    limits: InputLimits = InputLimits()
    models: dict[str, ModelEntry] = {}
    server: ServerEntry = ServerEntry()
    projects: dict[str, ProjectEntry] = {}
    quotas: Quotas = Quotas()
    functions: FunctionsEntry = FunctionsEntry()
    webhooks: list[WebhookEntry] = []
    ml_commons: MlCommonsEntry = MlCommonsEntry()
    deployments: DeploymentsEntry = DeploymentsEntry()
    storage: StorageEntry = StorageEntry()
    machine: MachineEntry = MachineEntry()
    cluster: ClusterEntry = ClusterEntry()
    quarantine: QuarantineEntry = QuarantineEntry()
    backups: BackupsEntry = BackupsEntry()
    retention: RetentionEntry = RetentionEntry()
    database: DatabaseEntry = DatabaseEntry()
    key_file: Path | None = None  # None: `secrets.key` in the data directory

    @property
    def secrets_key(self) -> Path:
        """The file with the keys that secrets in the database are encrypted with."""
        return self.key_file or self.data_dir / KEY_FILE

    @property
    def loses_key_file(self) -> bool:
        """Whether the key file lies in a data directory that is only a cache."""
        return self.storage.objects is not None and self.secrets_key.resolve().is_relative_to(self.data_dir)

    @property
    def project_quotas(self) -> ProjectQuotas:
        """What every project may have. Raises: InvalidConfig."""
        return ProjectQuotas.read(self.quotas, {name: entry.quotas for name, entry in self.projects.items()})
