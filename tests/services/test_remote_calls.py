"""Single calls through a connector: what is sent, what comes of it, and what is told of it."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from remote_room import KEY, US, RemoteRoom, at

from batchmill.engines import connections
from batchmill.errors import InvalidInput, ModelFailed
from batchmill.services.remote import calls as remote_calls
from batchmill.services.remote.calls import CONNECTOR_CALLS_MAX, RemoteReply
from batchmill.types.connectors import BATCH_PREDICT, BATCH_PREDICT_STATUS, CANCEL_BATCH_PREDICT, Connector

CERTIFICATE = Path(__file__).parent.parent / "fakes" / "tls" / "localhost.pem"
BATCH = {"id": "batch_1", "status": "validating", "error": None}


class Service:
    """Answers with `replies`, one after another, the last for ever. `seen` are the calls."""

    def __init__(self) -> None:
        self.replies: list[web.Response | None] = []
        self.seen: list[tuple[str, str, dict[str, str], str]] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.seen.append((request.method, request.raw_path, dict(request.headers), await request.text()))
        return await self.answer(request)

    async def answer(self, request: web.Request) -> web.Response:
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if reply is None:
            assert request.transport is not None
            request.transport.abort()
            raise ConnectionResetError
        return web.Response(status=reply.status, body=reply.body, headers=reply.headers)

    async def open(self) -> str:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    service = Service()
    service.url = await service.open()
    service.replies = [answer(BATCH)]
    yield service
    await service.runner.cleanup()


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[RemoteRoom]:
    room = RemoteRoom(tmp_path, private_hosts=("127.0.0.1",))
    await room.again()
    yield room
    await room.close()


def answer(data: Any, status: int = 200, **headers: str) -> web.Response:
    text = data if isinstance(data, str) else json.dumps(data)
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return web.Response(status=status, text=text, headers=headers)


async def connect(room: RemoteRoom, service: Service, **fields: Any) -> Connector:
    result = at(service.url, **{"parameters": {"provider": "openai", "endpoint": "/v1/embeddings"}} | fields)
    return (await room.remote.connectors.create(US, result)).connector


async def act(room: RemoteRoom, connector: Connector, kind: str = BATCH_PREDICT, **parameters: Any) -> RemoteReply:
    result = {"input_file_id": "file-1"} if kind == BATCH_PREDICT else {"id": "batch_1"}
    return await room.remote.calls.act(connector, kind, result | parameters)


async def test_a_batch_is_begun(room: RemoteRoom, service: Service) -> None:
    """The action is sent with its parameters and credential, and its reply comes back as data."""
    reply = await act(room, await connect(room, service))
    assert reply == RemoteReply(200, json.dumps(BATCH).encode(), BATCH)
    method, path, headers, body = service.seen[0]
    assert (method, path, headers["Authorization"]) == ("POST", "/v1/batches", f"Bearer {KEY}")
    assert json.loads(body) == {"input_file_id": "file-1", "endpoint": "/v1/embeddings", "completion_window": "24h"}


async def test_derived_actions(room: RemoteRoom, service: Service) -> None:
    """Status and cancel follow from the batch action; the id of a job is a part of the path and nothing more."""
    connector = await connect(room, service)
    await act(room, connector, BATCH_PREDICT_STATUS, id="a/b?c")
    await act(room, connector, CANCEL_BATCH_PREDICT)
    with pytest.raises(InvalidInput, match="cannot be a part of the URL's path"):
        await act(room, connector, BATCH_PREDICT_STATUS, id="a/../b")
    assert [(method, path) for method, path, _, _ in service.seen] == [
        ("GET", "/v1/batches/a%2Fb%3Fc"),
        ("POST", "/v1/batches/batch_1/cancel"),
    ]


async def test_rotated_credentials_count_at_once(room: RemoteRoom, service: Service) -> None:
    """The next call has the credential that the vault has then, through the connector of before."""
    connector = await connect(room, service)
    await room.remote.connectors.update(US, connector.id, {"credential": {"openAI_key": "sk-another-key-0123456"}})
    await act(room, connector)
    assert service.seen[0][2]["Authorization"] == "Bearer sk-another-key-0123456"


async def test_what_a_service_repeats_of_its_keys(room: RemoteRoom, service: Service) -> None:
    """A reply is kept and shown: the keys that a service repeats in it, as themselves or packed, are taken out."""
    packed = base64.b64encode(f"user:{KEY}".encode()).decode()
    service.replies = [
        answer({"id": "batch_1", "expected": f"Bearer {KEY}", KEY: 1, "packed": packed, "at": "us-east-1"})
    ]
    connector = await connect(room, service, credential={"openAI_key": KEY, "region": "us-east-1"})
    reply = await act(room, connector)
    assert reply.data is not None and reply.data["expected"] == "Bearer ***" and reply.data["***"] == 1
    assert KEY not in str(reply) and packed[8:-4] not in str(reply)
    assert (reply.data["id"], reply.data["at"]) == ("batch_1", "us-east-1")


async def test_errors_have_the_services_code(room: RemoteRoom, service: Service) -> None:
    """What a service refuses is told with its own status and words, without secrets, and bounded."""
    connector = await connect(room, service)
    service.replies = [answer({"message": f"no such key: Bearer {KEY}", "more": "x" * 5000}, 401)]
    reply = await act(room, connector)
    assert (reply.status, reply.code, reply.may_have_acted) == (401, "remote_error", False)
    assert reply.error.startswith('Error from remote service: {"message": "no such key: Bearer ***')
    assert len(reply.error) < 2200
    assert KEY not in reply.error


@pytest.mark.parametrize(
    ("reply", "status", "may_have_acted"),
    [
        (answer({"message": "runtime error"}, 500), 500, True),
        (answer("busy", 503), 503, True),
        (answer("busy", 429), 429, False),
        (answer("twice", 409), 409, True),
        (answer("no", 404), 404, False),
        (answer("there", 302, Location="http://169.254.169.254/"), 502, False),
        (answer({"message": "slow down"}, 400, x_amzn_ErrorType="ThrottlingException:http"), 429, False),
        (answer(""), 502, True),
        (None, 500, True),
    ],
)
async def test_what_comes_of_a_call(
    room: RemoteRoom, service: Service, reply: web.Response | None, status: int, may_have_acted: bool
) -> None:
    """Whatever a service does, the reply says it, and whether the service may have taken what it was sent."""
    connector = await connect(room, service)
    service.replies = [reply]
    found = await act(room, connector)
    assert (found.status, found.may_have_acted, found.data) == (status, may_have_acted, None)
    assert not found.is_ok
    assert len(service.seen) == 1


async def test_empty_replies(room: RemoteRoom, service: Service) -> None:
    """An empty reply is ML Commons' error, but for a cancellation, which needs none."""
    connector = await connect(room, service)
    service.replies = [answer("")]
    assert (await act(room, connector)).error == "Remote service returned empty response body"
    assert (await act(room, connector, CANCEL_BATCH_PREDICT)).is_ok


