"""ML Commons' built-in pre- and post-processing: from documents to parameters of calls, and from replies to tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Raw, Struct

from batchmill.errors import InvalidInput
from batchmill.optional import require
from batchmill.types.connectors import Action, Connector
from batchmill.wire.json_bytes import encode, shallow

JSON_PATHS = "batchmill.models.connectors.json_paths"
DOCS_MAX = 10_000
CALLS_MAX = 1_000  # calls of one request
STEP_SIZE = "input_docs_processed_step_size"

Parameters = dict[str, Any]
Texts = list[str | None]
DEFAULT = "connector.pre_process.default.embedding"


class Input(Struct, frozen=True):
    """The documents and query of a predict request."""

    docs: Texts
    query: str | None = None


def _as_array(name: str) -> Callable[[Input], Parameters]:
    return lambda documents: {name: documents.docs}


def _first_as(name: str, missing: str) -> Callable[[Input], Parameters]:
    def process(documents: Input) -> Parameters:
        if documents.docs[0] is None:
            raise InvalidInput(missing, code="invalid_input")
        return {name: documents.docs[0]}

    return process


def _text_and_image(documents: Input) -> Parameters:
    if documents.docs == [None]:
        raise InvalidInput("No input text or image provided", code="invalid_input")
    return dict(zip(("inputText", "inputImage"), documents.docs, strict=False))


def _nova(documents: Input) -> Parameters:
    """Parameters of one of four kinds. A document may be JSON with a member for its kind; otherwise it is text."""
    text = documents.docs[0]
    if text is None:
        raise InvalidInput("No input provided", code="invalid_input")
    try:
        fields = msgspec.json.decode(shallow(text.encode()))
    except (msgspec.MsgspecError, RecursionError):
        fields = None
    if isinstance(fields, dict):
        for kind in ("text", "image", "video", "audio"):
            if kind in fields:
                inner = fields[kind]
                return {kind: inner if isinstance(inner, str) else msgspec.json.encode(inner).decode()}
    return {"text": text}


def _rerank(documents: Input) -> Parameters:
    return {"query": documents.query, "documents": documents.docs, "top_n": len(documents.docs)}


def _bedrock_rerank(documents: Input) -> Parameters:
    return {
        "queries": [{"textQuery": {"text": documents.query}, "type": "TEXT"}],
        "sources": [
            {"inlineDocumentSource": {"textDocument": {"text": text}, "type": "TEXT"}, "type": "INLINE"}
            for text in documents.docs
        ],
        "numberOfResults": len(documents.docs),
    }


class _Preprocess(Struct, frozen=True):
    process: Callable[[Input], Parameters]
    is_rerank: bool = False
    docs_max: int | None = None  # documents in one call; None: all
    missing: str = "No input provided"


_NO_TEXT = "No input text provided"
_PREPROCESS = {
    "openai.embedding": _Preprocess(_as_array("input")),
    "default.embedding": _Preprocess(_as_array("input")),
    "cohere.embedding": _Preprocess(_as_array("texts")),
    "cohere.multimodal_embedding": _Preprocess(_as_array("images"), docs_max=1, missing="No image provided"),
    "bedrock.embedding": _Preprocess(_first_as("inputText", _NO_TEXT), docs_max=1),
    "bedrock.nova.text_embedding": _Preprocess(_first_as("inputText", _NO_TEXT), docs_max=1),
    "bedrock.nova.image_embedding": _Preprocess(_first_as("inputImage", "No input image provided"), docs_max=1),
    "bedrock.nova.video_embedding": _Preprocess(_first_as("inputVideo", "No input video provided"), docs_max=1),
    "bedrock.nova.audio_embedding": _Preprocess(_first_as("inputAudio", "No input audio provided"), docs_max=1),
    "bedrock.nova.embedding": _Preprocess(_nova, docs_max=1),
    "bedrock.multimodal_embedding": _Preprocess(_text_and_image, docs_max=2, missing="No input text or image provided"),
    "cohere.rerank": _Preprocess(_rerank, is_rerank=True),
    "default.rerank": _Preprocess(_rerank, is_rerank=True),
    "bedrock.rerank": _Preprocess(_bedrock_rerank, is_rerank=True),
}
PRE_PROCESS: dict[str, _Preprocess] = {f"connector.pre_process.{name}": each for name, each in _PREPROCESS.items()}


def prepare(connector: Connector, action: Action, body: Mapping[str, Any]) -> list[Parameters]:
    """The parameters of the calls for an ML Commons predict body: one call, or one for each chunk of documents.

    The body's `parameters` override those that pre-processing makes of the documents.

    Raises: InvalidInput.
    """
    parameters_field = body.get("parameters")
    if parameters_field is not None and not isinstance(parameters_field, Mapping):
        raise InvalidInput("`parameters` must be an object", code="invalid_input")
    parameters = dict(parameters_field or {})
    refuse_processors(parameters)
    documents = _read_input(body)
    if documents is None:
        return [parameters]
    name = action.pre_process_function
    if name is None and documents.query is not None:
        raise InvalidInput("pre_process_function not defined in connector", code="invalid_input")
    function = PRE_PROCESS[name or DEFAULT]
    _check_kind(function, documents)
    if not documents.docs:
        raise InvalidInput(function.missing, code="invalid_input")
    if function.is_rerank:
        return [{**function.process(documents), **parameters}]
    chunks = list(_chunks(documents.docs, _step(function, connector, parameters)))
    if len(chunks) > CALLS_MAX:
        raise InvalidInput(f"the request needs {len(chunks)} calls; the maximum is {CALLS_MAX}", code="too_large")
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
    """The documents of a body; None if it has none."""
    docs, query = body.get("text_docs"), body.get("query_text")
    if docs is None and query is None:
        return None
    if not isinstance(docs, list) or not all(text is None or isinstance(text, str) for text in docs):
        raise InvalidInput("`text_docs` must be a list of strings", code="invalid_input")
    if query is not None and not isinstance(query, str):
        raise InvalidInput("`query_text` must be a string", code="invalid_input")
    if len(docs) > DOCS_MAX:
        raise InvalidInput(f"`text_docs` has {len(docs)} entries; the maximum is {DOCS_MAX}", code="too_large")
    return Input(docs, query)


def _check_kind(function: _Preprocess, documents: Input) -> None:
    if function.is_rerank and documents.query is None:
        raise InvalidInput(
            "This pre_process_function can only support TextSimilarityInputDataSet", code="invalid_input"
        )
    if not function.is_rerank and documents.query is not None:
        raise InvalidInput(
            "This pre_process_function can only support TextDocsInputDataSet which including a list of string "
            "with key 'text_docs'",
            code="invalid_input",
        )


def _step(function: _Preprocess, connector: Connector, parameters: Parameters) -> int | None:
    """The number of documents in one call; None: all."""
    value = parameters.get(STEP_SIZE, connector.parameters.get(STEP_SIZE))
    if value is None:
        return function.docs_max
    try:
        step = int(value)
    except (TypeError, ValueError):
        step = 0
    if step <= 0:
        raise InvalidInput(f"Invalid parameter: {STEP_SIZE}. It must be positive integer.", code="invalid_input")
    return step if function.docs_max is None else min(step, function.docs_max)


def _chunks(docs: Texts, step: int | None) -> Iterator[Texts]:
    step = step or len(docs)
    return (docs[start : start + step] for start in range(0, len(docs), step))


FILTER = "response_filter"

# The first type with its name in a path (".int8") is the type of the selected values.
_TYPES = ("FLOAT32", "FLOAT64", "FLOAT16", "UINT8", "INT32", "INT8", "INT64", "BOOLEAN", "STRING")

Tensors = list[dict[str, Any]]
_MISSING = object()


def tensors(action: Action, reply: bytes, parameters: Mapping[str, Any]) -> Tensors:
    """The `output` for a reply: one tensor for each vector or score, or one map with the reply.

    Args:
        parameters: of the call, the connector's own included; only `response_filter` is used.

    Raises: InvalidInput, `unexpected_reply` for a reply that the function cannot read, or `invalid_response_filter`.
    """
    path = parameters.get(FILTER)
    expression = path if isinstance(path, str) and path.strip() else None
    function = None if action.post_process_function is None else POST_PROCESS[action.post_process_function]
    if function is None:
        return [_response(_select(reply, expression))]
    document = _decode(reply)
    if expression is None:
        return function.process(_value_at(document, function.steps), _type_in_path(function.path))
    exists, selected = require(JSON_PATHS, "a filter").find(expression, document, len(reply))
    if not exists:
        raise _unexpected(f"the reply has nothing at {expression[:100]!r}")
    return function.process(selected, _type_in_path(expression))


def output_json(action: Action, reply: bytes, parameters: Mapping[str, Any]) -> bytes:
    """As `tensors`, as JSON. The vectors of built-in functions stay unchanged, digit for digit.

    Raises: as `tensors`.
    """
    name = action.post_process_function
    reader = None if name is None or parameters.get(FILTER) else _VECTORS.get(name)
    if reader is not None:
        try:
            vectors = _vectors_json(reader(reply), POST_PROCESS[name or ""].path)
        except msgspec.MsgspecError:
            vectors = None  # `tensors` reports the error
        if vectors is not None:
            return vectors
    return encode(tensors(action, reply, parameters))


def result_json(action: Action, reply: bytes, parameters: Mapping[str, Any]) -> bytes:
    """The result of a row: `{"output": [tensors]}` with a function, otherwise what the filter selects.

    Raises: as `tensors`.
    """
    if action.post_process_function is not None:
        return b'{"output":%b}' % output_json(action, reply, parameters)
    path = parameters.get(FILTER)
    return encode(_select(reply, path if isinstance(path, str) and path.strip() else None))


def _decode(reply: bytes) -> Any:
    try:
        return msgspec.json.decode(shallow(reply))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise _unexpected("the reply is not JSON") from None


def _select(reply: bytes, expression: str | None) -> Any:
    """What a filter selects of a reply, or the whole reply without a match. A reply that is not JSON is text."""
    try:
        document = msgspec.json.decode(shallow(reply))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return reply.decode(errors="replace")
    if expression is None:
        return document
    exists, selected = require(JSON_PATHS, "a filter").find(expression, document, len(reply))
    return selected if exists else document


def _response(value: Any) -> dict[str, Any]:
    return {"name": "response", "dataAsMap": value if isinstance(value, dict) else {"response": value}}


def _value_at(document: Any, steps: tuple[str, ...]) -> Any:
    """The value at a fixed path; "*" matches each entry of a list."""
    for index, step in enumerate(steps):
        if step == "*":
            if not isinstance(document, list):
                raise _unexpected("Post process function input is not a List.")
            return [_value_at(each, steps[index + 1 :]) for each in document]
        document = document.get(step, _MISSING) if isinstance(document, dict) else _MISSING
        if document is _MISSING:
            raise _unexpected(f"the reply has no member {step!r} where it is expected")
    return document


def _type_in_path(path: str) -> str:
    lower = path.lower()
    return next((each for each in _TYPES if f".{each.lower()}" in lower), "FLOAT32")


def _unexpected(message: str) -> InvalidInput:
    return InvalidInput(message, code="unexpected_reply")


def _vector(values: Any, kind: str) -> dict[str, Any]:
    if not isinstance(values, list):
        raise _unexpected("The embedding should be a non-empty List containing List of Float values.")
    if not values or not all(isinstance(each, int | float) and not isinstance(each, bool) for each in values):
        raise _unexpected("The embedding should be a non-empty List containing Float values.")
    return {"name": "sentence_embedding", "data_type": kind, "shape": [len(values)], "data": values}


def _embeddings(value: Any, kind: str) -> Tensors:
    if not isinstance(value, list):
        raise _unexpected("Post process function input is not a List.")
    return [_vector(each, kind) for each in value]


def _embedding(value: Any, kind: str) -> Tensors:
    if not isinstance(value, list):
        raise _unexpected("Post process function input is not a List.")
    return [_vector(value, kind)]


def _scores(member: str) -> Callable[[Any, str], Tensors]:
    """A function that puts scores into the order of their documents."""

    def process(value: Any, kind: str) -> Tensors:
        if not isinstance(value, list):
            raise _unexpected("Post process function input is not a List.")
        scores: dict[int, float] = {}
        for each in value:
            if not isinstance(each, dict):
                raise _unexpected("Post process function input is not a List of Map.")
            index, score = each.get("index"), each.get(member)
            if type(index) is not int or type(score) not in (int, float):
                raise _unexpected(f"The rerank result should contain index and {member}.")
            scores[index] = score
        if sorted(scores) != list(range(len(value))):
            raise _unexpected("the rerank result does not have each index once")
        ordered = [float(scores[index]) for index in range(len(value))]
        return [{"name": "similarity", "data_type": "FLOAT32", "shape": [1], "data": [score]} for score in ordered]

    return process


def _job_arn(value: Any, kind: str) -> Tensors:
    if not isinstance(value, dict):
        raise _unexpected("Post process function input is not a Map.")
    arn = value.get("jobArn")
    if not isinstance(arn, str):
        raise _unexpected("job arn is missing.")
    return [_response({**value, "processedJobArn": arn.replace("/", "%2F")})]


def _passthrough(value: Any, kind: str) -> Tensors:
    """The output of another ML Commons, without another wrapper."""
    if not isinstance(value, dict | list):
        raise _unexpected("Post process function input must be a Map or List")
    results = value.get("inference_results") if isinstance(value, dict) else None
    if not isinstance(results, list):
        return [_response(value)]
    outputs = [result.get("output") for result in results if isinstance(result, dict)]
    return [tensor for output in outputs if isinstance(output, list) for tensor in output if isinstance(tensor, dict)]


class _Postprocess(Struct, frozen=True):
    path: str  # as ML Commons writes it
    process: Callable[[Any, str], Tensors]

    @property
    def steps(self) -> tuple[str, ...]:
        return tuple(self.path.replace("[*]", ".*").split(".")[1:])


_FUNCTIONS = {
    "openai.embedding": _Postprocess("$.data[*].embedding", _embeddings),
    "cohere.embedding": _Postprocess("$.embeddings", _embeddings),
    "cohere_v2.embedding.float": _Postprocess("$.embeddings.float", _embeddings),
    "cohere_v2.embedding.int8": _Postprocess("$.embeddings.int8", _embeddings),
    "cohere_v2.embedding.uint8": _Postprocess("$.embeddings.uint8", _embeddings),
    "cohere_v2.embedding.binary": _Postprocess("$.embeddings.binary", _embeddings),
    "cohere_v2.embedding.ubinary": _Postprocess("$.embeddings.ubinary", _embeddings),
    "default.embedding": _Postprocess("$[*]", _embeddings),
    "bedrock.embedding": _Postprocess("$.embedding", _embedding),
    "bedrock_v2.embedding.float": _Postprocess("$.embeddingsByType.float", _embedding),
    "bedrock_v2.embedding.binary": _Postprocess("$.embeddingsByType.binary", _embedding),
    "bedrock.nova.embedding": _Postprocess("$.embeddings[*].embedding", _embeddings),
    "bedrock.batch_job_arn": _Postprocess("$", _job_arn),
    "cohere.rerank": _Postprocess("$.results", _scores("relevance_score")),
    "default.rerank": _Postprocess("$[*]", _scores("relevance_score")),
    "bedrock.rerank": _Postprocess("$.results", _scores("relevanceScore")),
    "mlcommons.passthrough": _Postprocess("$", _passthrough),
}
POST_PROCESS: dict[str, _Postprocess] = {f"connector.post_process.{name}": each for name, each in _FUNCTIONS.items()}


class _Item(Struct, gc=False):
    embedding: Raw


class _Data(Struct, gc=False):
    data: list[_Item]


class _Embeddings(Struct, gc=False):
    embeddings: list[Raw]


_data = msgspec.json.Decoder(_Data)
_item = msgspec.json.Decoder(_Item)
_embeddings_of = msgspec.json.Decoder(_Embeddings)
_list = msgspec.json.Decoder(list[Raw])

# Function -> the vectors in a reply, as undecoded bytes.
_VECTORS: dict[str, Callable[[bytes], list[Raw]]] = {
    "connector.post_process.openai.embedding": lambda reply: [each.embedding for each in _data.decode(reply).data],
    "connector.post_process.cohere.embedding": lambda reply: _embeddings_of.decode(reply).embeddings,
    "connector.post_process.default.embedding": _list.decode,
    "connector.post_process.bedrock.embedding": lambda reply: [_item.decode(reply).embedding],
}
_NUMBER_BYTES = b"0123456789.,eE+- \t\r\n"


def _vectors_json(vectors: list[Raw], path: str) -> bytes | None:
    """Tensors for the vectors, as JSON; None if a vector is not a list of numbers."""
    parts = []
    kind = _type_in_path(path).encode()
    for vector in vectors:
        data = bytes(vector)
        if data.translate(None, _NUMBER_BYTES) != b"[]" or not any(each in data for each in b"0123456789"):
            return None
        parts.append(
            b'{"name":"sentence_embedding","data_type":"%s","shape":[%d],"data":%s}'
            % (kind, data.count(b",") + 1, data)
        )
    return b"[%s]" % b",".join(parts)
