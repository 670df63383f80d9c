"""Calls of connectors, rendered. Numbers are those of the reference's cases."""

import json
import re
from urllib.parse import quote, unquote, urlsplit

import pytest
from connector_samples import action, connector
from hypothesis import given
from hypothesis import strategies as st

from batchmill.errors import InvalidInput
from batchmill.models.connectors.headers import HEADER_BYTES_MAX
from batchmill.models.connectors.rendering import SHOWN_CHARS, Renderer
from batchmill.models.connectors.urls import find_action

SECRETS = {"key": "s3cret"}


def renderer(parameters=None, is_typed=False, kind="predict", **fields):
    made = connector(action(kind, **fields), parameters=parameters)
    return Renderer(made, made.actions[0], is_typed=is_typed)


def rendered_body(template, parameters, own=None, **options):
    return renderer(own, request_body=template, **options).render(parameters, SECRETS).body.decode()


def refusal(make):
    with pytest.raises(InvalidInput) as caught:
        make()
    return caught.value


# Body, parameters of the call, parameters of the connector, what is sent.
BODIES = {
    "1": ('{"input": "${parameters.input}"}', {"input": "test input value"}, {}, '{"input": "test input value"}'),
    "2 a list": ('{"input": ${parameters.input}}', {"input": ["a", "b"]}, {}, '{"input": ["a","b"]}'),
    "9": (
        '{"input": "${parameters.input}"}',
        {"input": 'hello "world" \n \t'},
        {},
        r'{"input": "hello \"world\" \n \t"}',
    ),
    "11": (
        '{"input": ${parameters.input}}',
        {"input": '{"key1": "value", "key2": 123}'},
        {},
        '{"input": {"key1": "value", "key2": 123}}',
    ),
    "13": (
        '{"a": "${parameters.key1}", "b": "${parameters.key2}", "c": "${parameters.key3}"}',
        {"no_escape_params": "key1, key3", "key1": r"\t", "key2": r"\t", "key3": r"\n"},
        {},
        r'{"a": "\t", "b": "\\t", "c": "\n"}',
    ),
    "14 the connector says": (
        '{"a": "${parameters.key1}"}',
        {"key1": r"\t"},
        {"no_escape_params": "key1"},
        r'{"a": "\t"}',
    ),
    "12 of the connector": ('{"a": ${parameters.a}}', {}, {"a": {"b": [1]}}, '{"a": {"b":[1]}}'),
    "skipped": (
        '{"a": "${parameters.x}"}',
        {"skip_validating_missing_parameters": "true"},
        {},
        '{"a": "${parameters.x}"}',
    ),
    "text that looks unfilled": (
        '{"a": "${parameters.x}"}',
        {"x": "write ${parameters.y} here"},
        {},
        '{"a": "write ${parameters.y} here"}',
    ),
    "no body": (None, {"http_body": '{"a": 1}'}, {}, '{"a": 1}'),
    "no body, an object": (None, {"http_body": {"a": 1}}, {}, '{"a":1}'),
    "lines": ('{"a": "${parameters.x}"}\n{"b": 2}', {"x": "1"}, {}, '{"a": "1"}\n{"b": 2}'),
}


@pytest.mark.parametrize("case", BODIES.values(), ids=BODIES)
def test_bodies(case):
    """The body of a call has the parameters of the call in it, then those of the connector."""
    template, parameters, own, expected = case
    assert rendered_body(template, parameters, own) == expected


ONE, TWO = '{"input": ${parameters.input} }', '{"a": ${parameters.a}, "b": ${parameters.b}}'
INVALID = {
    "3": (ONE, {}, "invalid_payload", "Invalid payload: " + ONE),
    "5": (TWO, {"a": 1}, "invalid_payload", 'Invalid payload: {"a": 1, "b": ${parameters.b}}'),
    "4 in quotes": (
        '{"a": "${parameters.a}", "b": "${parameters.b}", "c": "${parameters.a}"}',
        {},
        "missing_parameter",
        "Some parameter placeholder not filled in payload: a, b",
    ),
    "6 plain text": (ONE, {"input": "hello"}, "invalid_payload", 'Invalid payload: {"input": hello }'),
    "8 a scalar": ("${parameters.input}", {"input": "5"}, "invalid_payload", "Invalid payload: 5"),
    "10 injected": (
        '{"a": [${parameters.input}]}',
        {"input": "1, 2"},
        "invalid_payload",
        'Invalid payload: {"a": [1, 2]}',
    ),
    "nothing": (None, {}, "empty_payload", "Content length is 0. Aborting request to remote model"),
    "an empty body": (
        None,
        {"http_body": ""},
        "empty_payload",
        "Content length is 0. Aborting request to remote model",
    ),
    "charset": (ONE, {"input": 1, "charset": "klingon"}, "invalid_charset", "klingon"),
}


