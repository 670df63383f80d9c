"""Whether the models of a job can take the media of its rows: refused before anything runs, as far as it is known."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from batchmill.errors import InvalidInput
from batchmill.types import JobOrder, ModelSpec
from batchmill.types.engine_traits import Source
from batchmill.wire.media import AUDIO, DOCUMENT, IMAGE, KINDS, MEDIA_COLUMNS_MAX
from batchmill.wire.rows.forms import CHAT, TableForm

# Batch APIs -> the kinds that their rows can hold here. The others take text alone.
PROVIDER_KINDS = {
    "openai": KINDS, "azure": KINDS, "anthropic": (IMAGE, DOCUMENT), "gemini": KINDS,
}  # fmt: skip
ENGINE_KINDS = (IMAGE, AUDIO)  # of a vLLM server
# Architectures without eyes and ears, as vLLM calls them. It answers for others itself, row by row.
TEXT_ONLY = frozenset(
    f"{name}ForCausalLM"
    for name in (
        "Bloom", "DeepseekV2", "DeepseekV3", "Falcon", "Gemma", "Gemma2", "Gemma3", "Glm", "Glm4", "GPTNeoX", "GptOss",
        "Granite", "Llama", "Mistral", "Mixtral", "Olmo", "Olmo2", "OPT", "Phi", "Phi3", "Qwen2", "Qwen2Moe", "Qwen3",
        "Qwen3Moe", "StableLm",
    )
) | {"GPT2LMHeadModel"}  # fmt: skip


class _ModelConfig(Struct):
    architectures: list[str] = []


def check_media(order: JobOrder) -> None:
    """Raises: InvalidInput, naming the column or the model."""
    if len(order.media) > MEDIA_COLUMNS_MAX:
        raise InvalidInput(
            f"{len(order.media)} columns of media are more than {MEDIA_COLUMNS_MAX}: name fewer", code="invalid_media"
        )
    for at, each in enumerate(order.media):
        if each.kind not in KINDS:
            raise InvalidInput(f"there are no columns of {each.kind!r}: {', '.join(KINDS)}", code="invalid_media")
        if each.column in [other.column for other in order.media[:at]]:
            raise InvalidInput(f"the column {each.column!r} is named twice", code="invalid_media")
        if order.url not in (None, CHAT):
            raise InvalidInput(
                f"--{each.kind} makes messages of {CHAT}, not of {order.url}: leave one of both out",
                code="media_not_supported",
            )
        for model in order.models:
            _check_model(model, each.kind, each.column)


def check_media_of_retry(form: TableForm, model: ModelSpec) -> None:
    """Raises: InvalidInput where the model of a retry cannot take what the rows hold."""
    for each in form.media:
        for one in (*model.routes, model):
            if why := _refusal(one, each.kind):
                raise InvalidInput(
                    f"{one.name!r} takes no {each.kind}, which the rows have ({each.column!r}): {why}; choose another "
                    "model",
                    code="invalid_retry_model",
                )


def _check_model(model: ModelSpec, kind: str, column: str) -> None:
    for route in model.routes:
        _check_model(route, kind, column)
    if why := _refusal(model, kind):
        raise InvalidInput(
            f"{model.name!r} takes no {kind} ({column!r}): {why}; choose another model, or leave out --{kind} {column}",
            code="media_not_supported",
        )


def _refusal(model: ModelSpec, kind: str) -> str:
    """Why a model takes no media of a kind; empty: it may take them."""
    if model.takes_columns:
        return "it takes the columns by name"
    if model.provider is not None:
        kinds = PROVIDER_KINDS.get(model.provider, ())
        taken = f"take {' and '.join(kinds)} alone" if kinds else "take text alone"
        return "" if kind in kinds else f"batches of {model.provider} {taken}"
    if model.traits.is_local and model.traits.source is Source.WEIGHTS:
        if kind == DOCUMENT:
            return "vLLM reads no documents"
        name = next((each for each in _architectures(model.source) if each in TEXT_ONLY), None)
        return "" if name is None else f"{name} reads text alone"
    return ""


def _architectures(source: str) -> list[str]:
    """Those that the folder of a model names; none where it is no folder of this machine."""
    try:
        data = (Path(source) / "config.json").read_bytes()
        return msgspec.json.decode(data, type=_ModelConfig).architectures
    except (OSError, ValueError, msgspec.MsgspecError):
        return []
