"""Body fields beyond OpenAI's: those that a managed engine server knows, by URL, and those of LoRAX."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from msgspec import Raw, Struct

from batchmill.errors import InvalidRow
from batchmill.wire.json_bytes import encode, join_object, split_object
from batchmill.wire.rows.forms import CHAT, CLASSIFY, COMPLETIONS, EMBEDDINGS, RERANK, RESPONSES, SCORE

# OpenAI's fields that cannot change an answer. They are accepted everywhere, and have no effect in a managed engine.
NO_EFFECT = frozenset(
    ["metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user"]
)

# OpenAI's fields that an engine may lack -> their neutral values: OpenAI treats them as if the field were absent. Any
# other value is refused, as OpenAI refuses it for a model without the feature.
DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    "audio": (None,),
    "conversation": (None,),
    "function_call": (None, "none"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "stream_options": (None, {"include_obfuscation": False}),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
DEFAULT_BYTES_MAX = 128  # a longer value is not one of these

_GENERATE = """
    cache_salt ec_transfer_params frequency_penalty ignore_eos include_stop_str_in_output kv_transfer_params logit_bias
    min_p mm_payload model presence_penalty priority repetition_penalty request_id return_mm_kwargs seed session_id
    skip_special_tokens stop stop_token_ids stream structured_outputs temperature top_k top_p vllm_xargs watermarking
"""
_TEXT = """
    add_special_tokens allowed_token_ids bad_words echo length_penalty logprob_token_ids logprobs max_tokens min_tokens
    n prompt_logprobs repetition_detection response_format return_token_ids return_token_offsets
    return_tokens_as_token_ids routed_experts_prompt_start spaces_between_special_tokens stream_interval stream_options
    thinking_token_budget truncate_prompt_tokens truncation_side use_beam_search
"""
_MESSAGES = """
    add_generation_prompt chat_template chat_template_kwargs continue_final_message media_io_kwargs messages
    mm_processor_kwargs
"""
_CHAT_ONLY = """
    documents include_reasoning max_completion_tokens parallel_tool_calls reasoning_effort return_prompt_text
    tool_choice tools top_logprobs
"""
_RESPONSES_ONLY = """
    background chat_template_kwargs enable_response_messages include include_reasoning input instructions
    max_output_tokens max_tool_calls media_io_kwargs mm_processor_kwargs parallel_tool_calls previous_input_messages
    previous_response_id prompt reasoning text tool_choice tools top_logprobs truncation
"""
_POOLING = """
    cache_salt chat_template_kwargs mm_processor_kwargs model padding priority request_id truncate_prompt_tokens
    truncation_side use_activation
"""
_SCORING = "instruction max_tokens_per_doc max_tokens_per_query"


def _set(*names: str) -> frozenset[str]:
    return frozenset(" ".join(names).split()) | NO_EFFECT


KNOWN_FIELDS: Mapping[str, frozenset[str]] = {
    CHAT: _set(_GENERATE, _TEXT, _MESSAGES, _CHAT_ONLY),
    COMPLETIONS: _set(_GENERATE, _TEXT, "prompt prompt_embeds suffix"),
    RESPONSES: _set(_GENERATE, _RESPONSES_ONLY),
    EMBEDDINGS: _set(_POOLING, _MESSAGES, "add_special_tokens dimensions embed_dtype encoding_format endianness input"),
    RERANK: _set(_POOLING, _SCORING, "documents query top_n"),
    CLASSIFY: _set(_POOLING, _MESSAGES, "add_special_tokens input"),
    SCORE: _set(_POOLING, _SCORING, "data_1 data_2 documents items queries text_1 text_2"),
}


def unknown_fields(
    url: str, members: Mapping[str, bytes | Raw], known: Mapping[str, frozenset[str]] = KNOWN_FIELDS
) -> list[str]:
    """Return the members of a body that the engine would ignore, except neutral values; none for an unknown URL."""
    fields = known.get(url)
    if fields is None or members.keys() <= fields:
        return []
    return [name for name, value in members.items() if name not in fields and not _is_default(name, value)]


def _is_default(name: str, value: bytes | Raw) -> bool:
    if name not in DEFAULTS or len(raw := bytes(value)) > DEFAULT_BYTES_MAX:
        return False
    try:
        return msgspec.json.decode(raw) in DEFAULTS[name]
    except (msgspec.MsgspecError, RecursionError):
        return False


def refusal(url: str, unknown: list[str], known: Mapping[str, frozenset[str]] = KNOWN_FIELDS) -> str:
    """Render the message that refuses unknown fields, with the nearest known name for each."""
    named = []
    for name in unknown[:8]:
        if name in DEFAULTS:
            values = " or ".join(msgspec.json.encode(each).decode() for each in DEFAULTS[name])
            named.append(f"{name!r} (which may be left out, or {values})")
            continue
        nearest = difflib.get_close_matches(name, known[url], n=1)
        named.append(f"{name!r} (did you mean {nearest[0]!r}?)" if nearest else repr(name))
    more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
    return f"the engine does not know the field {', '.join(named)}{more} of {url} and would ignore it; remove it"


def fields_of_openapi(document: dict[str, Any], urls: Collection[str] = KNOWN_FIELDS) -> dict[str, frozenset[str]]:
    """Return the fields that a running server's OpenAPI document lists, for those of the URLs that it describes."""
    fields = {}
    for url in urls:
        schema = _body_schema(document, url)
        names = _properties(document, schema) if schema is not None else frozenset()
        if names:
            fields[url] = names | NO_EFFECT
    return fields


