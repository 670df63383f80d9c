"""How an engine is to run, in Predibase's fields and in flags of LoRAX's launcher and vLLM, as settings of ours.

A field without a counterpart here is refused by its name, with the way out; null and absent mean "not set". Which
arguments callers may set is not known here. Source: predibase 2025.10.3, `config.py` and `beta/config.py`; its page on
DeploymentConfig; LoRAX's launcher, `lorax-launcher --help`.
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
    """Of a model's config.json, what says its length; of one that sees images, the part for text says it."""

    max_position_embeddings: int | None = None
    n_positions: int | None = None
    text_config: _Text | None = None


def context_window(model: ModelSpec) -> int | None:
    """What its engine was told, or what its folder says; None where neither does."""
    for name, value in model.engine_args.items():
        if name.lstrip("-").replace("_", "-") == FLAG and type(value) is int and value > 0:
            return value
    return _of_folder(model.source)


@lru_cache(maxsize=256)
def _of_folder(source: str) -> int | None:
    """Of a hub's id nothing is known: its files are the engine's."""
    path = Path(source) / "config.json"
    try:
        if not Path(source).is_absolute() or path.stat().st_size > CONFIG_BYTES_MAX:
            return None
        adapter_config = msgspec.json.decode(path.read_bytes(), type=_Config)
    except (OSError, msgspec.MsgspecError, RecursionError):
        return None
    text = None if adapter_config.text_config is None else adapter_config.text_config.max_position_embeddings
    return adapter_config.max_position_embeddings or adapter_config.n_positions or text


Value = str | int | float | bool

SHOWN_CHARS = 80  # of what somebody sent, in a message
# A flag of the launcher -> the argument of vLLM that says the same.
SAME: dict[str, str] = {
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
# `--task` of vLLM as it was once, which Predibase's client still sends.
TASKS: dict[str, dict[str, Value]] = {
    "generate": {"runner": "generate"},
    "classify": {"runner": "pooling", "convert": "classify"},
    "embed": {"runner": "pooling", "convert": "embed"},
    "embedding": {"runner": "pooling", "convert": "embed"},
}
_ADAPTERS = "how many adapters an engine holds is the server's to say (models.NAME.limits.adapters_max)"
_SCHEDULER = "vLLM decides by itself when waiting requests join"
_LIMITS = "requests are not limited in this here"
_PLACE = "it says where an engine listens or keeps files, which is the server's to say"
_BASE = "the model is what baseModel says"
# A flag of the launcher without a counterpart -> why.
NONE_SUCH: dict[str, str] = {
    "max-input-length": "vLLM bounds prompt and answer together: say --max-total-tokens",
    "max-input-tokens": "vLLM bounds prompt and answer together: say --max-total-tokens",
    "max-batch-total-tokens": "vLLM uses the memory that it has: say --cuda-memory-fraction",
    "max-active-adapters": _ADAPTERS,
    "adapter-memory-fraction": _ADAPTERS,
    "adapter-cycle-time-s": "rows of one adapter run together, and the next is loaded meanwhile",
    "waiting-served-ratio": _SCHEDULER,
    "max-waiting-tokens": _SCHEDULER,
    "eager-prefill": _SCHEDULER,
    "max-best-of": _LIMITS,
    "max-stop-sequences": _LIMITS,
    "max-client-batch-size": _LIMITS,
    "validation-workers": "vLLM has none",
    "sharded": "say --num-shard",
    "model-id": _BASE,
    "source": _BASE,
    "revision": _BASE,
    "adapter-id": "rows and requests name their adapter; --preloaded-adapter-ids has it loaded at once",
    "adapter-source": "an adapter is registered with its source",
    "default-adapter-source": "an adapter is registered with its source",
    "predibase-api-key": "nothing is fetched from Predibase",
    "speculative-tokens": "deployments do not speculate",
    "speculation-max-batch-size": "deployments do not speculate",
    "trust-remote-code": "it runs code of the model; only the operator of the server configures such a model",
    "disable-custom-kernels": "vLLM has none of LoRAX's kernels",
    "watermark-gamma": "answers are not watermarked",
    "watermark-delta": "answers are not watermarked",
    "tokenizer-config-path": _PLACE,
    "huggingface-hub-cache": _PLACE,
    "weights-cache-override": _PLACE,
    "hostname": _PLACE,
    "port": _PLACE,
    "shard-uds-path": _PLACE,
    "master-addr": _PLACE,
    "master-port": _PLACE,
    "json-output": "the server's log is its own",
    "otlp-endpoint": "the server's traces are its own",
    "cors-allow-origin": _PLACE,
    "cors-allow-header": _PLACE,
    "cors-expose-header": _PLACE,
    "cors-allow-method": _PLACE,
    "cors-allow-credentials": _PLACE,
    "ngrok": _PLACE,
    "ngrok-authtoken": _PLACE,
    "ngrok-edge": _PLACE,
    "env": "it prints where LoRAX runs",
    "download-only": "an engine is there to answer",
    "backend": "vLLM chooses its kernels by itself",
    "merge-adapter-weights": "adapters stay beside their base model",
    "disable-sgmv": "vLLM has none of LoRAX's kernels",
    "memory-wiggle-room": "vLLM uses the memory that it has: say --cuda-memory-fraction",
}
_FLAG = re.compile(r"--?([A-Za-z][A-Za-z0-9._-]*)(?:=(.*))?", re.DOTALL)
_WHOLE, _REAL = re.compile(r"[+-]?\d{1,18}"), re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+)([eE][+-]?\d+)?")