@pytest.mark.parametrize("case", INVALID.values(), ids=INVALID)
def test_bodies_that_are_none(case):
    """A body that is not JSON, or has a placeholder left, is refused with ML Commons' text."""
    template, parameters, code, message = case
    error = refusal(lambda: rendered_body(template, parameters))
    assert (error.code, message in error.message) == (code, True), error.message


def test_16_a_long_body_names_what_is_missing():
    """However long a body is, the message stays short and still names the placeholder."""
    template = '{"a": "' + "x" * 9000 + '", "b": ${parameters.b}}'
    message = refusal(lambda: rendered_body(template, {})).message
    assert len(message) < SHOWN_CHARS + 100
    assert message.endswith("(not filled: b)")


def test_7_a_stream_is_asked_for():
    """With the interface of OpenAI's chat, `stream` adds what OpenAI wants; without, or with false, nothing."""
    template = '{"messages": ${parameters.messages}}'
    call = {"messages": [], "_llm_interface": "openai/v1/chat/completions"}
    assert json.loads(rendered_body(template, call | {"stream": "true"})) == {"messages": [], "stream": True}
    assert "stream" not in rendered_body(template, call)
    assert "stream" not in rendered_body(template, call | {"stream": False})
    assert "stream" not in rendered_body(template, {"messages": [], "stream": "true"})


def test_charsets():
    """A body is written in the charset that its parameters name."""
    made = renderer({"charset": "ISO-8859-1"}).render({"input": "é"}, SECRETS)
    assert made.body == '{"input": "é"}'.encode("latin-1")


def test_nova_is_sent_only_what_it_was_given():
    """The kinds of input of Nova's embeddings that nobody gave are left out."""
    template = (
        '{"singleEmbeddingParams": {"text": {"value": "${parameters.inputText:-null}"}, '
        '"image": {"source": {"bytes": "${parameters.inputImage:-null}"}}}}'
    )
    own = {"model": "amazon.nova-2-multimodal-embeddings-v1:0"}
    sent = json.loads(rendered_body(template, {"inputText": "a"}, own))
    assert sent == {"singleEmbeddingParams": {"text": {"value": "a"}}}


def test_structured_output_is_asked_for():
    """Where an action supports it, `_X_json` becomes the member X of the body, `_X_additions_json` is added to it."""
    template = '{"contents": ${parameters.contents}, "generationConfig": {"topK": 1, "seed": 2}}'
    call = {
        "contents": [],
        "_generationConfig_additions_json": '{"seed": 3, "responseMimeType": "application/json"}',
        "_response_format_json": {"type": "json_object"},
    }
    sent = json.loads(rendered_body(template, call, supports_structured_output=True))
    assert sent == {
        "contents": [],
        "generationConfig": {"topK": 1, "seed": 3, "responseMimeType": "application/json"},
        "response_format": {"type": "json_object"},
    }
    assert json.loads(rendered_body(template, call)) == {"contents": [], "generationConfig": {"topK": 1, "seed": 2}}
    wrong = call | {"_response_format_json": "[]"}
    error = refusal(lambda: rendered_body(template, wrong, supports_structured_output=True))
    assert error.message == "the parameter _response_format_json is not a JSON object"


def test_typed_rows_keep_their_text():
    """A row of JSON whose text looks like a number is sent as text."""
    assert rendered_body('{"input": ${parameters.input}}', {"input": "1234"}, is_typed=True) == '{"input": "1234"}'


def test_79_a_call_changes_nothing():
    """Parameters of one call are not those of the next."""
    made = renderer({"model": "small"}, request_body='{"model": "${parameters.model}"}')
    assert made.render({"model": "large"}, SECRETS).body == b'{"model": "large"}'
    assert made.render({}, SECRETS).body == b'{"model": "small"}'


