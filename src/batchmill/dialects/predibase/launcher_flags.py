"""`customArgs`: flags of LoRAX's launcher and flags of vLLM, as engine arguments.

Which arguments callers may set is not known here. Source: LoRAX's launcher, `lorax-launcher --help`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from msgspec import Struct

from batchmill.errors import InvalidInput

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
    "trust-remote-code": "it runs code of the model; whoever runs the server configures such a model",
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
