"""The connector engine: what is sent for a row, what its reply comes to, and how live requests are answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from contract.engine_suite import ListSink as Sink
from contract.engine_suite import OpenFeed, answer_to, run_all
from fakes.faulty_service import FAULTS, FaultyService
from fakes.held_clock import HeldClock

from batchmill.children import programs
from batchmill.children.bounds import ResourceLimits
from batchmill.children.programs import Programs
from batchmill.engines.remote.connector import ConnectorEngine
from batchmill.errors import (
    AuthRefused,
    BatchmillError,
    InvalidInput,
    ModelFailed,
    QuotaExhausted,
    TooComplex,
    Unavailable,
)
from batchmill.models import secrets
from batchmill.models.connectors import bounded
from batchmill.types import (
    Action,
    ClientConfig,
    Connector,
    Limits,
    LiveRequest,
    ModelSpec,
    Outcome,
    Provision,
    Row,
    Usage,
)
from batchmill.wire.rows.forms import OpenAIForm, TableForm

EMBEDDING = "connector.post_process.openai.embedding"
Answer = Callable[[web.Request, bytes], web.StreamResponse]


class Service:
    """A server in this process that answers as it is told, and keeps what it was sent."""

    def __init__(self) -> None:
        self.answers: list[web.StreamResponse | Answer] = []  # used up one by one; then a JSON object
        self.calls: list[tuple[str, str, dict[str, str], bytes]] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        self.calls.append((request.method, request.raw_path, dict(request.headers), data))
        answer = self.answers.pop(0) if self.answers else web.json_response({"echo": data.decode()})
        return answer(request, data) if callable(answer) else answer

    @property
    def bodies(self) -> list[Any]:
        return [json.loads(data) for _, _, _, data in self.calls]


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    made = Service()
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_route("*", "/{path:.*}", made.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


@pytest.fixture(autouse=True)
def nothing_provided() -> Iterator[None]:
    """What one test provides to its worker, the next does not have."""
    yield
    secrets.take(Provision())


def spec(url: str, body: str | None = '{"input": ${parameters.input}}', **fields: Any) -> ModelSpec:
    """A model of a connector with one predict action; `fields` are those of the action, connector or model."""
    parts: dict[str, dict[str, Any]] = {"action": {}, "connector": {"is_trusted": True}, "model": {}}
    for name, value in fields.items():
        part = (
            "action"
            if name in Action.__struct_fields__
            else "connector"
            if name in Connector.__struct_fields__
            else "model"
        )
        parts[part][name] = value
    predict = Action(
        **{"action_type": "PREDICT", "method": "POST", "url": url, "request_body": body, **parts["action"]}
    )
    connector = Connector(
        **{"id": "c1", "name": "c", "version": "1", "protocol": "http", "actions": [predict], **parts["connector"]}
    )
    return ModelSpec(**{"name": "m", "engine": "connector", "source": "c1", "connector": connector, **parts["model"]})


@asynccontextmanager
async def started(model: ModelSpec, clock: HeldClock | None = None) -> AsyncIterator[ConnectorEngine]:
    engine = ConnectorEngine(model, Path(), clock=clock or HeldClock(), jitter=lambda: 0.0)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def row(number: int = 0, **body: object) -> Row:
    line = {"custom_id": f"r{number}", "url": "/v1/embeddings", "body": body}
    return Row(number, number, json.dumps(line).encode(), OpenAIForm())


async def run(model: ModelSpec, *rows: Row, clock: HeldClock | None = None) -> list[Outcome]:
    async with started(model, clock) as engine:
        return (await run_all(engine, rows)).outcomes


def error_of(outcome: Outcome) -> tuple[str, str]:
    assert outcome.error is not None
    return outcome.error.code, outcome.error.message


# what is sent


@pytest.mark.parametrize(
    ("form", "raw", "sent"),
    [
        (OpenAIForm(), {"custom_id": "a", "url": "/v1/x", "body": {"input": "hi", "model": "m"}}, {"input": "hi"}),
        (OpenAIForm(), {"custom_id": "a", "url": "/v1/x", "body": {"input": ["a", 'b"']}}, {"input": ["a", 'b"']}),
        (
            OpenAIForm(),
            {"custom_id": "a", "url": "/v1/x", "body": {"parameters": {"input": 5}, "model": ""}},
            {"input": 5},
        ),
        (OpenAIForm(), {"custom_id": "a", "url": "/v1/x", "body": {"text_docs": ["x", "y"]}}, {"input": ["x", "y"]}),
        (TableForm(), {"input": "12", "other": None}, {"input": "12"}),
        (TableForm(prompt="say {word}", url="/v1/embeddings"), {"word": "tree"}, {"input": "say tree"}),
    ],
    ids=["body", "list", "parameters", "documents", "table", "prompt"],
)
async def test_rows_are_parameters(service: Service, form: Any, raw: dict[str, Any], sent: object) -> None:
    """Members of a body, its parameters or documents, columns, and what a prompt makes of them fill the template."""
    outcomes = await run(spec(service.url), Row(0, 0, json.dumps(raw).encode(), form))
    assert outcomes[0].error is None
    assert service.bodies == [sent]


async def test_another_models_name_is_a_parameter(service: Service) -> None:
    """Only our own name for the model is left out: a service with many models is told which."""
    body = '{"model": "${parameters.model}", "input": ${parameters.input}}'
    for name, sent in (("m", "own"), ("c1", "own"), ("large", "large")):
        await run(spec(service.url, body, parameters={"model": "own"}), row(input="x", model=name))
        assert service.bodies[-1]["model"] == sent


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({}, "invalid_payload"),
        ({"input": "x", "stream": True}, "unsupported_parameter"),
        ({"text_docs": ["a", "b"], "input_docs_processed_step_size": "1"}, "too_many_documents"),
    ],
)
async def test_rows_that_make_no_call(service: Service, body: dict[str, object], code: str) -> None:
    """A row whose parameters fill no template is an error of its own; nothing is sent for it."""
    outcomes = await run(spec(service.url), row(0, **body), row(1, input="fine"))
    assert {outcome.row.number: outcome.error and outcome.error.code for outcome in outcomes} == {0: code, 1: None}
    assert service.bodies == [{"input": "fine"}]


async def test_urls_hold_parameters(service: Service) -> None:
    """A row's value in a URL is one part of it, whatever it holds; the call needs no body."""
    model = spec("${parameters.base}/by/${parameters.name}", None, method="GET", parameters={"base": service.url})
    await run(model, row(name="a b/..x/c?d"))
    assert [(method, path) for method, path, _, _ in service.calls] == [("GET", "/by/a%20b%2F..x%2Fc%3Fd")]