def test_methods_and_headers():
    """A call has its action's method and headers; a body is JSON unless a header says otherwise."""
    made = renderer(headers={"Authorization": "Bearer ${credential.key}", "X-Tenant": "${parameters.tenant:-none}"})
    call = made.render({"input": "a"}, SECRETS)
    assert (call.method, call.headers) == (
        "POST",
        {"Authorization": "Bearer s3cret", "X-Tenant": "none", "Content-Type": "application/json"},
    )
    other = renderer(headers={"content-type": "text/plain"}).render({"input": "a"}, SECRETS)
    assert other.headers == {"content-type": "text/plain"}
    request = renderer(method="GET", request_body=None, kind="batch_predict_status").render({}, SECRETS)
    assert (request.method, request.body, request.headers) == ("GET", None, {"Authorization": "Bearer s3cret"})


def test_headers_follow_their_credentials():
    """A credential that has changed is in the next call, even in the same mapping."""
    made, secrets = renderer(), {"key": "old"}
    first = made.render({"input": "a"}, secrets).headers
    first["Authorization"] = "spoilt"
    assert made.render({"input": "a"}, secrets).headers["Authorization"] == "Bearer old"
    secrets["key"] = "new"
    assert made.render({"input": "a"}, secrets).headers["Authorization"] == "Bearer new"


@pytest.mark.parametrize("sign", ["\r", "\n", "\x00", "\x1b", "\x7f"])
def test_25_no_header_is_broken_up(sign):
    """A control character in a header is refused, wherever it comes from; a tab is none."""
    made = renderer(headers={"X-A": "${parameters.a}", "Authorization": "${credential.key}"})
    for call, secrets in (({"a": f"1{sign}2"}, SECRETS), ({"a": "1"}, {"key": f"1{sign}2"})):
        error = refusal(lambda call=call, secrets=secrets: made.render({"input": "a"} | call, secrets))
        assert error.message.startswith("Header value contains invalid control character")
    assert made.render({"input": "a", "a": "1\t2"}, SECRETS).headers["X-A"] == "1\t2"


def test_headers_have_a_size():
    """A header of HEADER_BYTES_MAX bytes is sent, one of a byte more is not, nor ten of them together."""
    made = renderer(headers={f"X-{n}": "${parameters.a}" for n in range(2)})
    assert made.render({"input": "a", "a": "x" * HEADER_BYTES_MAX}, SECRETS)
    assert refusal(lambda: made.render({"input": "a", "a": "x" * (HEADER_BYTES_MAX + 1)}, SECRETS))
    many = renderer(headers={f"X-{n}": "${parameters.a}" for n in range(10)})
    error = refusal(lambda: many.render({"input": "a", "a": "x" * HEADER_BYTES_MAX}, SECRETS))
    assert error.code == "invalid_header"


@pytest.mark.parametrize("text", ["${parameters.tenant}", "${credential.other}"])
def test_headers_that_are_left_open(text):
    """A header with a placeholder that nobody fills is refused, and names both."""
    error = refusal(lambda: renderer(headers={"X-A": text}).render({"input": "a"}, SECRETS))
    assert error.code == "missing_parameter"
    assert error.message.startswith("Header 'X-A' contains unresolved placeholder. Required parameter is missing.")
    assert text in error.message


def test_credentials_are_no_templates():
    """What a credential or a caller's header holds is sent as it is."""
    made = renderer(headers={"X-A": "${parameters.a}", "X-B": "${credential.key}"})
    headers = made.render({"input": "a", "a": "${credential.key}"}, {"key": "${parameters.a}"}).headers
    assert (headers["X-A"], headers["X-B"]) == ("${credential.key}", "${parameters.a}")