async def test_odd_replies_are_no_data(room: RemoteRoom, service: Service) -> None:
    """A reply that is not an object is handed on as it came, and has no data that could be a job's."""
    connector = await connect(room, service)
    service.replies = [answer("plain words")]
    reply = await act(room, connector)
    assert (reply.is_ok, reply.body) == (True, b"plain words")
    assert reply.data in (None, {"response": "plain words"})


RETRIES = {"max_retry_times": 2, "retry_backoff_millis": 500, "retry_backoff_policy": "constant"}


async def test_retries(room: RemoteRoom, service: Service) -> None:
    """client_config says how often and after how long a call is made again; then the last reply stands."""
    connector = await connect(room, service, client_config=RETRIES)
    service.replies = [answer("busy", 503), answer("busy", 429), answer(BATCH)]
    assert (await act(room, connector, BATCH_PREDICT_STATUS)).data == BATCH
    assert room.clock.slept == [0.5, 0.5]
    service.replies = [answer("busy", 503)]
    assert (await act(room, connector, BATCH_PREDICT_STATUS)).status == 503
    assert len(service.seen) == 6
    service.replies = [answer("no", 404)]
    await act(room, connector, BATCH_PREDICT_STATUS)
    assert len(service.seen) == 7


async def test_retries_end_with_their_time(room: RemoteRoom, service: Service) -> None:
    """Without a limit of calls there is one of time; waits grow as the policy says."""
    config = {"max_retry_times": -1, "retry_backoff_policy": "exponential_equal_jitter", "retry_timeout_seconds": 10}
    connector = await connect(room, service, client_config=config)
    service.replies = [answer("busy", 500)]
    began = room.clock.monotonic()
    assert (await act(room, connector, BATCH_PREDICT_STATUS)).status == 500
    assert 4 < room.clock.monotonic() - began <= 10
    assert len(room.clock.slept) >= 3
    assert all(0.1 * 2**n <= wait <= 0.2 * 2**n for n, wait in enumerate(room.clock.slept[:4]))


@pytest.mark.parametrize(
    ("first", "calls"), [(answer("busy", 429), 2), (answer("broken", 500), 1), (None, 1), (answer("", 503), 1)]
)
async def test_a_batch_is_not_begun_twice(
    room: RemoteRoom, service: Service, first: web.Response | None, calls: int
) -> None:
    """The call that begins a batch is made again only where the service has certainly not taken it."""
    connector = await connect(room, service, client_config=RETRIES)
    service.replies = [first, answer(BATCH)]
    await act(room, connector)
    assert len(service.seen) == calls


