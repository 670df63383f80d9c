"""A name whose address changes between two looks: what counts is the address that a socket is made for."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fakes.webhook_receiver import WebhookReceiver

from batchmill.engines.connections import Connections
from batchmill.engines.retry import NoReply
from batchmill.models.addresses import read_private
from batchmill.types import Limits

OPEN, INSIDE = "127.0.0.2", "127.0.0.1"  # the first is listed, so that no test leaves this machine


class FlippingNames:
    """The resolver of a hostile domain: it answers with one list after the other, the last one for ever."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers = list(answers)
        self.asked = 0

    def __call__(self, host: str, port: Any, *_: Any, **__: Any) -> list[tuple[Any, ...]]:
        found = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        kind = socket.SOCK_STREAM
        return [(socket.AF_INET, kind, socket.IPPROTO_TCP, "", (address, int(port or 0))) for address in found]


@pytest.fixture
async def inside() -> AsyncIterator[WebhookReceiver]:
    async with WebhookReceiver() as running:
        yield running


async def calls(monkeypatch: pytest.MonkeyPatch, inside: WebhookReceiver, *answers: list[str]) -> list[str]:
    """What became of three calls of a name that resolves so, each on a connection of its own."""
    monkeypatch.setattr(socket, "getaddrinfo", FlippingNames(*answers))
    received = []
    for _ in range(3):
        connections = Connections(Limits(connect_timeout_s=0.2), private=read_private([OPEN]))
        await connections.start()
        try:
            await connections.exchange("POST", f"https://rebind.example.com:{inside.port}/x", b"{}")
            received.append("answered")
        except NoReply as lost:
            received.append(lost.fault.error.code)
        finally:
            await connections.stop()
    return received


async def test_a_name_that_leads_inside_is_refused(monkeypatch: pytest.MonkeyPatch, inside: WebhookReceiver) -> None:
    """A harmless name with a private address gets no socket."""
    assert await calls(monkeypatch, inside, [INSIDE]) == ["url_not_allowed"] * 3
    assert inside.deliveries == []


async def test_one_bad_address_of_many_is_enough(monkeypatch: pytest.MonkeyPatch, inside: WebhookReceiver) -> None:
    """A name with an open and a private address is refused: which one is called is not left to chance."""
    received = await calls(monkeypatch, inside, [OPEN, INSIDE])
    assert set(received) <= {"url_not_allowed"} and inside.deliveries == []


async def test_every_connection_is_judged_anew(monkeypatch: pytest.MonkeyPatch, inside: WebhookReceiver) -> None:
    """A name that was open at the first call and leads inside at the next is refused then."""
    received = await calls(monkeypatch, inside, [OPEN], [INSIDE])
    assert received[0] == "connection_failed" and received[1:] == ["url_not_allowed"] * 2
    assert inside.deliveries == []