async def test_urls_differ_where_rows_do(service: Service) -> None:
    """A row that fills a URL in its own way changes nothing for the rows before and after it."""
    model = spec(service.url + "/by/${parameters.name:-all}", limits=Limits(in_flight_max=1))
    await run(model, *(row(n, input="x", **({"name": "one"} if n == 1 else {})) for n in range(3)))
    assert [path for _, path, _, _ in service.calls] == ["/by/all", "/by/one", "/by/all"]


async def test_credentials_go_in_headers(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret is read where it lies and stands where the header wants it."""
    monkeypatch.setenv("SOME_KEY", "s3cret-value")
    headers = {"Authorization": "Bearer ${credential.key}", "X-Kind": "${parameters.kind}"}
    model = spec(service.url, headers=headers, credential={"key": "env:SOME_KEY"}, parameters={"kind": "fast"})
    await run(model, row(input="x"))
    sent = service.calls[0][2]
    assert (sent["Authorization"], sent["X-Kind"], sent["Content-Type"]) == (
        "Bearer s3cret-value",
        "fast",
        "application/json",
    )
    assert sent["User-Agent"].startswith("batchmill/")


# what a reply comes to


def reply(data: object, kind: str = "application/json", status: int = 200, **headers: str) -> web.Response:
    body = data if isinstance(data, bytes) else json.dumps(data).encode()
    return web.Response(
        body=body, status=status, headers={"Content-Type": kind, **{k.replace("_", "-"): v for k, v in headers.items()}}
    )


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (reply({"a": [1.5, None]}), {"a": [1.5, None]}),
        (reply(b'{\n "a": 1\n}', "application/vnd.x+json; charset=utf-8"), {"a": 1}),
        (reply({"a": 1}, "application/octet-stream"), {"a": 1}),
        (reply({"a": 1}, "text/plain"), {"a": 1}),
        (reply({"made": True}, status=201), {"made": True}),
        (reply([[1, 2]]), [[1, 2]]),
        (reply(b"fine, thanks", "text/plain"), {"response": "fine, thanks"}),
        (reply(b"1,2,3", "text/csv; charset=utf-8"), {"response": "1,2,3"}),
        (reply("yes"), {"response": "yes"}),
        (reply(b"<a>1</a>", "application/xml"), {"response": "<a>1</a>"}),
        (reply(b"a: 1", "text/yaml; charset=utf-8"), {"response": "a: 1"}),
        (reply({"a": 1}, "application/x-own"), {"a": 1}),
    ],
)
async def test_results(service: Service, answer: web.Response, body: object) -> None:
    """Without post-processing the result is the service's reply as JSON on one line; text is its one member."""
    service.answers = [answer]
    (outcome,) = await run(spec(service.url), row(input="x"))
    assert outcome.error is None
    assert outcome.body is not None
    assert (json.loads(outcome.body), b"\n" in outcome.body) == (body, False)


@pytest.mark.parametrize(
    "answer",
    [
        reply(b""),
        reply(b"  \n"),
        reply(b'{"a": [1, 2'),
        reply(b"[1, 2"),
        reply(b"oops"),
        reply({"a": 1}, "text/html"),
        reply(b"<html></html>", "text/html"),
        reply(b"data: {}\n\n", "text/event-stream"),
        reply(b"\xff\xfe", "text/plain"),
        reply(b'{"a":"\xff"}'),
        reply({"error": {"message": "overloaded", "type": "overloaded_error"}}),
    ],
    ids=[
        "empty",
        "blank",
        "half object",
        "half list",
        "text",
        "html type",
        "html",
        "events",
        "no text",
        "no utf-8",
        "error",
    ],
)
async def test_what_is_never_a_result(service: Service, answer: web.Response) -> None:
    """A reply that is cut, empty, of the wrong type or an error in disguise is not a result: the row is tried again."""
    body, kind = answer.body, answer.headers["Content-Type"]
    service.answers = [answer, reply(b'{"fine":1}')]
    (outcome,) = await run(spec(service.url), row(input="x"))
    assert (outcome.body, len(service.calls)) == (b'{"fine":1}', 2), (body, kind)


async def test_a_predict_takes_text_of_any_type(service: Service) -> None:
    """For a predict of ML Commons what is not JSON is text, whatever the service calls it."""
    async with started(spec(service.url)) as engine:
        for text, kind in (
            ("<html>hi</html>", "text/html"), ("oops", "application/json"), ("{half", "application/octet-stream"),
            ("data: 1\n\n", "text/event-stream"), ("a,b", "application/x-own"),
        ):  # fmt: skip
            service.answers = [reply(text.encode(), kind)]
            _, body = await answer_to(engine, live({"parameters": {"input": "1"}}))
            received = json.loads(body)["inference_results"][0]["output"]
            assert received == [{"name": "response", "dataAsMap": {"response": text}}], kind
        service.answers = [reply(b"\xff\xfe", "image/png")]
        head, _ = await answer_to(engine, live({"parameters": {"input": "1"}}))
        assert head.status == 502


async def test_a_bad_reply_is_told(service: Service) -> None:
    """A row whose replies stay unusable has an error that says what came."""
    service.answers = [reply(b"<html>log in</html>", "text/html") for _ in range(2)]
    (outcome,) = await run(spec(service.url, limits=Limits(attempts_max=2)), row(input="x"))
    code, message = error_of(outcome)
    assert code == "bad_response"
    assert "text/html" in message
    assert "log in" in message


async def test_post_processing(service: Service) -> None:
    """With a built-in function the result is its tensors, or OpenAI's embeddings where those are asked for."""
    data = [{"embedding": [0.25, -1.5]}, {"embedding": [1, 2]}]
    service.answers = [reply({"data": data, "usage": {"prompt_tokens": 9, "total_tokens": 9}}) for _ in range(2)]
    model = spec(service.url, post_process_function=EMBEDDING)
    (outcome,) = await run(model, Row(0, 0, b'{"input": "x"}', TableForm()))
    assert outcome.body is not None
    output = json.loads(outcome.body)["output"]
    assert [(each["shape"], each["data"]) for each in output] == [([2], [0.25, -1.5]), ([2], [1, 2])]
    assert outcome.usage == Usage(9, 0, 0)
    (outcome,) = await run(model, row(input="x"))
    assert outcome.body is not None
    received = json.loads(outcome.body)
    assert [each["embedding"] for each in received["data"]] == [[0.25, -1.5], [1, 2]]
    assert (received["object"], received["model"], received["usage"]["prompt_tokens"]) == ("list", "c", 9)


@pytest.mark.parametrize("place", ["connector", "row"])
async def test_response_filter(service: Service, place: str) -> None:
    """A path that the connector or the row gives selects what the result holds."""
    service.answers = [reply({"a": {"b": [1, 2]}, "c": 3})]
    given = {"response_filter": "$.a"}
    model = spec(service.url, parameters=given if place == "connector" else {})
    (outcome,) = await run(model, row(input="x", **({} if place == "connector" else given)))
    assert outcome.body is not None
    assert json.loads(outcome.body) == {"b": [1, 2]}


async def test_a_reply_that_post_processing_cannot_take(service: Service) -> None:
    """One that is not what the function takes is asked for once more, and then an error beside what came."""
    service.answers = [reply(b'{"data":"no"}') for _ in range(3)]
    (outcome,) = await run(spec(service.url, post_process_function=EMBEDDING), row(input="x"))
    assert error_of(outcome)[0] == "unexpected_reply"
    assert (outcome.body, len(service.calls)) == (b'{"data":"no"}', 2)


async def test_usage_in_headers(service: Service) -> None:
    """Bedrock's counts, which it tells in headers, are usage too."""
    service.answers = [reply({"e": 1}, X_Amzn_Bedrock_Input_Token_Count="12", X_Amzn_Bedrock_Output_Token_Count="3")]
    (outcome,) = await run(spec(service.url), row(input="x"))
    assert outcome.usage == Usage(12, 0, 3)


# faults


@pytest.mark.parametrize("seed", range(3))
async def test_every_row_is_accounted_for(seed: int) -> None:
    """A service that fails in every way it can leaves no row without its result, and none with a wrong one."""
    clock = HeldClock()
    async with FaultyService(seed) as faulty:
        limits = Limits(attempt_timeout_s=0.4, attempts_max=10, in_flight_max=32)
        model = spec(faulty.url, post_process_function=EMBEDDING, limits=limits)
        texts = [f"{'bad' if n % 50 == 7 else 'text'} {n}" for n in range(200)]
        outcomes = await run(model, *(row(n, input=text) for n, text in enumerate(texts)), clock=clock)
        assert set(faulty.fates) >= set(FAULTS)
    assert sorted(outcome.row.number for outcome in outcomes) == list(range(200))
    for outcome in outcomes:
        text = texts[outcome.row.number]
        if text.startswith("bad"):
            assert error_of(outcome)[0] == "bad_thing"
        else:
            assert outcome.body is not None
            assert json.loads(outcome.body)["data"][0]["embedding"] == [len(text) + 2, 0.5]
            assert outcome.error is None


async def test_aws_throttles_with_400(service: Service) -> None:
    """AWS says in a header that it throttles: that costs no attempt."""
    service.answers = [
        reply({"message": "Rate exceeded"}, status=400, X_Amzn_ErrorType="ThrottlingException:http://x")
        for _ in range(7)
    ]
    (outcome,) = await run(spec(service.url), row(input="x"))
    assert (outcome.error, len(service.calls)) == (None, 8)


async def test_aws_errors_keep_their_names(service: Service) -> None:
    """An error whose name stands in a header has that as its code."""
    service.answers = [reply({"message": "no such field"}, status=400, X_Amzn_ErrorType="ValidationException:http://x")]
    (outcome,) = await run(spec(service.url), row(input="x"))
    assert error_of(outcome) == ("ValidationException", "no such field")


async def test_retry_after_rests_the_connector(service: Service) -> None:
    """A rest that one row was told holds for all."""
    clock = HeldClock()
    service.answers = [reply({}, status=429, Retry_After="7")]
    outcomes = await run(
        spec(service.url, limits=Limits(in_flight_max=1)), row(0, input="x"), row(1, input="y"), clock=clock
    )
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert sum(clock.slept) == pytest.approx(7.0)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (reply({"message": "who"}, status=401), AuthRefused),
        (reply({"error": {"code": "insufficient_quota"}}, status=429), QuotaExhausted),
    ],
)
async def test_what_pauses(service: Service, answer: web.Response, error: type[BatchmillError]) -> None:
    """Refused credentials and an empty account pause the job; rows that were taken stay undone."""
    service.answers = [answer]
    sink = Sink()
    async with started(spec(service.url)) as engine:
        with pytest.raises(error):
            await engine.run(OpenFeed(sink, [row(input="x")]), sink)
    assert sink.outcomes == []


