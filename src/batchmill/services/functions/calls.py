"""Calls of deployed functions: version lookup, permission, mirrors, statistics and logs.

This module knows no dialect and does not parse bodies. It passes them to the worker unchanged, and the worker's
replies are ready to send.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec

from batchmill.errors import BatchmillError, InvalidInput, LedgerBroken, Unavailable, UnknownName
from batchmill.jobs.pools.live import LivePath
from batchmill.models.call_log import FILE, OLDER, Entry, generation_of
from batchmill.models.redaction import mask_known
from batchmill.ports.clock import Clock
from batchmill.services.directory.directory import ModelDirectory
from batchmill.services.functions.function import VersionTarget
from batchmill.services.functions.names import LATEST
from batchmill.services.live_calls import LiveCall
from batchmill.services.trace_context import request_id
from batchmill.types import Caller, CallStats, LiveHead, LiveRequest, ModelSpec
from batchmill.wire.error_statuses import Raised
from batchmill.wire.messages import FunctionReply
from batchmill.wire.native_models import LogEntry, LogPage, LogQuery

log = logging.getLogger("batchmill.server")

COPIES_MAX = 256  # calls that mirrors have not answered yet; above it, calls are not copied
ANSWERED = 200
OK, FAILED, DROPPED = "ok", "failed", "dropped"

Cancel = Callable[[], None]


class FunctionCalls:
    def __init__(self, live: LivePath, directory: ModelDirectory, clock: Clock) -> None:
        self._live, self._directory, self._clock = live, directory, clock
        self._listeners: list[Callable[[LiveCall], None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._unloaded: set[tuple[str, str, int]] = set()  # versions that refuse calls until `load`
        self.copied: Counter[tuple[str, str]] = Counter()  # (mirror name, OK, FAILED or DROPPED)

    def listen(self, listener: Callable[[LiveCall], None]) -> None:
        """Call `listener` for every call that ends. It must be quick and must not raise."""
        self._listeners.append(listener)

    # -- lookup --------------------------------------------------------------------------------------------------------

    def find(self, caller: Caller, name: str, branch: str | None = None, version: str = "latest") -> VersionTarget:
        """The version that a call goes to now. An alias with weights is drawn anew for each call.

        Raises: UnknownName (`model_not_found`), with the same message for a missing version and for one that the
        caller may not use.
        """
        return self._directory.choose(caller, name, branch, version)

    def locate(self, caller: Caller, model: str, version: str | None = None) -> VersionTarget:
        """The version that `model`, `NAME` or `NAME@LABEL`, refers to.

        A label is an alias, a version, or a branch with "~" for each "/". Raises: UnknownName, as `find`.
        """
        name, _, label = model.partition("@")
        if not label:
            return self.find(caller, name, None, version or LATEST)
        branch = label.replace("~", "/")
        if version is not None:
            return self.find(caller, name, branch, version)
        try:
            return self.find(caller, name, None, label)
        except UnknownName as unknown:
            try:
                return self.find(caller, name, branch)
            except UnknownName:
                raise unknown from None

    def targets(self, caller: Caller) -> list[VersionTarget]:
        """Every ready version that the caller may use."""
        return [target for function in self._directory.functions(caller) for target in function.ready_targets()]

    # -- calling -------------------------------------------------------------------------------------------------------

    async def call(
        self, caller: Caller, target: VersionTarget, form: str, body: bytes, *, head: bytes = b"",
        timeout_s: float | None = None,
    ) -> FunctionReply:  # fmt: skip
        """Call the function and return its reply, in the form of the body. Cancelling ends the call.

        Raises: InvalidInput for a body that the form refuses; ModelFailed when the function raises or its process
        fails; Unavailable; and what `ports.jobs.Live.call` raises.
        """
        self._require_loaded(target)
        started_at = self._clock.monotonic()
        code: str | None = "abandoned"
        origin = caller.project, request_id.get()
        self._mirror_call(target, form, body, head, origin)
        try:
            reply = await self._live.call(target.model, form, body, head=head, timeout_s=timeout_s, origin=origin)
            code = None
        except BatchmillError as error:
            code = error.code
            raise
        finally:
            self._publish(caller, target, form, code, started_at)
        return reply

    def call_nowait(
        self,
        caller: Caller,
        target: VersionTarget,
        form: str,
        body: bytes,
        head: bytes,
        on_reply: Callable[[FunctionReply], None],
    ) -> Cancel | None:
        """Start a call without waiting and return a function that ends it early.

        Returns None if the call would have to wait: use `call` then. `on_reply` gets the reply, or the error in its
        `raised`, once and later. It is not called after the call was ended early.
        """
        if self._unloaded and not self.is_ready(target):
            return None
        started_at = self._clock.monotonic()

        def finish(reply: FunctionReply) -> None:
            self._publish(caller, target, form, None if reply.raised is None else reply.raised.code, started_at)
            try:
                on_reply(reply)
            except Exception as error:  # a bug of a frontend must not end the worker that replied
                log.error("a reply of %s could not be passed on", target.name, exc_info=error)
                on_reply(
                    FunctionReply(reply.id, raised=Raised.of(BatchmillError("the server failed to pass the reply on")))
                )

        origin = caller.project, request_id.get()
        cancel = self._live.call_nowait(target.model, form, body, head=head, origin=origin, on_reply=finish)
        if cancel is None:
            return None
        if target.mirrors:
            self._mirror_call(target, form, body, head, origin)
        return lambda: self._abandon(cancel, (caller, target, form, "abandoned", started_at))

    def _abandon(self, cancel: Cancel, request: tuple[Caller, VersionTarget, str, str, float]) -> None:
        cancel()
        self._publish(*request)

    async def stream(
        self, caller: Caller, target: VersionTarget, form: str, body: bytes, head: bytes = b""
    ) -> tuple[LiveHead, AsyncGenerator[bytes]]:
        """Stream a reply as server-sent events. Close the iterator to end the call early. Raises as `call`."""
        self._require_loaded(target)
        started_at = self._clock.monotonic()
        request = LiveRequest(
            f"/{form}", body, stream=True, form=form, head=head, project=caller.project, request=request_id.get()
        )
        for mirror in target.mirrors:
            self._start_copy(mirror, self._stream_mirror(mirror, request))
        chunks = self._live.predict(target.model, request)
        try:
            first = await anext(chunks, None)
            if not isinstance(first, LiveHead):
                raise LedgerBroken(f"a reply of {target.name!r} started without its head", code="internal_error")
        except BaseException as error:
            await chunks.aclose()
            code = error.code if isinstance(error, BatchmillError) else "abandoned"
            self._publish(caller, target, form, code, started_at)
            raise
        return first, self._body(chunks, (caller, target, form), started_at)

    async def _body(
        self, chunks: AsyncGenerator[LiveHead | bytes], request: tuple[Caller, VersionTarget, str], started_at: float
    ) -> AsyncGenerator[bytes]:
        code: str | None = "abandoned"
        try:
            async for chunk in chunks:
                assert isinstance(chunk, bytes), "a reply has one head"
                yield chunk
            code = None
        except BatchmillError as error:
            code = error.code
            raise
        finally:
            await chunks.aclose()
            self._publish(*request, code, started_at)

    def _publish(self, caller: Caller, target: VersionTarget, form: str, code: str | None, started_at: float) -> None:
        if not self._listeners:
            return
        status = ANSWERED if code is None else 0
        call = LiveCall(
            target.name, f"/{form}", status, self._clock.monotonic() - started_at, caller.project, error=code
        )
        for listener in self._listeners:
            listener(call)

    # -- mirrors -------------------------------------------------------------------------------------------------------

    def _mirror_call(self, target: VersionTarget, form: str, body: bytes, head: bytes, origin: tuple[str, str]) -> None:
        """Send a copy of a call to each mirror. The result of a copy has no effect on the call."""
        for mirror in target.mirrors:
            self._start_copy(mirror, self._call_mirror(mirror, form, body, head, origin))

    def _start_copy(self, mirror: ModelSpec, work: Coroutine[Any, Any, None]) -> None:
        if len(self._tasks) >= COPIES_MAX:
            self.copied[mirror.name, DROPPED] += 1
            work.close()
            return
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call_mirror(
        self, mirror: ModelSpec, form: str, body: bytes, head: bytes, origin: tuple[str, str]
    ) -> None:
        try:
            await self._live.call(mirror, form, body, head=head, origin=origin)
        except BatchmillError:
            self.copied[mirror.name, FAILED] += 1
        else:
            self.copied[mirror.name, OK] += 1

    async def _stream_mirror(self, mirror: ModelSpec, request: LiveRequest) -> None:
        try:
            async with contextlib.aclosing(self._live.predict(mirror, request)) as chunks:
                async for _ in chunks:
                    pass
        except BatchmillError:
            self.copied[mirror.name, FAILED] += 1
        else:
            self.copied[mirror.name, OK] += 1

    async def close(self) -> None:
        """Cancel the copies that mirrors have not answered."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # -- workers -------------------------------------------------------------------------------------------------------

    def stats(self, name: str, version: str, branch: str = "main") -> CallStats:
        """Counts of a version's calls, and of its rows in jobs, since the server started."""
        function = self._directory.snapshot.functions.get(name)
        target = None if function is None else function.ready_target(branch, version)
        return CallStats() if target is None else self._live.stats(target.model)

    def is_ready(self, target: VersionTarget) -> bool:
        """Whether the version accepts calls: it was not unloaded. The first call may wait for a worker to start."""
        return (target.name, target.branch, target.number) not in self._unloaded

    def _require_loaded(self, target: VersionTarget) -> None:
        if self._unloaded and not self.is_ready(target):
            raise Unavailable(
                f"{target.name} version {target.version} was unloaded: load it, or deploy a new version",
                code="model_unloaded",
            )

    async def load(self, target: VersionTarget) -> None:
        """Start a worker, and keep one ready until `unload`. Raises: ModelFailed, Unavailable."""
        await self._live.load(target.model)
        self._unloaded.discard((target.name, target.branch, target.number))

    async def unload(self, target: VersionTarget) -> None:
        """Refuse calls until `load`. Workers end after their last reply. Rows of jobs still run."""
        self._unloaded.add((target.name, target.branch, target.number))
        self._live.unload(target.model)


