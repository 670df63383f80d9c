"""A request that somebody waits for: whose model it means, whether the caller may, and how it went."""

from __future__ import annotations

import pytest
from dialects.open_server import CONFIG, open_server

from batchmill.errors import BatchmillError, InvalidRow, UnknownName
from batchmill.services.live_calls import LiveCall
from batchmill.types import Caller, Scope, Usage

ANN = Caller("ann", Scope.SUBMIT, "k")
NARROW = Caller("narrow", Scope.SUBMIT)
SERVICE = '\n[models.service]\nengine = "openai"\nsource = "far"\nbase_url = "http://127.0.0.1:9/v1"\n'


@pytest.fixture
async def live(tmp_path):
    async with open_server(tmp_path, CONFIG + SERVICE) as running:
        yield running.services.live


@pytest.fixture
def heard(live) -> list[LiveCall]:
    calls: list[LiveCall] = []
    live.listen(calls.append)
    return calls


async def test_an_answer_is_counted(live, heard):
    """The answer comes whole, and who listens hears how it went and what it used."""
    head, pieces = await live.predict(ANN, "/v1/twice", b'{"model":"double","n":21}')
    body = b"".join([piece async for piece in pieces])
    assert (head.status, body.startswith(b'{"twice":42')) == (200, True)
    [call] = heard
    assert (call.model, call.url, call.status, call.project, call.error) == ("double", "/v1/twice", 200, "ann", None)
    assert call.usage == Usage(21, 0, 1) and call.seconds > 0


async def test_a_stream_that_is_left(live, heard):
    """Closing the pieces early ends the call, and it is counted as abandoned."""
    head, pieces = await live.predict(ANN, "/v1/count", b'{"model":"count","to":1000000,"stream":true}')
    assert head.content_type == "text/event-stream" and await anext(pieces) == b'data: {"n":0}\n\n'
    await pieces.aclose()
    assert [(call.status, call.error) for call in heard] == [(200, "abandoned")]


async def test_a_call_that_fails_is_counted(live, heard):
    """What the function raised is raised, and heard of by its code."""
    with pytest.raises(BatchmillError, match="less than nothing"):
        await live.predict(ANN, "/v1/twice", b'{"model":"double","n":-1}')
    assert [(call.status, call.error) for call in heard] == [(0, "function_error")]


@pytest.mark.parametrize(
    ("caller", "url", "body", "error", "code"),
    [
        (ANN, "/v2/x", b'{"model":"double"}', UnknownName, "unknown_url"),
        (ANN, "/v1/x", b'{"model":"trouble"}', UnknownName, "model_not_found"),
        (NARROW, "/v1/x", b'{"model":"double"}', UnknownName, "model_not_found"),
        (Caller("ann", Scope.SUBMIT, models=frozenset({"gated"})), "/v1/x", b'{"model":"double"}', UnknownName,
         "model_not_found"),
        (ANN, "/v1/x", b"{}", InvalidRow, "missing_model"),
        (ANN, "/v1/x", b'{"model":""}', InvalidRow, "missing_model"),
        (ANN, "/v1/x", b"[]", InvalidRow, "invalid_field"),
        (ANN, "/v1/x", b"[" * 100_000, InvalidRow, "invalid_field"),
        (ANN, "/v1/chat/completions", b'{"model":"service"}', InvalidRow, "invalid_field"),
        (ANN, "/v1/chat/completions", b'{"model":"service","messages":[{"role":"user"}],"api_key":"x"}', InvalidRow,
         "parameter_not_allowed"),
    ],
)  # fmt: skip
async def test_what_cannot_be_asked(live, heard, caller, url, body, error, code):
    """A path, a model or a body that does not fit is refused before any model hears of it."""
    with pytest.raises(error) as refused:
        await live.predict(caller, url, body)
    assert refused.value.code == code
    assert heard == []