@pytest.mark.parametrize(
    ("config", "slept", "calls"),
    [
        (ClientConfig(max_retry_times=2, retry_backoff_millis=100), [0.1, 0.1], 3),
        (
            ClientConfig(max_retry_times=3, retry_backoff_millis=100, retry_backoff_policy="exponential_equal_jitter"),
            [0.1, 0.2, 0.4],
            4,
        ),
        (ClientConfig(max_retry_times=2, retry_backoff_policy="exponential_full_jitter"), [0.0, 0.0], 3),
        (
            ClientConfig(max_retry_times=-1, retry_backoff_millis=10_000, retry_timeout_seconds=25),
            [10.0, 10.0, 10.0],
            4,
        ),
    ],
)
async def test_retries_as_told(service: Service, config: ClientConfig, slept: list[float], calls: int) -> None:
    """A connector that says how failed calls are made again has them made so, and no more often."""
    clock = HeldClock()
    service.answers = [reply({}, status=500) for _ in range(20)]
    (outcome,) = await run(spec(service.url, client_config=config), row(input="x"), clock=clock)
    assert error_of(outcome)[0] == "server_error"
    assert (clock.slept, len(service.calls)) == (slept, calls)


async def test_no_word_of_retries(service: Service) -> None:
    """A client_config that says nothing of retries takes none away from rows."""
    service.answers = [reply({}, status=500)]
    (outcome,) = await run(spec(service.url, client_config=ClientConfig()), row(input="x"))
    assert (outcome.error, len(service.calls)) == (None, 2)


