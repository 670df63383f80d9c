"""The table of engines: the name of each, the settings it takes, and what other modules must know about it.

No other module compares engine names. A new engine is a folder in `engines/`, a row in `ENGINES` and a test suite.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from enum import Enum

from msgspec import Struct

from batchmill.errors import UnknownName

CONNECTOR, FUNCTION, FUNCTION_PROCESS, HTTP = "connector", "function", "function_process", "http"
LLM, PROVIDER_BATCH, ROUTES = "llm", "provider_batch", "routes"
PROVIDER = "PROVIDER"  # the placeholder for a provider's name in `EngineTraits.configured_as`

_OPENINGS = frozenset({"features", "paths"})
_PLACEMENT = frozenset({"cpus", "resources"})  # of a worker in a cluster
_REPLICAS = frozenset({"replicas_min", "replicas_max", "cooldown_s", "scale_up_requests", "memory", "gpus"})
_SERVICE_LIMITS = frozenset(
    {
        *("requests_per_minute", "tokens_per_minute", "in_flight_max", "attempts_max"),
        *("connect_timeout_s", "attempt_timeout_s"),
    }
)
_SCHEMA_LIMITS = frozenset({"schema_bytes_max", "schema_nodes_max", "schema_repetitions_max"})


class Source(Enum):
    """What `ModelSpec.source` names."""

    CODE = "FILE.py:NAME of user code"
    CONNECTOR = "a file that describes a connector"
    TEXT = "the name of a model at a service"
    WEIGHTS = "a folder, an id of a model hub, or a URL of an object store"


class EngineTraits(Struct, frozen=True, kw_only=True):
    """One engine.

    Args:
        class_path: `MODULE:CLASS`, imported in the worker. Empty if a job picks another engine before it runs.
        configured_as: its name in `--model NAME:SOURCE` and in the configuration. Empty: cannot be configured.
        settings, limits: the keys of a `[models]` table, and of its `limits`, that it accepts.
        refusals: setting -> why this engine does not accept it.
        shard_rows: fewest and most rows of a shard: up to two seconds of work at full speed.
        environment: variables of its workers: names, patterns, and the groups of `models/worker_environment.py`.
    """

    class_path: str = ""
    configured_as: str = ""
    settings: frozenset[str] = frozenset()
    limits: frozenset[str] = frozenset()
    refusals: Mapping[str, str] = {}
    source: Source = Source.TEXT
    shard_rows: tuple[int, int] = (64, 1_024)
    environment: tuple[str, ...] = ()

    takes_columns: bool = False  # a row is a set of arguments or parameters; otherwise it is a request of OpenAI's API
    groups_prefixes: bool = False  # rows that share a prompt prefix run one after another
    answers_live: bool = True
    is_local: bool = False  # its rows run on this machine, at no price per token, and their fields are checked strictly
    hands_over: bool = False  # a shard becomes one job at a provider, which runs on without a worker
    waits_for_service: bool = False  # failed rows wait until the service is back
    calls_openai: bool = False  # without a `base_url` it calls api.openai.com

    runs_user_code: bool = False
    starts_process: bool = False  # that would inherit the worker's niceness, and serves live requests
    limits_memory: bool = False  # itself: `limits.memory_bytes` is not set on the worker
    isolates: bool = False  # its process can run in namespaces
    takes_gpus: bool = False  # one per parallel rank, unless the model says how many
    loads_adapters: bool = False  # from folders; a service loads its own
    serves_base_models: bool = False  # deployments can be made of its models
    has_admin_paths: bool = False  # its server has paths that change it, which callers must not reach
    learns_poison: bool = False  # workers of one source share which requests crashed an engine


ENGINES: dict[str, EngineTraits] = {
    CONNECTOR: EngineTraits(
        class_path="batchmill.engines.remote.connector:ConnectorEngine",
        configured_as="connector",
        settings=_PLACEMENT | {"price", "engine_args", "deterministic"},
        limits=_SERVICE_LIMITS,
        source=Source.CONNECTOR,
        takes_columns=True,
        waits_for_service=True,
    ),
    FUNCTION: EngineTraits(
        class_path="batchmill.engines.function.engine:LocalFunctionEngine",
        configured_as="function",
        settings=_PLACEMENT | _REPLICAS | {"workers", "price", "deterministic"},
        limits=frozenset({"in_flight_max", "attempt_timeout_s", "memory_bytes"}),
        refusals={"python": "a function runs in batchmill's environment; `batchmill deploy` gives it its own"},
        source=Source.CODE,
        shard_rows=(1, 65_536),
        environment=("user_code", "devices", "hub_cache"),
        takes_columns=True,
        is_local=True,
        runs_user_code=True,
        limits_memory=True,
    ),
    FUNCTION_PROCESS: EngineTraits(
        class_path="batchmill.engines.function.engine:FunctionEngine",
        shard_rows=(1, 65_536),
        environment=("user_code", "devices", "hub_cache"),
        takes_columns=True,
        is_local=True,
        runs_user_code=True,
        starts_process=True,
        limits_memory=True,
        isolates=True,
    ),
    HTTP: EngineTraits(
        class_path="batchmill.engines.remote.http:HttpEngine",
        configured_as="openai",
        settings=_PLACEMENT | _OPENINGS | {"price", "adapters", "base_url", "api_key", "engine_args"},
        limits=_SERVICE_LIMITS,
        refusals={"workers": "one worker calls the service; in_flight_max bounds its requests"},
        groups_prefixes=True,
        waits_for_service=True,
        calls_openai=True,
    ),
    LLM: EngineTraits(
        class_path="batchmill.engines.llm.engine:LlmEngine",
        configured_as="vllm",
        settings=(
            _PLACEMENT | _OPENINGS | _REPLICAS | {"workers", "price", "adapters", "engine_args", "python", "secrets"}
        ),
        limits=_SCHEMA_LIMITS | {"in_flight_max", "attempts_max", "attempt_timeout_s", "adapters_max"},
        source=Source.WEIGHTS,
        shard_rows=(16, 64),
        environment=("vllm", "devices", "proxies"),
        groups_prefixes=True,
        is_local=True,
        starts_process=True,
        takes_gpus=True,
        loads_adapters=True,
        serves_base_models=True,
        has_admin_paths=True,
        learns_poison=True,
    ),
    ROUTES: EngineTraits(configured_as="routes", settings=frozenset({"routes"})),
    PROVIDER_BATCH: EngineTraits(
        class_path="batchmill.engines.provider_batch.engine:ProviderBatchEngine",
        configured_as=f"{PROVIDER}-batch",
        settings=_PLACEMENT | _OPENINGS | {"price", "base_url", "api_key", "engine_args"},
        limits=frozenset({"attempts_max", "connect_timeout_s", "attempt_timeout_s"}),
        answers_live=False,
        hands_over=True,
    ),
}


def traits_of(engine: str) -> EngineTraits:
    """Raises: UnknownName (`unknown_engine`)."""
    if engine not in ENGINES:
        raise unknown_engine(engine, ENGINES)
    return ENGINES[engine]


def unknown_engine(name: str, known: Iterable[str]) -> UnknownName:
    """The error for an engine that does not exist, with the nearest name."""
    names = list(known)
    matches = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {matches[0]!r}?" if matches else f"there are {', '.join(names)}"
    return UnknownName(f"no engine is called {name!r}; {hint}", code="unknown_engine")
