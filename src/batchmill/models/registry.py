"""Resolves `--model` and `[models.NAME]` to a complete ModelSpec.

It knows the settings of each engine, and refuses the settings of other engines by name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import fields, replace

from batchmill.config import WORKERS_MAX, Config, ModelEntry, limit_flaw
from batchmill.errors import InvalidInput, ModelFailed, UnknownName
from batchmill.models import functions
from batchmill.models.adapters import reading as adapters
from batchmill.models.connectors import reading
from batchmill.models.paths import OPENAI_LIKE, check_paths
from batchmill.models.providers import PROVIDERS
from batchmill.types import Limits, ModelSpec, Price
from batchmill.types.engine_traits import ENGINES, PROVIDER, ROUTES, EngineTraits, Source, unknown_engine
from batchmill.types.machines import GPUS_MAX
from batchmill.wire.features import check_features

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class EngineKind(Struct, frozen=True):
    """An engine under its configured name: its internal name, and its settings."""

    engine: str
    traits: EngineTraits
    settings: frozenset[str]
    provider: str | None = None  # of a batch API


def _kinds() -> Iterator[tuple[str, EngineKind]]:
    """Every engine that can be configured. An engine for batch APIs appears once for each provider."""
    for engine, traits in ENGINES.items():
        if PROVIDER not in traits.configured_as:
            yield traits.configured_as, EngineKind(engine, traits, traits.settings)
            continue
        for provider in PROVIDERS:
            settings = traits.settings if provider in OPENAI_LIKE else traits.settings - {"paths"}
            yield traits.configured_as.replace(PROVIDER, provider), EngineKind(engine, traits, settings, provider)


KINDS = {name: kind for name, kind in _kinds() if name}


class ModelFlags(Struct, frozen=True):
    """Settings of a model from the command line, which override the configuration. None: not given."""

    adapters: dict[str, str] = {}
    engine_args: dict[str, str | int | float | bool] = {}
    base_url: str | None = None
    api_key: str | None = None
    python: str | None = None
    workers: int | None = None
    gpus: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    in_flight_max: int | None = None
    attempt_timeout_s: float | None = None


def resolve(name: str, config: Config, *, cwd: Path, flags: ModelFlags = ModelFlags()) -> ModelSpec:
    """The model for `name`: a name in the configuration, or ENGINE:SOURCE.

    Raises: UnknownName for an unknown model or engine; InvalidInput for an invalid setting.
    """
    if name in config.models:
        entry, base, configured_name = config.models[name], config.base, name
    else:
        kind, colon, source = name.partition(":")
        if not colon or kind.endswith(".py"):
            raise UnknownName(_unknown_model(name, config, cwd), code="unknown_model")
        entry, base, configured_name = ModelEntry(engine=kind, source=source), cwd, ""
    kind = _kind(entry.engine)
    entry = _merge(configured_name, entry, base=base, flags=flags, cwd=cwd)
    _refuse_unused_settings(entry, kind)
    connector = reading.read_file(Path(entry.source)) if kind.traits.source is Source.CONNECTOR else None
    spec = ModelSpec(
        name=configured_name or (connector.name if connector is not None else _name_of(entry, kind)),
        engine=kind.engine,
        source=entry.source,
        adapters=entry.adapters,
        adapter_patterns=config.deployments.adapter_patterns if kind.traits.loads_adapters else [],
        adapter_rank=_adapter_rank(kind, entry, config),
        paths=entry.paths,
        features=entry.features,
        base_url=entry.base_url,
        api_key=entry.api_key,
        engine_args=dict(entry.engine_args),
        python=entry.python,
        workers=entry.workers,
        needs=entry.needs,
        scaling=entry.scaling,
        secrets=entry.secrets,
        price=Price.of(entry.price),
        limits=entry.limits,
        is_deterministic=entry.deterministic,
        connector=connector,
        provider=kind.provider,
        routes=_routes(name, entry, config, cwd),
    )
    _check(spec)
    return spec


def _routes(name: str, entry: ModelEntry, config: Config, cwd: Path) -> list[ModelSpec]:
    """The models of the configuration that are this model's routes."""
    if entry.engine != ROUTES:
        return []
    if len(entry.routes) < 2 or len(set(entry.routes)) < len(entry.routes):
        raise InvalidInput(f"routes of {name!r} must have two models or more, each once, not {entry.routes}")
    for route in entry.routes:
        if route not in config.models:
            raise UnknownName(
                f"the route {route!r} of {name!r} is not a model of the configuration", code="unknown_model"
            )
        if config.models[route].engine == ROUTES:
            raise InvalidInput(f"the route {route!r} of {name!r} has routes itself: name the models that do the work")
    specs = [resolve(route, config, cwd=cwd) for route in entry.routes]
    if any(spec.traits.runs_user_code for spec in specs):
        raise InvalidInput(f"a function cannot be a route: give {name!r} language models and services that are alike")
    if len({spec.takes_columns for spec in specs}) > 1:
        raise InvalidInput(f"the routes of {name!r} read rows differently: connectors only, or none of them")
    return specs