PAGE_BYTES_MAX = 8 * 1024 * 1024  # bytes of log read for one page that starts at a cursor
START = "start"
_CURSOR = re.compile(r"([0-9]{1,9})-([0-9]{1,12})")
_decode_entry = msgspec.json.Decoder(Entry).decode


def read(folder: Path, query: LogQuery, project: str | None) -> LogPage:
    """Read a page of the call log in a version's folder. Blocks.

    Args:
        project: show only the calls of this project, and output from before the first call. None: all calls.
    Raises: InvalidInput (`invalid_cursor`).
    """
    generation = generation_of(folder / OLDER)
    if query.after is None:
        return _read_newest(folder, query, project, generation)
    match = _CURSOR.fullmatch(query.after)
    if match is None:
        raise InvalidInput(
            f"{query.after[:40]!r} is not a cursor: pass `next` of the previous page", code="invalid_cursor"
        )
    file_number, offset = int(match[1]), int(match[2])
    is_lost = file_number < generation - 1  # rotation has deleted the file of the cursor
    if file_number < generation:
        file_number, offset = generation - 1, 0 if is_lost else offset
        page, offset, is_whole = _read_from(folder / OLDER, query, project, offset)
        if not is_whole:
            return LogPage(page, f"{file_number}-{offset}", is_lost)
        more, offset, _ = _read_from(folder / FILE, query, project, 0, len(page))
        return LogPage(page + more, f"{generation}-{offset}", is_lost)
    page, offset, _ = _read_from(folder / FILE, query, project, offset)
    return LogPage(page, f"{generation}-{offset}", is_lost)


