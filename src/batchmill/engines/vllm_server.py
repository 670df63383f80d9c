"""One vLLM server, from its start to its end, and the calls that batchmill makes to it."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from batchmill.engines.flight import Gauges, read_gauges
from batchmill.engines.replies import REPLY_BYTES_MAX, read_reply
from batchmill.engines.server_process import ServerProcess
from batchmill.engines.vllm_launch import Machine, adapter_place, plan_launch
from batchmill.errors import ModelFailed
from batchmill.ports import Clock
from batchmill.types import LiveHead, ModelSpec
from batchmill.wire.fields import KNOWN_FIELDS, fields_of_openapi

START_TIMEOUT_S = 3600.0  # a large model is downloaded and compiled in this time
POLL_S = 0.2
PROBE_TIMEOUT_S = 10.0
KEEPALIVE_S = 4.0  # below vLLM's 5 s: a call must not meet a connection that is being closed
BODY_COPY_MAX = 512 * 1024  # a larger body goes out as a stream, so that it does not hold up the loop
_IS_LOADED = "has already been loaded"  # a load whose answer was lost
BASE_URL = "http://vllm"  # a name for the Host header; the socket decides where it goes


class CallLost(Exception):
    """A call that got no reply: the connection broke, or the server is gone."""

    def __init__(self, why: str, *, was_sent: bool = True) -> None:
        super().__init__(why)
        self.was_sent = was_sent  # False: no server has heard of it


class ReplyTooLarge(Exception):
    """A reply that nobody would want in a result file; asking again would bring it again."""


class VllmServer:
    """A server process that speaks vLLM's HTTP. Started once; a new one takes its place when it dies."""

    def __init__(self, process: ServerProcess, clock: Clock) -> None:
        self.process = process
        self._clock = clock
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(process.socket), limit=0, keepalive_timeout=KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Content-Type": "application/json"},
            timeout=aiohttp.ClientTimeout(total=None),
            trust_env=False,
        )

    @classmethod
    async def launch(
        cls,
        model: ModelSpec,
        python: str,
        *,
        home: Path,
        env: Mapping[str, str],
        clock: Clock,
        note: Callable[[str], None],
    ) -> VllmServer:
        """Start a server and return once it is healthy; `note` hears how long it has taken so far.

        Raises: ModelFailed, with what the server's log says.
        """
        process = await asyncio.to_thread(ServerProcess.claim, home)
        server = None
        try:
            launch = plan_launch(model, python, process.socket, env=env, machine=Machine.here(env))
            await process.start(launch.command, launch.env)
            server = cls(process, clock)
            await server._wait_healthy(note)
        except BaseException:
            await (process.stop() if server is None else server.stop())
            raise
        return server

    async def _wait_healthy(self, note: Callable[[str], None]) -> None:
        began = self._clock.monotonic()
        while not await self.is_healthy():
            waited_s = self._clock.monotonic() - began
            note(f"starting vLLM: {waited_s:.0f} s")
            if not self.process.is_alive:
                raise ModelFailed(f"vLLM did not start: {self.process.complaint()}\n(its log: {self.process.log_path})")
            if waited_s > START_TIMEOUT_S:
                raise ModelFailed(
                    f"vLLM was not healthy after {waited_s:.0f} s; its log: {self.process.log_path}, "
                    f"which ends: {self.process.complaint()}"
                )
            await self._clock.sleep(POLL_S)
        note("")

    async def is_healthy(self) -> bool:
        """Whether the server says that it and its engine are well."""
        return await self._get("/health") is not None

    async def _get(self, path: str) -> bytes | None:
        """The body of a 200 reply; None where there is none, be it that the server is stopped or stuck."""
        if self._session.closed:
            return None
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S), self._session.get(f"{BASE_URL}{path}") as reply:
                return await _read(reply) if reply.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None

    async def post(self, url: str, body: bytes) -> tuple[int, bytes]:
        """One call. Raises: CallLost where no whole reply comes, ReplyTooLarge."""
        if self._session.closed:
            raise CallLost("the server was stopped")
        data = body if len(body) <= BODY_COPY_MAX else io.BytesIO(body)
        try:
            async with self._session.post(f"{BASE_URL}{url}", data=data) as reply:
                return reply.status, await _read(reply)
        except (aiohttp.ClientError, OSError) as error:
            raise CallLost(f"{type(error).__name__}: {error}") from None

    async def predict(self, url: str, body: bytes, silence_s: float) -> AsyncGenerator[LiveHead | bytes]:
        """One call whose reply is handed on as it comes. Closing the iterator ends it at the server too.

        Raises: CallLost where the reply does not come or breaks off, or the server is silent for `silence_s`.
        """
        if self._session.closed:
            raise CallLost("the server was stopped", was_sent=False)
        reply = None
        try:
            async with asyncio.timeout(silence_s):
                reply = await self._session.post(f"{BASE_URL}{url}", data=body)
            yield LiveHead(reply.status, reply.headers.get("Content-Type", "application/json"))
            while True:
                async with asyncio.timeout(silence_s):
                    piece = await reply.content.readany()
                if not piece:
                    return
                yield piece
        except TimeoutError:
            raise CallLost(f"the server said nothing for {silence_s:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise CallLost(f"no connection to it: {error.os_error}", was_sent=False) from None
        except (aiohttp.ClientError, OSError) as error:
            raise CallLost(f"{type(error).__name__}: {error}") from None
        finally:
            if reply is not None and not reply.content.at_eof():
                reply.close()  # the connection goes with it: nobody waits for the rest

    async def load_adapter(self, name: str, place: str, timeout_s: float) -> str:
        """Have it load an adapter. Returns why it could not, in its own words; empty: it is there. Raises: CallLost."""
        body = msgspec.json.encode({"lora_name": name, "lora_path": adapter_place(place)})
        try:
            async with asyncio.timeout(timeout_s):
                status, data = await self.post("/v1/load_lora_adapter", body)
        except TimeoutError:
            return f"it took longer than {timeout_s:g} s"
        if status == 200:
            return ""
        message = read_reply(status, data).row_error().message
        return "" if _IS_LOADED in message else message

    async def unload_adapter(self, name: str, timeout_s: float) -> None:
        """Have it forget an adapter that nobody uses. Raises: CallLost."""
        try:
            async with asyncio.timeout(timeout_s):
                status, data = await self.post("/v1/unload_lora_adapter", msgspec.json.encode({"lora_name": name}))
        except TimeoutError:
            raise CallLost(f"it has not let go of the adapter {name!r} in {timeout_s:g} s") from None
        if status not in (200, 404):
            raise CallLost(
                f"it does not let go of the adapter {name!r}: {read_reply(status, data).row_error().message}"
            )

    async def gauges(self) -> Gauges | None:
        """What its metrics say now; None where it does not answer."""
        data = await self._get("/metrics")
        return None if data is None else read_gauges(data.decode("utf-8", "replace"))

    async def fields(self, paths: Collection[str] = ()) -> Mapping[str, frozenset[str]]:
        """The body fields it understands, by URL: its own word, or ours for what it does not describe. `paths`: of
        further URLs, as far as it describes them."""
        data = await self._get("/openapi.json")  # a flag of vLLM switches it off
        return KNOWN_FIELDS if data is None else _known(msgspec.json.decode(data), paths)

    async def stop(self) -> None:
        await self._session.close()
        await self.process.stop()


def _known(document: dict[str, Any], paths: Collection[str]) -> Mapping[str, frozenset[str]]:
    return {**KNOWN_FIELDS, **fields_of_openapi(document, {*KNOWN_FIELDS, *paths})}


async def _read(reply: aiohttp.ClientResponse) -> bytes:
    size = reply.content_length
    if size is not None and size <= REPLY_BYTES_MAX:
        return await reply.read()
    pieces, total = [], 0
    async for piece in reply.content.iter_any():
        total += len(piece)
        if total > REPLY_BYTES_MAX:
            reply.close()
            raise ReplyTooLarge(f"the reply is larger than {REPLY_BYTES_MAX // 2**20} MiB")
        pieces.append(piece)
    return b"".join(pieces)
