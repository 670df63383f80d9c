"""Connectors are read as ML Commons reads them, with its messages. Numbers are those of the reference's cases."""

import json
import subprocess
import sys

import msgspec
import pytest
from connector_samples import KEY, action, body, connector

from batchmill.errors import InvalidInput
from batchmill.models.connectors.headers import BLOCKED
from batchmill.models.connectors.reading import NAMES_MAX, read_connector, read_file, update_connector
from batchmill.models.connectors.rendering import Renderer
from batchmill.types.connectors import ClientConfig

AWS = {"access_key": "AK", "secret_key": "SK"}
PLACE = {"region": "us-east-1", "service_name": "sagemaker"}


def refusal(fields, is_trusted=False):
    with pytest.raises(InvalidInput) as caught:
        read_connector(fields, id="c1", is_trusted=is_trusted)
    return caught.value


def without(name):
    return {key: value for key, value in body().items() if key != name}


UNSAFE = "can only contain letters, numbers, spaces, and basic punctuation (.,!?():@-_'/\");"
REFUSED = {
    "29 no name": (without("name"), "Connector name is null"),
    "29 null name": (body(name=None), "Connector name is null"),
    "29 no version": (without("version"), "Connector version is null"),
    "29 no protocol": (without("protocol"), "Connector protocol is null"),
    "30 unknown protocol": (
        body(protocol="grpc"),
        "Unsupported connector protocol. Please use one of [aws_sigv4, http, mcp_sse, mcp_streamable_http]",
    ),
    "31 no credential": (without("credential"), "Connector credential is null or empty list"),
    "31 empty credential": (body(credential={}), "Connector credential is null or empty list"),
    "34 no actions": (without("actions"), "No actions configured for this connector"),
    "34 empty actions": (body(actions=[]), "No actions configured for this connector"),
    "35 no secret key": (
        body(protocol="aws_sigv4", credential={"access_key": "AK"}, parameters=PLACE),
        "Missing credential",
    ),
    "35 no service": (
        body(protocol="aws_sigv4", credential=AWS, parameters={"region": "us-east-1"}),
        "Missing service name",
    ),
    "35 no region": (body(protocol="aws_sigv4", credential=AWS, parameters={"service_name": "es"}), "Missing region"),
    "36 no action type": (body(action(action_type=None)), "action type can't be null"),
    "36 no url": (body(action(url=None)), "url can't be null"),
    "36 no method": (body(action(method=None)), "method can't be null"),
    "36 bad action type": (
        body(action("foo")),
        "No enum constant org.opensearch.ml.common.connector.ConnectorAction.ActionType.FOO",
    ),
    "37 name of 65": (body(action(name="a" * 65)), "Action name exceeds maximum length of 64 characters"),
    "37 name with a space": (
        body(action(name="a b")),
        "Action name contains invalid characters. Only alphanumeric characters, hyphens, and underscores are allowed",
    ),
    "37 name of a type": (
        body(action(name="predict")),
        "name can't be one of action type "
        "[PREDICT, EXECUTE, BATCH_PREDICT, CANCEL_BATCH_PREDICT, BATCH_PREDICT_STATUS]",
    ),
    "37 name with a newline": (body(action(name="a\n")), "Action name must not contain control characters"),
    "39 a caller's authorization": (
        body(action(headers={"Authorization": "${parameters.k}"})),
        "Header 'Authorization' cannot use ${parameters.*} placeholders for security reasons. "
        "Use ${credential.*} instead.",
    ),
    "39 in any case": (
        body(action(headers={"x-API-key": "a${parameters.k}"})),
        "Header 'x-API-key' cannot use ${parameters.*} placeholders for security reasons. Use ${credential.*} instead.",
    ),
    "unsafe name": (body(name="<b>"), f"Validation Failed: 1: Model connector name {UNSAFE}"),
    "unsafe name and description": (
        body(name="a;b", description="<script>"),
        f"Validation Failed: 1: Model connector name {UNSAFE} 2: Model connector description {UNSAFE}",
    ),
    "retry policy": (body(client_config={"retry_backoff_policy": "twice"}), "Unsupported retry backoff policy"),
    "access": (
        body(backend_roles=["a"]),
        "You cannot specify connector access control parameters because the Security plugin or connector access "
        "control is disabled on your cluster.",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refusals_have_the_words_of_ml_commons(case):
    """What ML Commons refuses is refused with its text."""
    fields, message = case
    assert refusal(fields).message == message


# What is wrong, the code, a part of the message.
OURS = {
    "mcp": (body(protocol="mcp_sse"), "unsupported_field", "mcp_sse"),
    "credential in a url": (body(action(url="https://a.b/${credential.key}")), "misplaced_credential", "only headers"),
    "credential in a body": (
        body(action(request_body='{"k": "${credential.key}"}')),
        "misplaced_credential",
        "request_body of the action PREDICT has ${credential.key}",
    ),
    "credential in a default": (
        body(action(request_body='{"k": "${parameters.x:-${credential.key}}"}')),
        "misplaced_credential",
        "${credential.key}",
    ),
    "credential in a parameter": (body(parameters={"p": "${credential.key}"}), "misplaced_credential", "'p'"),
    "a host of the caller's": (
        body(action(url="https://${parameters.host}/v1")),
        "invalid_url",
        "https://${parameters.host}/v1",
    ),
    "a port of the caller's": (
        body(action(url="https://a.b:${parameters.port}/v1")),
        "invalid_url",
        "needs a fixed scheme",
    ),
    "a scheme of the caller's": (
        body(action(url="${parameters.scheme}://a.b/v1")),
        "invalid_url",
        "needs a fixed scheme",
    ),
    "no url": (body(action(url="not a url")), "invalid_url", "create uri from endpoint"),
    "a file": (body(action(url="file:///etc/passwd")), "invalid_url", "create uri from endpoint"),
    "a password": (body(action(url="https://a:b@c.d/")), "invalid_url", "create uri from endpoint"),
    "a backslash": (body(action(url="https://a.b\\@c.d/")), "invalid_url", "create uri from endpoint"),
    "method": (body(action(method="PATCH")), "invalid_connector", "unsupported http method"),
    "painless before": (
        body(action(pre_process_function="return params.text_docs;")),
        "painless_not_supported",
        "pre_process_function of the action PREDICT is a Painless script",
    ),
    "painless after": (
        body(action(post_process_function="def x = 1; return x;")),
        "painless_not_supported",
        "connector.post_process.openai.embedding",
    ),
    "a function nobody knows": (
        body(action(pre_process_function="connector.pre_process.openai.embeding")),
        "painless_not_supported",
        "did you mean 'connector.pre_process.openai.embedding'",
    ),
    "structured output, perhaps": (
        body(action(supports_structured_output="perhaps")),
        "invalid_connector",
        "supports_structured_output",
    ),
    "processors": (body(parameters={"output_processors": []}), "unsupported_field", "output_processors"),
    "a half escape": (
        body(action(request_body='{"a": "\\${parameters.x}"}')),
        "invalid_template",
        "follows a backslash",
    ),
    "certificates": (body(client_config={"mutual_tls_enabled": True}), "unsupported_field", "mutual_tls_enabled"),
    "no connections": (body(client_config={"max_connection": 0}), "invalid_connector", "max_connection"),
    "half a second": (body(client_config={"read_timeout": 0.5}), "invalid_connector", "read_timeout"),
    "a loop": (
        body(action(url="https://a.b/${parameters.p}"), parameters={"p": "${parameters.p}"}),
        "placeholder_loop",
        "parameters.p->parameters.p",
    ),
    "a header of the connection": (body(action(headers={"Transfer-Encoding": "x"})), "invalid_header", "connection"),
    "a header twice": (body(action(headers={"a": "1", "A": "2"})), "invalid_header", "twice"),
    "no name of a header": (body(action(headers={"a b": "1"})), "invalid_header", "not a name"),
    "a line break in a header": (body(action(headers={"a": "1\r\nb: 2"})), "invalid_header", "control character"),
    "a name of a credential": (body(credential={"a/b": "x"}), "invalid_connector", "a/b"),
    "too many parameters": (
        body(parameters={str(n): "" for n in range(NAMES_MAX + 1)}),
        "invalid_connector",
        str(NAMES_MAX),
    ),
    "too large": (body(parameters={"p": "x" * (2 << 20)}), "too_large", "bytes"),
    "a filter that is none": (body(parameters={"response_filter": "$.a["}), "invalid_response_filter", "$.a["),
    "actions of another kind": (body(actions=["predict"]), "invalid_connector", "actions"),
    "a name of another kind": (body(name={"a": 1}), "invalid_connector", "name"),
}


@pytest.mark.parametrize("case", OURS.values(), ids=OURS)
def test_what_could_never_work_is_refused_at_once(case):
    """A connector that is unsafe, or asks for what is not supported, is refused with a code and the reason."""
    fields, code, part = case
    error = refusal(fields)
    assert (error.code, part in error.message) == (code, True), error.message


@pytest.mark.parametrize("name", sorted(BLOCKED))
def test_39_blocked_headers_take_credentials(name):
    """A header that says who calls, or for whom, may hold a credential and no parameter."""
    assert refusal(body(action(headers={name.title(): "${parameters.k}"}))).code == "invalid_header"
    assert connector(action(headers={name.title(): "${credential.key}"})).actions[0].headers


def test_a_connector_is_read():
    """Every field arrives: versions are text, parameters are text or JSON, types are upper case."""
    fields = body(
        action("Predict", name="embed-1", pre_process_function="connector.pre_process.default.embedding"),
        action("batch_predict", method="get", headers=None, request_body=None),
        description="reads (well)",
        parameters={"a": "x", "b": 5, "c": [1, "2"], "d": {"e": None}, "f": True, "g": None},
        client_config={"max_connection": "20", "retry_backoff_policy": "EXPONENTIAL_FULL_JITTER"},
    )
    read, secrets = read_connector(fields, id="c1", is_trusted=False)
    assert (read.name, read.version, read.protocol, read.description) == ("an embedder", "1", "http", "reads (well)")
    assert read.parameters == {"a": "x", "b": "5", "c": '[1,"2"]', "d": '{"e":null}', "f": "true", "g": "null"}
    assert read.credential == {"key": "secret:connector/c1/key"}
    assert secrets == {"key": "s3cret"}
    assert read.client_config == ClientConfig(max_connection=20, retry_backoff_policy="exponential_full_jitter")
    assert [(each.action_type, each.method, each.name) for each in read.actions] == [
        ("PREDICT", "POST", "embed-1"),
        ("BATCH_PREDICT", "GET", None),
    ]
    assert read.actions[1].headers == {}


def test_33_unknown_fields_are_ignored():
    """A field that nobody knows changes nothing: clients send more than is asked for."""
    fields = body(action(unheard_of=1), unheard_of={"a": 1}, client_config={"unheard_of": 1})
    assert connector(action(unheard_of=1), unheard_of={"a": 1}, client_config={"unheard_of": 1}).client_config
    assert read_connector(fields, id="c1", is_trusted=False)[0].client_config == ClientConfig()


def test_35_place_and_service_may_be_credentials():
    """Region and service of a signed connector count wherever they stand."""
    for parameters, credential in ((PLACE, AWS), ({}, AWS | PLACE), ({"region": "eu-1"}, AWS | {"service_name": "es"})):
        assert connector(protocol="aws_sigv4", credential=credential, parameters=parameters).protocol == "aws_sigv4"


def test_37_a_name_of_64_is_one():
    """An action's name may have 64 characters."""
    assert connector(action(name="a-_" + "b" * 61)).actions[0].name


def test_references_count_for_those_who_are_trusted():
    """Only in a trusted connector does "env:NAME" mean a variable; over the API it is the credential itself."""
    credential = {"a": "env:NAME", "b": "file:/x", "c": "secret:NAME", "d": "sk-1"}
    trusted, secrets = read_connector(body(credential=credential), id="c1", is_trusted=True)
    assert trusted.credential == credential | {"d": "secret:connector/c1/d"}
    assert secrets == {"d": "sk-1"}
    other, secrets = read_connector(body(credential=credential), id="c1", is_trusted=False)
    assert set(other.credential.values()) == {f"secret:connector/c1/{key}" for key in credential}
    assert secrets == credential


def test_a_credential_may_be_called_as_its_parts():
    """`username:password`, as a blueprint of ML Commons has it, is a name."""
    credential = {"username:password": "dTpw"}
    made, secrets = read_connector(
        body(action(headers={"Authorization": "Basic ${credential.username:password}"}), credential=credential),
        id="c1",
        is_trusted=False,
    )
    assert (made.credential, secrets) == ({"username:password": "secret:connector/c1/username:password"}, credential)
    call = Renderer(made, made.actions[0]).render({"input": "a"}, credential)
    assert call.headers["Authorization"] == "Basic dTpw"


def test_a_trusted_connector_may_have_no_credential():
    """A service of the operator's own may want none."""
    assert connector(action(headers={}), credential=None, is_trusted=True).credential == {}
    assert refusal(body(credential=None, protocol="aws_sigv4"), is_trusted=True).code == "invalid_connector"


def test_no_secret_is_in_a_connector():
    """What a connector is written as does not hold its credentials."""
    assert b"s3cret" not in msgspec.json.encode(connector())


def test_updates_merge():
    """Parameters and credentials are merged key by key; actions and settings replace what was there."""
    old = connector(
        action(),
        action("batch_predict"),
        parameters={"a": "1", "b": "2"},
        credential={"key": "x", "other": "y"},
        client_config={"max_connection": 7},
    )
    new, secrets = update_connector(
        old,
        {
            "name": None,
            "description": "newer",
            "parameters": {"b": 3, "c": "4"},
            "credential": {"key": "z"},
            "actions": [action(url="https://b.example.com/")],
            "client_config": {"read_timeout": 9},
            "unheard_of": 1,
        },
    )
    assert (new.name, new.description) == ("an embedder", "newer")
    assert new.parameters == {"a": "1", "b": "3", "c": "4"}
    assert new.credential == old.credential
    assert secrets == {"key": "z"}
    assert [each.url for each in new.actions] == ["https://b.example.com/"]
    assert new.client_config == ClientConfig(read_timeout=9)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"actions": []}, "invalid_connector"),
        ({"actions": [action(url="https://${parameters.h}/")]}, "invalid_url"),
        ({"parameters": {"host": "${parameters.h}"}}, "invalid_url"),
        ({"protocol": "smtp"}, "invalid_connector"),
        ({"protocol": "aws_sigv4"}, "invalid_connector"),
        ({"name": "<"}, "unsafe_text"),
        ({"access_mode": "public"}, "invalid_connector"),
    ],
)
def test_updates_are_checked(fields, code):
    """A connector is no less safe after an update than when it was made."""
    old = connector(action(url="https://${parameters.host}/"), parameters={"host": "a.example.com"})
    with pytest.raises(InvalidInput) as caught:
        update_connector(old, fields)
    assert caught.value.code == code