async def test_connections_are_bounded(service: Service) -> None:
    """`max_connection` is how many rows are in flight at most, and the model's own limit where that is lower."""
    for limit, received, most in ((None, 5, 5), (3, 5, 3), (9, 5, 5)):
        model = spec(
            service.url, client_config=ClientConfig(max_connection=received), limits=Limits(in_flight_max=limit)
        )
        async with started(model) as engine:
            assert engine.stats().in_flight_limit == most


# secrets


async def test_a_rotated_secret_is_used_at_once(service: Service) -> None:
    """What the owner provides anew goes out with the next call; nothing is started again."""
    secrets.take(Provision({"secret:connector/c1/key": "first-secret"}))
    model = spec(service.url, headers={"X-Key": "${credential.key}"}, credential={"key": "secret:connector/c1/key"})
    async with started(model) as engine:
        await run_all(engine, [row(input="x")])
        secrets.take(Provision({"secret:connector/c1/key": "second-secret"}))
        await run_all(engine, [row(input="x")])
    assert [headers["X-Key"] for _, _, headers, _ in service.calls] == ["first-secret", "second-secret"]


async def test_a_refused_secret_is_read_again(service: Service, tmp_path: Path) -> None:
    """A 401 is met by reading the file again: the call is made once more where it holds another key now."""
    file = tmp_path / "key"
    file.write_text("first-secret")

    def rotate(_: web.Request, __: bytes) -> web.Response:
        file.write_text("second-secret")
        return reply({"message": "expired"}, status=401)

    service.answers = [rotate]
    model = spec(service.url, headers={"X-Key": "${credential.key}"}, credential={"key": f"file:{file}"})
    (outcome,) = await run(model, row(input="x"))
    assert outcome.error is None
    assert [headers["X-Key"] for _, _, headers, _ in service.calls] == ["first-secret", "second-secret"]


