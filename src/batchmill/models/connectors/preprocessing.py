"""The built-in pre-processing of ML Commons: documents and queries become the parameters of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from batchmill.errors import InvalidInput
from batchmill.types.connectors import Action, Connector
from batchmill.wire.json_bytes import shallow

DOCS_MAX = 10_000
CALLS_MAX = 1_000  # that one request may come to
STEP_SIZE = "input_docs_processed_step_size"

Parameters = dict[str, Any]
Texts = list[str | None]
DEFAULT = "connector.pre_process.default.embedding"


class Input(Struct, frozen=True):
    """What a predict request brought, besides parameters."""

    docs: Texts
    query: str | None = None


def _as_array(name: str) -> Callable[[Input], Parameters]:
    return lambda given: {name: given.docs}


def _first_as(name: str, missing: str) -> Callable[[Input], Parameters]:
    def process(given: Input) -> Parameters:
        if given.docs[0] is None:
            raise InvalidInput(missing, code="invalid_input")
        return {name: given.docs[0]}

    return process


def _text_and_image(given: Input) -> Parameters:
    if given.docs == [None]:
        raise InvalidInput("No input text or image provided", code="invalid_input")
    return dict(zip(("inputText", "inputImage"), given.docs, strict=False))


def _nova(given: Input) -> Parameters:
    """One of four kinds: a document may be JSON whose member says which."""
    text = given.docs[0]
    if text is None:
        raise InvalidInput("No input provided", code="invalid_input")
    try:
        read = msgspec.json.decode(shallow(text.encode()))
    except (msgspec.MsgspecError, RecursionError):
        read = None
    if isinstance(read, dict):
        for kind in ("text", "image", "video", "audio"):
            if kind in read:
                inner = read[kind]
                return {kind: inner if isinstance(inner, str) else msgspec.json.encode(inner).decode()}
    return {"text": text}


def _rerank(given: Input) -> Parameters:
    return {"query": given.query, "documents": given.docs, "top_n": len(given.docs)}


def _bedrock_rerank(given: Input) -> Parameters:
    return {
        "queries": [{"textQuery": {"text": given.query}, "type": "TEXT"}],
        "sources": [
            {"inlineDocumentSource": {"textDocument": {"text": text}, "type": "TEXT"}, "type": "INLINE"}
            for text in given.docs
        ],
        "numberOfResults": len(given.docs),
    }


class _Function(Struct, frozen=True):
    process: Callable[[Input], Parameters]
    is_rerank: bool = False
    docs_max: int | None = None  # that one call can take; None: all
    missing: str = "No input provided"


_NO_TEXT = "No input text provided"
_FUNCTIONS = {
    "openai.embedding": _Function(_as_array("input")),
    "default.embedding": _Function(_as_array("input")),
    "cohere.embedding": _Function(_as_array("texts")),
    "cohere.multimodal_embedding": _Function(_as_array("images"), docs_max=1, missing="No image provided"),
    "bedrock.embedding": _Function(_first_as("inputText", _NO_TEXT), docs_max=1),
    "bedrock.nova.text_embedding": _Function(_first_as("inputText", _NO_TEXT), docs_max=1),
    "bedrock.nova.image_embedding": _Function(_first_as("inputImage", "No input image provided"), docs_max=1),
    "bedrock.nova.video_embedding": _Function(_first_as("inputVideo", "No input video provided"), docs_max=1),
    "bedrock.nova.audio_embedding": _Function(_first_as("inputAudio", "No input audio provided"), docs_max=1),
    "bedrock.nova.embedding": _Function(_nova, docs_max=1),
    "bedrock.multimodal_embedding": _Function(_text_and_image, docs_max=2, missing="No input text or image provided"),
    "cohere.rerank": _Function(_rerank, is_rerank=True),
    "default.rerank": _Function(_rerank, is_rerank=True),
    "bedrock.rerank": _Function(_bedrock_rerank, is_rerank=True),
}
PRE_PROCESS: dict[str, _Function] = {f"connector.pre_process.{name}": each for name, each in _FUNCTIONS.items()}


def prepare(connector: Connector, action: Action, body: Mapping[str, Any]) -> list[Parameters]:
    """The parameters of the calls that an ML Commons predict body asks for: one call, or one for each chunk of docs.

    What the body gives as `parameters` goes over what pre-processing makes of its documents.

    Raises: InvalidInput.
    """
    given = body.get("parameters")
    if given is not None and not isinstance(given, Mapping):
        raise InvalidInput("`parameters` is an object", code="invalid_input")
    parameters = dict(given or {})
    refuse_processors(parameters)
    read = _read_input(body)
    if read is None:
        return [parameters]
    name = action.pre_process_function
    if name is None and read.query is not None:
        raise InvalidInput("pre_process_function not defined in connector", code="invalid_input")
    function = PRE_PROCESS[name or DEFAULT]
    _check_kind(function, read)
    if not read.docs:
        raise InvalidInput(function.missing, code="invalid_input")
    if function.is_rerank:
        return [{**function.process(read), **parameters}]
    chunks = list(_chunks(read.docs, _step(function, connector, parameters)))
    if len(chunks) > CALLS_MAX:
        raise InvalidInput(f"{len(chunks)} calls would be needed; a request may have {CALLS_MAX}", code="too_large")
    return [{**function.process(Input(docs)), **parameters} for docs in chunks]


def refuse_processors(parameters: Mapping[str, Any]) -> None:
    """Raises: InvalidInput for the chains of processors that ML Commons reads from parameters."""
    for name in ("input_processors", "output_processors"):
        if name in parameters:
            raise InvalidInput(
                f"the parameter {name!r} is not supported: use response_filter, or post_process_function",
                code="unsupported_field",
            )


def _read_input(body: Mapping[str, Any]) -> Input | None:
    """The documents of a body; None where it has none."""
    docs, query = body.get("text_docs"), body.get("query_text")
    if docs is None and query is None:
        return None
    if not isinstance(docs, list) or not all(text is None or isinstance(text, str) for text in docs):
        raise InvalidInput("`text_docs` is a list of strings", code="invalid_input")
    if query is not None and not isinstance(query, str):
        raise InvalidInput("`query_text` is a string", code="invalid_input")
    if len(docs) > DOCS_MAX:
        raise InvalidInput(f"`text_docs` has {len(docs)} entries; there may be {DOCS_MAX}", code="too_large")
    return Input(docs, query)


def _check_kind(function: _Function, given: Input) -> None:
    if function.is_rerank and given.query is None:
        raise InvalidInput(
            "This pre_process_function can only support TextSimilarityInputDataSet", code="invalid_input"
        )
    if not function.is_rerank and given.query is not None:
        raise InvalidInput(
            "This pre_process_function can only support TextDocsInputDataSet which including a list of string "
            "with key 'text_docs'",
            code="invalid_input",
        )


def _step(function: _Function, connector: Connector, parameters: Parameters) -> int | None:
    """How many documents go into one call; None: all."""
    asked = parameters.get(STEP_SIZE, connector.parameters.get(STEP_SIZE))
    if asked is None:
        return function.docs_max
    try:
        step = int(asked)
    except (TypeError, ValueError):
        step = 0
    if step <= 0:
        raise InvalidInput(f"Invalid parameter: {STEP_SIZE}. It must be positive integer.", code="invalid_input")
    return step if function.docs_max is None else min(step, function.docs_max)


def _chunks(docs: Texts, step: int | None) -> Iterator[Texts]:
    step = step or len(docs)
    return (docs[at : at + step] for at in range(0, len(docs), step))