def _read_newest(folder: Path, query: LogQuery, project: str | None, generation: int) -> LogPage:
    entries: deque[LogEntry] = deque(maxlen=query.limit)
    offset = 0
    for name in (OLDER, FILE):
        offset = 0
        for line in _lines(folder / name, 0):
            offset += len(line)
            if (entry := _visible_entry(line, query, project)) is not None:
                entries.append(entry)
    return LogPage(list(entries), f"{generation}-{offset}")


def _read_from(
    path: Path, query: LogQuery, project: str | None, offset: int, entries_before: int = 0
) -> tuple[list[LogEntry], int, bool]:
    """Read entries from an offset on. Returns them, the offset after them, and whether this is the end of the file.

    Offsets in the older file do not count its first line, so that they stay the same through the rotation.
    """
    entries: list[LogEntry] = []
    start = offset
    for line in _lines(path, offset):
        if entries_before + len(entries) >= query.limit or offset - start >= PAGE_BYTES_MAX:
            return entries, offset, False
        offset += len(line)
        if (entry := _visible_entry(line, query, project)) is not None:
            entries.append(entry)
    return entries, offset, True


def _lines(path: Path, offset: int) -> Iterator[bytes]:
    """Complete lines from an offset on. A line that is still being written is left for the next call."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        if path.name == OLDER:
            offset += len(file.readline(1024))
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield line


def _visible_entry(line: bytes, query: LogQuery, project: str | None) -> LogEntry | None:
    """The entry of a line if it matches the query and the project may see it; None otherwise."""
    request_id = query.request
    if request_id is not None and request_id.encode() not in line:
        return None
    try:
        entry = _decode_entry(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None  # incomplete, because the disk was full
    if request_id is not None and not any(
        each == request_id or each.startswith(f"{request_id} ") for each in entry.requests
    ):
        return None
    if project is not None and entry.project != project and not (entry.stage == START and not entry.requests):
        return None
    return LogEntry(entry.at, entry.stream, mask_known(entry.text), entry.stage, entry.project, entry.requests)
