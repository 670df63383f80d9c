"""What every gRPC call passes: keys, scopes, rates, statuses, request ids and the log."""

import asyncio
import contextlib

import grpc
import pytest
from fakes.held_clock import HeldClock

from batchmill.config import ServerEntry
from batchmill.dialects.open_inference.grpc.bodies import METHODS, SERVICE
from batchmill.dialects.open_inference.grpc.call_gate import CallGate
from batchmill.errors import ModelFailed, RateLimited, Unauthenticated, UnknownName
from batchmill.server.admission_control import Admission, RequestLimiter
from batchmill.server.auth import Gate
from batchmill.types import Caller, Scope

KEYS = {
    "read": Caller("one", Scope.READ, "k1"),
    "submit": Caller("one", Scope.SUBMIT, "k2"),
    "slow": Caller("two", Scope.SUBMIT, "k3", requests_per_minute=1),
}
INFER, LIVE, STREAM = METHODS["ModelInfer"], METHODS["ServerLive"], METHODS["ModelStreamInfer"]
CALLS_MAX = 2
BYTES_MAX = 8 * 1024 * 1024
NO_MESSAGE = b"\xff"  # which is not a message of any kind


class HeldKeys:
    """Keys that are known without a database."""

    async def any_exist(self):
        return True

    def cached_caller(self, token):
        return None

    async def authenticate(self, token):
        if token not in KEYS:
            raise Unauthenticated("no such key")
        return KEYS[token]


class Room:
    """A server with one call_gate, whose ModelInfer does what a test says; `lines` are its log."""

    def __init__(self):
        self.lines, self.begun, self.go = [], asyncio.Event(), asyncio.Event()
        self.ended, self.waiting = asyncio.Event(), 0
        entry = ServerEntry(body_bytes_max=BYTES_MAX, body_memory_bytes_max=4 * BYTES_MAX)
        self.admission = Admission(entry, files=1000, clock=asyncio.get_running_loop().time)
        self.admission.project_requests = RequestLimiter(CALLS_MAX, 0, 0)
        self.call_gate = CallGate(
            Gate(HeldKeys(), HeldClock()),
            HeldClock(),
            hide=lambda text: text.replace("/secret/", ""),
            watchers=[self.lines.append],
            admission=self.admission,
            bytes_max=BYTES_MAX,
        )

    async def infer(self, caller, request):
        match request.model_name:
            case "unknown":
                raise UnknownName("there is no /secret/model", code="model_not_found")
            case "failing":
                raise ModelFailed("x" * 20_000 + "\nValueError: é", code="function_error")
            case "broken":
                raise RuntimeError("a bug of ours")
            case "slow":
                self.begun.set()
                self.waiting += 1
                try:
                    await self.go.wait()
                finally:
                    self.ended.set()
        return INFER.response(model_name=request.model_name, id=caller.project)

    async def live(self, caller, request):
        return LIVE.response(live=True)

    async def converse(self, caller, requests, write):
        async for request, done in requests:
            done()
            try:
                self.call_gate.spend(caller)
            except RateLimited as error:
                await write(STREAM.response(error_message=self.call_gate.message_of(error)).SerializeToString())
                continue
            await write(STREAM.response(infer_response={"id": request.id}).SerializeToString())


@pytest.fixture
async def room():
    room = Room()
    handlers = {
        "ModelInfer": room.call_gate.unary(INFER, Scope.SUBMIT, room.infer),
        "ServerLive": room.call_gate.unary(LIVE, None, room.live),
        "ModelStreamInfer": room.call_gate.stream(STREAM, Scope.SUBMIT, room.converse),
    }
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", BYTES_MAX * 4)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as room.channel:
        yield room
    await server.stop(0)


def call(room, method=INFER, key="submit", metadata=(), timeout=None, **fields):
    ask = room.channel.unary_unary(f"/{SERVICE}/{method.name}")
    sent = fields.pop("sent", None)
    results = [*metadata, *([("authorization", key)] if key else [])]
    message = method.request(**fields).SerializeToString() if sent is None else sent
    return ask(message, metadata=results, timeout=timeout)