# URL, the connector's own parameters, the caller's, what is called.
URLS = {
    "as written": (
        "https://a.b${parameters.path}?v=${parameters.v}",
        {"path": "/v1/x", "v": "1&w=2"},
        {},
        "https://a.b/v1/x?v=1&w=2",
    ),
    "encoded": (
        "https://a.b/${parameters.id}",
        {},
        {"id": "a/b?c#d e&f=ü%"},
        "https://a.b/a%2Fb%3Fc%23d%20e%26f%3D%C3%BC%25",
    ),
    "encoded in a query": ("https://a.b/?q=${parameters.q}", {}, {"q": "1&r=2 3"}, "https://a.b/?q=1%26r%3D2%203"),
    "a caller goes first": ("https://a.b/${parameters.id}", {"id": "x"}, {"id": "y"}, "https://a.b/y"),
    "never in the host": (
        "https://${parameters.endpoint}/v1/${parameters.endpoint}",
        {"endpoint": "api.b"},
        {"endpoint": "evil.example"},
        "https://api.b/v1/evil.example",
    ),
    "never behind the host": ("https://a.b${parameters.p}/v1", {"p": "/x"}, {"p": ".evil.example"}, "https://a.b/x/v1"),
    "never in the port": ("https://a.b${parameters.p}/v1", {"p": ":8443"}, {"p": "@evil"}, "https://a.b:8443/v1"),
    "in the middle of one": (
        "https://a.b/${parameters.region}/x",
        {"region": "${parameters.r}-1"},
        {"r": "e/u"},
        "https://a.b/e%2Fu-1/x",
    ),
    "a default": ("https://a.b/${parameters.v:-v1/x}", {}, {}, "https://a.b/v1/x"),
    "an escaped one": ("https://a.b/$${parameters.v}", {}, {"v": "x"}, "https://a.b/${parameters.v}"),
    "a number": ("https://a.b/${parameters.n}", {}, {"n": 5}, "https://a.b/5"),
    "an arn": (
        "https://a.b/${parameters.jobArn}/stop",
        {},
        {"jobArn": "arn:aws:bedrock:job/1"},
        "https://a.b/arn%3Aaws%3Abedrock%3Ajob%2F1/stop",
    ),
    "an arn that is encoded": (
        "https://a.b/${parameters.processedJobArn}",
        {},
        {"processedJobArn": "arn:aws:bedrock:job%2F1"},
        "https://a.b/arn%3Aaws%3Abedrock%3Ajob%2F1",
    ),
    "a dot within": ("https://a.b/${parameters.id}.json", {}, {"id": "."}, "https://a.b/..json"),
}


@pytest.mark.parametrize("case", URLS.values(), ids=URLS)
def test_urls(case):
    """A connector's own parameters stand in its URL as written; a caller's are encoded, and never lead elsewhere."""
    url, own, parameters, expected = case
    made = connector(action(url=url), parameters=own)
    assert Renderer(made, made.actions[0]).render({"input": "a"} | parameters, SECRETS).url == expected


SMUGGLED = (
    "", ".", "..", "%2e%2e", ".%2E", "%252e%252e", "%c0%ae%c0%ae", "../x", "a/../b", "..\\x", "a\\..\\b", "..;/x",
    "..;x", "a/..;y/b", " .. ", "a/.. /b", "\uff0e\uff0e", "\u2025", "\uff0e\uff0e\uff0fx", "a\r\nX: b", "a\0",
    "%0d%0a", "a%2Fb",
)  # fmt: skip


@pytest.mark.parametrize("value", SMUGGLED)
def test_no_segment_goes_up_or_away(value):
    """A parameter that a server could read as no segment or another path, however it decodes, is refused."""
    made = renderer(url="https://a.b/x/${parameters.id}/y")
    assert refusal(lambda: made.render({"input": "a", "id": value}, SECRETS)).code == "invalid_parameter"


def test_a_segment_may_hold_anything_else():
    """Ids with slashes, dots, semicolons and other scripts are one segment, encoded; the encoded one goes no way up."""
    made = renderer(url="https://a.b/x/${parameters.id}/y")
    for value in ("a/b", "v1.2..x", "...", "a;b", "arn:aws:x/y", "100%", "\u00e9\u4e2d", "a b"):
        assert made.render({"input": "a", "id": value}, SECRETS).url == f"https://a.b/x/{quote(value, safe='')}/y"
    arn = renderer(url="https://a.b/x/${parameters.processedJobArn}")
    assert refusal(lambda: arn.render({"input": "a", "processedJobArn": "%2e."}, SECRETS)).code == "invalid_parameter"