async def test_a_missing_secret(service: Service) -> None:
    """An engine whose secret is nowhere does not start, and says which it is."""
    with pytest.raises(ModelFailed, match="NOT_THERE"):
        await run(spec(service.url, credential={"key": "env:NOT_THERE"}))


def signature_of(method: str, url: str, headers: dict[str, str], data: bytes) -> str:
    """What botocore makes of a call as it came in."""
    names = headers["Authorization"].partition("SignedHeaders=")[2].partition(",")[0].split(";")
    received = {name.lower(): value for name, value in headers.items()}
    request = AWSRequest(method, url, headers={name: received[name] for name in names if name != "host"}, data=data)
    request.context["timestamp"] = headers["X-Amz-Date"]
    auth = SigV4Auth(Credentials("AKIDEXAMPLE-TEST", "wJalrXUtnFEMI-TEST"), "bedrock", "us-east-1")
    return auth.signature(auth.string_to_sign(request, auth.canonical_request(request)), request)


async def test_signed_anew_for_each_attempt(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signature is as old as its attempt, not as its row, and fits the call as it arrives."""
    monkeypatch.setenv("AWS_TEST_ID", "AKIDEXAMPLE-TEST")
    monkeypatch.setenv("AWS_TEST_SECRET", "wJalrXUtnFEMI-TEST")
    clock = HeldClock()
    service.answers = [reply({}, status=500, Retry_After="900"), reply({}, status=503, Retry_After="900")]
    model = spec(
        service.url,
        protocol="aws_sigv4",
        credential={"access_key": "env:AWS_TEST_ID", "secret_key": "env:AWS_TEST_SECRET"},
        parameters={"region": "us-east-1", "service_name": "bedrock"},
    )
    (outcome,) = await run(model, row(input="x"), clock=clock)
    assert outcome.error is None
    dates = [headers["X-Amz-Date"] for _, _, headers, _ in service.calls]
    assert len(dates) == 3
    assert dates[1] < dates[2]
    for method, path, headers, data in service.calls:
        assert headers["Authorization"].endswith(f"Signature={signature_of(method, service.url + path, headers, data)}")


# where calls go


async def test_a_connector_of_a_caller_reaches_no_private_place(service: Service) -> None:
    """One that was made over the API is not called inside, until the operator lists the place."""
    (outcome,) = await run(spec(service.url, is_trusted=False), row(input="x"))
    assert error_of(outcome)[0] == "url_not_allowed"
    assert service.calls == []
    secrets.take(Provision(private_hosts=["127.0.0.1"]))
    (outcome,) = await run(spec(service.url, is_trusted=False), row(input="x"))
    assert outcome.error is None


async def test_metadata_is_never_reached() -> None:
    """Nobody's connector is sent to where a cloud keeps credentials."""
    (outcome,) = await run(spec("http://169.254.169.254/latest"), row(input="x"))
    assert error_of(outcome)[0] == "url_not_allowed"


async def test_redirects_are_not_followed(service: Service) -> None:
    """A redirect is an error of its row, and its target is not called."""
    service.answers = [web.Response(status=302, headers={"Location": service.url + "/other"})]
    (outcome,) = await run(spec(service.url), row(input="x"))
    assert (error_of(outcome)[0], len(service.calls)) == ("redirected", 1)


@pytest.mark.parametrize("change", [{"engine_args": {"speed": 1}}, {"python": "/usr/bin/python3"}, {"connector": None}])
def test_what_has_no_effect_is_refused(change: dict[str, Any]) -> None:
    """What the engine does not know it refuses by name."""
    fields = {"name": "m", "engine": "connector", "source": "c1", "connector": spec("http://x").connector, **change}
    with pytest.raises(ModelFailed):
        ConnectorEngine(ModelSpec(**fields), Path())


# live requests


def live(body: object, form: str = "ml_commons") -> LiveRequest:
    return LiveRequest("/predict", json.dumps(body).encode(), form=form)


async def test_ml_commons_predict(service: Service) -> None:
    """A predict body of parameters comes back as ML Commons' inference results."""
    async with started(spec(service.url)) as engine:
        head, body = await answer_to(engine, live({"parameters": {"input": '["a"]'}}))
    tensor = {"name": "response", "dataAsMap": {"echo": '{"input": ["a"]}'}}
    assert (head.status, json.loads(body)) == (200, {"inference_results": [{"output": [tensor], "status_code": 200}]})


async def test_ml_commons_documents(service: Service) -> None:
    """Documents that take several calls come back as several results, in their order."""
    service.answers = [lambda _, data: reply({"embedding": [float(json.loads(data)["inputText"])]}) for _ in range(40)]
    model = spec(
        service.url,
        '{"inputText": "${parameters.inputText}"}',
        pre_process_function="connector.pre_process.bedrock.embedding",
        post_process_function="connector.post_process.bedrock.embedding",
    )
    async with started(model) as engine:
        _, body = await answer_to(engine, live({"text_docs": [str(n) for n in range(40)]}))
    results = json.loads(body)["inference_results"]
    assert [result["output"][0]["data"] for result in results] == [[n] for n in range(40)]


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        (reply({"message": "bad input"}, status=400), 400, 'Error from remote service: {"message": "bad input"}'),
        (reply({"message": "who"}, status=401), 401, "Error from remote service"),
        (reply(b"oops", "text/plain", 503), 503, "Error from remote service: oops"),
        (reply({}, status=429), 429, "Error from remote service: {}"),
        (reply(b""), 502, "Remote service returned empty response body"),
    ],
)
async def test_ml_commons_errors(service: Service, answer: web.Response, status: int, words: str) -> None:
    """An error of the service has its status and its body, in ML Commons' words."""
    service.answers = [answer]
    async with started(spec(service.url)) as engine:
        head, body = await answer_to(engine, live({"parameters": {"input": "1"}}))
    error = json.loads(body)["error"]
    assert head.status == status
    assert words in error["message"]
    assert error["code"]