async def refusal(calling):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await calling
    return caught.value


@pytest.mark.parametrize("key", ["submit", "Bearer submit", "bearer submit"])
async def test_a_key_comes_as_it_does_over_http(room, key):
    """A key may be bare or a bearer's, and whose it is stands in the log."""
    reply = INFER.response.FromString(await call(room, key=key, model_name="m"))
    assert (reply.model_name, reply.id) == ("m", "one")
    line = room.lines[-1]
    assert (line.method, line.route, line.status) == ("GRPC", f"/{SERVICE}/ModelInfer", 200)
    assert (line.project, line.key, line.code) == ("one", "k2", None)
    assert line.bytes_in == 3
    assert line.bytes_out > 0


@pytest.mark.parametrize(
    ("key", "status", "code"),
    [
        (None, grpc.StatusCode.UNAUTHENTICATED, "invalid_api_key"),
        ("wrong", grpc.StatusCode.UNAUTHENTICATED, "invalid_api_key"),
        ("read", grpc.StatusCode.PERMISSION_DENIED, "forbidden"),
    ],
)
async def test_who_may_not_is_told_so(room, key, status, code):
    """Without a key, with a wrong one, or with one that does not reach so far, nothing is called."""
    error = await refusal(call(room, key=key, model_name="slow"))
    assert error.code() is status
    assert dict(error.trailing_metadata())["batchmill-code"] == code
    assert room.lines[-1].code == code
    assert not room.begun.is_set()


async def test_anybody_may_ask_whether_it_lives(room):
    """Health needs no key."""
    assert LIVE.response.FromString(await call(room, LIVE, key=None)).live
    assert room.lines[-1].project is not None


async def test_a_rate_is_kept(room):
    """A key that has asked as often as it may is told when to come again."""
    await call(room, key="slow", model_name="m")
    error = await refusal(call(room, key="slow", model_name="m"))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"]) == 60_000
    assert room.lines[-1].status == 429


async def test_a_request_has_an_id(room):
    """A request keeps the id that it brings, if it is one, and gets one otherwise; the reply and the log have it."""
    kept = call(room, metadata=[("x-request-id", "mine.1")], model_name="m")
    await kept
    assert dict(await kept.trailing_metadata())["x-request-id"] == room.lines[-1].id == "mine.1"
    error = await refusal(call(room, metadata=[("x-request-id", "not one")], model_name="unknown"))
    assert dict(error.trailing_metadata())["x-request-id"] == room.lines[-1].id
    assert room.lines[-1].id.startswith("req_")


async def test_an_error_has_its_status_and_says_no_place(room):
    """Errors come with the status of their kind, without what is nobody's business."""
    error = await refusal(call(room, model_name="unknown"))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert error.details() == "there is no model"
    assert (room.lines[-1].status, room.lines[-1].code) == (404, "model_not_found")


async def test_a_long_traceback_arrives(room):
    """The last line of a long message reaches the client, whose headers have a limit."""
    error = await refusal(call(room, model_name="failing"))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert error.details().endswith("\nValueError: é")
    assert (room.lines[-1].status, room.lines[-1].code) == (500, "function_error")


async def test_a_bug_of_ours_says_no_more_than_that(room, caplog):
    """What goes wrong in the server itself is in its log under the request's id, and nowhere else."""
    error = await refusal(call(room, model_name="broken"))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "a bug of ours" not in error.details()
    assert room.lines[-1].id in error.details()
    assert any(record.exc_info for record in caplog.records)


async def test_what_is_no_message_is_refused(room):
    """Bytes that are not a request are the caller's fault, and the next call works."""
    error = await refusal(call(room, sent=NO_MESSAGE))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "not a ModelInferRequest" in error.details()
    await call(room, model_name="m")