class Launch(Struct, frozen=True):
    """What the flags say. `quantize` is LoRAX's name of a quantization."""

    engine_args: dict[str, Value] = {}
    quantize: str | None = None
    preloaded_adapters: list[str] = []


def read_flags(words: Sequence[str]) -> Launch:
    """What the words of `customArgs` say. Raises: InvalidInput, naming the flag."""
    arguments: dict[str, Value] = {}
    quantize: str | None = None
    preloaded: list[str] = []
    for name, text in _flags(words):
        if name in NONE_SUCH:
            raise _refused(name, NONE_SUCH[name])
        if name == PRELOADED:
            preloaded += [each for each in _needed(name, text).split(",") if each]
        elif name == QUANTIZE:
            quantize = _needed(name, text)
        else:
            for argument, value in _as_arguments(name, text).items():
                if argument in arguments and arguments[argument] != value:
                    raise InvalidInput(f"customArgs says {argument} twice, and differently", code="repeated_parameter")
                arguments[argument] = value
    return Launch(arguments, quantize, preloaded)


def _flags(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Each flag and its value: `--flag value`, `--flag=value`, `--flag`. A repeated list has its values behind it."""
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


def _as_arguments(name: str, text: str | None) -> dict[str, Value]:
    if name == TASK:
        task = _needed(name, text)
        if task not in TASKS:
            raise InvalidInput(
                f"customArgs: --task {task[:SHOWN_CHARS]!r} is none of {', '.join(TASKS)}", code="invalid_value"
            )
        return TASKS[task]
    if name == COMPILE:
        return {"enforce-eager": not _value(text)}
    if name == EMBEDDING:
        return TASKS["embed"] if _value(text) else {}
    if name.startswith("no-") and text is None:
        return {name.removeprefix("no-"): False}
    return {SAME.get(name, name): _value(text)}


def _value(text: str | None) -> Value:
    """A word of a command line as the value it stands for."""
    if text is None:
        return True
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if _REAL.fullmatch(text) else text


def _needed(name: str, text: str | None) -> str:
    if not text:
        raise InvalidInput(f"customArgs: --{name} needs a value", code="invalid_value")
    return text


def _refused(name: str, why: str) -> InvalidInput:
    return InvalidInput(
        f"customArgs: --{name} has no counterpart here: {why}; leave it out", code="parameter_not_allowed"
    )


TOKEN_CHARS_MAX = 1024
ADAPTERS_MAX = 256  # that a deployment names to be loaded at once
FLAGS_MAX = 256
SPECULATORS = (None, "disabled", "auto")  # auto: as the server thinks best, which is none
# Predibase's name -> vLLM's. None: the weights as they are.
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
# Engine arguments that have a field of their own.
OF_FIELDS = frozenset(
    ["max-model-len", "max-num-batched-tokens", "enable-prefix-caching", "enable-chunked-prefill", "quantization"]
)
# What is refused whatever it says -> why, and what to do.
REFUSED: dict[str, str] = {
    "loraxImageTag": "batchmill runs vLLM and no LoRAX image; leave it out",
    "backend": "it names a generation of Predibase's own engine, here there is one, vLLM; leave it out",
    "accelerator": "replicas run on the GPUs of this machine (models.NAME.gpus in batchmill.toml); leave it out",
    "computeSpec": "replicas run on the GPUs of this machine (models.NAME.gpus in batchmill.toml); leave it out",
    "speculationDisableByBatchSize": "there is no speculation to turn off; leave it out",
}
# What is refused where it is true: false is how it is.
REFUSED_TRUE: dict[str, str] = {
    "requestLoggingEnabled": "batchmill keeps no log of requests and answers; leave it out",
    "directIngress": "a deployment answers at this server's own address, with nothing in between; leave it out",
    "usesGuaranteedCapacity": "there is no capacity to buy; min_replicas keeps replicas running",
    "mergeAdapter": "adapters stay beside their base model, so that it answers without them too; leave it out",
}


class ServerConfig(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """`BatchInferenceServerConfig` as it is sent."""

    base_model: str
    custom_args: list[str] | None = None
    hf_token: str | None = None
    lorax_image_tag: str | None = None
    quantization: str | None = None
    backend: str | None = None


class DeploymentConfig(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """`DeploymentConfig` and `UpdateDeploymentConfig` as they are sent; only who creates one must name a base model."""

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
    """The engine that a batch inference job asks for. `hf_token` is as it was sent: who keeps it makes it a secret.

    Raises: InvalidInput, naming the field.
    """
    _refuse(config)
    launch = read_flags(_bounded("customArgs", config.custom_args, FLAGS_MAX))
    return LlmSettings(
        base_model=_base_model(config.base_model),
        engine_args=_engine_args({}, config.quantization, launch),
        hf_token=_token(config.hf_token),
        preloaded_adapters=_bounded("customArgs", launch.preloaded_adapters, ADAPTERS_MAX),
    )


def of_deployment_config(config: DeploymentConfig, had: LlmSettings | None = None) -> LlmSettings:
    """The engine that a deployment asks for; of an update, `had` with what the update says.

    Flags are said anew, all of them, where there are any: no other way takes one away. What fields say stays.

    Raises: InvalidInput, naming the field.
    """
    _refuse(config)
    had = LlmSettings(base_model="") if had is None else had
    launch = read_flags(_bounded("customArgs", config.custom_args, FLAGS_MAX))
    said = {
        "max-model-len": _count("maxTotalTokens", config.max_total_tokens),
        "max-num-batched-tokens": _count("maxNumBatchedTokens", config.max_num_batched_tokens),
        "enable-prefix-caching": config.prefix_caching,
        "enable-chunked-prefill": config.chunked_prefill,
    }
    arguments = _engine_args(
        {name: value for name, value in said.items() if value is not None}, config.quantization, launch
    )
    says_adapters = config.preloaded_adapters is not None or bool(launch.preloaded_adapters)
    preloaded = [*(config.preloaded_adapters or []), *launch.preloaded_adapters]
    adapters = _bounded("preloadedAdapters", preloaded, ADAPTERS_MAX)
    takes_adapters = had.takes_adapters if config.disable_adapters is None else not config.disable_adapters
    if adapters and not takes_adapters:
        raise InvalidInput(
            "preloadedAdapters names adapters and disableAdapters refuses them: say one", code="invalid_value"
        )
    kept = {name: value for name, value in had.engine_args.items() if config.custom_args is None or name in OF_FIELDS}
    if config.quantization is not None or launch.quantize is not None:
        kept.pop("quantization", None)
    return replace(
        had,
        base_model=had.base_model if config.base_model is None and had.base_model else _base_model(config.base_model),
        engine_args=kept | arguments,
        hf_token=_token(config.hf_token) or had.hf_token,
        scaling=_scaling(config, had.scaling),
        takes_adapters=takes_adapters,
        preloaded_adapters=list(dict.fromkeys(adapters)) if says_adapters else had.preloaded_adapters,
    )


def shown(settings: LlmSettings) -> DeploymentConfig:
    """Settings as a config that a client can send back, or make a job's of.

    A job's has few fields beside `customArgs`: so these tell all engine arguments, those with a field of their own too.
    What callers may not set is left to the base model. A token is never shown.
    """
    named = {name.lstrip("-").replace("_", "-"): value for name, value in settings.engine_args.items()}
    arguments = {name: value for name, value in named.items() if name in ALLOWED}
    quantization, scaling = arguments.pop("quantization", None), settings.scaling
    return DeploymentConfig(
        base_model=settings.base_model,
        max_total_tokens=_whole(arguments.get("max-model-len")),
        max_num_batched_tokens=_whole(arguments.get("max-num-batched-tokens")),
        prefix_caching=_switch(arguments.get("enable-prefix-caching")),
        chunked_prefill=_switch(arguments.get("enable-chunked-prefill")),
        quantization=None if quantization is None else str(quantization),
        custom_args=[_word(name, value) for name, value in sorted(arguments.items())] or None,
        cooldown_time=None if scaling.cooldown_s is None else math.ceil(scaling.cooldown_s),
        min_replicas=scaling.replicas_min,
        max_replicas=scaling.replicas_max,
        scale_up_request_threshold=scaling.scale_up_requests,
        preloaded_adapters=settings.preloaded_adapters or None,
        disable_adapters=not settings.takes_adapters,
    )


def _whole(value: Value | None) -> int | None:
    return value if type(value) is int else None


def _switch(value: Value | None) -> bool | None:
    return value if isinstance(value, bool) else None


def _word(name: str, value: Value) -> str:
    """An engine argument as `read_flags` reads it."""
    return f"--{name}={str(value).lower() if isinstance(value, bool) else value}"


def _refuse(config: ServerConfig | DeploymentConfig) -> None:
    for field in fields(config):
        name, value = field.encode_name, getattr(config, field.name)
        if name in REFUSED and value is not None:
            raise _not_taken(name, value, REFUSED[name])
        if name in REFUSED_TRUE and value:
            raise _not_taken(name, value, REFUSED_TRUE[name])
        if name == "speculator" and value not in SPECULATORS:
            raise _not_taken(name, value, "deployments do not speculate; leave it out, or say 'disabled'")


def _not_taken(name: str, value: Any, why: str) -> InvalidField:
    message = f"{name} is {str(value)[:SHOWN_CHARS]!r}: {why}"
    return InvalidField(message, code="parameter_not_allowed", param=name)


def _base_model(name: str | None) -> str:
    if not name:
        raise InvalidField(
            "Missing required parameter: 'baseModel'", code="missing_required_parameter", param="baseModel"
        )
    return name


def _engine_args(said: dict[str, Value], quantization: str | None, launch: Launch) -> dict[str, Value]:
    """What fields and flags say together, as far as callers may say it: a field counts before the same flag."""
    named = {} if quantization is None else {"quantization": _quantization("quantization", quantization)}
    if launch.quantize is not None:
        named["customArgs"] = _quantization("customArgs: --quantize", launch.quantize)
    if len(set(named.values())) > 1:
        raise InvalidInput(
            "quantization and customArgs ask for different quantizations: say one", code="repeated_parameter"
        )
    for method in named.values():
        said = said if method is None else {**said, "quantization": method}
    return checked(launch.engine_args | said)


def _quantization(field: str, name: str) -> str | None:
    if name in QUANTIZATIONS:
        return QUANTIZATIONS[name]
    why = NO_COUNTERPART.get(name, f"known are {', '.join(QUANTIZATIONS)}")
    raise InvalidField(
        f"{field} is {name[:SHOWN_CHARS]!r}: {why}", code="parameter_not_allowed", param=field.partition(":")[0]
    )


def _token(token: str | None) -> str | None:
    """A token as it was sent."""
    if not token:
        return None
    if len(token) > TOKEN_CHARS_MAX or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidField(
            "hfToken is no token: it has up to 1,024 printable characters", code="invalid_value", param="hfToken"
        )
    return token


def _count(name: str, value: int | None) -> int | None:
    if value is not None and not 1 <= value < 2**31:
        raise InvalidField(f"Invalid value for {name!r}: {value} is not at least 1", code="invalid_value", param=name)
    return value


def _bounded(name: str, values: list[str] | None, most: int) -> list[str]:
    found = list(values or [])
    if len(found) > most:
        raise InvalidField(f"{name} has {len(found):,} items, more than {most:,}", code="invalid_value", param=name)
    return found


def _scaling(config: DeploymentConfig, had: Scaling) -> Scaling:
    least = had.replicas_min if config.min_replicas is None else config.min_replicas
    most = had.replicas_max if config.max_replicas is None else config.max_replicas
    if least < 0 or most < 1 or least > most:
        message = (
            f"Invalid value for 'minReplicas': {least} to {most} replicas are no range; 0 <= minReplicas <= maxReplicas"
        )
        raise InvalidField(message, code="invalid_value", param="minReplicas")
    cooldown = _count("cooldownTime", config.cooldown_time)
    above = _count("scaleUpRequestThreshold", config.scale_up_request_threshold)
    return Scaling(
        replicas_min=least,
        replicas_max=most,
        cooldown_s=had.cooldown_s if cooldown is None else float(cooldown),
        scale_up_requests=had.scale_up_requests if above is None else above,
    )