async def test_other_live_requests(service: Service) -> None:
    """Members of any other body are parameters, answered as a row is; errors are the service's own."""
    service.answers = [
        reply({"data": [{"embedding": [1.0]}]}),
        reply({"error": {"message": "no", "code": "x"}}, status=422),
    ]
    async with started(spec(service.url, post_process_function=EMBEDDING)) as engine:
        head, body = await answer_to(engine, live({"input": "a", "model": "m"}, "arguments"))
        assert (head.status, json.loads(body)["output"][0]["data"]) == (200, [1.0])
        head, body = await answer_to(engine, live({"input": "a"}, "arguments"))
        assert (head.status, json.loads(body)) == (422, {"error": {"message": "no", "code": "x"}})
        service.answers = [reply({"data": [{"embedding": [1.50]}, {"embedding": [2]}], "usage": {"prompt_tokens": 3}})]
        _, body = await answer_to(engine, LiveRequest("/v1/embeddings", b'{"input": "a"}'))
        assert json.loads(body) == {
            "object": "list",
            "data": [{"object": "embedding", "index": at, "embedding": [each]} for at, each in ((0, 1.5), (1, 2))],
            "model": "c",
            "usage": {"prompt_tokens": 3, "total_tokens": 3},
        }
        service.answers = [reply({"message": "who"}, status=403)]
        with pytest.raises(AuthRefused):
            await answer_to(engine, live({"input": "a"}, "arguments"))
        with pytest.raises(InvalidInput):
            await answer_to(engine, live({}, "arguments"))