def test_no_two_parameters_go_up():
    """Nor do two that make one segment together."""
    made = renderer(url="https://a.b/${parameters.x}${parameters.y}/z")
    assert refusal(lambda: made.render({"input": "a", "x": ".", "y": "."}, SECRETS)).code == "invalid_parameter"


def test_open_urls_name_what_is_missing():
    """A placeholder that is left in a URL is a mistake with its name."""
    error = refusal(lambda: renderer(url="https://a.b/${parameters.id}/${parameters.x}").render({"input": "a"}, {}))
    assert error.code in ("missing_parameter",)
    made = renderer(url="https://a.b/${parameters.id}/${parameters.x}")
    error = refusal(lambda: made.render({"input": "a"}, SECRETS))
    assert error.message == "Some parameter placeholder not filled in url: id, x"


@given(st.text(), st.text())
def test_no_value_leads_elsewhere(one, two):
    """Whatever a caller gives, scheme, host, port and the number of segments and arguments stay."""
    made = renderer(
        {"host": "api.example.com:8443"},
        method="GET",
        kind="batch_predict_status",
        request_body=None,
        url="https://${parameters.host}/v1/${parameters.one}/x-${parameters.two}?a=${parameters.two}&b=1",
    )
    try:
        url = urlsplit(made.render({"one": one, "two": two, "host": one}, SECRETS).url)
    except InvalidInput as error:
        assert error.code == "invalid_parameter"
        assert not one or any(re.search(r"[\x00-\x1f\x7f-\x9f\uff0e\u2024\u2025.%]", each) for each in (one, two))
        return
    assert (url.scheme, url.netloc, url.fragment) == ("https", "api.example.com:8443", "")
    segments = url.path.split("/")
    assert (len(segments), unquote(segments[2]), unquote(segments[3])) == (4, one, f"x-{two}")
    assert url.query.count("&") == 1


@given(st.text())
def test_any_text_is_rendered(text):
    """Whatever text a row holds, the body is JSON and holds just that text."""
    assert json.loads(rendered_body('{"input": "${parameters.input}"}', {"input": text})) == {"input": text}


def test_cancelling_needs_no_body():
    """A call that cancels a job may be a POST of nothing."""
    made = connector(action("batch_predict", url="https://api.openai.com/v1/batches"))
    call = Renderer(made, find_action(made, "CANCEL_BATCH_PREDICT")).render({"id": "b 1"}, SECRETS)
    assert (call.method, call.url, call.body) == ("POST", "https://api.openai.com/v1/batches/b%201/cancel", None)


def test_blueprints_of_batches():
    """SageMaker's blueprint takes objects from the connector, and others from a call as Data Prepper makes it."""
    template = (
        '{ "DataProcessing": ${parameters.DataProcessing}, "ModelName": "${parameters.ModelName}", '
        '"TransformInput": ${parameters.TransformInput}, "TransformJobName": "${parameters.TransformJobName}" }'
    )
    own = {
        "DataProcessing": {"InputFilter": "$.text", "JoinSource": "Input"},
        "ModelName": "m",
        "TransformInput": {"ContentType": "application/json"},
        "TransformJobName": "job",
    }
    there = {"DataSource": {"S3DataSource": {"S3DataType": "ManifestFile", "S3Uri": "s3://b/${x}"}}}
    made = renderer(own, kind="batch_predict", request_body=template)
    assert json.loads(made.render({}, SECRETS).body) == own
    call = {"TransformInput": there, "TransformJobName": "DataPrepper-1"}
    assert json.loads(made.render(call, SECRETS).body) == own | call
    as_text = call | {"TransformInput": json.dumps(there)}
    assert json.loads(made.render(as_text, SECRETS).body) == own | call


def test_5070_json_does_not_leave_its_quotes():
    """Text that is JSON stays text within a string of the template: it adds no member to the payload."""
    template = '{"messages": [{"role": "user", "content": "${parameters.prompt}"}], "max_tokens": 5}'
    prompt = '{"x": "\\"}], \\"max_tokens\\": 9999, \\"a\\": [{\\""}'
    sent = json.loads(rendered_body(template, {"prompt": prompt}))
    assert sent == {"messages": [{"role": "user", "content": prompt}], "max_tokens": 5}
