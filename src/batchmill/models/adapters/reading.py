"""Reads an adapter's files, and checks whether vLLM can serve it and whether it fits a base model.

Source: PEFT's adapter_config.json, and vllm/lora/peft_helper.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from batchmill.errors import InvalidInput
from batchmill.models.adapters.tensors import FLOATS, TensorHead, read_heads
from batchmill.wire.adapter_bundles import CONFIG, FILES, PICKLES, WEIGHTS, refused_pickle
from batchmill.wire.json_bytes import shallow

BASE_CONFIG, BASE_WEIGHTS, BASE_INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
BASE_CONFIG_BYTES_MAX = 16 * 1024 * 1024
INDEX_BYTES_MAX = 64 * 1024 * 1024
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values that vLLM accepts for its maximum rank
RANK_MAX = VLLM_RANKS[-1]
RANK_DEFAULT = 16  # the least maximum rank of an engine, so that another adapter seldom needs a new engine
RANK_ARGUMENT = "max-lora-rank"  # the engine's argument for its maximum rank
PREFIX = "base_model.model."  # PEFT's prefix of module names
PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica", "lora_ga"})  # which do not change the base model
CLASSIFIER_HEADS = frozenset({"classifier", "score"})
SHOWN_CHARS = 120
_LORA = re.compile(r"(.+)\.lora_([AB])(?:\.[\w-]+)?\.weight")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# Parts of the names of bases that differ only in the format of their numbers.
_VARIANT = re.compile(r"[-_.](unsloth|bnb|awq|gptq|fp8|fp16|bf16|gguf|int4|int8|w4a16|w8a8|[48]bit|hf)(?=[-_.]|$)")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class AdapterFacts(Struct, frozen=True):
    """Properties of an adapter, from its files."""

    rank: int  # the largest of its modules
    base: str | None  # the model it was trained for: an id, or a path on the author's machine
    bytes: int
    target_modules: list[str]
    modules: dict[str, tuple[int, int]] = {}  # module -> its input and output size, if its weights show them


def read_adapter(folder: Path) -> AdapterFacts:
    """Read the adapter in a folder.

    Raises: InvalidInput (`invalid_adapter`) if it is not a LoRA, is incomplete, or would be refused by vLLM.
    """
    config = _config_of(folder)
    if flaw := _unsupported(config):
        raise _invalid(flaw)
    rank = _rank_of(config)
    weights = folder / WEIGHTS
    if not weights.is_file():
        raise _no_weights(folder)
    modules = _modules(read_heads(weights), rank)
    base, targets = config.get("base_model_name_or_path"), config.get("target_modules")
    return AdapterFacts(
        rank=rank,
        base=base if isinstance(base, str) and base else None,
        bytes=weights.stat().st_size + (folder / CONFIG).stat().st_size,
        target_modules=[targets] if isinstance(targets, str) else sorted(targets),
        modules=modules,
    )


def rank_of(folder: Path) -> int:
    """The rank in an adapter's configuration. Raises: InvalidInput, as `read_adapter`."""
    return _rank_of(_config_of(folder))


def configured_rank(engine_args: Mapping[str, object]) -> int | None:
    """The maximum rank in the engine's arguments; None if they have none."""
    ranks = [str(value) for name, value in engine_args.items() if name.lstrip("-").replace("_", "-") == RANK_ARGUMENT]
    return int(ranks[-1]) if ranks and ranks[-1].isdecimal() else None


def engine_rank_for(ranks: Iterable[int]) -> int:
    """The smallest maximum rank of vLLM that fits all of these ranks; 0 without ranks.

    Raises: InvalidInput for a rank that is too high.
    """
    highest = max(ranks, default=0)
    if highest > RANK_MAX:
        raise InvalidInput(f"an adapter has rank {highest}; vLLM serves at most {RANK_MAX}", code="invalid_adapter")
    return next(room for room in VLLM_RANKS if room >= highest) if highest else 0


def find_mismatch(facts: AdapterFacts, *, base_source: str, rank_max: int) -> str:
    """Why an adapter does not fit a base model; empty if no mismatch is known.

    If the base is a folder, its files decide; otherwise its name in the adapter's configuration.

    Args:
        base_source: a folder or an id.
        rank_max: the maximum rank of the engine; 0 if unknown.

    Raises: InvalidInput if the base's files cannot be read.
    """
    if rank_max and facts.rank > rank_max:
        return f"its rank is {facts.rank}, and the maximum of this model's engine is {rank_max}"
    folder = Path(base_source)
    if folder.is_dir():
        return _mismatch_with_files(facts, folder)
    if facts.base is None or not _HUB_ID.fullmatch(facts.base) or not _HUB_ID.fullmatch(base_source):
        return ""
    if _plain_name(facts.base) == _plain_name(base_source):
        return ""
    return f"it was trained for {facts.base[:SHOWN_CHARS]}, not for {base_source[:SHOWN_CHARS]}"