def _kind(name: str) -> EngineKind:
    if name not in KINDS:
        raise unknown_engine(name, list(KINDS))
    return KINDS[name]


def _unknown_model(name: str, config: Config, cwd: Path) -> str:
    if re.search(r"\.py:", name):
        return f"{name!r} is not a model: write --model function:{name}"
    if (cwd / name).is_dir():
        return f"{name!r} is not a model of the configuration: write --model vllm:{name} for the model in that folder"
    close_names = difflib.get_close_matches(name, config.models, n=1)
    if close_names:
        return f"no model is called {name!r}; did you mean {close_names[0]!r}?"
    choices = f"known are {', '.join(config.models)}" if config.models else "the configuration has none"
    return f"no model is called {name!r}: {choices}; ENGINE:SOURCE defines one in place, with {', '.join(KINDS)}"


def _merge(name: str, entry: ModelEntry, *, base: Path, flags: ModelFlags, cwd: Path) -> ModelEntry:
    """Apply the flags to the entry, and make all paths absolute: those of flags from `cwd`, the others from `base`."""
    reference = {each.name: getattr(flags, each.name) for each in fields(flags)}
    limits = {name: reference[name] for name in _LIMIT_FLAGS if reference[name] is not None}
    names = ("base_url", "api_key", "python", "workers", "gpus")
    overrides: dict[str, Any] = {name: reference[name] for name in names if reference[name] is not None}
    kind = _kind(entry.engine)
    adapters_of_entry = {name: _adapter(kind, name, source, base) for name, source in entry.adapters.items()}
    adapters_of_flags = {name: _adapter(kind, name, source, cwd) for name, source in flags.adapters.items()}
    python = overrides.get("python", entry.python)
    if python is not None:
        python = _interpreter(python, cwd if flags.python is not None else base)
    return replace(
        entry,
        **overrides
        | {
            "source": _source(name, entry, kind, base),
            "adapters": adapters_of_entry | adapters_of_flags,
            "engine_args": _engine_args(entry.engine_args, base) | _engine_args(flags.engine_args, cwd),
            "python": python,
            "api_key": _secret(overrides.get("api_key", entry.api_key), base),
            "secrets": {name: _secret(reference, base, f"secrets.{name}") for name, reference in entry.secrets.items()},
            "limits": replace(entry.limits, **limits),
        },
    )


_LIMIT_FLAGS = ("requests_per_minute", "tokens_per_minute", "in_flight_max", "attempt_timeout_s")


def _source(name: str, entry: ModelEntry, kind: EngineKind, base: Path) -> str:
    if entry.engine == ROUTES:
        if entry.source:
            raise InvalidInput("a model with routes has no source of its own: each route names its own")
        return name
    if not entry.source:
        raise InvalidInput(f"the engine {entry.engine!r} needs a model: write {entry.engine}:SOURCE")
    match kind.traits.source:
        case Source.CODE:
            source = functions.absolute(entry.source, base)
            try:
                functions.digest(source)
            except ModelFailed as error:
                raise InvalidInput(error.message, code="unknown_function") from None
            return source
        case Source.CONNECTOR:
            return _file(entry.source, base)
        case Source.WEIGHTS:
            return _path_or_hub_id(entry.source, base, "model")
        case Source.TEXT:
            return entry.source


def _file(text: str, base: Path) -> str:
    path = base / Path(text).expanduser()
    if not path.is_file():
        raise InvalidInput(f"there is no connector file at {path}", code="unknown_connector")
    return str(path.resolve())


def _path_or_hub_id(text: str, base: Path, item: str) -> str:
    """The absolute path of an existing file or folder, or `text` itself if it can be an id of a model hub."""
    path = base / Path(text).expanduser()
    if path.exists():
        return str(path.resolve())
    if text.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(text):
        raise InvalidInput(f"there is no {item} at {path}", code=f"unknown_{item}")
    return text


def _adapter(kind: EngineKind, name: str, source: str, base: Path) -> str:
    if "adapters" in kind.settings and not kind.traits.loads_adapters:
        if source != name:
            raise InvalidInput(
                f"the service at base_url has its own adapters: write {name}={name}, not {name}={source}"
            )
        return source
    folder = _path_or_hub_id(source, base, "adapter")
    if folder != source and not (Path(folder) / "adapter_config.json").is_file():
        raise InvalidInput(f"the adapter {name!r} at {folder} has no adapter_config.json", code="unknown_adapter")
    return folder


