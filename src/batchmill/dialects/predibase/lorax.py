"""LoRAX's generate call: what may stand in it, and how a completion of vLLM's is asked for the same. Pure.

Source: LoRAX's router (`validation.rs`, `infer.rs`) and predibase 2025.10.3, `resources/lorax/types.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from batchmill.errors import InvalidInput

BEST_OF_MAX = 16
WHOLE_WINDOW = 2**31 - 1  # tokens: more than any engine has, so that it says how many there are
SEED_MAX = 2**63 - 1
COUNTS = ("top_k", "max_new_tokens", "truncate", "return_k_alternatives")
NO_MERGING = "has no counterpart in vLLM: merge them into one adapter, register that, and name it in `adapter_id`"
NO_TOKEN = "is not taken in a request: an adapter is fetched when it is registered, with a token of its own"


class Parameters(Struct, frozen=True, forbid_unknown_fields=True):
    """How to answer. None: not said."""

    adapter_id: str | None = None
    adapter_source: str | None = None
    merged_adapters: dict[str, Any] | None = None
    api_token: str | None = None
    do_sample: bool = False
    max_new_tokens: int | None = None
    ignore_eos_token: bool = False
    repetition_penalty: float | None = None
    return_full_text: bool | None = None
    stop: list[str] = []
    seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    truncate: int | None = None
    typical_p: float | None = None
    best_of: int | None = None
    watermark: bool = False
    details: bool = False
    decoder_input_details: bool = False
    return_k_alternatives: int | None = None
    response_format: dict[str, Any] | None = None

    @property
    def samples(self) -> bool:
        """Tokens are drawn; otherwise the likeliest is taken."""
        said = (self.temperature, self.top_k, self.top_p)
        return self.temperature != 0 and (self.do_sample or any(each is not None for each in said))

    @property
    def tells(self) -> bool:
        """The answer tells of its tokens."""
        return self.details or self.decoder_input_details or self.return_k_alternatives is not None


class Generate(Struct, frozen=True, forbid_unknown_fields=True):
    """A call as it is sent."""

    inputs: str
    parameters: Parameters | None = None
    stream: bool = False


def check(asked: Generate) -> Parameters:
    """The parameters of a call that can be answered. Raises: InvalidInput in LoRAX's words, or naming the field."""
    told = Parameters() if asked.parameters is None else asked.parameters
    best_of = 1 if told.best_of is None else told.best_of
    streams, sampled = asked.stream, "is not supported when streaming tokens"
    wrong = (
        (not asked.inputs, "`inputs` cannot be empty"),
        (not 1 <= best_of <= BEST_OF_MAX, f"`best_of` must be > 0 and <= {BEST_OF_MAX}. Given: {best_of}"),
        (best_of > 1 and streams, f"`best_of` != 1 {sampled}"),
        (best_of > 1 and told.seed is not None, "`seed` must not be set when `best_of` > 1"),
        (best_of > 1 and not told.samples, "you must use sampling when `best_of` is > 1"),
        (_is_below(told.temperature, 0), "`temperature` must not be negative"),
        (told.repetition_penalty is not None and told.repetition_penalty <= 0, _positive("repetition_penalty")),
        (told.top_p is not None and not 0 < told.top_p < 1, "`top_p` must be > 0.0 and < 1.0"),
        *((_is_below(getattr(told, name), 1), _positive(name)) for name in COUNTS),
        (told.seed is not None and not 0 <= told.seed <= SEED_MAX, f"`seed` must be from 0 to {SEED_MAX}"),
        (streams and told.decoder_input_details, f"`decoder_input_details` == true {sampled}"),
        (streams and told.return_k_alternatives is not None, f"`return_k_alternatives` {sampled}"),
        (told.typical_p is not None, "`typical_p` has no counterpart in vLLM: use `top_p`, and leave it out"),
        (told.watermark, "`watermark` has no counterpart here: leave it out"),
        (told.merged_adapters is not None, f"`merged_adapters` {NO_MERGING}"),
        (bool(told.api_token), f"`api_token` {NO_TOKEN}"),
    )
    for is_wrong, why in wrong:
        if is_wrong:
            raise InvalidInput(why, code="invalid_parameter")
    return told


def _positive(name: str) -> str:
    return f"`{name}` must be strictly positive"


def _is_below(value: float | None, least: float) -> bool:
    return value is not None and value < least


def body_of(asked: Generate, told: Parameters, window: int | None) -> dict[str, Any]:
    """The body of a completion that answers the call; `window`: tokens of prompt and answer together, where known."""
    body: dict[str, Any] = {
        "prompt": asked.inputs,
        "max_tokens": told.max_new_tokens or window or WHOLE_WINDOW,
        "repetition_penalty": told.repetition_penalty or 1.0,
        "ignore_eos": told.ignore_eos_token,
        "temperature": 0.0,
        "return_token_ids": True,
    }
    if told.samples:
        chosen = 1.0 if told.temperature is None else told.temperature
        body |= {"temperature": chosen, "top_p": told.top_p or 1.0, "top_k": told.top_k or 0}
    if told.seed is not None:
        body["seed"] = told.seed
    if told.stop:
        body |= {"stop": told.stop, "include_stop_str_in_output": True}
    if told.truncate is not None:
        body |= {"truncate_prompt_tokens": told.truncate, "truncation_side": "left"}
    if told.response_format is not None:
        body["response_format"] = response_format_of(told.response_format)
    if (told.best_of or 1) > 1:
        body["n"] = told.best_of
    if asked.stream or told.tells or "n" in body:
        body["logprobs"] = 0
    if told.decoder_input_details:
        body["echo"] = True
    if asked.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def response_format_of(told: Mapping[str, Any]) -> dict[str, Any]:
    """LoRAX's `{"type": "json_object", "schema": …}` as OpenAI writes it; other forms as they are.

    Raises: InvalidInput.
    """
    kind, schema = told.get("type"), told.get("schema")
    if kind not in ("json_object", "json_schema", "text"):
        raise InvalidInput(
            f"`response_format` has the type {str(kind)[:80]!r}: it must be json_object", code="invalid_parameter"
        )
    unknown = [name for name in told if name not in ("type", "schema", "json_schema")]
    if unknown:
        raise InvalidInput(f"`response_format` has no {unknown[0][:80]!r}", code="unknown_parameter")
    if schema is None:
        return {name: value for name, value in told.items() if name != "schema"}
    if kind != "json_object" or not isinstance(schema, dict):
        raise InvalidInput(
            "`response_format.schema` must be an object, of the type json_object", code="invalid_parameter"
        )
    return {"type": "json_schema", "json_schema": {"name": "response", "schema": schema}}