def test_an_empty_update_changes_nothing():
    """A connector is what it was."""
    old = connector(parameters={"a": "1"})
    assert update_connector(old, {}) == (old, {})


def test_files_are_read(tmp_path):
    """A connector in a file is trusted, called after the file, and holds references."""
    path = tmp_path / "my-embedder.json"
    path.write_text(json.dumps(body(credential={"key": "env:EMBEDDER_KEY"}, created_time=1)))
    read = read_file(path)
    assert (read.id, read.is_trusted, read.credential) == ("my-embedder.json", True, {"key": "env:EMBEDDER_KEY"})


FILES = {
    "a key itself": (body(), "invalid_secret", "'key'"),
    "a misspelt field": (body(parametres={}), "unknown_field", "did you mean 'parameters'"),
    "a misspelt field of an action": (body(action(post_proces_function="x")), "unknown_field", "post_process_function"),
    "a misspelt setting": (body(client_config={"max_conection": 1}), "unknown_field", "max_connection"),
    "a list": ([], "invalid_connector", "not a JSON object"),
}


@pytest.mark.parametrize("case", FILES.values(), ids=FILES)
def test_files_are_checked(case, tmp_path):
    """A file with a key in it, or a field that means nothing, is refused; the key is not repeated."""
    content, code, part = case
    path = tmp_path / "c1.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InvalidInput) as caught:
        read_file(path)
    assert (caught.value.code, part in caught.value.message) == (code, True), caught.value.message
    assert "s3cret" not in caught.value.message


def test_a_file_that_is_missing_is_named(tmp_path):
    """Whoever names a file that is not there is told which."""
    with pytest.raises(InvalidInput, match="nowhere.json cannot be read"):
        read_file(tmp_path / "nowhere.json")
    (tmp_path / "a b.json").write_text(json.dumps(body(action(headers=KEY))))
    with pytest.raises(InvalidInput, match="the name of the connector file"):
        read_file(tmp_path / "a b.json")


def test_reading_loads_nothing_that_few_need():
    """Connectors without signatures and filters load neither botocore nor JSONPath."""
    code = (
        "import sys; from batchmill.models.connectors import reading, rendering; "
        "print({'botocore', 'jsonpath', 'aiohttp', 'sqlalchemy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"
