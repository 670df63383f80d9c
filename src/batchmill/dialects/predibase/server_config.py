"""Turn Predibase's config fields and the flags of LoRAX's launcher and vLLM into settings of an engine.

A field without a counterpart is refused by its name, with the way out; null and absent mean "not set".
`llms/arguments.py` decides which engine arguments callers may set. Source: predibase 2025.10.3, `config.py` and
`beta/config.py`; its page on DeploymentConfig; LoRAX's launcher, `lorax-launcher --help`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import fields, replace

from batchmill.errors import InvalidInput
from batchmill.server.bodies import InvalidField
from batchmill.services.llms.arguments import ALLOWED, checked
from batchmill.types import LlmSettings, ModelSpec, Scaling

FLAG = "max-model-len"
CONFIG_BYTES_MAX = 4 * 1024 * 1024


class _Text(Struct):
    max_position_embeddings: int | None = None


class _Config(Struct):
    """The fields of a model's config.json that give its window; a multimodal model has them in `text_config`."""

    max_position_embeddings: int | None = None
    n_positions: int | None = None
    text_config: _Text | None = None


def context_window(model: ModelSpec) -> int | None:
    """Return a model's window in tokens from its engine arguments or its config.json; None if neither has it."""
    for name, value in model.engine_args.items():
        if name.lstrip("-").replace("_", "-") == FLAG and type(value) is int and value > 0:
            return value
    return _window_of_folder(model.source)


@lru_cache(maxsize=256)
def _window_of_folder(source: str) -> int | None:
    """Read the window from a folder's config.json; None for a model of a hub, whose files only the engine has."""
    path = Path(source) / "config.json"
    try:
        if not Path(source).is_absolute() or path.stat().st_size > CONFIG_BYTES_MAX:
            return None
        config = msgspec.json.decode(path.read_bytes(), type=_Config)
    except (OSError, msgspec.MsgspecError, RecursionError):
        return None
    text = None if config.text_config is None else config.text_config.max_position_embeddings
    return config.max_position_embeddings or config.n_positions or text


Value = str | int | float | bool

SHOWN_CHARS = 80  # of a client's text, in a message
# A flag of LoRAX's launcher -> vLLM's argument with the same meaning.
VLLM_ARGUMENTS: dict[str, str] = {
    "max-total-tokens": "max-model-len",
    "max-batch-prefill-tokens": "max-num-batched-tokens",
    "max-concurrent-requests": "max-num-seqs",
    "cuda-memory-fraction": "gpu-memory-utilization",
    "num-shard": "tensor-parallel-size",
    "prefix-caching": "enable-prefix-caching",
    "chunked-prefill": "enable-chunked-prefill",
    "quantize": "quantization",
}
QUANTIZE, PRELOADED, TASK = "quantize", "preloaded-adapter-ids", "task"
COMPILE, EMBEDDING = "compile", "embedding-model"
# `--task` of older versions of vLLM, which Predibase's client still sends.
TASKS: dict[str, dict[str, Value]] = {
    "generate": {"runner": "generate"},
    "classify": {"runner": "pooling", "convert": "classify"},
    "embed": {"runner": "pooling", "convert": "embed"},
    "embedding": {"runner": "pooling", "convert": "embed"},
}
_ADAPTERS = "the server's configuration sets how many adapters an engine holds (models.NAME.limits.adapters_max)"
_SCHEDULER = "vLLM decides when waiting requests join a batch"
_LIMITS = "batchmill has no such limit for requests"
_LOCATION = "the server decides where an engine listens and keeps files"
_BASE = "baseModel names the model"
# A flag of LoRAX's launcher without a counterpart -> why, and what to use.
NO_FLAG_COUNTERPART: dict[str, str] = {
    "max-input-length": "vLLM limits prompt and answer together: use --max-total-tokens",
    "max-input-tokens": "vLLM limits prompt and answer together: use --max-total-tokens",
    "max-batch-total-tokens": "vLLM uses the memory that it has: use --cuda-memory-fraction",
    "max-active-adapters": _ADAPTERS,
    "adapter-memory-fraction": _ADAPTERS,
    "adapter-cycle-time-s": "rows of one adapter run together while the next adapter loads",
    "waiting-served-ratio": _SCHEDULER,
    "max-waiting-tokens": _SCHEDULER,
    "eager-prefill": _SCHEDULER,
    "max-best-of": _LIMITS,
    "max-stop-sequences": _LIMITS,
    "max-client-batch-size": _LIMITS,
    "validation-workers": "vLLM has no validation workers",
    "sharded": "use --num-shard",
    "model-id": _BASE,
    "source": _BASE,
    "revision": _BASE,
    "adapter-id": "rows and requests name their adapter; --preloaded-adapter-ids loads it at the start",
    "adapter-source": "an adapter is registered with its source",
    "default-adapter-source": "an adapter is registered with its source",
    "predibase-api-key": "nothing is fetched from Predibase",
    "speculative-tokens": "deployments do not speculate",
    "speculation-max-batch-size": "deployments do not speculate",
    "trust-remote-code": "it runs the model's code; only the operator of the server can configure such a model",
    "disable-custom-kernels": "vLLM does not have LoRAX's kernels",
    "watermark-gamma": "answers are not watermarked",
    "watermark-delta": "answers are not watermarked",
    "tokenizer-config-path": _LOCATION,
    "huggingface-hub-cache": _LOCATION,
    "weights-cache-override": _LOCATION,
    "hostname": _LOCATION,
    "port": _LOCATION,
    "shard-uds-path": _LOCATION,
    "master-addr": _LOCATION,
    "master-port": _LOCATION,
    "json-output": "the server's configuration sets its log format",
    "otlp-endpoint": "the server's configuration sets where traces go",
    "cors-allow-origin": _LOCATION,
    "cors-allow-header": _LOCATION,
    "cors-expose-header": _LOCATION,
    "cors-allow-method": _LOCATION,
    "cors-allow-credentials": _LOCATION,
    "ngrok": _LOCATION,
    "ngrok-authtoken": _LOCATION,
    "ngrok-edge": _LOCATION,
    "env": "it only prints LoRAX's environment",
    "download-only": "an engine must answer requests",
    "backend": "vLLM chooses its kernels itself",
    "merge-adapter-weights": "adapters are kept apart from their base model",
    "disable-sgmv": "vLLM does not have LoRAX's kernels",
    "memory-wiggle-room": "vLLM uses the memory that it has: use --cuda-memory-fraction",
}
_FLAG = re.compile(r"--?([A-Za-z][A-Za-z0-9._-]*)(?:=(.*))?", re.DOTALL)
_WHOLE, _REAL = re.compile(r"[+-]?\d{1,18}"), re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+)([eE][+-]?\d+)?")