async def test_live_retries_as_told(service: Service) -> None:
    """A live call that fails is made again where the connector says so, and not otherwise."""
    for config, calls, status in ((None, 1, 500), (ClientConfig(), 1, 500), (ClientConfig(max_retry_times=2), 3, 200)):
        service.answers = [reply({}, status=500), reply({}, status=429)][: calls - 1 or 1]
        service.calls.clear()
        async with started(spec(service.url, client_config=config)) as engine:
            head, _ = await answer_to(engine, live({"parameters": {"input": "1"}}))
        assert (head.status, len(service.calls)) == (status, calls)


async def test_live_without_a_service(service: Service) -> None:
    """A service that cannot be reached is told as such."""
    async with started(spec("http://127.0.0.1:9/")) as engine:
        with pytest.raises(Unavailable):
            await answer_to(engine, live({"parameters": {"input": "1"}}))


UNIONS = "$.." + "[*,*,*]" * 114  # 3 ** 114 ways through a reply


async def test_a_filter_that_never_ends_is_stopped(service, monkeypatch):
    """A caller's filter without an end fails its own row and call with `too_complex`; others go on."""
    monkeypatch.setattr(bounded, "BOUNDS", ResourceLimits(cpu_s=0.2))
    nested = {"a": json.loads("[" * 40 + "1" + "]" * 40)}
    service.answers = [web.json_response(nested) for _ in range(7)]
    async with started(spec(service.url)) as engine:
        body = json.dumps({"input": "x", "response_filter": UNIONS})
        request = LiveRequest("/v1/embeddings", body.encode(), project="p")
        stuck = asyncio.create_task(answer_to(engine, request))
        plain = json.dumps({"input": "x", "response_filter": "$.a[0]"}).encode()
        for _ in range(3):
            head, answer = await answer_to(engine, LiveRequest("/v1/embeddings", plain, project="q"))
            assert json.loads(answer) == nested["a"][0]
        assert not stuck.done()
        with pytest.raises(TooComplex, match=r"the response_filter '\$\.\.\[\*,\*,\*\].* took more than 0.2 s"):
            await stuck
        outcomes = (await run_all(engine, [row(0, input="x", response_filter=UNIONS), row(1, input="x")])).outcomes
    by_number = {each.row.number: each for each in outcomes}
    assert by_number[0].error.code == "too_complex"
    assert by_number[1].error is None
    assert len(service.calls) == 6  # the row's call was paid for once