def _adapter_rank(kind: EngineKind, entry: ModelEntry, config: Config) -> int:
    """The maximum rank that our own engine must support, for its adapters and for those that rows may name."""
    if not kind.traits.loads_adapters or not (entry.adapters or config.deployments.adapter_patterns):
        return 0
    ranks = [adapters.RANK_DEFAULT]
    for path in entry.adapters.values():
        if Path(path).is_absolute():
            try:
                ranks.append(adapters.rank_of(Path(path)))
            except InvalidInput:  # only rows that name it fail
                continue
    return adapters.engine_rank_for(ranks)


def _interpreter(text: str, base: Path) -> str:
    """The absolute path of an interpreter. Symbolic links stay, because a virtual environment's interpreter is one."""
    path = base / Path(text).expanduser()
    if not path.is_file():
        raise InvalidInput(f"there is no Python interpreter at {path}", code="unknown_python")
    return str(path)


def _secret(reference: str | None, base: Path, key: str = "api_key") -> str | None:
    """A reference to a key, with an absolute path. Errors do not repeat the text, which may be the key itself."""
    if reference is None:
        return None
    kind, _, location = reference.partition(":")
    if kind not in ("env", "file", "secret") or not location:
        raise InvalidInput(
            f'{key} must be "env:NAME", "file:PATH" or "secret:NAME", never the key itself', code="invalid_secret"
        )
    return reference if kind != "file" else f"file:{base / Path(location).expanduser()}"


def _engine_args(args: dict[str, Any], base: Path) -> dict[str, Any]:
    """The engine's arguments, with absolute paths in references to key files."""
    return {
        name: _secret(value, base) if isinstance(value, str) and value.startswith("file:") else value
        for name, value in args.items()
    }


def _refuse_unused_settings(entry: ModelEntry, kind: EngineKind) -> None:
    """Refuse settings of other engines, which would be ignored."""
    blank = ModelEntry(engine="", source="")
    names = [each.name for each in fields(ModelEntry) if each.name not in ("engine", "source", "limits")]
    for name in names:
        if name not in kind.settings and getattr(entry, name) != getattr(blank, name):
            raise InvalidInput(_unused_setting_message(name, entry.engine, kind, kind.settings))
    for each in fields(Limits):
        if each.name not in kind.traits.limits and getattr(entry.limits, each.name) != each.default:
            known_limits = frozenset(f"limits.{limit}" for limit in kind.traits.limits)
            raise InvalidInput(_unused_setting_message(f"limits.{each.name}", entry.engine, kind, known_limits))


def _unused_setting_message(name: str, engine: str, kind: EngineKind, used_settings: frozenset[str]) -> str:
    why = kind.traits.refusals.get(name) or f"it knows {', '.join(sorted(used_settings))}"
    return f"the engine {engine!r} does not use {name}: {why}"


def _name_of(entry: ModelEntry, kind: EngineKind) -> str:
    match kind.traits.source:
        case Source.CODE:
            return functions.parse(entry.source).attribute
        case Source.WEIGHTS:
            return Path(entry.source).name
        case _:
            return entry.source


def _check(spec: ModelSpec) -> None:
    if not 1 <= spec.workers <= WORKERS_MAX:
        raise InvalidInput(f"workers must be 1 to {WORKERS_MAX}, not {spec.workers}")
    if not 0 <= spec.needs.gpus <= GPUS_MAX:
        raise InvalidInput(f"gpus must be 0 to {GPUS_MAX}, not {spec.needs.gpus}")
    if spec.workers != 1 and spec.scaling is not None:
        raise InvalidInput(
            f"{spec.workers} workers: the configuration gives {spec.name!r} {spec.scaling.replicas_min} to "
            f"{spec.scaling.replicas_max} replicas; leave the flag out"
        )
    check_paths(spec.paths, has_admin_paths=spec.traits.has_admin_paths)
    check_features(spec.features)
    for name in spec.adapters:
        if name in (spec.name, spec.source):
            raise InvalidInput(f"the adapter {name!r} has the name of its model: give it another")
    if spec.base_url is not None and not re.match(r"https?://[^\s/]+", spec.base_url):
        raise InvalidInput(f"base_url must begin with http:// or https:// and a host, not {spec.base_url!r}")
    for name in _LIMIT_FLAGS:
        if flaw := limit_flaw(name, getattr(spec.limits, name)):
            raise InvalidInput(flaw)


def checked_budget(budget: float | None, models: list[ModelSpec]) -> float | None:
    """Check and return the budget. It needs the price of every model. Raises: InvalidInput."""
    routes = [way for model in models for way in (model.routes if model.needs_route else [model])]
    unpriced = [way.name for way in routes if way.price is None]
    if budget is not None and unpriced:
        raise InvalidInput(
            f"--budget needs a price of every model: give models.{unpriced[0]}.price in the configuration",
            code="unknown_price",
        )
    return budget