def _body_schema(document: dict[str, Any], url: str) -> Any:
    match document.get("paths", {}).get(url, {}).get("post"):
        case {"requestBody": {"content": {"application/json": {"schema": schema}}}}:
            return schema
    return None


def _properties(document: dict[str, Any], schema: dict[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the property names of a schema and of all its alternatives."""
    if depth > 8:
        return frozenset()
    if isinstance(reference := schema.get("$ref"), str):
        named = document.get("components", {}).get("schemas", {}).get(reference.rsplit("/", 1)[-1], {})
        return _properties(document, named, depth + 1)
    alternatives = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())]
    return frozenset(schema.get("properties", ())).union(
        *(_properties(document, alternative, depth + 1) for alternative in alternatives)
    )


RENAMED = {"ignore_eos_token": "ignore_eos"}
FORMAT = "response_format"
# LoRAX's fields that are not supported -> why, and what to do.
REFUSED = {
    "adapter_id": "name the adapter in `model`",
    "adapter_source": "an adapter is registered with its source: leave it out",
    "merged_adapters": "vLLM merges none: merge them into one adapter, register that, and name it in `model`",
    "api_token": "an adapter is fetched when it is registered, with a token of its own: leave it out",
}
KNOWN = frozenset([*RENAMED, *REFUSED, FORMAT])
NOTHING = (b"null", b'""')  # values that clients send for an absent field
_HINT = re.compile(b"|".join(b'"%b"' % name.encode() for name in sorted(KNOWN)))


class _Format(Struct):
    type: str | None = None
    schema: Raw = Raw(b"null")
    json_schema: Raw = Raw(b"null")


def translate_body(body: bytes) -> bytes:
    """Translate LoRAX's fields of a request body for the engine. Raises: InvalidRow, naming the field."""
    if _HINT.search(body) is None:  # nearly all bodies
        return body
    members = split_object(body)
    result = translate_fields(members)
    return body if result == members else join_object(result)


def translate_fields(members: Mapping[str, Raw]) -> dict[str, Raw]:
    """Translate LoRAX's fields for the engine. Raises: InvalidRow, naming the field."""
    result = dict(members)
    for name in KNOWN.intersection(members):
        value = result.pop(name)
        if name == FORMAT:
            result[name] = _format(value)
        elif bytes(value) in NOTHING:
            continue
        elif name in REFUSED:
            raise lorax_refusal(name)
        elif RENAMED[name] in members:
            raise InvalidRow(f"body has {name} and {RENAMED[name]}, which mean the same", code="invalid_field")
        else:
            result[RENAMED[name]] = value
    return result


def lorax_refusal(name: str) -> InvalidRow:
    """The error for a field in REFUSED."""
    return InvalidRow(f"body.{name} is not supported: {REFUSED[name]}", code="parameter_not_allowed")


def _format(value: Raw) -> Raw:
    """Translate LoRAX's `{"type": "json_object", "schema": …}` to OpenAI's format; other values are unchanged."""
    try:
        declared = msgspec.json.decode(value, type=_Format | None)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return value  # the engine refuses it
    if declared is None or bytes(declared.schema) == b"null":
        return value
    if declared.type != "json_object" or bytes(declared.json_schema) != b"null":
        raise InvalidRow("body.response_format.schema needs the type json_object", code="invalid_field")
    return Raw(encode({"type": "json_schema", "json_schema": {"name": "response", "schema": declared.schema}}))
