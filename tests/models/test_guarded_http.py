"""Connections to places that somebody else named."""

import socket
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest
from fakes.webhook_receiver import WebhookReceiver

from batchmill.errors import InvalidInput
from batchmill.models.addresses import EVERYWHERE, Target, read_private, read_url
from batchmill.models.guarded_http import GuardedHttp, refusal_of


@pytest.fixture
def guard() -> Iterator[GuardedHttp]:
    made = GuardedHttp(read_private([]))
    yield made
    made.close()


@pytest.fixture
async def receiver() -> AsyncIterator[WebhookReceiver]:
    async with WebhookReceiver() as running:
        yield running


async def call(guard: GuardedHttp, target: Target, url: str = "") -> int:
    async with guard.session(target, 5.0) as session, session.post(url or target.url, allow_redirects=False) as reply:
        return reply.status


async def test_a_name_that_leads_inside_is_refused_when_it_is_resolved(guard: GuardedHttp, receiver: WebhookReceiver):
    """A harmless name with a private address gets no socket, and the reason is told."""
    target = Target(f"http://localhost:{receiver.port}/", "localhost", receiver.port, is_listed=False)
    with pytest.raises(aiohttp.ClientError) as refused:
        await call(guard, target)
    assert "private" in (refusal_of(refused.value) or "")
    assert receiver.deliveries == []


async def test_an_address_is_judged_where_the_socket_is_made(guard: GuardedHttp, receiver: WebhookReceiver):
    """An address that was not resolved at all is judged too: nothing gets past the connector."""
    target = read_url("https://example.com/")
    with pytest.raises(aiohttp.ClientError) as refused:
        await call(guard, target, receiver.url())
    assert "private" in (refusal_of(refused.value) or "")
    assert receiver.deliveries == []


async def test_a_listed_name_is_called(receiver: WebhookReceiver):
    """A host that the operator named may resolve to a private address."""
    guard = GuardedHttp(read_private(["localhost"]))
    target = read_url(f"http://localhost:{receiver.port}/hook", guard.private)
    assert await call(guard, target) == 204
    guard.close()


async def test_proxies_and_redirects_are_not_followed(receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch):
    """A proxy of the environment is ignored, and a redirect is an answer like any other."""
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{nobody.getsockname()[1]}")
        guard = GuardedHttp(read_private(["127.0.0.1"]))
        receiver.answers["/hook"] = [(307, {"location": receiver.url("/inside")})]
        assert await call(guard, read_url(receiver.url(), guard.private)) == 307
        guard.close()
    assert [each.path for each in receiver.deliveries] == ["/hook"]


def test_other_errors_are_no_refusals():
    """An error that is not the guard's has no reason of the guard's."""
    assert refusal_of(OSError("x")) is None


async def keeping(guard: GuardedHttp, url: str) -> int:
    """A call of a session that keeps its connections."""
    guard.admit(url)
    async with (
        aiohttp.ClientSession(connector=guard.connections(keepalive_s=4.0)) as session,
        session.post(url, allow_redirects=False) as reply,
    ):
        return reply.status


async def test_kept_connections_are_judged_as_well(guard: GuardedHttp, receiver: WebhookReceiver):
    """Sessions that call many places get a socket only where a session of one place would."""
    with pytest.raises(InvalidInput):
        await keeping(guard, receiver.url())
    with pytest.raises(aiohttp.ClientError) as refused:
        await keeping(guard, f"https://localhost:{receiver.port}/")
    assert "private" in (refusal_of(refused.value) or "")
    assert receiver.deliveries == []


async def test_a_listed_name_opens_no_other(receiver: WebhookReceiver):
    """The address that a listed name has stays closed to other names, and to itself."""
    guard = GuardedHttp(read_private(["localhost"]))
    assert await keeping(guard, f"http://localhost:{receiver.port}/hook") == 204
    with pytest.raises(InvalidInput):
        guard.admit(receiver.url())
    guard.close()


async def test_everywhere_has_an_end(receiver: WebhookReceiver):
    """Whoever runs the machine may call private places, and still not where clouds keep credentials."""
    guard = GuardedHttp(EVERYWHERE)
    assert await keeping(guard, receiver.url()) == 204
    with pytest.raises(aiohttp.ClientError) as refused:
        await keeping(guard, "http://169.254.169.254/")
    assert "credentials" in (refusal_of(refused.value) or "")
    guard.close()


def test_a_place_is_admitted_by_its_text(guard: GuardedHttp):
    """What a URL's text gives away is refused before anything is resolved, however often it is asked."""
    for _ in range(2):
        guard.admit("https://example.com/a")
        for url in ("http://example.com/", "https://10.0.0.1/", "https://example.com:22/", "https://u@example.com/"):
            with pytest.raises(InvalidInput) as refused:
                guard.admit(url)
            assert refused.value.code == "url_not_allowed"
