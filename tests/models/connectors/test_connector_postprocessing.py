"""Replies become tensors. Numbers are those of the reference's cases."""

import json

import msgspec
import pytest
from connector_samples import action, connector
from hypothesis import given
from hypothesis import strategies as st

from batchmill.errors import InvalidInput
from batchmill.models.connectors.json_paths import SEARCHED_BYTES_MAX
from batchmill.models.connectors.processing import POST_PROCESS, output_json, tensors

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "0"]), inner, max_size=3),
    max_leaves=8,
)


def act(name):
    function = None if name is None else f"connector.post_process.{name}"
    return connector(action(post_process_function=function)).actions[0]


def vector(*values, kind="FLOAT32"):
    return {"name": "sentence_embedding", "data_type": kind, "shape": [len(values)], "data": list(values)}


def scores(*values):
    return [{"name": "similarity", "data_type": "FLOAT32", "shape": [1], "data": [value]} for value in values]


def response(value):
    return [{"name": "response", "dataAsMap": value}]


ARN = "arn:aws:bedrock:us-east-1:1:model-invocation-job/abc"
CASES = {
    "openai": (
        "openai.embedding",
        {"object": "list", "data": [{"embedding": [1, -2.5e-3], "index": 0}, {"embedding": [0.5, 2]}], "usage": {}},
        [vector(1, -2.5e-3), vector(0.5, 2)],
    ),
    "cohere": ("cohere.embedding", {"embeddings": [[1.5], [2.5]]}, [vector(1.5), vector(2.5)]),
    "cohere float": ("cohere_v2.embedding.float", {"embeddings": {"float": [[1.5]]}}, [vector(1.5)]),
    "cohere int8": ("cohere_v2.embedding.int8", {"embeddings": {"int8": [[1, -2]]}}, [vector(1, -2, kind="INT8")]),
    "cohere uint8": ("cohere_v2.embedding.uint8", {"embeddings": {"uint8": [[1]]}}, [vector(1, kind="UINT8")]),
    "cohere binary": ("cohere_v2.embedding.binary", {"embeddings": {"binary": [[1]]}}, [vector(1)]),
    "cohere ubinary": ("cohere_v2.embedding.ubinary", {"embeddings": {"ubinary": [[1]]}}, [vector(1)]),
    "default": ("default.embedding", [[1.5], [2.5]], [vector(1.5), vector(2.5)]),
    "bedrock": ("bedrock.embedding", {"embedding": [1.5, 2], "inputTextTokenCount": 2}, [vector(1.5, 2)]),
    "bedrock float": ("bedrock_v2.embedding.float", {"embeddingsByType": {"float": [1.5]}}, [vector(1.5)]),
    "bedrock binary": ("bedrock_v2.embedding.binary", {"embeddingsByType": {"binary": [1, 0]}}, [vector(1, 0)]),
    "nova": ("bedrock.nova.embedding", {"embeddings": [{"embedding": [1.5], "embeddingType": "TEXT"}]}, [vector(1.5)]),
    "41": (
        "bedrock.batch_job_arn",
        {"jobArn": ARN},
        response({"jobArn": ARN, "processedJobArn": ARN.replace("/", "%2F")}),
    ),
    "43 cohere": (
        "cohere.rerank",
        {"results": [{"index": 1, "relevance_score": 0.9}, {"index": 0, "relevance_score": 0.1}]},
        scores(0.1, 0.9),
    ),
    "43 default": ("default.rerank", [{"index": 0, "relevance_score": 1}], scores(1.0)),
    "43 bedrock": (
        "bedrock.rerank",
        {"results": [{"index": 1, "relevanceScore": 0.9}, {"index": 0, "relevanceScore": 0.1}]},
        scores(0.1, 0.9),
    ),
    "passthrough": (
        "mlcommons.passthrough",
        {"inference_results": [{"output": [vector(1.5)], "status_code": 200}, {"output": response({"a": 1})}]},
        [vector(1.5), *response({"a": 1})],
    ),
    "passthrough of others": ("mlcommons.passthrough", {"a": 1}, response({"a": 1})),
    "none, an object": (None, {"a": [1]}, response({"a": [1]})),
    "none, a list": (None, [1, 2], response({"response": [1, 2]})),
    "none, a string": (None, "text", response({"response": "text"})),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_replies_become_tensors(case):
    """Each built-in function finds its vectors, scores or map; the JSON of the output says the same."""
    name, reply, expected = case
    data = json.dumps(reply).encode()
    assert tensors(act(name), data, {}) == expected
    assert json.loads(output_json(act(name), data, {})) == expected


def test_every_function_has_a_case():
    """No built-in function is untested."""
    assert {f"connector.post_process.{case[0]}" for case in CASES.values() if case[0]} == set(POST_PROCESS)


def test_text_is_a_response():
    """A reply that is not JSON is handed on as text."""
    assert tensors(act(None), b"it works", {}) == response({"response": "it works"})
    assert tensors(act(None), b"it works", {"response_filter": "$.a"}) == response({"response": "it works"})


def test_numbers_keep_their_digits():
    """Vectors leave as they came: not a digit is rounded."""
    data = b'{"data":[{"embedding":[0.1000000000000000055511151231257827, 1e-7,\n 2]}]}'
    assert b'"shape":[3],"data":[0.1000000000000000055511151231257827, 1e-7,\n 2]}' in output_json(
        act("openai.embedding"), data, {}
    )


NOT_A_LIST = "Post process function input is not a List."
WRONG = {
    "no json": ("openai.embedding", b"<html>", "the reply is not JSON"),
    "no member": ("openai.embedding", b"{}", "the reply has no member 'data' where it is expected"),
    "no vector": ("openai.embedding", b'{"data":[{}]}', "the reply has no member 'embedding' where it is expected"),
    "no list": ("openai.embedding", b'{"data":{}}', NOT_A_LIST),
    "an object": ("cohere.embedding", b'{"embeddings":{"float":[[1]]}}', NOT_A_LIST),
    "base64": (
        "openai.embedding",
        b'{"data":[{"embedding":"AAAA"}]}',
        "The embedding should be a non-empty List containing List of Float values.",
    ),
    "words": (
        "openai.embedding",
        b'{"data":[{"embedding":["a"]}]}',
        "The embedding should be a non-empty List containing Float values.",
    ),
    "an empty vector": (
        "openai.embedding",
        b'{"data":[{"embedding":[ ]}]}',
        "The embedding should be a non-empty List containing Float values.",
    ),
    "nested": ("default.embedding", b"[[[1]]]", "The embedding should be a non-empty List containing Float values."),
    "41 no map": ("bedrock.batch_job_arn", b"[]", "Post process function input is not a Map."),
    "41 no arn": ("bedrock.batch_job_arn", b"{}", "job arn is missing."),
    "43 no score": (
        "cohere.rerank",
        b'{"results":[{"index":0}]}',
        "The rerank result should contain index and relevance_score.",
    ),
    "43 no map": ("cohere.rerank", b'{"results":[1]}', "Post process function input is not a List of Map."),
    "43 an index twice": (
        "cohere.rerank",
        b'{"results":[{"index":0,"relevance_score":1},{"index":0,"relevance_score":2}]}',
        "the rerank result does not have each index once",
    ),
    "passthrough of text": ("mlcommons.passthrough", b"5", "Post process function input must be a Map or List"),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_replies_of_another_kind(case):
    """A reply that a function cannot read is an error that says what was expected."""
    name, reply, message = case
    for read in (tensors, output_json):
        with pytest.raises(InvalidInput) as caught:
            read(act(name), reply, {})
        assert (caught.value.code, caught.value.message) == ("unexpected_reply", message)


REPLY = {"completion": "hi", "choices": [{"text": "a"}, {"text": "b"}], "n": 5, "o": {"p": 1}, "v": {"int8": [[1]]}}
FILTERS = {
    "27": ("$.completion", {"response": "hi"}),
    "an object": ("$.o", {"p": 1}),
    "one of a list": ("$.choices[0].text", {"response": "a"}),
    "the last": ("$.choices[-1].text", {"response": "b"}),
    "all": ("$.choices[*].text", {"response": ["a", "b"]}),
    "by condition": ("$.choices[?(@.text == 'b')].text", {"response": ["b"]}),
    "anywhere": ("$..text", {"response": ["a", "b"]}),
    "a number": ("$.n", {"response": 5}),
    "without a root": ("choices[0].text", {"response": "a"}),
    "the whole": ("$", REPLY),
    "nothing there": ("$.other", REPLY),
    "no one": ("$.choices[*].other", {"response": []}),
    "blank": (" ", REPLY),
}


@pytest.mark.parametrize("case", FILTERS.values(), ids=FILTERS)
def test_filters_select(case):
    """`response_filter` selects one value or a list; the whole reply stays where a path leads nowhere."""
    expression, expected = case
    assert tensors(act(None), json.dumps(REPLY).encode(), {"response_filter": expression}) == response(expected)


def test_filters_go_before_functions():
    """With a filter, a built-in function reads what it selects; a type in the path is the vectors'."""
    found = tensors(act("openai.embedding"), json.dumps(REPLY).encode(), {"response_filter": "$.v.int8"})
    assert found == [vector(1, kind="INT8")]
    with pytest.raises(InvalidInput) as caught:
        tensors(act("openai.embedding"), b"{}", {"response_filter": "$.v.int8"})
    assert caught.value.code == "unexpected_reply"


@pytest.mark.parametrize(
    "expression",
    [
        "$.a[",
        "$..a..b",
        "$[?@.a == 1e400]",
        "$[?match(@.a, '(a+)+$')]",
        "$[?search(@.a, '(a+)+$')]",
        "$[?@.a =~ /(a+)+$/]",
        "$[?$..a]",
        "$[?^..a]",
        "$." + "a" * 1000,
    ],
)
def test_filters_that_are_not_taken(expression):
    """An expression that cannot be read, or could run for ever, is refused."""
    with pytest.raises(InvalidInput) as caught:
        tensors(act(None), b'{"a": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!"}', {"response_filter": expression})
    assert caught.value.code == "invalid_response_filter"


@given(st.text(alphabet="$.@[]*?()'\"ab01:,-=~!&|<> _#^{}"), JSON)
def test_any_expression_is_read_or_refused(expression, document):
    """Whatever somebody writes as a filter, the reply is filtered or the expression refused."""
    try:
        (found,) = tensors(act(None), json.dumps(document).encode(), {"response_filter": expression})
    except InvalidInput as error:
        assert error.code == "invalid_response_filter"
    else:
        assert found["name"] == "response"


def test_large_replies_are_not_searched():
    """A reply above SEARCHED_BYTES_MAX is filtered by plain paths and wildcards; searching it is refused."""
    reply = json.dumps({"a": [{"b": 1}, {"c": "x" * SEARCHED_BYTES_MAX}]}).encode()
    assert tensors(act(None), reply, {"response_filter": "$.a[0].b"}) == response({"response": 1})
    assert tensors(act(None), reply, {"response_filter": "$.a[*].b"}) == response({"response": [1]})
    for expression in ("$..b", "$.a[?@.b == 1]"):
        with pytest.raises(InvalidInput, match="not searched"):
            tensors(act(None), reply, {"response_filter": expression})


def test_the_output_may_be_encoded():
    """Tensors are plain values: any JSON encoder writes them."""
    assert msgspec.json.decode(msgspec.json.encode(tensors(act("default.embedding"), b"[[1]]", {}))) == [vector(1)]
