"""Documents and queries become parameters of calls. Numbers are those of the reference's cases."""

import json

import pytest
from connector_samples import action, connector

from batchmill.errors import InvalidInput
from batchmill.models.connectors.processing import CALLS_MAX, DOCS_MAX, prepare
from batchmill.models.connectors.rendering import Renderer


def prepared(name, body, parameters=None):
    function = None if name is None else f"connector.pre_process.{name}"
    made = connector(action(pre_process_function=function), parameters=parameters)
    return prepare(made, made.actions[0], body)


def docs(*texts, **others):
    return {"text_docs": list(texts), **others}


CASES = {
    "15": ("openai.embedding", docs("a", "b"), [{"input": ["a", "b"]}]),
    "default": ("default.embedding", docs("a", "b"), [{"input": ["a", "b"]}]),
    "none": (None, docs("a"), [{"input": ["a"]}]),
    "cohere": ("cohere.embedding", docs("a", "b"), [{"texts": ["a", "b"]}]),
    "cohere images": ("cohere.multimodal_embedding", docs("i", "j"), [{"images": ["i"]}, {"images": ["j"]}]),
    "bedrock": ("bedrock.embedding", docs("a", "b"), [{"inputText": "a"}, {"inputText": "b"}]),
    "bedrock both": ("bedrock.multimodal_embedding", docs("a", "i"), [{"inputText": "a", "inputImage": "i"}]),
    "bedrock text alone": ("bedrock.multimodal_embedding", docs("a"), [{"inputText": "a"}]),
    "bedrock image alone": ("bedrock.multimodal_embedding", docs(None, "i"), [{"inputText": None, "inputImage": "i"}]),
    "nova text": ("bedrock.nova.text_embedding", docs("a"), [{"inputText": "a"}]),
    "nova image": ("bedrock.nova.image_embedding", docs("a"), [{"inputImage": "a"}]),
    "nova video": ("bedrock.nova.video_embedding", docs("a"), [{"inputVideo": "a"}]),
    "nova audio": ("bedrock.nova.audio_embedding", docs("a"), [{"inputAudio": "a"}]),
    "nova plain": ("bedrock.nova.embedding", docs("a"), [{"text": "a"}]),
    "nova by member": ("bedrock.nova.embedding", docs('{"image": "i"}'), [{"image": "i"}]),
    "nova other json": ("bedrock.nova.embedding", docs('{"a": "i"}'), [{"text": '{"a": "i"}'}]),
    "rerank": (
        "cohere.rerank",
        docs("a", "b", query_text="q"),
        [{"query": "q", "documents": ["a", "b"], "top_n": 2}],
    ),
    "bedrock rerank": (
        "bedrock.rerank",
        docs("a", query_text="q"),
        [
            {
                "queries": [{"textQuery": {"text": "q"}, "type": "TEXT"}],
                "sources": [
                    {"inlineDocumentSource": {"textDocument": {"text": "a"}, "type": "TEXT"}, "type": "INLINE"}
                ],
                "numberOfResults": 1,
            }
        ],
    ),
    "parameters": ("openai.embedding", {"parameters": {"x": 1}, "action_type": "predict"}, [{"x": 1}]),
    "nothing": ("openai.embedding", {}, [{}]),
    "parameters go over": ("openai.embedding", docs("a", parameters={"input": "b", "y": 1}), [{"input": "b", "y": 1}]),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_inputs_become_parameters(case):
    """Each built-in function gives the parameters that its service wants; parameters pass as they are."""
    name, body, expected = case
    assert prepared(name, body) == expected


TEXT_DOCS = (
    "This pre_process_function can only support TextDocsInputDataSet which including a list of string "
    "with key 'text_docs'"
)
REFUSED = {
    "a query for an embedding": ("openai.embedding", docs("a", query_text="q"), TEXT_DOCS),
    "no query": ("cohere.rerank", docs("a"), "This pre_process_function can only support TextSimilarityInputDataSet"),
    "a query and no function": (None, docs("a", query_text="q"), "pre_process_function not defined in connector"),
    "no image": ("cohere.multimodal_embedding", docs(), "No image provided"),
    "no text or image": ("bedrock.multimodal_embedding", docs(None), "No input text or image provided"),
    "no docs": ("bedrock.multimodal_embedding", docs(), "No input text or image provided"),
    "no text": ("bedrock.embedding", docs(None), "No input text provided"),
    "numbers": ("openai.embedding", {"text_docs": [1]}, "`text_docs` must be a list of strings"),
    "one text": ("openai.embedding", {"text_docs": "a"}, "`text_docs` must be a list of strings"),
    "parameters of another kind": ("openai.embedding", {"parameters": []}, "`parameters` must be an object"),
    "processors": (
        "openai.embedding",
        {"parameters": {"input_processors": "[]"}},
        "the parameter 'input_processors' is not supported: use response_filter, or post_process_function",
    ),
    "no step": (
        "openai.embedding",
        docs("a", parameters={"input_docs_processed_step_size": 0}),
        "Invalid parameter: input_docs_processed_step_size. It must be positive integer.",
    ),
    "no number": (
        "openai.embedding",
        docs("a", parameters={"input_docs_processed_step_size": "x"}),
        "Invalid parameter: input_docs_processed_step_size. It must be positive integer.",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_inputs_of_the_wrong_kind(case):
    """An input that a function cannot take is refused with ML Commons' text."""
    name, body, message = case
    with pytest.raises(InvalidInput) as caught:
        prepared(name, body)
    assert caught.value.message == message


def test_docs_are_divided():
    """As many documents go into a call as the connector says, or the call itself; never more than its service takes."""
    step = {"input_docs_processed_step_size": "2"}
    assert [each["input"] for each in prepared("openai.embedding", docs("a", "b", "c"), step)] == [["a", "b"], ["c"]]
    own = docs("a", "b", "c", parameters={"input_docs_processed_step_size": 3})
    assert len(prepared("openai.embedding", own, step)) == 1
    assert len(prepared("bedrock.embedding", docs("a", "b", "c"), step)) == 3


def test_requests_have_a_size():
    """DOCS_MAX documents and CALLS_MAX calls are taken, one more of either is not."""
    assert prepared("openai.embedding", docs(*["a"] * DOCS_MAX))
    assert len(prepared("bedrock.embedding", docs(*["a"] * CALLS_MAX))) == CALLS_MAX
    for name, count in (("openai.embedding", DOCS_MAX), ("bedrock.embedding", CALLS_MAX)):
        with pytest.raises(InvalidInput) as caught:
            prepared(name, docs(*["a"] * (count + 1)))
        assert caught.value.code == "too_large"


def test_documents_are_rendered_as_they_are():
    """What pre-processing makes fits the templates of ML Commons' blueprints, quotes and all."""
    template = '{ "input": ${parameters.input}, "first": "${parameters.text:-null}" }'
    made = connector(action(request_body=template, pre_process_function="connector.pre_process.openai.embedding"))
    (parameters,) = prepare(made, made.actions[0], docs('say "hi"', "${parameters.x}"))
    body = Renderer(made, made.actions[0]).render(parameters, {"key": "k"}).body
    assert json.loads(body) == {"input": ['say "hi"', "${parameters.x}"], "first": None}
