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
| models.NAME.cooldown_s       | a copy that nobody needs goes after so long                               |
| models.NAME.scale_up_requests | another copy starts above so many requests and rows a copy               |
| models.NAME.memory           | what one copy takes of the machine's, bytes or "12GiB"                    |
| models.NAME.gpus             | how many GPUs one copy takes                                              |
| models.NAME.secrets          | variable of the engine's environment -> "env:NAME", "file:PATH" or        |
|                              | "secret:NAME"                                                             |
| models.NAME.price            | USD per million tokens: `input`, `cached` (as `input` if absent), `output` |
|                              | or one number for all of them                                             |
| models.NAME.limits           | the fields of types.Limits                                                |
| machine.memory               | what models take together, bytes or "24GiB"; none: no limit               |
| machine.gpus                 | how many GPUs they share, or their ids; none: those that are visible      |
| server.host, server.port     | where `batchmill serve` listens (`--host`, `--port`)                       |
| server.grpc_port             | where tensors are taken over gRPC (`--grpc-port`); none: nowhere           |
| server.body_bytes_max        | the largest request that is no upload                                     |
| server.body_memory_bytes_max | what bodies may take of the memory together, and half of it of a project   |
| server.body_timeout_s        | how long a body that is no upload may take to come                        |
| server.body_rate_min         | bytes a second that any body has to come at, at least                     |
| server.connections_max       | how many connections are open at once                                     |
| server.trusted_proxies       | addresses and networks whose X-Forwarded-For is believed                  |
| server.file_bytes_max        | the largest file                                                          |
| server.rows_max              | the most rows of one batch                                                |
| server.file_expires_s        | when an uploaded batch file goes if its upload does not say; none: never  |
| server.requests_per_minute   | of one key that has no limit of its own; none: no limit                   |
| server.idle_unload_s         | a model that nobody has used for so long is unloaded                      |
| server.allowed_hosts         | values of the Host header besides the address it listens on; "*": any     |
| server.private_hosts         | names, addresses and networks outside the public internet that webhooks,  |
|                              | and connectors made over the API, may reach                               |
| server.worker_environment    | variables of the server's environment that its workers get besides those  |
|                              | that their engine heeds: names, or beginnings like "ACME_*"               |
| server.otlp_endpoint         | where traces are sent (OTEL_EXPORTER_OTLP_ENDPOINT); none: nowhere         |
| secrets.key_file             | what secrets in the database are encrypted with                           |
|                              | (BATCHMILL_SECRETS_KEY_FILE); none: secrets.key in data_dir                |
| projects.NAME.weight         | its share of the workers beside other projects, 1 if it is not said        |
| projects.NAME.models         | the models it may use; none: all                                          |
| projects.NAME.functions      | the deployed functions it may use; none: all, or as `models` says         |
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
| ml_commons.status_field      | members of a provider's reply that say how a batch stands                 |
| ml_commons.status_regex.STATE | an expression for cancelling, cancelled, completed, expired and failed   |
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import fields, replace

from batchmill.errors import InvalidConfig
from batchmill.types import DatasetSpec, Limits, Price, ProjectQuotas, Quotas
from batchmill.types.isolation import FunctionsEntry
from batchmill.types.machines import MachineEntry, ReplicaEntry
from batchmill.wire.json_bytes import DEPTH_MAX

FILE_NAME = "batchmill.toml"
KEY_FILE = "secrets.key"  # in the data directory, unless secrets.key_file says where
FILE_BYTES_MAX = 4 * 1024 * 1024
WORKERS_MAX = 1024
SHOWN_CHARS = 40  # of a value out of range, in a message
# The largest value of each limit, whether it stands in the file or is a flag.
LIMITS_MAX = {
    "line_bytes_max": 1024**3,  # a line is in memory whole, several times over
    "depth_max": DEPTH_MAX,
    "rows_max": 2**32 - 1,
    "unpacked_bytes_max": 2**50,
    "unpacked_ratio_max": 10**9,
    "requests_per_minute": 10**9,
    "tokens_per_minute": 10**12,
    "in_flight_max": 100_000,
    "attempts_max": 1000,
    "connect_timeout_s": 86_400.0,
    "attempt_timeout_s": 7 * 86_400.0,
    "memory_bytes": 2**50,
    "adapters_max": 10_000,
    "schema_bytes_max": 64 * 1024**2,
    "schema_nodes_max": 10_000_000,
    "schema_repetitions_max": 10**9,
}
SERVER_MAX = {
    "port": 65_535,
    "grpc_port": 65_535,
    "body_bytes_max": 1024**3,
    "body_memory_bytes_max": 2**40,
    "body_timeout_s": 86_400.0,
    "body_rate_min": 2**30,
    "connections_max": 1_000_000,
    "file_bytes_max": 2**50,
    "rows_max": 2**32 - 1,
    "file_expires_s": 10 * 365 * 86_400,
    "requests_per_minute": 10**9,
    "idle_unload_s": 365 * 86_400.0,
}
QUARANTINE_MAX = {"deaths_per_hour": 10_000, "expires_s": 365 * 86_400.0, "entries_max": 1_000_000}
WEIGHT_MAX = 1_000_000.0
BATCH_TASKS_MAX = 10_000  # as ML Commons has it
POLL_S_MAX = 86_400.0
PROJECT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
VARIABLES = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?")
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@-]{0,199}")
_DATASET = {each.name: each.default for each in fields(DatasetSpec)}


