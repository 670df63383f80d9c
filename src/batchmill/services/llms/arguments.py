"""The engine arguments that callers may set, each with its type and its bounds. Pure.

Whatever names files, code, hosts or trust is not among them: it is for whoever runs the machine, in batchmill.toml.

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
    """What one argument may be."""

    kind: type  # int, float, bool or str
    low: float = 0
    high: float = 0
    choices: tuple[str, ...] = ()


class _Speculation(Struct, frozen=True, forbid_unknown_fields=True):
    """Of `speculative-config`: guessing from the prompt itself, which needs no other model."""

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
GPU_COUNTS = ("tensor-parallel-size", "pipeline-parallel-size")  # their product is GPUs of one replica
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
# What other versions of vLLM call one of them.
OTHER_NAMES = {"guided-decoding-backend": "structured-outputs-config.backend"}
_CODE = "it makes the engine run code; only the operator can set it, in batchmill.toml"
_FILES = "it names files of this machine; only the operator can set it, in batchmill.toml"
_HOSTS = "it connects to other machines; only the operator can set it, in batchmill.toml"
_OURS = "batchmill sets it itself"
_ADAPTERS = "adapters are registered with batchmill, which says how many and how large ones the engine has room for"
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
    "hf-token": "a token for the model hub is given as hf_token, where it is kept encrypted",
    "enable-lora": _ADAPTERS, "max-loras": _ADAPTERS, "max-cpu-loras": _ADAPTERS, "max-lora-rank": _ADAPTERS,
    "lora-modules": _ADAPTERS, "data-parallel-size": "a deployment has replicas in its place: say how many",
}  # fmt: skip


def checked(args: Mapping[str, Value | None], *, gpus_max: int | None = None) -> dict[str, Value]:
    """The arguments under vLLM's own names, each of its type; None is a flag without a value.

    Args:
        gpus_max: what one replica may have at most; None: no matter.

    Raises: InvalidInput (`engine_arg_not_allowed`, `invalid_engine_arg`), naming the argument and the way out.
    """
    found: dict[str, Value] = {}
    for flag, value in args.items():
        name = flag.lstrip("-").replace("_", "-")
        name = OTHER_NAMES.get(name, name)
        if name not in ALLOWED:
            why = REFUSED.get(name, f"callers may set {', '.join(ALLOWED)}")
            raise InvalidInput(
                f"the engine argument {flag[:SHOWN_CHARS]!r} is not yours to set: {why}", code="engine_arg_not_allowed"
            )
        if name in found:
            raise _invalid(flag, value, "once: it was given twice")
        found[name] = _read(flag, name, value)
    needed = math.prod(int(found.get(name, 1)) for name in GPU_COUNTS)
    if gpus_max is not None and needed > max(1, gpus_max):
        flag = " × ".join(name for name in GPU_COUNTS if name in found)
        raise InvalidInput(
            f"{flag} = {needed} GPUs for a replica, and this machine has {gpus_max}: ask for fewer",
            code="invalid_engine_arg",
        )
    return found


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
    if (found := words.get(str(value).lower())) is None:
        raise _invalid(text, value, "true or false")
    return found


def _speculation(text: str, value: Value | None) -> str:
    """The same JSON in one form. Raises: InvalidInput for a method that loads another model."""
    try:
        read = msgspec.json.decode(str(value), type=_Speculation)
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError) as error:
        raise _invalid(text, value, f"a JSON object with method and num_speculative_tokens ({error})") from None
    if read.method != "ngram":
        raise _invalid(text, read.method, 'of the method "ngram": others load a further model or code')
    counts = (read.num_speculative_tokens, read.prompt_lookup_max, read.prompt_lookup_min)
    if any(count is not None and not 1 <= count <= SPECULATED_MAX for count in counts):
        raise _invalid(text, value, f"of numbers from 1 to {SPECULATED_MAX}")
    least, most = read.prompt_lookup_min, read.prompt_lookup_max
    if least is not None and most is not None and least > most:
        raise _invalid(text, value, "of a prompt_lookup_min that is at most prompt_lookup_max")
    members = {name: count for name, count in msgspec.structs.asdict(read).items() if count is not None}
    return msgspec.json.encode(members, order="deterministic").decode()


def _invalid(text: str, value: object, wanted: str) -> InvalidInput:
    return InvalidInput(
        f"the engine argument {text[:SHOWN_CHARS]!r} must be {wanted}, not {str(value)[:SHOWN_CHARS]!r}",
        code="invalid_engine_arg",
    )
