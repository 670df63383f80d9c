"""Work that would hold up the owner's loop runs in a child, see `jobs.offload_child`.

The function takes (order: bytes, progress: Callable[[float], None]) and returns bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

import msgspec

from batchmill.errors import BatchmillError
from batchmill.wire.raised import Raised

PROGRESS_S = 0.2
_ANSWER, _PROGRESS, _ERROR = b"A", b"P", b"E"

CHILD_DIED = "child_died"


async def offload(target: str, order: bytes, progress: Callable[[float], None]) -> bytes:
    """Run `target` in a child process. Raises what it raised, or a BatchmillError when the child died.

    Cancelling kills the child.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "batchmill.jobs.offload_child", str(os.getpid()), target,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdin and process.stdout and process.stderr
    words = asyncio.create_task(process.stderr.read())
    try:
        process.stdin.write(order)
        process.stdin.close()
        while head := await _read_head(process.stdout):
            kind, length = head[:1], int.from_bytes(head[1:], "little")
            data = await process.stdout.readexactly(length)
            if kind == _PROGRESS:
                progress(msgspec.json.decode(data, type=float))
                continue
            await process.wait()
            await words
            if kind == _ERROR:
                raise msgspec.json.decode(data, type=Raised).error()
            return data
        await process.wait()
        last = (await words).decode(errors="replace").strip()[-2000:]
        text = f"{target} ended with exit code {process.returncode} and no answer: {last}"
        raise BatchmillError(text, code=CHILD_DIED)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        words.cancel()


async def _read_head(stream: asyncio.StreamReader) -> bytes:
    try:
        return await stream.readexactly(5)
    except asyncio.IncompleteReadError:
        return b""


def _send(kind: bytes, data: bytes) -> None:
    sys.stdout.buffer.write(kind + len(data).to_bytes(4, "little") + data)
    sys.stdout.buffer.flush()


def answer(target: str, load: Callable[[], Callable[[bytes, Callable[[float], None]], bytes]]) -> None:
    """In the child: run what `load` finds on the order from stdin, and tell the parent what became of it."""
    sent = 0.0

    def progress(share: float) -> None:
        nonlocal sent
        if time.monotonic() - sent >= PROGRESS_S:
            sent = time.monotonic()
            _send(_PROGRESS, msgspec.json.encode(share))

    try:
        data = load()(sys.stdin.buffer.read(), progress)
    except BatchmillError as error:
        _send(_ERROR, msgspec.json.encode(Raised.of(error)))
    except Exception as error:  # our own bug in a child: the parent must be told what it was
        traceback.print_exc()
        message = f"{target}: {type(error).__name__}: {error}"
        _send(_ERROR, msgspec.json.encode(Raised.of(BatchmillError(message))))
    else:
        _send(_ANSWER, data)