async def test_certificates_are_checked(room: RemoteRoom, service: Service) -> None:
    """A certificate that nobody known has signed is none, unless the connector says that it may be any."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(CERTIFICATE)
    site = web.TCPSite(service.runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    service.url = f"https://127.0.0.1:{service.runner.addresses[-1][1]}"
    for config in (None, {}, {"max_retry_times": 1, "retry_backoff_millis": 0}):
        reply = await act(room, await connect(room, service, client_config=config))
        assert reply.status == 500 and "certificate" in reply.error.lower() and service.seen == []
    reply = await act(room, await connect(room, service, client_config={"skip_ssl_verification": True}))
    assert reply.is_ok and len(service.seen) == 1


async def test_nobody_there(room: RemoteRoom, service: Service) -> None:
    """Where no connection is made the service has certainly not acted: a batch may be tried again."""
    connector = await connect(room, service, client_config=RETRIES)
    await service.runner.cleanup()
    reply = await act(room, connector)
    assert (reply.status, reply.code, reply.may_have_acted) == (500, "connection_failed", False)
    assert reply.error.startswith("Error communicating with remote model: ")
    assert len(room.clock.slept) == 2


async def test_missing_parameters_are_named(room: RemoteRoom, service: Service) -> None:
    """A placeholder that nothing fills is the caller's mistake, and nothing is sent."""
    connector = await connect(room, service)
    with pytest.raises(InvalidInput, match="input_file_id"):
        await room.remote.calls.act(connector, BATCH_PREDICT, {})
    with pytest.raises(InvalidInput, match="no PREDICTION action found"):
        await room.remote.calls.act(connector, "PREDICTION", {})
    assert service.seen == []


async def test_missing_credentials_are_named(room: RemoteRoom, service: Service) -> None:
    """A credential that the vault does not have any more is named, and nothing is sent."""
    connector = await connect(room, service)
    await room.vault.remove(f"connector/{connector.id}/openAI_key")
    with pytest.raises(ModelFailed, match=f"connector/{connector.id}/openAI_key"):
        await act(room, connector)
    assert service.seen == []


async def test_what_is_listed_no_more(room: RemoteRoom, service: Service) -> None:
    """A connector that was made while its host was listed calls it no more once it is not."""
    connector = await connect(room, service)
    closed = RemoteRoom(room.folder)
    closed.database = None
    room.config = closed.config
    await room.remote.close()
    await room.again()
    with pytest.raises(InvalidInput, match="not https|its address is private"):
        await act(room, connector)
    assert service.seen == []


async def test_trusted_connectors_call_inside(
    tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What whoever runs the machine wrote goes inside, with the variable that it refers to."""
    room = RemoteRoom(tmp_path)
    remote = await room.again()
    monkeypatch.setenv("SOME_KEY", "key-of-the-environment")
    fields = at(service.url, credential={"openAI_key": "env:SOME_KEY"})
    made = await remote.connectors.create(US, fields, is_trusted=True)
    await act(room, made.connector)
    assert service.seen[0][2]["Authorization"] == "Bearer key-of-the-environment"
    await room.close()


async def test_replies_are_bounded(room: RemoteRoom, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply may have so many bytes and not one more."""
    connector = await connect(room, service)
    size = len(json.dumps(BATCH))
    monkeypatch.setattr(connections, "REPLY_BYTES_MAX", size)
    assert (await act(room, connector)).is_ok
    monkeypatch.setattr(connections, "REPLY_BYTES_MAX", size - 1)
    reply = await act(room, connector)
    assert (reply.status, reply.code, reply.may_have_acted) == (502, "reply_too_large", True)


async def test_pools_are_bounded(room: RemoteRoom, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connectors with settings of their own share nothing, and what was used longest ago is closed first."""
    monkeypatch.setattr(remote_calls, "POOLS_MAX", 2)
    for seconds in (5, 6, 7, 5):
        connector = await connect(room, service, client_config={"read_timeout": seconds})
        assert (await act(room, connector)).is_ok
    assert len(room.remote.calls._pools) == 2


async def test_calls_at_once(room: RemoteRoom, service: Service) -> None:
    """Many calls at once are made, each with its own parameters."""
    connector = await connect(room, service)
    replies = await asyncio.gather(*(act(room, connector, BATCH_PREDICT_STATUS, id=f"b{n}") for n in range(100)))
    assert all(reply.is_ok for reply in replies)
    assert sorted(path for _, path, _, _ in service.seen) == sorted(f"/v1/batches/b{n}" for n in range(100))


async def test_a_service_that_hangs_holds_up_no_other(room: RemoteRoom, service: Service) -> None:
    """Through one connector there go so many calls at once and no more, and others go on meanwhile."""
    hung, other = await connect(room, service), await connect(room, service)
    arrived, release = asyncio.Semaphore(0), asyncio.Event()

    async def hold(request: web.Request) -> web.Response:
        arrived.release()
        await release.wait()
        return answer(BATCH)

    answers, service.answer = service.answer, hold
    held = [asyncio.create_task(act(room, hung, BATCH_PREDICT_STATUS)) for _ in range(CONNECTOR_CALLS_MAX + 1)]
    for _ in range(CONNECTOR_CALLS_MAX):
        await arrived.acquire()
    service.answer = answers
    assert (await act(room, other)).is_ok
    assert len(service.seen) == CONNECTOR_CALLS_MAX + 1  # the one that is too many has not been made
    release.set()
    assert all(reply.is_ok for reply in await asyncio.gather(*held))