class InputLimits(Struct, frozen=True):
    """What one line of an input file may be, and what a file may become when it is unpacked."""

    line_bytes_max: int = _DATASET["line_bytes_max"]
    depth_max: int = _DATASET["depth_max"]
    rows_max: int = _DATASET["rows_max"]
    unpacked_bytes_max: int = _DATASET["unpacked_bytes_max"]
    unpacked_ratio_max: int = _DATASET["unpacked_ratio_max"]


class ModelEntry(ReplicaEntry, frozen=True):
    """`[models.NAME]` as it is written: paths still as they stand there."""

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


class _File(Struct, frozen=True):
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
    machine: MachineEntry = MachineEntry()
    quarantine: QuarantineEntry = QuarantineEntry()


class Config(Struct, frozen=True):
    """What batchmill was told. `base` is the folder that paths in `models` are relative to."""

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
    machine: MachineEntry = MachineEntry()
    quarantine: QuarantineEntry = QuarantineEntry()
    key_file: Path | None = None  # None: `secrets.key` in the data directory

    @property
    def secrets_key(self) -> Path:
        """The file with the keys that secrets in the database are encrypted with."""
        return self.key_file or self.data_dir / KEY_FILE

    @property
    def project_quotas(self) -> ProjectQuotas:
        """What every project may have. Raises: InvalidConfig."""
        return ProjectQuotas.read(self.quotas, {name: entry.quotas for name, entry in self.projects.items()})


def load(
    *,
    environ: Mapping[str, str],
    cwd: Path,
    data_dir: str | None = None,
    config_file: str | None = None,
    reads_file: bool = True,
) -> Config:
    """The configuration of a command started in `cwd`; `data_dir` and `config_file` are its flags.

    Args: reads_file: False for a command that works at a server, whose configuration is the server's own.

    Raises: InvalidConfig, naming the file, the key and the way out.
    """
    path = _config_path(config_file or environ.get("BATCHMILL_CONFIG"), cwd) if reads_file else None
    read = _File() if path is None else _read(path)
    base = cwd if path is None else path.parent
    chosen = data_dir or environ.get("BATCHMILL_DATA_DIR")
    if chosen:
        place = cwd / Path(chosen).expanduser()
    elif read.data_dir is not None:
        place = base / Path(read.data_dir).expanduser()
    else:
        place = _default_data_dir(environ)
    key_file = _place(environ.get("BATCHMILL_SECRETS_KEY_FILE"), cwd) or _place(read.secrets.key_file, base)
    paths = ("data_dir", "secrets")
    kept = {each.name: getattr(read, each.name) for each in fields(_File) if each.name not in paths}
    return Config(data_dir=place.resolve(), base=base, file=path, key_file=key_file, **kept)


def _place(told: str | None, base: Path) -> Path | None:
    """Its last part is not resolved: a key file that is a link is refused."""
    return (base / Path(told).expanduser()).absolute() if told else None


def _default_data_dir(environ: Mapping[str, str]) -> Path:
    """The XDG base directory specification: a relative XDG_DATA_HOME counts as unset."""
    told = environ.get("XDG_DATA_HOME", "")
    home = Path(told) if told.startswith("/") else Path(environ.get("HOME") or Path.home()) / ".local/share"
    return home / "batchmill"


def _config_path(named: str | None, cwd: Path) -> Path | None:
    if named:
        return (cwd / Path(named).expanduser()).resolve()
    found = cwd / FILE_NAME
    return found.resolve() if found.exists() else None