async def test_a_filter_that_is_none_is_the_callers(service):
    """A caller's filter that cannot be read fails its own call or row as their mistake, and is not tried again."""
    async with started(spec(service.url)) as engine:
        for body, form in (
            ({"input": "x", "response_filter": "$.a["}, ""),
            ({"parameters": {"input": '"x"', "response_filter": "$.a["}}, "ml_commons"),
        ):
            with pytest.raises(InvalidInput, match=r"response_filter '\$\.a\['"):
                await answer_to(engine, live(body, form))
        (outcome,) = (await run_all(engine, [row(0, input="x", response_filter="$.a[")])).outcomes
    assert (outcome.error.code, len(service.calls)) == ("invalid_response_filter", 3)


async def test_many_rows_with_such_a_filter_cost_little(service, monkeypatch):
    """Rows of one job share a filter without an end: a few of them pay for its bound, and the others fail at once."""
    monkeypatch.setattr(bounded, "BOUNDS", ResourceLimits(cpu_s=0.05))
    service.answers = [web.json_response({"a": json.loads("[" * 40 + "1" + "]" * 40)}) for _ in range(20)]
    rows = [row(number, input="x", response_filter=UNIONS) for number in range(20)]
    errors = [each.error for each in await run(spec(service.url), *rows)]
    assert {each.code for each in errors} == {"too_complex"}
    stopped = [each for each in errors if "took more than" in each.message]
    assert programs.STRIKES_MAX <= len(stopped) < programs.STRIKES_MAX + programs.PLACES


async def test_filters_of_the_configuration_stay_in_place(service, monkeypatch):
    """A filter of a trusted connector, and any plain path, cost no process."""
    service.answers = [web.json_response({"a": {"b": [{"c": 1}]}}) for _ in range(2)]
    monkeypatch.delattr(Programs, "run")
    (outcome,) = await run(spec(service.url, parameters={"response_filter": "$..c"}), row(0, input="x"))
    assert outcome.body == b"[1]"
    (outcome,) = await run(spec(service.url), row(0, input="x", response_filter="$.a.b[*].c"))
    assert outcome.body == b"[1]"
