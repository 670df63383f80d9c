"""One vLLM server from start to end, and the calls to it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from batchmill.engines.llm import guard
from batchmill.engines.llm.launch import Hardware, absolute_adapter_path, plan_launch
from batchmill.engines.llm.row_queue import Gauges, read_gauges
from batchmill.engines.retry import REPLY_BYTES_MAX, read_reply
from batchmill.errors import ModelFailed
from batchmill.ports.clock import Clock
from batchmill.types import LiveHead, ModelSpec
from batchmill.wire.fields import KNOWN_FIELDS, fields_of_openapi

TAIL_BYTES = 256 * 1024
LINES_MAX = 8
LINE_CHARS_MAX = 400

# "(EngineCore pid=12) ERROR 11-21 19:20:01 [core.py:1]", each part optional, before the message
_PREFIX = re.compile(r"^(\([\w ]+pid=\d+\)\s?)?((DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:.]+ \[[^\]]*\] ?)?")
_ERROR_LINE = re.compile(r"^([A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Failure)(:|$)|[\w.\- ]+: error: )")
# These lines only refer to a cause that was logged earlier.
_UNINFORMATIVE = re.compile(
    r"Engine core initialization failed|Engine core proc.*died|WorkerProc initialization failed"
    r"|^(SystemExit|KeyboardInterrupt|(asyncio\.\w+\.)?CancelledError)"
)


def read_tail(path: Path, offset: int = 0) -> str:
    """The end of a log from `offset` on; all of a log that is shorter, since that is a new file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            begin = offset if offset <= size else 0
            file.seek(max(begin, size - TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def error_lines(log: str) -> str:
    """The last exception of a log with its context, or the last lines if there is none."""
    lines = [_PREFIX.sub("", line).rstrip() for line in log.splitlines()]
    telling = [i for i, line in enumerate(lines) if _ERROR_LINE.match(line) and not _UNINFORMATIVE.search(line)]
    if not telling:
        return _cut([line for line in lines if line][-5:])
    first = telling[-1]
    return _cut([lines[first], *_continuation(lines[first + 1 : first + LINES_MAX])])


def _continuation(lines: list[str]) -> list[str]:
    """The lines that continue an exception's message, up to the next frame or blank line."""
    continuation = []
    for line in lines:
        if not line.startswith("  ") or line.lstrip().startswith(("File ", "For further information")):
            break
        continuation.append(line.strip())
    return continuation


def _cut(lines: list[str]) -> str:
    return "\n".join(line[:LINE_CHARS_MAX] for line in lines)


GRACE_S = 6.0  # from SIGTERM to SIGKILL; vLLM takes one to three
SLOTS_MAX = 256  # engines at once under one home
SOCKET_NAME = "s"
SOCKET_BYTES_MAX = 100  # Linux allows 107, macOS 103


class ServerProcess:
    """A server in a separate process tree, created by `claim`. It starts once, and cannot start again after a stop.

    Concurrency: one event loop.
    """

    def __init__(self, home: Path, slot: int, lock_fd: int, *, grace_s: float) -> None:
        self.pid_file = home / f"engine-{slot}.pid"
        self.log_path = home / f"engine-{slot}.log"
        self.scratch = make_scratch()
        self.socket = self.scratch / SOCKET_NAME
        self.exit_code: int | None = None
        self._grace_s = grace_s
        self._lock_fd = lock_fd
        self._marker = uuid.uuid4().hex
        self._guard: asyncio.subprocess.Process | None = None
        self._ended: asyncio.Task[int] | None = None
        self._log_offset = self.log_path.stat().st_size if self.log_path.exists() else 0

    @classmethod
    def claim(cls, home: Path, *, grace_s: float = GRACE_S) -> ServerProcess:
        """Take a free slot under `home`, and end processes that an earlier engine left. Blocks; call it in a thread.

        Raises: ModelFailed if no slot is free.
        """
        home.mkdir(parents=True, exist_ok=True)
        for slot in range(SLOTS_MAX):
            fd = os.open(home / f"engine-{slot}.pid", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if guard.try_lock(fd):
                guard.end_leftovers(guard.read_record(fd))
                server = cls(home, slot, fd, grace_s=grace_s)
                guard.write_record(fd, server._record())
                return server
            os.close(fd)
        raise ModelFailed(f"{SLOTS_MAX} engine servers are running under {home}; stop some")

    def _record(self) -> dict[str, object]:
        pid = os.getpid()
        return {
            "marker": self._marker,
            "worker_pid": pid,
            "worker_start": guard.start_time(pid),
            "boot_id": guard.boot_id(),
            "scratch": str(self.scratch),
            "grace_s": self._grace_s,
        }

    async def start(self, command: list[str], env: Mapping[str, str]) -> None:
        """Start the guard, which starts the server. If the command cannot start, the server ends at once."""
        assert self._guard is None, "a server is started once"
        arguments = ["--worker", str(os.getpid()), "--lock-fd", str(self._lock_fd), "--log", str(self.log_path)]
        arguments += ["--scratch", str(self.scratch), "--grace-s", str(self._grace_s), "--", *command]
        with self.log_path.open("ab") as log:
            self._guard = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                guard.__file__,
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={
                    **env,
                    guard.MARKER: self._marker,
                    "SPT_NOENV": "1",
                },  # SPT_NOENV: a new process title does not overwrite the marker
                pass_fds=[self._lock_fd],
                start_new_session=True,
            )
        self._ended = asyncio.create_task(self._wait_until_ended(self._guard))

    async def _wait_until_ended(self, process: asyncio.subprocess.Process) -> int:
        code = await process.wait()
        if code < 0:  # another process killed the guard
            await asyncio.to_thread(guard.end_leftovers, guard.read_record(self._lock_fd))
            guard.write_record(self._lock_fd, {})
        self._release()
        self.exit_code = code
        return code

    def _release(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    @property
    def is_alive(self) -> bool:
        return self._ended is not None and not self._ended.done()

    async def wait(self) -> int:
        """Wait until all processes have ended. Returns the exit code, below zero if the guard was killed."""
        assert self._ended is not None, "the server was not started"
        return await asyncio.shield(self._ended)

    async def stop(self) -> None:
        """End the server and everything it started. Safe to call twice and before `start`."""
        if self._guard is None or self._ended is None:
            if self._lock_fd >= 0:
                guard.write_record(self._lock_fd, {})
                shutil.rmtree(self.scratch, ignore_errors=True)
                self._release()
            return
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        timeout_s = self._grace_s + guard.KILL_WAIT_S + 5.0
        done, _ = await asyncio.wait([self._ended], timeout=timeout_s)
        if not done:
            with contextlib.suppress(ProcessLookupError):
                self._guard.kill()
            await asyncio.wait([self._ended])

    def complaint(self) -> str:
        """How the server ended and the errors in its log, in a few lines."""
        errors = error_lines(read_tail(self.log_path, self._log_offset)) or "it wrote nothing"
        code = self.exit_code
        if code is None:
            return errors
        ending = f"killed by signal {code - 128}" if code > 128 else f"exit code {code}"
        return f"{ending}: {errors}"


def make_scratch() -> Path:
    """A new private directory with a short path: a Unix socket's path has at most about 100 bytes."""
    for base in (os.environ.get("XDG_RUNTIME_DIR"), "/tmp", tempfile.gettempdir()):
        if base and os.access(base, os.W_OK | os.X_OK):
            path = Path(tempfile.mkdtemp(prefix="batchmill-", dir=base))
            if len(os.fsencode(path / SOCKET_NAME)) <= SOCKET_BYTES_MAX - 40:  # vLLM's own sockets go there too
                return path
            path.rmdir()
    raise ModelFailed(
        f"no directory has a path short enough for a Unix socket: set XDG_RUNTIME_DIR to a path of at most "
        f"{SOCKET_BYTES_MAX - 60} bytes"
    )


START_TIMEOUT_S = 3600.0  # enough to download and compile a large model
POLL_S = 0.2
PROBE_TIMEOUT_S = 10.0
KEEPALIVE_S = 4.0  # below vLLM's 5 s, so that no call uses a connection that vLLM is closing
BODY_COPY_MAX = 512 * 1024  # a larger body is streamed, so that it does not block the event loop
_IS_LOADED = "has already been loaded"  # the reply to an earlier load was lost
BASE_URL = "http://vllm"  # for the Host header; calls go to the socket


class CallLost(Exception):
    """A call that got no reply: the connection broke, or the server is gone."""

    def __init__(self, why: str, *, was_sent: bool = True) -> None:
        super().__init__(why)
        self.was_sent = was_sent  # False: no server received it


class ReplyTooLarge(Exception):
    """A reply that is too large for a result file. A retry would return it again."""


class VllmServer:
    """A vLLM server process and its HTTP API. It starts once; a new object replaces a dead server."""

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
        """Start a server and return once it is healthy. `note` gets a progress message with the seconds so far.

        Raises: ModelFailed, with the errors of the server's log.
        """
        process = await asyncio.to_thread(ServerProcess.claim, home)
        server = None
        try:
            launch = plan_launch(model, python, process.socket, env=env, machine=Hardware.detect(env))
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
        """Whether the server reports itself and its engine as healthy."""
        return await self._get("/health") is not None

    async def _get(self, path: str) -> bytes | None:
        """The body of a 200 reply; None for any other outcome, also if the server is stopped or hangs."""
        if self._session.closed:
            return None
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S), self._session.get(f"{BASE_URL}{path}") as reply:
                return await _read(reply) if reply.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None

    async def post(self, url: str, body: bytes) -> tuple[int, bytes]:
        """Make a call. Raises: CallLost without a complete reply, ReplyTooLarge."""
        if self._session.closed:
            raise CallLost("the server was stopped")
        data = body if len(body) <= BODY_COPY_MAX else io.BytesIO(body)
        try:
            async with self._session.post(f"{BASE_URL}{url}", data=data) as reply:
                return reply.status, await _read(reply)
        except (aiohttp.ClientError, OSError) as error:
            raise CallLost(f"{type(error).__name__}: {error}") from None

    async def predict(self, url: str, body: bytes, silence_s: float) -> AsyncGenerator[LiveHead | bytes]:
        """Make a call and stream its reply. Closing the iterator cancels it at the server.

        Raises: CallLost without a complete reply, or if the server sends nothing for `silence_s`.
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
            raise CallLost(f"the server sent nothing for {silence_s:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise CallLost(f"cannot connect to the server: {error.os_error}", was_sent=False) from None
        except (aiohttp.ClientError, OSError) as error:
            raise CallLost(f"{type(error).__name__}: {error}") from None
        finally:
            if reply is not None and not reply.content.at_eof():
                reply.close()  # close the connection, which still has the rest of the reply

    async def load_adapter(self, name: str, path: str, timeout_s: float) -> str:
        """Load an adapter. Returns the server's error message; empty: it is loaded. Raises: CallLost."""
        body = msgspec.json.encode({"lora_name": name, "lora_path": absolute_adapter_path(path)})
        try:
            async with asyncio.timeout(timeout_s):
                status, data = await self.post("/v1/load_lora_adapter", body)
        except TimeoutError:
            return f"the load took longer than {timeout_s:g} s"
        if status == 200:
            return ""
        message = read_reply(status, data).row_error().message
        return "" if _IS_LOADED in message else message

    async def unload_adapter(self, name: str, timeout_s: float) -> None:
        """Unload an unused adapter. Raises: CallLost."""
        try:
            async with asyncio.timeout(timeout_s):
                status, data = await self.post("/v1/unload_lora_adapter", msgspec.json.encode({"lora_name": name}))
        except TimeoutError:
            raise CallLost(f"the server did not unload the adapter {name!r} in {timeout_s:g} s") from None
        if status not in (200, 404):
            raise CallLost(
                f"the server cannot unload the adapter {name!r}: {read_reply(status, data).row_error().message}"
            )

    async def gauges(self) -> Gauges | None:
        """The current metrics; None if the server does not reply."""
        data = await self._get("/metrics")
        return None if data is None else read_gauges(data.decode("utf-8", "replace"))

    async def fields(self, paths: Collection[str] = ()) -> Mapping[str, frozenset[str]]:
        """The body fields that the server understands, by URL, from its OpenAPI document or else from our tables.

        `paths`: further URLs to include if the document describes them.
        """
        data = await self._get("/openapi.json")  # absent with vLLM's flag disable-fastapi-docs
        return KNOWN_FIELDS if data is None else _merge_fields(msgspec.json.decode(data), paths)

    async def stop(self) -> None:
        await self._session.close()
        await self.process.stop()


def _merge_fields(document: dict[str, Any], paths: Collection[str]) -> Mapping[str, frozenset[str]]:
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