def _read(path: Path) -> _File:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidConfig(f"the configuration file {path} cannot be read: {error.strerror}") from None
    if len(data) > FILE_BYTES_MAX:
        raise InvalidConfig(f"the configuration file {path} is longer than {FILE_BYTES_MAX:,} bytes")
    try:
        table = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidConfig(f"{path} is not TOML: {error}") from None
    try:
        _check_keys(table)
        read = msgspec.convert(table, _File)
        read = replace(read, models={name: _one_count(name, each) for name, each in read.models.items()})
        _check_values(read)
    except (msgspec.ValidationError, InvalidConfig) as error:
        raise InvalidConfig(f"{path}: {error}") from None
    return read


def _check_keys(table: dict[str, Any]) -> None:
    """Refuse every key nobody knows, with the nearest one that is known."""
    _only_known(table, _File, "")
    _only_known(table.get("limits"), InputLimits, "limits.")
    _only_known(table.get("server"), ServerEntry, "server.")
    projects, webhooks, commons = table.get("projects"), table.get("webhooks"), table.get("ml_commons")
    _only_known(commons, MlCommonsEntry, "ml_commons.")
    _only_known(table.get("functions"), FunctionsEntry, "functions.")
    _only_known(table.get("secrets"), SecretsEntry, "secrets.")
    _only_known(table.get("machine"), MachineEntry, "machine.")
    _only_known(table.get("quotas"), Quotas, "quotas.")
    deployments = table.get("deployments")
    _only_known(deployments, DeploymentsEntry, "deployments.")
    if isinstance(deployments, dict):
        _only_known(deployments.get("default_price"), Price, "deployments.default_price.")
    if isinstance(commons, dict):
        _only_known(commons.get("status_regex"), StatusRegex, "ml_commons.status_regex.")
    for name, entry in projects.items() if isinstance(projects, dict) else ():
        _only_known(entry, ProjectEntry, f"projects.{name}.")
        _only_known(entry.get("quotas") if isinstance(entry, dict) else None, Quotas, f"projects.{name}.quotas.")
    for entry in webhooks if isinstance(webhooks, list) else ():
        _only_known(entry, WebhookEntry, "webhooks.")
    models = table.get("models")
    for name, entry in models.items() if isinstance(models, dict) else ():
        _only_known(entry, ModelEntry, f"models.{name}.")
        if isinstance(entry, dict):
            _only_known(entry.get("price"), Price, f"models.{name}.price.")
            _only_known(entry.get("limits"), Limits, f"models.{name}.limits.")


def _only_known(table: Any, struct: type[Struct], place: str) -> None:
    if not isinstance(table, dict):
        return  # msgspec says what it should have been
    known = [each.name for each in fields(struct)]
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {place}{near[0]}?" if near else f"known are: {', '.join(known)}"
            raise InvalidConfig(f"there is no key {place}{key}; {hint}")


def _one_count(name: str, entry: ModelEntry) -> ModelEntry:
    if entry.replicas is None:
        return entry
    if entry.workers != 1:
        raise InvalidConfig(f"models.{name}: workers and replicas are two names of one number; leave one out")
    return replace(entry, workers=entry.replicas, replicas=None)


def _check_values(read: _File) -> None:
    _check_limits(read.limits, "limits")
    _check_serving(read)
    _check_ml_commons(read.ml_commons)
    read.functions.check()
    _check_deployments(read)
    read.machine.check()
    for name, entry in read.models.items():
        place = f"models.{name}"
        if not MODEL_NAME.fullmatch(name):
            raise InvalidConfig(f"{place}: a model's name is made of letters, digits and . _ / @ -, 200 at most")
        if not 1 <= entry.workers <= WORKERS_MAX:
            raise InvalidConfig(f"{place}.workers must be 1 to {WORKERS_MAX}, not {entry.workers}")
        entry.check(place)
        if entry.workers != 1 and entry.scaling is not None:
            raise InvalidConfig(f"{place}: workers is fixed and replicas_min to replicas_max a range: leave one out")
        _check_limits(entry.limits, f"{place}.limits")
        _check_price(Price.of(entry.price), f"{place}.price")


def _check_price(price: Price | None, place: str) -> None:
    for each in fields(Price) if price is not None else ():
        usd = getattr(price, each.name)
        if usd is not None and not (math.isfinite(usd) and usd >= 0):
            raise InvalidConfig(f"{place}.{each.name} must be 0 or more USD, not {usd}")


