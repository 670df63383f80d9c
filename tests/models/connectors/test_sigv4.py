"""Signatures are those that botocore's own signers make."""

import sys
from datetime import UTC, datetime

import botocore.auth
import pytest
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from connector_samples import action, connector

from batchmill.errors import InvalidConfig, InvalidInput
from batchmill.models.connectors.rendering import Rendered, Renderer
from batchmill.models.connectors.signing import sign

AT = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
AWS = {"access_key": "AKIDEXAMPLE", "secret_key": "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"}
ARN = "arn%3Aaws%3Abedrock%3Aus-east-1%3A1%3Amodel-invocation-job%2Fabc"

CALLS = {
    "s3": ("PUT", "s3", "https://bucket.s3.us-east-1.amazonaws.com/a%20b/c//d%2Fe~f+g.jsonl", b"rows\n"),
    "s3 list": ("GET", "s3", "https://bucket.s3.us-east-1.amazonaws.com/?prefix=a%2Fb&list-type=2", None),
    "sagemaker": ("POST", "sagemaker", "https://api.sagemaker.us-east-1.amazonaws.com/CreateTransformJob", b"{}"),
    "bedrock": ("POST", "bedrock", "https://bedrock-runtime.us-east-1.amazonaws.com/model/a.b-v1:0/invoke", b'{"a":1}'),
    "bedrock job": ("GET", "bedrock", f"https://bedrock.us-east-1.amazonaws.com/model-invocation-job/{ARN}", None),
    "es": ("POST", "es", "https://search.us-east-1.es.amazonaws.com/_plugins/_ml/models/m/_predict?pretty=", b"{}"),
    "a port": ("POST", "execute-api", "http://127.0.0.1:4566/x/./y/../z?b=2&a=1&b=1", b"\xc3\xa9"),
}


def signed_by_botocore(monkeypatch, call, token, headers):
    """What botocore's `add_auth` makes of the same call at the same time."""
    method, service, url, body = call
    kind = botocore.auth.S3SigV4Auth if service == "s3" else botocore.auth.SigV4Auth
    request = AWSRequest(method, url, headers, body or b"")
    with monkeypatch.context() as patch:
        patch.setattr(botocore.auth, "get_current_datetime", lambda: AT)
        kind(Credentials(AWS["access_key"], AWS["secret_key"], token), service, "us-east-1").add_auth(request)
    return dict(request.headers.items())


@pytest.mark.parametrize("token", [None, "FwoGZXIvYXdzE=="])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_signatures_are_botocores(call, token, monkeypatch):
    """For each service, with and without a session, the headers are those that botocore would send."""
    method, service, url, body = call
    headers = {"Content-Type": "application/json"}
    made = sign(
        Rendered(method, url, headers, body),
        service=service,
        region="us-east-1",
        access_key=AWS["access_key"],
        secret_key=AWS["secret_key"],
        session_token=token,
        at=AT,
    )
    assert made.headers == signed_by_botocore(monkeypatch, call, token, headers)
    assert (made.method, made.url, made.body) == (method, url, body)
    assert "SignedHeaders=content-type;host;" in made.headers["Authorization"]
    assert headers == {"Content-Type": "application/json"}


def aws(credential=None, parameters=None, **fields):
    made = connector(
        action(url="https://bedrock-runtime.${parameters.region}.amazonaws.com/model/m/invoke", **fields),
        protocol="aws_sigv4",
        credential=AWS if credential is None else credential,
        parameters={"region": "us-east-1", "service_name": "bedrock"} if parameters is None else parameters,
    )
    return Renderer(made, made.actions[0])


def test_connectors_sign(monkeypatch):
    """A signed connector's call carries the signature of its body, by the keys of its credential."""
    made = aws(headers=None).render({"input": "a"}, AWS, AT)
    call = (made.method, "bedrock", made.url, made.body)
    assert made.headers == signed_by_botocore(monkeypatch, call, None, {"Content-Type": "application/json"})
    assert AWS["secret_key"] not in str(made)


def test_place_and_service_may_be_credentials():
    """Region and service that stand among the credentials are signed for; a session's token is sent."""
    secrets = AWS | {"region": "us-east-1", "service_name": "bedrock", "session_token": "T"}
    made = connector(action(headers=None), protocol="aws_sigv4", credential=secrets, parameters={})
    call = Renderer(made, made.actions[0]).render({"input": "a"}, secrets, AT)
    assert "/20260304/us-east-1/bedrock/aws4_request" in call.headers["Authorization"]
    assert call.headers["X-Amz-Security-Token"] == "T"


def test_a_caller_has_no_word_in_it():
    """The region of a call's parameters changes neither the host nor what is signed for."""
    call = aws(headers=None).render({"input": "a", "region": "evil", "service_name": "iam"}, AWS, AT)
    assert call.url.startswith("https://bedrock-runtime.us-east-1.")
    assert "/us-east-1/bedrock/" in call.headers["Authorization"]


def test_blueprints_ask_for_the_digest():
    """`x-amz-content-sha256: required`, as ML Commons' blueprints have it, becomes the digest of the body."""
    headers = aws(headers={"x-amz-content-sha256": "required"}).render({"input": "a"}, AWS, AT).headers
    (digest,) = (value for name, value in headers.items() if name.lower() == "x-amz-content-sha256")
    assert len(digest) == 64
    assert "x-amz-content-sha256" in headers["Authorization"]


def test_each_attempt_has_its_time():
    """A call can be signed anew, at another time, from the same composed one."""
    renderer = aws(headers=None)
    composed = renderer.compose({"input": "a"}, AWS)
    assert "Authorization" not in composed.headers
    first, again = (renderer.sign(composed, AWS, AT.replace(minute=minute)) for minute in (1, 30))
    assert first.headers["X-Amz-Date"] != again.headers["X-Amz-Date"]
    assert renderer.sign(first, AWS, AT.replace(minute=30)) == again
    assert renderer.sign(composed, AWS).headers["Authorization"]


@pytest.mark.parametrize("digest", ["UNSIGNED-PAYLOAD", "ab" * 32])
@pytest.mark.parametrize("service", ["s3", "bedrock"])
def test_a_body_from_elsewhere(service, digest):
    """A body that is streamed is signed by its digest, or not at all."""
    call = Rendered("PUT", "https://b.s3.amazonaws.com/k", {}, None)
    made = sign(call, service=service, region="us-east-1", access_key="a", secret_key="b", at=AT, body_sha256=digest)
    assert digest in made.headers.values()


@pytest.mark.parametrize(
    ("missing", "message"), [("secret_key", "Missing credential"), ("access_key", "Missing credential")]
)
def test_keys_that_are_missing(missing, message):
    """A key that is gone is a mistake with a name, not a signature with nothing."""
    secrets = {name: value for name, value in AWS.items() if name != missing}
    with pytest.raises(InvalidInput) as caught:
        aws(headers=None).render({"input": "a"}, secrets, AT)
    assert (caught.value.code, caught.value.message) == ("missing_credential", message)


def test_without_botocore_the_extra_is_named(monkeypatch):
    """Where botocore is not installed, a signed connector says what to install."""
    monkeypatch.delitem(sys.modules, "batchmill.models.connectors.signing")
    for name in ("botocore", "botocore.auth"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InvalidConfig, match=r"pip install 'batchmill\[aws\]'") as caught:
        aws()
    assert caught.value.code == "missing_dependency"