async def test_a_method_that_there_is_not(room):
    """A method of nobody's is unimplemented."""
    error = await refusal(room.channel.unary_unary(f"/{SERVICE}/Unheard")(b""))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_who_leaves_ends_the_call(room):
    """A cancelled call ends at once, and the log says that its client left."""
    calling = asyncio.ensure_future(call(room, model_name="slow"))
    await room.begun.wait()
    calling.cancel()
    await room.ended.wait()
    with contextlib.suppress(asyncio.CancelledError):
        await calling
    await room.call_gate.wait_idle()
    assert room.lines[-1].status == 499


async def test_a_deadline_ends_the_call(room):
    """A client that has no more time ends its call, here too."""
    error = await refusal(call(room, model_name="slow", timeout=0.05))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await room.ended.wait()
    await room.call_gate.wait_idle()
    assert room.lines[-1].status in (499, 504)


async def test_too_many_calls_are_told_to_come_again(room):
    """Of calls under way there are as many as there may be, and not one more."""
    first = asyncio.ensure_future(call(room, model_name="slow"))
    await room.begun.wait()
    await call(room, model_name="m")
    second = asyncio.ensure_future(call(room, model_name="slow"))
    while room.waiting < CALLS_MAX:
        await asyncio.sleep(0)
    error = await refusal(call(room, model_name="m"))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    room.go.set()
    await asyncio.gather(first, second)


@pytest.mark.parametrize("key", [None, "wrong", "read"])
async def test_a_message_is_not_read_before_its_key(room, key):
    """A message whose sender may not send it is refused while it is on its way, and never comes into memory."""
    read = []
    one = room.call_gate._receiver.receive
    room.call_gate._receiver.receive = lambda *args: read.append(args) or one(*args)
    error = await refusal(call(room, key=key, sent=bytes(BYTES_MAX * 3)))
    assert error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
    assert not read and room.lines[-1].bytes_in == 0


async def test_what_nobody_needs_a_key_for_is_answered_unread(room):
    """Whether the server lives is told without looking at what was sent."""
    assert LIVE.response.FromString(await call(room, LIVE, key=None, sent=NO_MESSAGE)).live
    assert room.lines[-1].bytes_in == 0


async def test_messages_are_counted_while_they_are_in_memory(room):
    """A message beyond the memory of its project is told to come again; once the others are answered it is taken."""
    large = INFER.request(model_name="slow", raw_input_contents=[bytes(BYTES_MAX - 1000)]).SerializeToString()
    room.admission.project_requests = RequestLimiter()
    held = [asyncio.ensure_future(call(room, sent=large)) for _ in range(2)]
    while room.waiting < 2:
        await asyncio.sleep(0)
    assert room.admission.memory.held("one") == 2 * len(large)
    assert (await refusal(call(room, sent=large))).code() is grpc.StatusCode.UNAVAILABLE
    room.go.set()
    await asyncio.gather(*held)
    assert room.admission.memory.total == 0
    await call(room, sent=large)


async def test_a_stream_is_one_call_and_each_of_its_requests_counts(room):
    """A stream passes the call_gate once; a request beyond the rate is refused in it, and it goes on."""
    talk = room.channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")(metadata=[("authorization", "slow")])
    for name in ("a", "b"):
        await talk.write(INFER.request(id=name).SerializeToString())
    await talk.done_writing()
    replies = [STREAM.response.FromString(data) async for data in talk]
    assert replies[0].infer_response.id == "a"
    assert replies[1].error_message.startswith("more than 1 requests a minute")
    assert [line.status for line in room.lines] == [200]
    assert room.lines[0].bytes_in == 6


async def test_a_stream_without_a_key_is_refused(room):
    """A stream is refused before any of its requests is read."""
    talk = room.channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")()
    error = await refusal(talk.read())
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_stream_may_hold_what_is_no_message(room):
    """Bytes that are not a request end their stream with the caller's fault."""
    talk = room.channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")(metadata=[("authorization", "submit")])
    await talk.write(NO_MESSAGE)
    error = await refusal(talk.read())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
