"""The engine arguments that callers may set, each with its type and bounds. Pure.

Arguments that name files, code, hosts or trust are not allowed: only the operator can set them, in batchmill.toml.

Source: vLLM's AsyncEngineArgs, 0.32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from batchmill.errors import InvalidInput

Value = str | int | float | bool
SHOWN_CHARS = 60
TOKENS_MAX = 10_000_000
SPECULATED_MAX = 32  # tokens ahead


class Rule(Struct, frozen=True):
    """The type and bounds of one argument."""

    kind: type  # int, float, bool or str
    low: float = 0
    high: float = 0
    choices: tuple[str, ...] = ()


class _Speculation(Struct, frozen=True, forbid_unknown_fields=True):
    """`speculative-config` with n-gram speculation from the prompt, which needs no other model."""

    method: str
    num_speculative_tokens: int
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None


QUANTIZATIONS = (
    "awq", "awq_marlin", "auto_awq", "gptq", "gptq_marlin", "auto_gptq", "fp8", "fbgemm_fp8", "fp8_per_tensor",
    "fp8_per_block", "fp8_per_channel", "compressed-tensors", "modelopt", "modelopt_fp4", "mxfp4",
    "mxfp8", "moe_wna16", "quark", "torchao", "experts_int8", "int8_per_channel_weight_only",
)  # fmt: skip
_SWITCH = Rule(bool)
GPU_COUNTS = ("tensor-parallel-size", "pipeline-parallel-size")  # their product is the number of GPUs of one replica
SPECULATION = "speculative-config"
ALLOWED: dict[str, Rule] = {
    "quantization": Rule(str, choices=QUANTIZATIONS),
    "dtype": Rule(str, choices=("auto", "half", "float16", "bfloat16", "float", "float32")),
    "kv-cache-dtype": Rule(str, choices=("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "float16", "bfloat16")),
    "max-model-len": Rule(int, 1, TOKENS_MAX),
    "max-num-seqs": Rule(int, 1, 65_536),
    "max-num-batched-tokens": Rule(int, 1, TOKENS_MAX),
    "max-logprobs": Rule(int, 0, 1_000),
    "long-prefill-token-threshold": Rule(int, 0, TOKENS_MAX),
    "block-size": Rule(int, 1, 1_024),
    "seed": Rule(int, 0, 2**32 - 1),
    "runner": Rule(str, choices=("auto", "generate", "pooling")),
    "convert": Rule(str, choices=("auto", "none", "embed", "classify")),
    "gpu-memory-utilization": Rule(float, 0.05, 0.98),
    "tensor-parallel-size": Rule(int, 1, 1_024),
    "pipeline-parallel-size": Rule(int, 1, 1_024),
    "enable-prefix-caching": _SWITCH,
    "enable-chunked-prefill": _SWITCH,
    "enable-expert-parallel": _SWITCH,
    "enforce-eager": _SWITCH,
    "disable-sliding-window": _SWITCH,
    "structured-outputs-config.backend": Rule(
        str, choices=("auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer")
    ),
    SPECULATION: Rule(str),  # JSON, see _Speculation
}
# Names of arguments in other versions of vLLM.
OTHER_NAMES = {"guided-decoding-backend": "structured-outputs-config.backend"}
_CODE = "it makes the engine run code; only the operator can set it, in batchmill.toml"
_FILES = "it names files of this machine; only the operator can set it, in batchmill.toml"
_HOSTS = "it connects to other machines; only the operator can set it, in batchmill.toml"
_OURS = "batchmill sets it itself"
_ADAPTERS = "register adapters with batchmill, which sets their number and rank itself"
REFUSED = {
    "trust-remote-code": _CODE, "worker-cls": _CODE, "worker-extension-cls": _CODE, "logits-processors": _CODE,
    "io-processor-plugin": _CODE, "tool-parser-plugin": _CODE, "reasoning-parser-plugin": _CODE,
    "middleware": _CODE, "model-loader-extra-config": _CODE, "hf-overrides": _CODE, "additional-config": _CODE,
    "scheduler-cls": _OURS, "distributed-executor-backend": _CODE, "compilation-config": _CODE,
    "load-format": _FILES, "tokenizer": _FILES, "download-dir": _FILES, "hf-config-path": _FILES,
    "generation-config": _FILES, "chat-template": _FILES, "config": _FILES, "log-config-file": _FILES,
    "allowed-local-media-path": _FILES, "profiler-config": _FILES, "quantization-param-path": _FILES,
    "allowed-media-domains": _HOSTS, "kv-transfer-config": _HOSTS, "kv-events-config": _HOSTS,
    "ec-transfer-config": _HOSTS, "weight-transfer-config": _HOSTS, "otlp-traces-endpoint": _HOSTS,
    "master-addr": _HOSTS, "data-parallel-address": _HOSTS, "host": _OURS, "port": _OURS, "uds": _OURS,
    "api-key": _OURS, "model": _OURS, "served-model-name": _OURS, "scheduling-policy": _OURS, "root-path": _OURS,
    "hf-token": "set the token for the model hub as hf_token, which is stored encrypted",
    "enable-lora": _ADAPTERS, "max-loras": _ADAPTERS, "max-cpu-loras": _ADAPTERS, "max-lora-rank": _ADAPTERS,
    "lora-modules": _ADAPTERS, "data-parallel-size": "set the number of replicas of the deployment instead",
}  # fmt: skip


def checked(args: Mapping[str, Value | None], *, gpus_max: int | None = None) -> dict[str, Value]:
    """Return the arguments with vLLM's own names, each converted to its type. None is a flag without a value.

    Args:
        gpus_max: the GPUs that one replica may have at most; None: no limit.

    Raises: InvalidInput (`engine_arg_not_allowed`, `invalid_engine_arg`), with the argument and the way out.
    """
    arguments: dict[str, Value] = {}
    for flag, value in args.items():
        name = flag.lstrip("-").replace("_", "-")
        name = OTHER_NAMES.get(name, name)
        if name not in ALLOWED:
            reason = REFUSED.get(name, f"callers may set {', '.join(ALLOWED)}")
            raise InvalidInput(
                f"the engine argument {flag[:SHOWN_CHARS]!r} cannot be set: {reason}", code="engine_arg_not_allowed"
            )
        if name in arguments:
            raise _invalid(flag, value, "set only once")
        arguments[name] = _read(flag, name, value)
    needed = math.prod(int(arguments.get(name, 1)) for name in GPU_COUNTS)
    if gpus_max is not None and needed > max(1, gpus_max):
        flag = " × ".join(name for name in GPU_COUNTS if name in arguments)
        raise InvalidInput(
            f"{flag} = {needed} GPUs for a replica, but this machine has {gpus_max}: use fewer",
            code="invalid_engine_arg",
        )
    return arguments


def _read(text: str, name: str, value: Value | None) -> Value:
    rule = ALLOWED[name]
    if rule.kind is bool:
        return _switch(text, value)
    if name == SPECULATION:
        return _speculation(text, value)
    if rule.choices:
        if value not in rule.choices:
            raise _invalid(text, value, f"one of {', '.join(rule.choices)}")
        return str(value)
    number = _number(value, rule.kind)
    if number is None or not rule.low <= number <= rule.high:
        what = "a whole number" if rule.kind is int else "a number"
        raise _invalid(text, value, f"{what} from {rule.low:,} to {rule.high:,}")
    return number


def _number(value: Value | None, kind: type) -> int | float | None:
    if isinstance(value, bool) or value is None:
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    if kind is float:
        return number
    return int(number) if number == int(number) else None


def _switch(text: str, value: Value | None) -> bool:
    words = {"true": True, "false": False, "1": True, "0": False}
    if value is None or isinstance(value, bool):
        return value is not False
    if (switch := words.get(str(value).lower())) is None:
        raise _invalid(text, value, "true or false")
    return switch


def _speculation(text: str, value: Value | None) -> str:
    """Return the same JSON, normalized. Raises: InvalidInput for a method that loads another model."""
    try:
        config = msgspec.json.decode(str(value), type=_Speculation)
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError) as error:
        raise _invalid(text, value, f"a JSON object with method and num_speculative_tokens ({error})") from None
    if config.method != "ngram":
        raise _invalid(text, config.method, 'of the method "ngram": other methods load another model or code')
    counts = (config.num_speculative_tokens, config.prompt_lookup_max, config.prompt_lookup_min)
    if any(count is not None and not 1 <= count <= SPECULATED_MAX for count in counts):
        raise _invalid(text, value, f"of numbers from 1 to {SPECULATED_MAX}")
    lookup_min, lookup_max = config.prompt_lookup_min, config.prompt_lookup_max
    if lookup_min is not None and lookup_max is not None and lookup_min > lookup_max:
        raise _invalid(text, value, "of a prompt_lookup_min that is at most prompt_lookup_max")
    members = {name: count for name, count in msgspec.structs.asdict(config).items() if count is not None}
    return msgspec.json.encode(members, order="deterministic").decode()


def _invalid(text: str, value: object, expected: str) -> InvalidInput:
    return InvalidInput(
        f"the engine argument {text[:SHOWN_CHARS]!r} must be {expected}, not {str(value)[:SHOWN_CHARS]!r}",
        code="invalid_engine_arg",
    )