def _check_deployments(read: _File) -> None:
    entry = read.deployments
    _check_price(Price.of(entry.default_price), "deployments.default_price")
    for name, source in entry.base_models.items():
        if not MODEL_NAME.fullmatch(name):
            raise InvalidConfig(
                f"deployments.base_models.{name}: a model's name is made of letters, digits and . _ / @ -, 200 at most"
            )
        if name in read.models:
            raise InvalidConfig(f"deployments.base_models.{name}: models.{name} has that name: leave one out")
        if not source:
            raise InvalidConfig(f"deployments.base_models.{name} names no model: write a directory or an id")
    for key in ("hub_models", "adapter_patterns", "adapter_sources"):
        if "" in getattr(entry, key):
            raise InvalidConfig(f"deployments.{key} holds an empty pattern, which fits nothing: leave it out")


def _check_serving(read: _File) -> None:
    server = read.server
    ProjectQuotas.read(read.quotas, {name: project.quotas for name, project in read.projects.items()})
    for each in fields(ServerEntry):
        value = getattr(server, each.name)
        if each.name in SERVER_MAX and value is not None and not 0 < value <= SERVER_MAX[each.name]:
            raise InvalidConfig(
                f"server.{each.name} must be more than 0 and at most {SERVER_MAX[each.name]:,.0f}, not {value}"
            )
    if server.body_memory_bytes_max is not None and server.body_memory_bytes_max < 2 * server.body_bytes_max:
        raise InvalidConfig(
            f"server.body_memory_bytes_max is {server.body_memory_bytes_max:,}: half of it is what a project may have, "
            f"which must hold one request of server.body_bytes_max, {server.body_bytes_max:,} bytes"
        )
    for name, most in QUARANTINE_MAX.items():
        value = getattr(read.quarantine, name)
        if not 0 < value <= most:
            raise InvalidConfig(f"quarantine.{name} must be more than 0 and at most {most:,.0f}, not {value}")
    for name in server.worker_environment:
        if not VARIABLES.fullmatch(name):
            raise InvalidConfig(
                f"server.worker_environment: {name[:SHOWN_CHARS]!r} is no variable's name, nor a beginning like ACME_*"
            )
    for name, project in read.projects.items():
        if not PROJECT_NAME.fullmatch(name):
            raise InvalidConfig(f"projects.{name}: a project's name is made of letters, digits and . _ -, 64 at most")
        if not (math.isfinite(project.weight) and 0 < project.weight <= WEIGHT_MAX):
            raise InvalidConfig(
                f"projects.{name}.weight must be more than 0 and at most {WEIGHT_MAX:,.0f}, not {project.weight}"
            )
        for model in project.models or ():
            is_known = any(model == known or model in entry.adapters for known, entry in read.models.items())
            if not (is_known or read.deployments.offers(model)):
                raise InvalidConfig(f"projects.{name}.models: there is no model {model!r}")
    for webhook in read.webhooks:
        if not webhook.url.startswith(("https://", "http://")):
            raise InvalidConfig(f"webhooks.url must begin with https:// or http://, not {webhook.url[:SHOWN_CHARS]!r}")
        if not webhook.secret.startswith(("env:", "file:")):  # what stands there may be the secret: it is not repeated
            raise InvalidConfig('webhooks.secret is "env:NAME" or "file:PATH", never the secret itself')


def _check_ml_commons(entry: MlCommonsEntry) -> None:
    if not 0 <= entry.max_batch_inference_tasks <= BATCH_TASKS_MAX:
        raise InvalidConfig(
            f"ml_commons.max_batch_inference_tasks must be 0 to {BATCH_TASKS_MAX:,}, not "
            f"{entry.max_batch_inference_tasks}"
        )
    if not 0 < entry.poll_s <= POLL_S_MAX:
        raise InvalidConfig(f"ml_commons.poll_s must be more than 0 and at most {POLL_S_MAX:,.0f}, not {entry.poll_s}")
    expressions = [("trusted_connector_endpoints", each) for each in entry.trusted_connector_endpoints]
    states = entry.status_regex
    expressions += [(f"status_regex.{each.name}", getattr(states, each.name)) for each in fields(StatusRegex)]
    for place, expression in expressions:
        try:
            re.compile(expression)
        except re.error as error:
            raise InvalidConfig(f"ml_commons.{place}: {expression[:SHOWN_CHARS]!r} cannot be read: {error}") from None


def _check_limits(limits: Struct, place: str) -> None:
    for each in fields(type(limits)):
        if flaw := limit_flaw(each.name, getattr(limits, each.name)):
            raise InvalidConfig(f"{place}.{flaw}")


def limit_flaw(name: str, value: float | None) -> str:
    """What is wrong with the value of a limit; empty: nothing. None is no limit."""
    if value is None or 0 < value <= LIMITS_MAX[name]:
        return ""
    return f"{name} must be more than 0 and at most {LIMITS_MAX[name]:,.0f}, not {str(value)[:SHOWN_CHARS]}"
