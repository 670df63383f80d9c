"""What an adapter is, read from its own files, and whether it fits a base model. Knows what vLLM refuses.

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
ROOMS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the ranks that vLLM has room for
RANK_MAX = ROOMS[-1]
RANK_LEAST = 16  # room that an engine has in any case, so that one more adapter seldom means another engine
RANK_ARGUMENT = "max-lora-rank"  # of the engine, where somebody has settled its room
PREFIX = "base_model.model."  # before the module's own name, as PEFT writes it
PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica", "lora_ga"})  # which leave the base as it is
HEADS_OF_CLASSIFIERS = frozenset({"classifier", "score"})
SHOWN_CHARS = 120
_LORA = re.compile(r"(.+)\.lora_([AB])(?:\.[\w-]+)?\.weight")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# What a base is called besides, where only its numbers are written differently.
_VARIANT = re.compile(r"[-_.](unsloth|bnb|awq|gptq|fp8|fp16|bf16|gguf|int4|int8|w4a16|w8a8|[48]bit|hf)(?=[-_.]|$)")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class AdapterFacts(Struct, frozen=True):
    """What the files of an adapter say of it."""

    rank: int  # the largest of its modules
    base: str | None  # the model it was trained for, as its maker called it: an id, or a path on their machine
    bytes: int
    target_modules: list[str]
    modules: dict[str, tuple[int, int]] = {}  # module -> how many numbers it takes and gives, where its weights say so


def read_adapter(place: Path) -> AdapterFacts:
    """The facts of the adapter in a folder.

    Raises: InvalidInput (`invalid_adapter`) for one that is no LoRA, is not whole, or that vLLM would refuse.
    """
    config = _config_of(place)
    if flaw := _unsupported(config):
        raise _invalid(flaw)
    rank = _rank_of(config)
    weights = place / WEIGHTS
    if not weights.is_file():
        raise _no_weights(place)
    modules = _modules(read_heads(weights), rank)
    base, targets = config.get("base_model_name_or_path"), config.get("target_modules")
    return AdapterFacts(
        rank=rank,
        base=base if isinstance(base, str) and base else None,
        bytes=weights.stat().st_size + (place / CONFIG).stat().st_size,
        target_modules=[targets] if isinstance(targets, str) else sorted(targets),
        modules=modules,
    )


def rank_of(place: Path) -> int:
    """The rank that an adapter's configuration names. Raises: InvalidInput, as `read_adapter`."""
    return _rank_of(_config_of(place))


def settled_room(engine_args: Mapping[str, object]) -> int | None:
    """The room for ranks that the engine's own arguments settle; None: they say nothing of it."""
    ranks = [str(value) for name, value in engine_args.items() if name.lstrip("-").replace("_", "-") == RANK_ARGUMENT]
    return int(ranks[-1]) if ranks and ranks[-1].isdecimal() else None


def room_for(ranks: Iterable[int]) -> int:
    """The least rank that vLLM has room for and that holds all of these; 0 where there are none.

    Raises: InvalidInput for one that is too high.
    """
    highest = max(ranks, default=0)
    if highest > RANK_MAX:
        raise InvalidInput(f"an adapter has rank {highest}; vLLM serves at most {RANK_MAX}", code="invalid_adapter")
    return next(room for room in ROOMS if room >= highest) if highest else 0


def flaw(facts: AdapterFacts, *, base_source: str, rank_max: int) -> str:
    """Why an adapter does not fit a base model; empty: nothing speaks against it.

    Where the base is a folder its own files decide; otherwise what the adapter's maker called it.

    Args: base_source: a folder or an id; rank_max: the largest rank that its engine has room for, 0 for none known.

    Raises: InvalidInput where the base's own files cannot be read.
    """
    if rank_max and facts.rank > rank_max:
        return f"its rank is {facts.rank}, and the engine of this model has room for {rank_max}"
    folder = Path(base_source)
    if folder.is_dir():
        return _misfit(facts, folder)
    if facts.base is None or not _HUB_ID.fullmatch(facts.base) or not _HUB_ID.fullmatch(base_source):
        return ""
    if _plain_name(facts.base) == _plain_name(base_source):
        return ""
    return f"it was trained for {facts.base[:SHOWN_CHARS]}, and this model is {base_source[:SHOWN_CHARS]}"


# -- the adapter itself -----------------------------------------------------------------------------------------------


def _config_of(place: Path) -> dict[str, Any]:
    try:
        with (place / CONFIG).open("rb") as file:
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
    """What of an adapter vLLM does not do; empty: it does all of it."""
    kind, init = config.get("peft_type"), config.get("init_lora_weights")
    saved = config.get("modules_to_save")
    others = sorted({str(each) for each in saved} - HEADS_OF_CLASSIFIERS) if isinstance(saved, list) else []
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
            "lora_alpha is no number",
        ),
        (
            not (isinstance(targets, str) or _is_texts(targets)),
            "target_modules names no modules",
        ),
    )
    return next((reason for is_so, reason in reasons if is_so), "")


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _rank_of(config: dict[str, Any]) -> int:
    patterns = config.get("rank_pattern") or {}
    ranks = [config.get("r"), *(patterns.values() if isinstance(patterns, dict) else [None])]
    for rank in ranks:
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise _invalid(f"its rank is {rank!r}: r and rank_pattern hold numbers from 1 on")
    highest = max(ranks)
    if highest > RANK_MAX:
        raise _invalid(f"its rank is {highest}, and vLLM serves at most {RANK_MAX}")
    return highest


