"""What each field of a request may hold on its way to an engine server; what shapes the answer is walked by `schemas`.

Texts and messages are bounded by the size of a body and by the model's context. Every other field, whether it is known
here or not, is small, and its numbers are such as fit the engine's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from batchmill.engines.llm_bounds.schemas import SchemaLimits, SchemaWalk
from batchmill.errors import InvalidRow
from batchmill.types import Limits
from batchmill.wire.forms import COMPLETIONS

CHOICES_MAX = 128  # `n` and its like; as OpenAI has it
ANSWERS_MAX = 1_024  # of one request: choices times prompts
SMALL_BYTES_MAX = 4_096  # of a field that has no bound of its own
SMALL_DEPTH_MAX, SMALL_PARTS_MAX = 8, 256
NUMBER_MAX = 2**31 - 1
SHORT_BYTES = 9  # digits that are no more are within NUMBER_MAX


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


NOTHING = (b"null", b'""', b"{}", b"[]")

# Bounded by the body and the context. `documents` and `items` are texts too.
CONTENT = _names(
    """
    data_1 data_2 documents input instruction instructions items messages metadata model previous_input_messages
    prompt prompt_cache_key queries query safety_identifier suffix text_1 text_2 user
    """
)
# What shapes an answer: the engine compiles it. `guided_*` is how vLLM called it before 0.12.
SHAPES = _names(
    """
    functions guided_choice guided_grammar guided_json guided_regex response_format structural_tag
    structured_outputs text tool_choice tools
    """
)
# Field -> why no caller may set it.
REFUSED = {
    "chat_template": "it is a program that would run in the engine; the model's own is used",
    "ec_transfer_params": "it is how engines speak to each other",
    "kv_transfer_params": "it is how engines speak to each other",
    "media_io_kwargs": "it changes how much memory an image or video takes",
    "mm_processor_kwargs": "it changes how much memory an image or video takes",
    "prompt_embeds": "it is a serialised tensor; send the text, or ids of tokens",
    "request_id": "the engine gives each request an id of its own",
    "vllm_xargs": "it is for extensions of the engine",
}
# Of `chat_template_kwargs`: parameters of the renderer, not of a template.
RENDERER = _names(
    """
    chat_template max_length padding return_assistant_tokens_mask return_dict return_tensors tokenize
    tokenizer_kwargs truncation
    """
)
# Field -> its bytes and entries at most.
LISTS = {
    "allowed_token_ids": (2 * 1024 * 1024, 262_144),
    "bad_words": (65_536, 1_024),
    "logit_bias": (65_536, 1_024),
    "logprob_token_ids": (65_536, 1_024),
    "stop": (65_536, 1_024),
    "stop_token_ids": (65_536, 1_024),
}
TEXTS = frozenset(["bad_words", "cache_salt", "session_id", "stop"])  # whose texts are no numbers, however they look
RANGES = {
    "best_of": (0, CHOICES_MAX),
    "n": (0, CHOICES_MAX),
    "priority": (0, NUMBER_MAX),
    "seed": (-(2**63), 2**63 - 1),
}


class Bounds:
    """The bounds of one model's requests."""

    def __init__(self, limits: Limits) -> None:
        self._schemas = SchemaLimits.of(limits)

    def check(self, url: str, members: Mapping[str, Raw]) -> None:
        """Raises: InvalidRow, naming the field, its value and the limit."""
        walk: SchemaWalk | None = None
        for name, raw in members.items():
            if name in CONTENT:
                continue
            if name in SHAPES:
                walk = walk or SchemaWalk(self._schemas)
                walk.check(name, bytes(raw))
            else:
                _check(name, bytes(raw))
        if "n" in members and url == COMPLETIONS:
            _check_answers(members)


def _check(name: str, raw: bytes) -> None:
    size = len(raw)
    if size <= SHORT_BYTES and name not in REFUSED and name not in RANGES and raw.isdigit():
        return
    if name in REFUSED:
        if raw not in NOTHING:
            raise InvalidRow(f"body.{name} is not taken: {REFUSED[name]}", code="parameter_not_allowed")
        return
    bytes_max, entries_max = LISTS.get(name, (SMALL_BYTES_MAX, SMALL_PARTS_MAX))
    if size > bytes_max:
        raise InvalidRow(f"body.{name} has {size:,} bytes, and {bytes_max:,} is the most", code="parameter_too_large")
    if raw in (b"true", b"false", b"null"):
        return
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRow(f"body.{name} cannot be read: {error}", code="invalid_field") from None
    if name == "chat_template_kwargs" and isinstance(value, dict) and (wrong := sorted(RENDERER & value.keys())):
        text = f"body.chat_template_kwargs.{wrong[0]} is not taken: it is no variable of a template"
        raise InvalidRow(text, code="parameter_not_allowed")
    _check_value(name, value, entries_max, RANGES.get(name, (-NUMBER_MAX, NUMBER_MAX)))


def _check_value(name: str, value: Any, entries_max: int, allowed: tuple[int, int]) -> None:
    """Its numbers, how deep it nests, and how many parts it has."""
    left: list[tuple[Any, int]] = [(value, 0)]
    parts = 0
    while left:
        each, depth = left.pop()
        parts += 1
        if parts > entries_max + 1 or depth > SMALL_DEPTH_MAX:
            raise InvalidRow(
                f"body.{name} has more than {entries_max:,} entries, or nests deeper than {SMALL_DEPTH_MAX}",
                code="parameter_too_large",
            )
        if isinstance(each, dict):
            left += [(inner, depth + 1) for inner in each.values()]
        elif isinstance(each, list):
            left += [(inner, depth + 1) for inner in each]
        elif not isinstance(each, bool | None) and (number := _number(name, each)) is not None:
            _check_number(name, number, allowed)


def _number(name: str, value: Any) -> int | float | None:
    """The number that the engine reads it as: a text that looks like one is one, where no text is meant."""
    if isinstance(value, str) and name not in TEXTS:
        try:
            return float(value)
        except ValueError:
            return None
    return None if isinstance(value, str) else value


def _check_number(name: str, number: int | float, allowed: tuple[int, int]) -> None:
    least, most = allowed
    if not least <= number <= most:  # nor what is no number
        is_short = isinstance(number, float) or abs(number) < 10**30
        shown = str(number) if is_short else f"a number of {int(number).bit_length()} bits"
        raise InvalidRow(f"body.{name} is {shown}; it may be {least:,} to {most:,}", code="number_out_of_range")


def _check_answers(members: Mapping[str, Raw]) -> None:
    """A request asks for so many choices of each of its prompts."""
    try:
        choices = msgspec.json.decode(members["n"], type=int | None) or 1
        prompt = members.get("prompt", Raw(b"null"))
        prompts = len(msgspec.json.decode(prompt, type=list[Raw])) if bytes(prompt).startswith(b"[") else 1
    except (msgspec.MsgspecError, RecursionError):
        return  # the engine says what is wrong with it
    if choices * prompts > ANSWERS_MAX:
        raise InvalidRow(
            f"body asks for {choices} choices of each of {prompts:,} prompts, and {ANSWERS_MAX:,} answers in all is "
            "the most",
            code="parameter_too_large",
        )
