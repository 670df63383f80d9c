"""Check LoRAX's calls, turn them into vLLM's completion requests, and turn vLLM's answers into LoRAX's. Pure.

Source: LoRAX's router (`validation.rs`, `infer.rs`) and predibase 2025.10.3, `resources/lorax/types.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from batchmill.errors import BatchmillError, InvalidInput
from batchmill.wire.json_bytes import encode

BEST_OF_MAX = 16
WHOLE_WINDOW = 2**31 - 1  # tokens: longer than any window, so that the engine's error names its real window
SEED_MAX = 2**63 - 1
COUNTS = ("top_k", "max_new_tokens", "truncate", "return_k_alternatives")
NO_MERGING = "has no counterpart in vLLM: merge them into one adapter, register that, and name it in `adapter_id`"
NO_TOKEN = "is not supported in a request: an adapter is fetched when it is registered, with a token of its own"


class Parameters(Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of a generate call. None: not set."""

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
    def is_sampling(self) -> bool:
        """True if the engine samples tokens; False if it always takes the most likely token."""
        settings = (self.temperature, self.top_k, self.top_p)
        return self.temperature != 0 and (self.do_sample or any(each is not None for each in settings))

    @property
    def has_token_details(self) -> bool:
        """True if the answer contains details of its tokens."""
        return self.details or self.decoder_input_details or self.return_k_alternatives is not None