def _modules(heads: dict[str, TensorHead], rank: int) -> dict[str, tuple[int, int]]:
    """The modules that weights are there for, each with both halves. Raises: InvalidInput where one is not so."""
    halves: dict[str, dict[str, list[int]]] = {}
    for name, head in heads.items():
        if "lora_magnitude_vector" in name:
            raise _invalid("its weights are those of a DoRA")
        if (match := _LORA.fullmatch(name)) is not None:
            halves.setdefault(match[1].removeprefix(PREFIX), {})[match[2]] = head.shape
        elif "lora_" not in name and not any(f".{each}." in f".{name}." for each in HEADS_OF_CLASSIFIERS):
            raise _invalid(f"the tensor {name[:SHOWN_CHARS]!r} is none of a LoRA")
    if not heads:
        raise _invalid(f"{WEIGHTS} holds no tensors")
    modules = {}
    for name, found in halves.items():
        if set(found) != {"A", "B"}:
            raise _invalid(f"of {name[:SHOWN_CHARS]!r} only lora_{next(iter(found))} is there")
        first, second = found["A"], found["B"]
        if (
            len(first) != 2 or len(second) != 2 or ".experts" in name
        ):  # experts and convolutions have shapes of their own
            continue
        if first[0] != second[1] or first[0] > rank:
            raise _invalid(f"{name[:SHOWN_CHARS]!r} has rank {first[0]} and {second[1]}; {CONFIG} says {rank}")
        modules[name] = first[1], second[0]
    return modules


def _no_weights(place: Path) -> InvalidInput:
    for name in PICKLES:
        if (place / name).exists():
            return refused_pickle(name)
    return _invalid(f"it has no {WEIGHTS}")


def _invalid(why: str) -> InvalidInput:
    return InvalidInput(f"this is no adapter that can be served: {why}", code="invalid_adapter")


# -- the base ---------------------------------------------------------------------------------------------------------


class _Base(Struct, frozen=True):
    """What the files of a base model say of its modules."""

    modules: frozenset[str]
    shapes: dict[str, tuple[int, int]]  # module -> how many numbers it takes and gives, where its weights are plain
    layers: int | None


def _misfit(facts: AdapterFacts, folder: Path) -> str:
    base = _read_base(folder, _stamp(folder))
    trained = f": it was trained for {facts.base[:SHOWN_CHARS]}" if facts.base else ""
    for name, (takes, gives) in facts.modules.items():
        layer, found = _LAYER.search(name), base.shapes.get(name)
        if layer is not None and base.layers is not None and int(layer[1]) >= base.layers:
            return f"it is for layer {layer[1]}, and this model has layers 0 to {base.layers - 1}{trained}"
        if found is not None and (takes, gives) not in (found, found[::-1]):
            return (
                f"its {name} takes {takes} and gives {gives}, where this model's has {found[0]} and {found[1]}{trained}"
            )
        begin = name[: layer.end()] if layer is not None else ""
        if begin and name not in base.modules and any(each.startswith(begin) for each in base.modules):
            return f"this model has no {name}{trained}"
    return ""


def _stamp(folder: Path) -> tuple[int, ...]:
    """What changes when another model is put there."""
    paths = (folder / BASE_CONFIG, folder / BASE_WEIGHTS, folder / BASE_INDEX)
    return tuple(path.stat().st_mtime_ns if path.is_file() else 0 for path in paths)


@lru_cache(maxsize=8)
def _read_base(folder: Path, stamp: tuple[int, ...]) -> _Base:
    """`stamp` only tells one model in a folder from the next. Raises: InvalidInput for files that cannot be read."""
    heads: dict[str, TensorHead] = {}
    for name in _weight_files(folder):
        if (folder / name).is_file():  # what is missing is for the engine to say
            heads |= read_heads(folder / name)
    config = _object(folder / BASE_CONFIG, BASE_CONFIG_BYTES_MAX)
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
    places = _object(folder / BASE_INDEX, INDEX_BYTES_MAX).get("weight_map")
    names = {each for each in places.values() if isinstance(each, str)} if isinstance(places, dict) else set()
    return sorted(name for name in names if Path(name).name == name)


def _object(path: Path, bytes_max: int) -> dict[str, Any]:
    """A JSON object of a base model; empty where there is no such file. Raises: InvalidInput."""
    if not path.is_file():
        return {}
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(shallow(file.read(bytes_max)), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path.name} of the base model cannot be read: {error}", code="invalid_model") from None


def _plain_name(model_id: str) -> str:
    """A model's name without its organisation, its case, and what says how its numbers are written."""
    name = model_id.rpartition("/")[2].lower()
    while (shorter := _VARIANT.sub("", name)) != name:
        name = shorter
    return name.replace("_", "-").removeprefix("meta-")