# -- the adapter itself -----------------------------------------------------------------------------------------------


def _config_of(folder: Path) -> dict[str, Any]:
    try:
        with (folder / CONFIG).open("rb") as file:
            data = file.read(FILES[CONFIG] + 1)
    except OSError as error:
        raise _invalid(f"it has no {CONFIG} that can be read: {error.strerror}") from None
    if len(data) > FILES[CONFIG]:
        raise _invalid(f"{CONFIG} is larger than {FILES[CONFIG]:,} bytes")
    try:
        return msgspec.json.decode(shallow(data), type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _invalid(f"{CONFIG} cannot be read: {error}") from None


def _unsupported(config: dict[str, Any]) -> str:
    """The first feature of an adapter that vLLM does not support; empty if it supports all."""
    kind, init = config.get("peft_type"), config.get("init_lora_weights")
    saved = config.get("modules_to_save")
    others = sorted({str(each) for each in saved} - CLASSIFIER_HEADS) if isinstance(saved, list) else []
    targets = config.get("target_modules")
    reasons = (
        (kind != "LORA", f"peft_type is {kind!r}, and only LORA is served"),
        (bool(config.get("use_dora")), "it is a DoRA (use_dora)"),
        (config.get("bias", "none") not in ("none", None) or bool(config.get("lora_bias")), "it trains biases"),
        (bool(others), f"it replaces whole modules (modules_to_save: {', '.join(others)[:SHOWN_CHARS]})"),
        (
            isinstance(init, str) and init.lower() not in PLAIN_INITS,
            f"init_lora_weights is {init!r}, which changes the base model: convert it to a plain LoRA with PEFT",
        ),
        (bool(config.get("alora_invocation_tokens")), "it is an activated LoRA (alora_invocation_tokens)"),
        (bool(config.get("layer_replication")), "it repeats layers (layer_replication)"),
        (bool(config.get("use_bdlora")), "it is block-diagonal (use_bdlora)"),
        (bool(config.get("use_qalora")), "it is a QALoRA (use_qalora)"),
        (
            not isinstance(config.get("lora_alpha"), int | float) or isinstance(config.get("lora_alpha"), bool),
            "lora_alpha is not a number",
        ),
        (
            not (isinstance(targets, str) or _is_texts(targets)),
            "target_modules has no modules",
        ),
    )
    return next((reason for applies, reason in reasons if applies), "")


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _rank_of(config: dict[str, Any]) -> int:
    patterns = config.get("rank_pattern") or {}
    ranks = [config.get("r"), *(patterns.values() if isinstance(patterns, dict) else [None])]
    for rank in ranks:
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise _invalid(f"its rank is {rank!r}: r and rank_pattern must have numbers from 1 on")
    highest = max(ranks)
    if highest > RANK_MAX:
        raise _invalid(f"its rank is {highest}, and vLLM serves at most {RANK_MAX}")
    return highest


def _modules(heads: dict[str, TensorHead], rank: int) -> dict[str, tuple[int, int]]:
    """The modules with weights, with their sizes. Raises: InvalidInput for a module without both LoRA matrices."""
    halves: dict[str, dict[str, list[int]]] = {}
    for name, head in heads.items():
        if "lora_magnitude_vector" in name:
            raise _invalid("its weights are those of a DoRA")
        if (match := _LORA.fullmatch(name)) is not None:
            halves.setdefault(match[1].removeprefix(PREFIX), {})[match[2]] = head.shape
        elif "lora_" not in name and not any(f".{each}." in f".{name}." for each in CLASSIFIER_HEADS):
            raise _invalid(f"the tensor {name[:SHOWN_CHARS]!r} does not belong to a LoRA")
    if not heads:
        raise _invalid(f"{WEIGHTS} has no tensors")
    modules = {}
    for name, shapes in halves.items():
        if set(shapes) != {"A", "B"}:
            raise _invalid(f"{name[:SHOWN_CHARS]!r} has only lora_{next(iter(shapes))}")
        first, second = shapes["A"], shapes["B"]
        if len(first) != 2 or len(second) != 2 or ".experts" in name:  # experts and convolutions have other shapes
            continue
        if first[0] != second[1] or first[0] > rank:
            raise _invalid(f"{name[:SHOWN_CHARS]!r} has rank {first[0]} and {second[1]}; {CONFIG} says {rank}")
        modules[name] = first[1], second[0]
    return modules


def _no_weights(folder: Path) -> InvalidInput:
    for name in PICKLES:
        if (folder / name).exists():
            return refused_pickle(name)
    return _invalid(f"it has no {WEIGHTS}")


def _invalid(why: str) -> InvalidInput:
    return InvalidInput(f"this adapter cannot be served: {why}", code="invalid_adapter")


# -- the base ---------------------------------------------------------------------------------------------------------


class _Base(Struct, frozen=True):
    """The modules of a base model, from its files."""

    modules: frozenset[str]
    shapes: dict[str, tuple[int, int]]  # module -> its input and output size, if its weights are not packed
    layers: int | None


def _mismatch_with_files(facts: AdapterFacts, folder: Path) -> str:
    base = _read_base(folder, _modification_times(folder))
    origin = f": it was trained for {facts.base[:SHOWN_CHARS]}" if facts.base else ""
    for name, (size_in, size_out) in facts.modules.items():
        layer, base_shape = _LAYER.search(name), base.shapes.get(name)
        if layer is not None and base.layers is not None and int(layer[1]) >= base.layers:
            return f"it is for layer {layer[1]}, and this model has layers 0 to {base.layers - 1}{origin}"
        if base_shape is not None and (size_in, size_out) not in (base_shape, base_shape[::-1]):
            return (
                f"its {name} takes {size_in} and gives {size_out}, and this model's takes {base_shape[0]} and gives "
                f"{base_shape[1]}{origin}"
            )
        layer_prefix = name[: layer.end()] if layer is not None else ""
        if layer_prefix and name not in base.modules and any(each.startswith(layer_prefix) for each in base.modules):
            return f"this model has no {name}{origin}"
    return ""


def _modification_times(folder: Path) -> tuple[int, ...]:
    """The modification times of a base model's files, which change when the model is replaced."""
    paths = (folder / BASE_CONFIG, folder / BASE_WEIGHTS, folder / BASE_INDEX)
    return tuple(path.stat().st_mtime_ns if path.is_file() else 0 for path in paths)


@lru_cache(maxsize=8)
def _read_base(folder: Path, stamp: tuple[int, ...]) -> _Base:
    """Read the files of a base model. `stamp` is for the cache. Raises: InvalidInput for files that cannot be read."""
    heads: dict[str, TensorHead] = {}
    for name in _weight_files(folder):
        if (folder / name).is_file():  # the engine reports missing files
            heads |= read_heads(folder / name)
    config = _read_object(folder / BASE_CONFIG, BASE_CONFIG_BYTES_MAX)
    inner = config.get("text_config")
    layers = (inner if isinstance(inner, dict) else config).get("num_hidden_layers")
    shapes = {
        name.removesuffix(".weight"): (head.shape[1], head.shape[0])
        for name, head in heads.items()
        if name.endswith(".weight") and len(head.shape) == 2 and head.dtype in FLOATS
    }
    modules = frozenset(name.rpartition(".")[0] for name in heads)
    return _Base(modules, shapes, layers if isinstance(layers, int) and layers > 0 else None)


def _weight_files(folder: Path) -> list[str]:
    if (folder / BASE_WEIGHTS).is_file():
        return [BASE_WEIGHTS]
    weight_map = _read_object(folder / BASE_INDEX, INDEX_BYTES_MAX).get("weight_map")
    names = {each for each in weight_map.values() if isinstance(each, str)} if isinstance(weight_map, dict) else set()
    return sorted(name for name in names if Path(name).name == name)


def _read_object(path: Path, bytes_max: int) -> dict[str, Any]:
    """Read a JSON object of a base model; empty if the file does not exist. Raises: InvalidInput."""
    if not path.is_file():
        return {}
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(shallow(file.read(bytes_max)), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path.name} of the base model cannot be read: {error}", code="invalid_model") from None


def _plain_name(model_id: str) -> str:
    """A model's name in lower case, without its organisation and without the format of its numbers."""
    name = model_id.rpartition("/")[2].lower()
    while (shorter := _VARIANT.sub("", name)) != name:
        name = shorter
    return name.replace("_", "-").removeprefix("meta-")
