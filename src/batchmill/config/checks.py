"""Checks a configuration file: known keys, and values within bounds."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import fields, replace

from batchmill.config.entries import (
    BackupsEntry,
    Config,
    DatabaseEntry,
    DeploymentsEntry,
    File,
    InputLimits,
    MlCommonsEntry,
    ModelEntry,
    ProjectEntry,
    RetentionEntry,
    SecretsEntry,
    ServerEntry,
    StatusRegex,
    WebhookEntry,
)
from batchmill.errors import InvalidConfig
from batchmill.object_store.prefixes import check_prefixes
from batchmill.object_store.urls import parse_url
from batchmill.types import Limits, Price, ProjectQuotas, Quotas
from batchmill.types.cluster import ClusterEntry
from batchmill.types.isolation import FunctionsEntry
from batchmill.types.machines import MachineEntry
from batchmill.wire.json_bytes import DEPTH_MAX

WORKERS_MAX = 1024
SHOWN_CHARS = 40  # of a value out of range, in a message
# The largest value of each limit, in the file or as a flag.
LIMITS_MAX = {
    "line_bytes_max": 1024**3,  # a line is in memory whole, several times over
    "depth_max": DEPTH_MAX,
    "rows_max": 2**32 - 1,
    "unpacked_bytes_max": 2**50,
    "unpacked_ratio_max": 10**9,
    "download_bytes_max": 2**50,
    "media_bytes_max": 2**30,
    "media_row_bytes_max": 2**30,
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
RETENTION_S_MAX = 100 * 366 * 86_400.0
REUSE_JOBS_MAX = 100_000  # jobs that one lookup may look at
BACKUP_INTERVAL_S_MAX, BACKUPS_MAX = 366 * 86_400.0, 1000
QUARANTINE_MAX = {"deaths_per_hour": 10_000, "expires_s": 365 * 86_400.0, "entries_max": 1_000_000}
WEIGHT_MAX = 1_000_000.0
BATCH_TASKS_MAX = 10_000  # as ML Commons has it
POLL_S_MAX = 86_400.0
PROJECT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
VARIABLES = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?")
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@-]{0,199}")


def check_keys(table: dict[str, Any]) -> None:
    """Refuse unknown keys, and suggest the nearest known one."""
    _only_known(table, File, "")
    _only_known(table.get("limits"), InputLimits, "limits.")
    _only_known(table.get("server"), ServerEntry, "server.")
    projects, webhooks, commons = table.get("projects"), table.get("webhooks"), table.get("ml_commons")
    _only_known(commons, MlCommonsEntry, "ml_commons.")
    _only_known(table.get("functions"), FunctionsEntry, "functions.")
    _only_known(table.get("secrets"), SecretsEntry, "secrets.")
    _only_known(table.get("database"), DatabaseEntry, "database.")
    _only_known(table.get("machine"), MachineEntry, "machine.")
    _only_known(table.get("cluster"), ClusterEntry, "cluster.")
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


def one_count(name: str, entry: ModelEntry) -> ModelEntry:
    if entry.replicas is None:
        return entry
    if entry.workers != 1:
        raise InvalidConfig(f"models.{name}: workers and replicas are two names of one number; leave one out")
    return replace(entry, workers=entry.replicas, replicas=None)


def check_values(read: File) -> None:
    _check_limits(read.limits, "limits")
    _check_serving(read)
    _check_ml_commons(read.ml_commons)
    read.functions.check()
    _check_deployments(read)
    read.machine.check()
    _check_cluster(read)
    read.database.check()
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


def _check_deployments(read: File) -> None:
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


def _check_serving(read: File) -> None:
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
    if not 0 < read.backups.interval_s <= BACKUP_INTERVAL_S_MAX:
        raise InvalidConfig(
            f"backups.interval_s must be more than 0 and at most {BACKUP_INTERVAL_S_MAX:,.0f}, not "
            f"{read.backups.interval_s}"
        )
    for each in fields(RetentionEntry):
        value = getattr(read.retention, each.name)
        if value is not None and not 0 <= value <= RETENTION_S_MAX:
            raise InvalidConfig(f"retention.{each.name} must be 0 to {RETENTION_S_MAX:,.0f}, not {value}")
    if not 0 <= read.backups.keep <= BACKUPS_MAX:
        raise InvalidConfig(f"backups.keep must be 0 to {BACKUPS_MAX:,}, not {read.backups.keep}")
    if read.database.url is not None and read.backups != BackupsEntry():
        raise InvalidConfig(
            "backups are copies of the file SQLite, and database.url names a PostgreSQL database: leave [backups] out, "
            "and make backups with pg_dump or the database's own server"
        )
    if read.storage.objects is not None:
        parse_url(read.storage.objects)
    assert read.storage.cache_bytes
    for name in server.worker_environment:
        if not VARIABLES.fullmatch(name):
            raise InvalidConfig(
                f"server.worker_environment: {name[:SHOWN_CHARS]!r} is not a variable's name, nor a prefix like ACME_*"
            )
    for name, project in read.projects.items():
        if not PROJECT_NAME.fullmatch(name):
            raise InvalidConfig(f"projects.{name}: a project's name is made of letters, digits and . _ -, 64 at most")
        if not (math.isfinite(project.weight) and 0 < project.weight <= WEIGHT_MAX):
            raise InvalidConfig(
                f"projects.{name}.weight must be more than 0 and at most {WEIGHT_MAX:,.0f}, not {project.weight}"
            )
        if not 0 < project.reuse_age_s <= RETENTION_S_MAX:
            raise InvalidConfig(
                f"projects.{name}.reuse_age_s must be more than 0 and at most {RETENTION_S_MAX:,.0f}, not "
                f"{project.reuse_age_s}"
            )
        if not 1 <= project.reuse_jobs_max <= REUSE_JOBS_MAX:
            raise InvalidConfig(
                f"projects.{name}.reuse_jobs_max must be at least 1 and at most {REUSE_JOBS_MAX:,}, not "
                f"{project.reuse_jobs_max}"
            )
        check_prefixes(f"projects.{name}.objects", project.objects, read.storage.objects)
        for model in project.models or ():
            is_known = any(model == known or model in entry.adapters for known, entry in read.models.items())
            if not (is_known or read.deployments.offers(model)):
                raise InvalidConfig(f"projects.{name}.models: there is no model {model!r}")
    for webhook in read.webhooks:
        if not webhook.url.startswith(("https://", "http://")):
            raise InvalidConfig(f"webhooks.url must begin with https:// or http://, not {webhook.url[:SHOWN_CHARS]!r}")
        if not webhook.secret.startswith(("env:", "file:")):  # the value may be the secret itself: it is not repeated
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


def _check_cluster(read: File) -> None:
    read.cluster.check()
    if read.cluster.executor is None:
        for name, entry in read.models.items():
            if entry.cpus is not None or entry.resources:
                which = "resources" if entry.resources else "cpus"
                raise InvalidConfig(
                    f'models.{name}.{which} has no effect on workers of this machine: set cluster.executor = "ray"'
                )
    elif read.machine != MachineEntry():
        raise InvalidConfig("[machine] has no effect on a cluster, where Ray deals memory and GPUs: leave it out")


def _check_limits(limits: Struct, place: str) -> None:
    for each in fields(type(limits)):
        if flaw := limit_flaw(each.name, getattr(limits, each.name)):
            raise InvalidConfig(f"{place}.{flaw}")


def limit_flaw(name: str, value: float | None) -> str:
    """Why the value of a limit is invalid; empty: it is valid. None means no limit."""
    if value is None or 0 < value <= LIMITS_MAX[name]:
        return ""
    return f"{name} must be more than 0 and at most {LIMITS_MAX[name]:,.0f}, not {str(value)[:SHOWN_CHARS]}"


FILE_NAME = "batchmill.toml"
FILE_BYTES_MAX = 4 * 1024 * 1024


def load(
    *,
    environ: Mapping[str, str],
    cwd: Path,
    data_dir: str | None = None,
    config_file: str | None = None,
    reads_file: bool = True,
    executor: str | None = None,
) -> Config:
    """The configuration of a command started in `cwd`; `data_dir` and `config_file` are its flags.

    Args:
        reads_file: False for a command that works at a server, whose configuration is the server's own.
        executor: a flag, instead of cluster.executor.

    Raises: InvalidConfig, naming the file, the key and the way out.
    """
    path = _config_path(config_file or environ.get("BATCHMILL_CONFIG"), cwd) if reads_file else None
    read = _with_executor(File(), executor) if path is None else _read(path, executor)
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
    kept = {each.name: getattr(read, each.name) for each in fields(File) if each.name not in paths}
    return Config(data_dir=place.resolve(), base=base, file=path, key_file=key_file, **kept)


def _place(path_text: str | None, base: Path) -> Path | None:
    """Its last part is not resolved: a key file that is a link is refused."""
    return (base / Path(path_text).expanduser()).absolute() if path_text else None


def _default_data_dir(environ: Mapping[str, str]) -> Path:
    """The XDG base directory specification: a relative XDG_DATA_HOME counts as unset."""
    data_home = environ.get("XDG_DATA_HOME", "")
    home = Path(data_home) if data_home.startswith("/") else Path(environ.get("HOME") or Path.home()) / ".local/share"
    return home / "batchmill"


def _config_path(named: str | None, cwd: Path) -> Path | None:
    if named:
        return (cwd / Path(named).expanduser()).resolve()
    found = cwd / FILE_NAME
    return found.resolve() if found.exists() else None


def _with_executor(read: File, executor: str | None) -> File:
    return read if executor is None else replace(read, cluster=replace(read.cluster, executor=executor))


def _read(path: Path, executor: str | None) -> File:
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
        check_keys(table)
        read = _with_executor(msgspec.convert(table, File), executor)
        read = replace(read, models={name: one_count(name, each) for name, each in read.models.items()})
        check_values(read)
    except (msgspec.ValidationError, InvalidConfig) as error:
        raise InvalidConfig(f"{path}: {error}") from None
    return read