class Generate(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a generate call."""

    inputs: str
    parameters: Parameters | None = None
    stream: bool = False


def check(request: Generate) -> Parameters:
    """Check a generate call and return its parameters. Raises: InvalidInput in LoRAX's words, or naming the field."""
    parameters = Parameters() if request.parameters is None else request.parameters
    best_of = 1 if parameters.best_of is None else parameters.best_of
    streams, not_streaming = request.stream, "is not supported when streaming tokens"
    wrong = (
        (not request.inputs, "`inputs` cannot be empty"),
        (not 1 <= best_of <= BEST_OF_MAX, f"`best_of` must be > 0 and <= {BEST_OF_MAX}. Given: {best_of}"),
        (best_of > 1 and streams, f"`best_of` != 1 {not_streaming}"),
        (best_of > 1 and parameters.seed is not None, "`seed` must not be set when `best_of` > 1"),
        (best_of > 1 and not parameters.is_sampling, "you must use sampling when `best_of` is > 1"),
        (_is_below(parameters.temperature, 0), "`temperature` must not be negative"),
        (
            parameters.repetition_penalty is not None and parameters.repetition_penalty <= 0,
            _positive("repetition_penalty"),
        ),
        (parameters.top_p is not None and not 0 < parameters.top_p < 1, "`top_p` must be > 0.0 and < 1.0"),
        *((_is_below(getattr(parameters, name), 1), _positive(name)) for name in COUNTS),
        (parameters.seed is not None and not 0 <= parameters.seed <= SEED_MAX, f"`seed` must be from 0 to {SEED_MAX}"),
        (streams and parameters.decoder_input_details, f"`decoder_input_details` == true {not_streaming}"),
        (streams and parameters.return_k_alternatives is not None, f"`return_k_alternatives` {not_streaming}"),
        (parameters.typical_p is not None, "`typical_p` has no counterpart in vLLM: leave it out, and use `top_p`"),
        (parameters.watermark, "`watermark` has no counterpart here: leave it out"),
        (parameters.merged_adapters is not None, f"`merged_adapters` {NO_MERGING}"),
        (bool(parameters.api_token), f"`api_token` {NO_TOKEN}"),
    )
    for is_wrong, why in wrong:
        if is_wrong:
            raise InvalidInput(why, code="invalid_parameter")
    return parameters


def _positive(name: str) -> str:
    return f"`{name}` must be strictly positive"


def _is_below(value: float | None, least: float) -> bool:
    return value is not None and value < least


def body_of(request: Generate, parameters: Parameters, window: int | None) -> dict[str, Any]:
    """Return the body of vLLM's completion for a call.

    `window`: tokens of prompt and answer together, None if unknown.
    """
    body: dict[str, Any] = {
        "prompt": request.inputs,
        "max_tokens": parameters.max_new_tokens or window or WHOLE_WINDOW,
        "repetition_penalty": parameters.repetition_penalty or 1.0,
        "ignore_eos": parameters.ignore_eos_token,
        "temperature": 0.0,
        "return_token_ids": True,
    }
    if parameters.is_sampling:
        chosen = 1.0 if parameters.temperature is None else parameters.temperature
        body |= {"temperature": chosen, "top_p": parameters.top_p or 1.0, "top_k": parameters.top_k or 0}
    if parameters.seed is not None:
        body["seed"] = parameters.seed
    if parameters.stop:
        body |= {"stop": parameters.stop, "include_stop_str_in_output": True}
    if parameters.truncate is not None:
        body |= {"truncate_prompt_tokens": parameters.truncate, "truncation_side": "left"}
    if parameters.response_format is not None:
        body["response_format"] = response_format_of(parameters.response_format)
    if (parameters.best_of or 1) > 1:
        body["n"] = parameters.best_of
    if request.stream or parameters.has_token_details or "n" in body:
        body["logprobs"] = 0
    if parameters.decoder_input_details:
        body["echo"] = True
    if request.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def response_format_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Turn LoRAX's `{"type": "json_object", "schema": …}` into OpenAI's form; other forms are unchanged.

    Raises: InvalidInput.
    """
    kind, schema = fields.get("type"), fields.get("schema")
    if kind not in ("json_object", "json_schema", "text"):
        raise InvalidInput(
            f"`response_format` has the type {str(kind)[:80]!r}: it must be json_object", code="invalid_parameter"
        )
    unknown = [name for name in fields if name not in ("type", "schema", "json_schema")]
    if unknown:
        message = f"`response_format` has the unknown field {unknown[0][:80]!r}: leave it out"
        raise InvalidInput(message, code="unknown_parameter")
    if schema is None:
        return {name: value for name, value in fields.items() if name != "schema"}
    if kind != "json_object" or not isinstance(schema, dict):
        raise InvalidInput(
            "`response_format.schema` must be an object, and the type json_object", code="invalid_parameter"
        )
    return {"type": "json_schema", "json_schema": {"name": "response", "schema": schema}}


_MARKER = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")  # the form of special tokens


class AlternativeToken(Struct, frozen=True):
    id: int
    text: str
    logprob: float | None


class PrefillToken(Struct, frozen=True):
    id: int
    text: str
    logprob: float | None  # None for the first token, which follows no other


class Token(Struct, frozen=True, omit_defaults=True):
    id: int
    text: str
    logprob: float | None
    special: bool
    alternative_tokens: list[AlternativeToken] | None = None


class OtherSequence(Struct, frozen=True):
    """One of several answers to a prompt, other than the best."""

    generated_text: str
    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]


class Details(Struct, frozen=True, omit_defaults=True):
    finish_reason: str
    prompt_tokens: int
    generated_tokens: int
    prefill: list[PrefillToken]
    tokens: list[Token]
    seed: int | None = None
    best_of_sequences: list[OtherSequence] | None = None


class Generated(Struct, frozen=True, omit_defaults=True):
    generated_text: str
    details: Details | None = None


class _Logprobs(Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []


class Choice(Struct):
    """One answer of vLLM, or a piece of it."""

    text: str = ""
    index: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, _PromptLogprob] | None] | None = None


class _PromptLogprob(Struct):
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0


class Answer(Struct):
    """A reply of vLLM's completions, or one event of a stream."""

    choices: list[Choice] = []
    usage: _Usage | None = None
    error: Any = None


read_answer = msgspec.json.Decoder(Answer).decode


def alternatives_body(choice: Choice, count: int, window: int | None) -> dict[str, Any]:
    """Return a completion request whose prompt is prompt and answer together; the reply has the alternatives."""
    ids = [*(choice.prompt_token_ids or ()), *(choice.token_ids or ())]
    if window is not None:
        ids = ids[: window - 1]  # leave room for the one generated token that vLLM requires
    return {"prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": count}


def with_alternatives(choice: Choice, tokens: Sequence[Token], alternatives: Choice, count: int) -> list[Token]:
    """Return `tokens` with the `count` most likely tokens at each position.

    `alternatives` is the reply to `alternatives_body`.
    """
    positions = (alternatives.prompt_logprobs or [])[len(choice.prompt_token_ids or ()) :]
    result = []
    for number, token in enumerate(tokens):
        candidates = (positions[number] if number < len(positions) else None) or {}
        ranked = sorted(candidates.items(), key=lambda item: -item[1].logprob)[:count]
        others = [AlternativeToken(int(id), each.decoded_token or "", each.logprob) for id, each in ranked]
        result.append(msgspec.structs.replace(token, alternative_tokens=others or None))
    return result


def best_first(choices: Sequence[Choice]) -> list[Choice]:
    """Sort answers by the mean log probability of their tokens, the most likely first."""
    return sorted(choices, key=lambda each: -_mean_logprob(each))


def _mean_logprob(choice: Choice) -> float:
    logprobs = [] if choice.logprobs is None else [each for each in choice.logprobs.token_logprobs if each is not None]
    return sum(logprobs) / len(logprobs) if logprobs else float("-inf")


def finish_of(choice: Choice) -> str:
    """Return LoRAX's finish reason. Raises: BatchmillError if the engine did not finish the answer."""
    match choice.finish_reason, choice.stop_reason:
        case "length", _:
            return "length"
        case "stop", str():
            return "stop_sequence"
        case "stop", _:
            return "eos_token"
    raise BatchmillError(f"the engine ended the answer early ({choice.finish_reason})", code="incomplete_generation")


def tokens_of(choice: Choice) -> list[Token]:
    """Return the tokens of an answer or of a piece. The joined text of the tokens that are not special is its text."""
    ids = choice.token_ids or []
    logprobs = choice.logprobs or _Logprobs()
    texts, values = logprobs.tokens[-len(ids) :] if ids else [], logprobs.token_logprobs[-len(ids) :] if ids else []
    texts = texts if len(texts) == len(ids) else [""] * len(ids)
    values = values if len(values) == len(ids) else [None] * len(ids)
    is_end = choice.finish_reason == "stop" and not isinstance(choice.stop_reason, str)
    last = len(ids) - 1
    special = [_is_special(text, choice.text) or (is_end and number == last) for number, text in enumerate(texts)]
    fitted = _fit_texts(choice.text, texts, special)
    return [Token(*each) for each in zip(ids, fitted, values, special, strict=True)]


def _is_special(text: str, whole: str) -> bool:
    return _MARKER.fullmatch(text) is not None and text not in whole


def _fit_texts(whole: str, texts: list[str], special: list[bool]) -> list[str]:
    """Return the tokens' texts so that they join to `whole`.

    Where one character spans several tokens, the last token gets all the text that cannot be split.
    """
    plain = [number for number, is_special in enumerate(special) if not is_special]
    if not plain or "".join(texts[number] for number in plain) == whole:
        return texts
    fitted = [text if is_special else "" for text, is_special in zip(texts, special, strict=True)]
    at = 0
    for number in plain[:-1]:
        if whole.startswith(texts[number], at):
            fitted[number] = texts[number]
            at += len(texts[number])
        else:
            break
    fitted[plain[-1]] = whole[at:]
    return fitted


def prefill_of(choice: Choice) -> list[PrefillToken]:
    """Return the tokens of the prompt if the answer contains them, otherwise an empty list."""
    ids = choice.prompt_token_ids or []
    if choice.logprobs is None or len(choice.logprobs.tokens) < len(ids) + len(choice.token_ids or []):
        return []
    tokens = zip(ids, choice.logprobs.tokens, choice.logprobs.token_logprobs, strict=False)
    return [PrefillToken(id, text, logprob) for id, text, logprob in tokens]


class _Order(Struct, frozen=True):
    request: Generate
    answer: bytes
    alternatives: bytes = b""


def pack(request: Generate, answer: bytes, alternatives: bytes = b"") -> bytes:
    """Encode a call and the engine's replies for `write`.

    `alternatives` is the reply to `alternatives_body`; empty if the call does not need it.
    """
    return msgspec.msgpack.encode(_Order(request, answer, alternatives))


def write(order: bytes, progress: Callable[[float], None]) -> bytes:
    """Write the reply to a call from what `pack` encoded. Raises: the errors of `generated`."""
    decoded = msgspec.msgpack.decode(order, type=_Order)
    request, answer, tokens = decoded.request, read_answer(decoded.answer), None
    parameters = request.parameters or Parameters()
    if decoded.alternatives and parameters.return_k_alternatives is not None:
        best, alternatives = best_first(answer.choices)[0], read_answer(decoded.alternatives)
        tokens = with_alternatives(best, tokens_of(best), alternatives.choices[0], parameters.return_k_alternatives)
    return msgspec.json.encode([generated(request, parameters, answer, tokens)])


def generated(
    request: Generate, parameters: Parameters, answer: Answer, tokens: list[Token] | None = None
) -> Generated:
    """Return LoRAX's answer. `tokens`: those of the best answer with alternatives; None: made from `answer`."""
    best, *others = best_first(answer.choices) if len(answer.choices) > 1 else answer.choices
    head = request.inputs if parameters.return_full_text else ""
    if not parameters.has_token_details:
        finish_of(best)
        return Generated(head + best.text)
    details = Details(
        finish_reason=finish_of(best),
        prompt_tokens=len(best.prompt_token_ids or ()),
        generated_tokens=len(best.token_ids or ()),
        prefill=prefill_of(best) if parameters.decoder_input_details else [],
        tokens=tokens_of(best) if tokens is None else tokens,
        seed=parameters.seed,
        best_of_sequences=[_other(each, head, parameters) for each in others] or None,
    )
    return Generated(head + best.text, details)


def _other(choice: Choice, head: str, parameters: Parameters) -> OtherSequence:
    prefill = prefill_of(choice) if parameters.decoder_input_details else []
    count = len(choice.token_ids or ())
    return OtherSequence(head + choice.text, finish_of(choice), count, parameters.seed, prefill, tokens_of(choice))


INPUTS_MAX = 10_000
T = TypeVar("T", bound=Struct)
Progress = Callable[[float], None]


class Classify(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a classify call. The client sends all three fields, with an empty token."""

    input: str | Annotated[list[str], Meta(min_length=1, max_length=INPUTS_MAX)]
    model: str | None = None
    api_token: str = ""


class Class(Struct, frozen=True):
    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class Classified(Struct, frozen=True):
    """vLLM's answer to /classify, which the client accepts unchanged."""

    id: str
    object: str
    created: int
    model: str
    data: list[Class]


class Embed(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of an embed call: the client sends a generate body, of which only `inputs` has a meaning here."""

    inputs: Annotated[str, Meta(min_length=1)]
    parameters: None = None
    stream: bool = False


class Embedded(Struct, frozen=True):
    embeddings: list[float]


class _Vector(Struct):
    embedding: list[float]


class _Vectors(Struct):
    data: Annotated[list[_Vector], Meta(min_length=1)]


def classify_body(request: Classify) -> dict[str, object]:
    """Return the body of the engine's request. Raises: InvalidInput."""
    if request.api_token:
        raise InvalidInput(f"`api_token` {NO_TOKEN}", code="invalid_parameter")
    return {"input": request.input}


def classified(answer: bytes, progress: Progress) -> bytes:
    """Return the reply to a classify call from the engine's answer."""
    return encode(_read(answer, Classified))


def embed_body(request: Embed) -> dict[str, object]:
    """Return the body of the engine's request. Raises: InvalidInput."""
    if request.stream:
        raise InvalidInput("`stream`: a vector comes in one piece; leave it out", code="invalid_parameter")
    return {"input": request.inputs}


def embedded(answer: bytes, progress: Progress) -> bytes:
    """Return the reply to an embed call from the engine's answer."""
    return encode(Embedded(_read(answer, _Vectors).data[0].embedding))


def _read(answer: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(answer, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BatchmillError(f"the engine's answer cannot be read: {error}", code="internal_error") from None