class Launch(Struct, frozen=True):
    """The settings that flags make. `quantize` is LoRAX's name of a quantization."""

    engine_args: dict[str, Value] = {}
    quantize: str | None = None
    preloaded_adapters: list[str] = []


def read_flags(words: Sequence[str]) -> Launch:
    """Parse the words of `customArgs`. Raises: InvalidInput, naming the flag."""
    arguments: dict[str, Value] = {}
    quantize: str | None = None
    preloaded: list[str] = []
    for name, text in _flags(words):
        if name in NO_FLAG_COUNTERPART:
            raise _refused_flag(name, NO_FLAG_COUNTERPART[name])
        if name == PRELOADED:
            preloaded += [each for each in _require_value(name, text).split(",") if each]
        elif name == QUANTIZE:
            quantize = _require_value(name, text)
        else:
            for argument, value in _arguments_of_flag(name, text).items():
                if argument in arguments and arguments[argument] != value:
                    raise InvalidInput(
                        f"customArgs sets {argument} twice to different values: set it once", code="repeated_parameter"
                    )
                arguments[argument] = value
    return Launch(arguments, quantize, preloaded)


def _flags(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield each flag and its value: `--flag value`, `--flag=value`, `--flag`. A list flag takes several values."""
    name: str | None = None
    had_value = False
    for word in words:
        match = _FLAG.fullmatch(word)
        if match is not None and not _REAL.fullmatch(word):
            if name is not None and not had_value:
                yield name, None
            name, had_value = match[1].replace("_", "-").lower(), match[2] is not None
            if match[2] is not None:
                yield name, match[2]
        elif name is None or (had_value and name != PRELOADED):
            raise InvalidInput(
                f"customArgs has {word[:SHOWN_CHARS]!r} where a flag is expected: write ['--flag', 'value', …]",
                code="invalid_value",
            )
        else:
            had_value = True
            yield name, word
    if name is not None and not had_value:
        yield name, None


def _arguments_of_flag(name: str, text: str | None) -> dict[str, Value]:
    if name == TASK:
        task = _require_value(name, text)
        if task not in TASKS:
            raise InvalidInput(
                f"customArgs: --task {task[:SHOWN_CHARS]!r} is not one of {', '.join(TASKS)}", code="invalid_value"
            )
        return TASKS[task]
    if name == COMPILE:
        return {"enforce-eager": not _value(text)}
    if name == EMBEDDING:
        return TASKS["embed"] if _value(text) else {}
    if name.startswith("no-") and text is None:
        return {name.removeprefix("no-"): False}
    return {VLLM_ARGUMENTS.get(name, name): _value(text)}


def _value(text: str | None) -> Value:
    """Parse a value of the command line; a flag without a value is true."""
    if text is None:
        return True
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if _REAL.fullmatch(text) else text


def _require_value(name: str, text: str | None) -> str:
    if not text:
        raise InvalidInput(f"customArgs: --{name} needs a value", code="invalid_value")
    return text


def _refused_flag(name: str, why: str) -> InvalidInput:
    return InvalidInput(
        f"customArgs: --{name} has no counterpart here: {why}; leave it out", code="parameter_not_allowed"
    )


TOKEN_CHARS_MAX = 1024
ADAPTERS_MAX = 256  # that an engine loads at its start
FLAGS_MAX = 256
SPECULATORS = (None, "disabled", "auto")  # auto: the server chooses, and it chooses no speculation
# Predibase's name -> vLLM's name. None: the weights are used as they are.
QUANTIZATIONS: dict[str, str | None] = {"none": None, "fp8": "fp8", "awq": "awq", "gptq": "gptq"}
NO_COUNTERPART: dict[str, str] = {
    "bitsandbytes": "vLLM no longer reads it; use fp8, or a base model whose weights are quantized (awq, gptq)",
    "bitsandbytes-nf4": "vLLM no longer reads it; use fp8, or a base model whose weights are quantized (awq, gptq)",
    "bitsandbytes-fp4": "vLLM no longer reads it; use fp8, or a base model whose weights are quantized (awq, gptq)",
    "eetq": "only LoRAX has it; use fp8",
    "hqq-4bit": "only LoRAX has it; use a base model whose weights are quantized (awq, gptq)",
    "hqq-3bit": "only LoRAX has it; use a base model whose weights are quantized (awq, gptq)",
    "hqq-2bit": "only LoRAX has it; use a base model whose weights are quantized (awq, gptq)",
}
# Engine arguments that a field of the config sets.
FIELD_ARGUMENTS = frozenset(
    ["max-model-len", "max-num-batched-tokens", "enable-prefix-caching", "enable-chunked-prefill", "quantization"]
)
# Fields that are refused with any value -> why, and what to do.
REFUSED: dict[str, str] = {
    "loraxImageTag": "batchmill runs vLLM and no LoRAX image; leave it out",
    "backend": "it names a version of Predibase's own engine, and batchmill only runs vLLM; leave it out",
    "accelerator": "replicas run on the GPUs of this machine (models.NAME.gpus in batchmill.toml); leave it out",
    "computeSpec": "replicas run on the GPUs of this machine (models.NAME.gpus in batchmill.toml); leave it out",
    "speculationDisableByBatchSize": "deployments do not speculate; leave it out",
}
# Fields that are refused when they are true; false has no effect.
REFUSED_TRUE: dict[str, str] = {
    "requestLoggingEnabled": "batchmill keeps no log of requests and answers; leave it out",
    "directIngress": "a deployment answers at this server's own address, with nothing in between; leave it out",
    "usesGuaranteedCapacity": "batchmill sells no capacity; leave it out, and keep replicas running with min_replicas",
    "mergeAdapter": "adapters are kept apart from their base model, which also answers without them; leave it out",
}


class ServerConfig(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The client's `BatchInferenceServerConfig`."""

    base_model: str
    custom_args: list[str] | None = None
    hf_token: str | None = None
    lorax_image_tag: str | None = None
    quantization: str | None = None
    backend: str | None = None


class DeploymentConfig(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The client's `DeploymentConfig` and `UpdateDeploymentConfig`; `base_model` is only required to create."""

    base_model: str | None = None
    custom_args: list[str] | None = None
    cooldown_time: int | None = None
    hf_token: str | None = None
    min_replicas: int | None = None
    max_replicas: int | None = None
    scale_up_request_threshold: int | None = None
    max_total_tokens: int | None = None
    lorax_image_tag: str | None = None
    request_logging_enabled: bool | None = None
    direct_ingress: bool | None = None
    preloaded_adapters: list[str] | None = None
    speculator: str | None = None
    prefix_caching: bool | None = None
    backend: str | None = None
    disable_adapters: bool | None = None
    uses_guaranteed_capacity: bool | None = None
    chunked_prefill: bool | None = None
    speculation_disable_by_batch_size: int | None = None
    max_num_batched_tokens: int | None = None
    cache_model: bool | None = None
    merge_adapter: bool | None = None
    compute_spec: dict[str, Any] | None = None
    quantization: str | None = None
    accelerator: str | None = None


def of_server_config(config: ServerConfig) -> LlmSettings:
    """Return the engine settings of a batch inference job. `hf_token` is in plain text: store it as a secret.

    Raises: InvalidInput, naming the field.
    """
    _refuse_unsupported(config)
    launch = read_flags(_bounded("customArgs", config.custom_args, FLAGS_MAX))
    return LlmSettings(
        base_model=_base_model(config.base_model),
        engine_args=_engine_args({}, config.quantization, launch),
        hf_token=_token(config.hf_token),
        preloaded_adapters=_bounded("customArgs", launch.preloaded_adapters, ADAPTERS_MAX),
    )


def of_deployment_config(config: DeploymentConfig, current: LlmSettings | None = None) -> LlmSettings:
    """Return the engine settings of a deployment; for an update, `current` with the changes.

    `customArgs` in an update replaces all earlier flags, because there is no other way to remove one. Arguments that
    fields set are unchanged.

    Raises: InvalidInput, naming the field.
    """
    _refuse_unsupported(config)
    current = LlmSettings(base_model="") if current is None else current
    launch = read_flags(_bounded("customArgs", config.custom_args, FLAGS_MAX))
    fields_set = {
        "max-model-len": _count("maxTotalTokens", config.max_total_tokens),
        "max-num-batched-tokens": _count("maxNumBatchedTokens", config.max_num_batched_tokens),
        "enable-prefix-caching": config.prefix_caching,
        "enable-chunked-prefill": config.chunked_prefill,
    }
    arguments = _engine_args(
        {name: value for name, value in fields_set.items() if value is not None}, config.quantization, launch
    )
    has_adapters = config.preloaded_adapters is not None or bool(launch.preloaded_adapters)
    preloaded = [*(config.preloaded_adapters or []), *launch.preloaded_adapters]
    adapters = _bounded("preloadedAdapters", preloaded, ADAPTERS_MAX)
    takes_adapters = current.takes_adapters if config.disable_adapters is None else not config.disable_adapters
    if adapters and not takes_adapters:
        raise InvalidInput(
            "preloadedAdapters names adapters and disableAdapters turns them off: set one of the two",
            code="invalid_value",
        )
    keeps_flags = config.custom_args is None
    unchanged = {name: value for name, value in current.engine_args.items() if keeps_flags or name in FIELD_ARGUMENTS}
    if config.quantization is not None or launch.quantize is not None:
        unchanged.pop("quantization", None)
    return replace(
        current,
        base_model=_base_model(current.base_model if config.base_model is None else config.base_model),
        engine_args=unchanged | arguments,
        hf_token=_token(config.hf_token) or current.hf_token,
        scaling=_scaling(config, current.scaling),
        takes_adapters=takes_adapters,
        preloaded_adapters=list(dict.fromkeys(adapters)) if has_adapters else current.preloaded_adapters,
    )


def config_of(settings: LlmSettings) -> DeploymentConfig:
    """Return settings as a config that a client can send back, or use for a job.

    A job's config has few fields beside `customArgs`. So `customArgs` contains all engine arguments, also those that
    have a field. Arguments that callers may not set are left out. A token is never shown.
    """
    named = {name.lstrip("-").replace("_", "-"): value for name, value in settings.engine_args.items()}
    arguments = {name: value for name, value in named.items() if name in ALLOWED}
    quantization, scaling = arguments.pop("quantization", None), settings.scaling
    return DeploymentConfig(
        base_model=settings.base_model,
        max_total_tokens=_int_or_none(arguments.get("max-model-len")),
        max_num_batched_tokens=_int_or_none(arguments.get("max-num-batched-tokens")),
        prefix_caching=_bool_or_none(arguments.get("enable-prefix-caching")),
        chunked_prefill=_bool_or_none(arguments.get("enable-chunked-prefill")),
        quantization=None if quantization is None else str(quantization),
        custom_args=[_flag_of(name, value) for name, value in sorted(arguments.items())] or None,
        cooldown_time=None if scaling.cooldown_s is None else math.ceil(scaling.cooldown_s),
        min_replicas=scaling.replicas_min,
        max_replicas=scaling.replicas_max,
        scale_up_request_threshold=scaling.scale_up_requests,
        preloaded_adapters=settings.preloaded_adapters or None,
        disable_adapters=not settings.takes_adapters,
    )


def _int_or_none(value: Value | None) -> int | None:
    return value if type(value) is int else None


def _bool_or_none(value: Value | None) -> bool | None:
    return value if isinstance(value, bool) else None


def _flag_of(name: str, value: Value) -> str:
    """Write an engine argument as a flag for `read_flags`."""
    return f"--{name}={str(value).lower() if isinstance(value, bool) else value}"


def _refuse_unsupported(config: ServerConfig | DeploymentConfig) -> None:
    for field in fields(config):
        name, value = field.encode_name, getattr(config, field.name)
        if name in REFUSED and value is not None:
            raise _refused_field(name, value, REFUSED[name])
        if name in REFUSED_TRUE and value:
            raise _refused_field(name, value, REFUSED_TRUE[name])
        if name == "speculator" and value not in SPECULATORS:
            raise _refused_field(name, value, "deployments do not speculate; leave it out, or set it to 'disabled'")


def _refused_field(name: str, value: Any, why: str) -> InvalidField:
    message = f"{name} is {str(value)[:SHOWN_CHARS]!r}: {why}"
    return InvalidField(message, code="parameter_not_allowed", param=name)


def _base_model(name: str | None) -> str:
    if not name:
        raise InvalidField(
            "Missing required parameter: 'baseModel'", code="missing_required_parameter", param="baseModel"
        )
    return name


def _engine_args(fields_set: dict[str, Value], quantization: str | None, launch: Launch) -> dict[str, Value]:
    """Merge the arguments of fields and flags and check that callers may set them. A field overrides the same flag."""
    methods = {} if quantization is None else {"quantization": _quantization("quantization", quantization)}
    if launch.quantize is not None:
        methods["customArgs"] = _quantization("customArgs: --quantize", launch.quantize)
    if len(set(methods.values())) > 1:
        raise InvalidInput(
            "quantization and customArgs ask for different quantizations: set one of the two", code="repeated_parameter"
        )
    for method in methods.values():
        fields_set = fields_set if method is None else {**fields_set, "quantization": method}
    return checked(launch.engine_args | fields_set)


def _quantization(field: str, name: str) -> str | None:
    if name in QUANTIZATIONS:
        return QUANTIZATIONS[name]
    why = NO_COUNTERPART.get(name, f"use one of {', '.join(QUANTIZATIONS)}")
    raise InvalidField(
        f"{field} is {name[:SHOWN_CHARS]!r}: {why}", code="parameter_not_allowed", param=field.partition(":")[0]
    )


def _token(token: str | None) -> str | None:
    """Check a token that a client sent."""
    if not token:
        return None
    if len(token) > TOKEN_CHARS_MAX or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidField(
            "hfToken is not a token: a token has up to 1,024 printable ASCII characters and no spaces",
            code="invalid_value",
            param="hfToken",
        )
    return token


def _count(name: str, value: int | None) -> int | None:
    if value is not None and not 1 <= value < 2**31:
        raise InvalidField(
            f"Invalid value for {name!r}: {value} is not from 1 to {2**31 - 1:,}", code="invalid_value", param=name
        )
    return value


def _bounded(name: str, values: list[str] | None, items_max: int) -> list[str]:
    items = list(values or [])
    if len(items) > items_max:
        raise InvalidField(
            f"{name} has {len(items):,} items; the limit is {items_max:,}", code="invalid_value", param=name
        )
    return items


def _scaling(config: DeploymentConfig, current: Scaling) -> Scaling:
    replicas_min = current.replicas_min if config.min_replicas is None else config.min_replicas
    replicas_max = current.replicas_max if config.max_replicas is None else config.max_replicas
    if replicas_min < 0 or replicas_max < 1 or replicas_min > replicas_max:
        message = (
            f"Invalid value for 'minReplicas': {replicas_min} to {replicas_max} replicas is not a range: "
            "0 <= minReplicas <= maxReplicas, and maxReplicas is at least 1"
        )
        raise InvalidField(message, code="invalid_value", param="minReplicas")
    cooldown = _count("cooldownTime", config.cooldown_time)
    scale_up_requests = _count("scaleUpRequestThreshold", config.scale_up_request_threshold)
    return Scaling(
        replicas_min=replicas_min,
        replicas_max=replicas_max,
        cooldown_s=current.cooldown_s if cooldown is None else float(cooldown),
        scale_up_requests=current.scale_up_requests if scale_up_requests is None else scale_up_requests,
    )
