"""Calls of deployed functions: which version is meant, whether the caller may, who gets a copy, and how it went.

Knows no dialect and reads no bodies: they go to the worker as they came, and its answers come back ready to be sent.
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

from batchmill.errors import BatchmillError, InvalidInput, LedgerBroken, Unavailable
from batchmill.jobs.pools.live import LivePath
from batchmill.models.call_log import FILE, OLDER, Entry, generation_of
from batchmill.models.redaction import mask_known
from batchmill.ports import Clock
from batchmill.services.directory import ModelDirectory
from batchmill.services.functions.function import VersionTarget
from batchmill.services.live_calls import LiveCall
from batchmill.services.trace_context import request_id
from batchmill.types import Caller, CallStats, LiveHead, LiveRequest, ModelSpec
from batchmill.wire.error_statuses import Raised
from batchmill.wire.messages import FunctionReply
from batchmill.wire.native_models import LogEntry, LogPage, LogQuery

log = logging.getLogger("batchmill.server")

COPIES_MAX = 256  # of calls that mirrors have and have not answered; further ones get none
ANSWERED = 200
OK, FAILED, DROPPED = "ok", "failed", "dropped"

Cancel = Callable[[], None]


class FunctionCalls:
    def __init__(self, live: LivePath, directory: ModelDirectory, clock: Clock) -> None:
        self._live, self._directory, self._clock = live, directory, clock
        self._listeners: list[Callable[[LiveCall], None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._unloaded: set[tuple[str, str, int]] = set()  # versions that are not called until somebody loads them
        self.copied: Counter[tuple[str, str]] = Counter()  # (name of a mirror, what became of a copy)

    def listen(self, listener: Callable[[LiveCall], None]) -> None:
        """Tell `listener` of every call that ends; it must be quick and must not raise."""
        self._listeners.append(listener)

    # -- which ---------------------------------------------------------------------------------------------------------

    def find(self, caller: Caller, name: str, branch: str | None = None, version: str = "latest") -> VersionTarget:
        """The version that a call means now: of an alias with weights, each time another.

        Raises: UnknownName (`model_not_found`), in the same words for what is unknown and for what is not the caller's.
        """
        return self._directory.choose(caller, name, branch, version)

    def targets(self, caller: Caller) -> list[VersionTarget]:
        """Every version that is ready and that the caller may use."""
        return [target for function in self._directory.functions(caller) for target in function.ready_targets()]

    # -- calling -------------------------------------------------------------------------------------------------------

    async def ask(
        self, caller: Caller, target: VersionTarget, form: str, body: bytes, *, head: bytes = b"",
        timeout_s: float | None = None,
    ) -> FunctionReply:  # fmt: skip
        """The answer to a body, in the body's form. Cancelling it ends the call.

        Raises: what the form says is wrong with the body (InvalidInput), ModelFailed for what the function raised or
        did, Unavailable, and what `ports.Live.ask` raises.
        """
        self._require_loaded(target)
        began = self._clock.monotonic()
        code: str | None = "abandoned"
        origin = caller.project, request_id.get()
        self._copy(target, form, body, head, origin)
        try:
            answer = await self._live.ask(target.model, form, body, head=head, timeout_s=timeout_s, origin=origin)
            code = None
        except BatchmillError as error:
            code = error.code
            raise
        finally:
            self._publish(caller, target, form, code, began)
        return answer

    def ask_now(
        self,
        caller: Caller,
        target: VersionTarget,
        form: str,
        body: bytes,
        head: bytes,
        on_reply: Callable[[FunctionReply], None],
    ) -> Cancel | None:
        """Begin a call without waiting; what is returned ends it early. None: it would have to wait, so `ask`.

        `on_reply` gets the answer, its `raised` included: once, later, and never once the call was ended early.
        """
        if self._unloaded and not self.is_ready(target):
            return None
        began = self._clock.monotonic()

        def replied(answer: FunctionReply) -> None:
            self._publish(caller, target, form, None if answer.raised is None else answer.raised.code, began)
            try:
                on_reply(answer)
            except Exception as error:  # the edge: a frontend's own bug must not end the worker that answered
                log.error("an answer of %s could not be handed on", target.name, exc_info=error)
                on_reply(
                    FunctionReply(
                        answer.id, raised=Raised.of(BatchmillError("the server failed to hand the answer on"))
                    )
                )

        origin = caller.project, request_id.get()
        cancel = self._live.ask_now(target.model, form, body, head=head, origin=origin, on_reply=replied)
        if cancel is None:
            return None
        if target.mirrors:
            self._copy(target, form, body, head, origin)
        return lambda: self._give_up(cancel, (caller, target, form, "abandoned", began))

    def _give_up(self, cancel: Cancel, request: tuple[Caller, VersionTarget, str, str, float]) -> None:
        cancel()
        self._publish(*request)

    async def stream(
        self, caller: Caller, target: VersionTarget, form: str, body: bytes, head: bytes = b""
    ) -> tuple[LiveHead, AsyncGenerator[bytes]]:
        """An answer event by event, as server-sent events. Close the iterator to end it early. Raises as `ask`."""
        self._require_loaded(target)
        began = self._clock.monotonic()
        request = LiveRequest(
            f"/{form}", body, stream=True, form=form, head=head, project=caller.project, request=request_id.get()
        )
        for mirror in target.mirrors:
            self._spawn_copy(mirror, self._drain(mirror, request))
        pieces = self._live.predict(target.model, request)
        try:
            first = await anext(pieces, None)
            if not isinstance(first, LiveHead):
                raise LedgerBroken(f"an answer of {target.name!r} began without its head", code="internal_error")
        except BaseException as error:
            await pieces.aclose()
            code = error.code if isinstance(error, BatchmillError) else "abandoned"
            self._publish(caller, target, form, code, began)
            raise
        return first, self._body(pieces, (caller, target, form), began)

    async def _body(
        self, pieces: AsyncGenerator[LiveHead | bytes], request: tuple[Caller, VersionTarget, str], began: float
    ) -> AsyncGenerator[bytes]:
        code: str | None = "abandoned"
        try:
            async for piece in pieces:
                assert isinstance(piece, bytes), "an answer has one head"
                yield piece
            code = None
        except BatchmillError as error:
            code = error.code
            raise
        finally:
            await pieces.aclose()
            self._publish(*request, code, began)

    def _publish(self, caller: Caller, target: VersionTarget, form: str, code: str | None, began: float) -> None:
        if not self._listeners:
            return
        status = ANSWERED if code is None else 0
        call = LiveCall(target.name, f"/{form}", status, self._clock.monotonic() - began, caller.project, error=code)
        for listener in self._listeners:
            listener(call)

    # -- copies --------------------------------------------------------------------------------------------------------

    def _copy(self, target: VersionTarget, form: str, body: bytes, head: bytes, origin: tuple[str, str]) -> None:
        """Whatever becomes of it, the call itself hears nothing of it."""
        for mirror in target.mirrors:
            self._spawn_copy(mirror, self._ask_copy(mirror, form, body, head, origin))

    def _spawn_copy(self, mirror: ModelSpec, work: Coroutine[Any, Any, None]) -> None:
        if len(self._tasks) >= COPIES_MAX:
            self.copied[mirror.name, DROPPED] += 1
            work.close()
            return
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask_copy(self, mirror: ModelSpec, form: str, body: bytes, head: bytes, origin: tuple[str, str]) -> None:
        try:
            await self._live.ask(mirror, form, body, head=head, origin=origin)
        except BatchmillError:
            self.copied[mirror.name, FAILED] += 1
        else:
            self.copied[mirror.name, OK] += 1

    async def _drain(self, mirror: ModelSpec, request: LiveRequest) -> None:
        try:
            async with contextlib.aclosing(self._live.predict(mirror, request)) as pieces:
                async for _ in pieces:
                    pass
        except BatchmillError:
            self.copied[mirror.name, FAILED] += 1
        else:
            self.copied[mirror.name, OK] += 1

    async def close(self) -> None:
        """Nobody waits for copies that are still on their way."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # -- workers -------------------------------------------------------------------------------------------------------

    def stats(self, name: str, version: str, branch: str = "main") -> CallStats:
        """What became of the calls of a version, and of its rows in jobs, since the server began."""
        function = self._directory.snapshot.functions.get(name)
        found = None if function is None else function.ready_target(branch, version)
        return CallStats() if found is None else self._live.stats(found.model)

    def is_ready(self, target: VersionTarget) -> bool:
        """It may be called: nobody has unloaded it. Its first call may wait for a worker to start."""
        return (target.name, target.branch, target.number) not in self._unloaded

    def _require_loaded(self, target: VersionTarget) -> None:
        if self._unloaded and not self.is_ready(target):
            raise Unavailable(
                f"{target.name} version {target.version} was unloaded: load it, or deploy a new version",
                code="model_unloaded",
            )

    async def load(self, target: VersionTarget) -> None:
        """Have a worker ready, and keep it so until `unload`. Raises: ModelFailed, Unavailable."""
        await self._live.load(target.model)
        self._unloaded.discard((target.name, target.branch, target.number))

    async def unload(self, target: VersionTarget) -> None:
        """Call it no more until it is loaded: its workers end once they have answered. Rows of jobs still run."""
        self._unloaded.add((target.name, target.branch, target.number))
        self._live.unload(target.model)


PIECE_BYTES_MAX = 8 * 1024 * 1024  # looked at for one page that goes on from a cursor
START = "start"
_CURSOR = re.compile(r"([0-9]{1,9})-([0-9]{1,12})")
_entry = msgspec.json.Decoder(Entry).decode


def read(folder: Path, query: LogQuery, project: str | None) -> LogPage:
    """A page of what is kept in a version's folder. Blocks.

    Args:
        project: whose calls are shown, with what was printed before any call; None: everybody's.
    Raises: InvalidInput (`invalid_cursor`).
    """
    generation = generation_of(folder / OLDER)
    if query.after is None:
        return _last(folder, query, project, generation)
    match = _CURSOR.fullmatch(query.after)
    if match is None:
        raise InvalidInput(f"{query.after[:40]!r} is no cursor: give `next` of the page before", code="invalid_cursor")
    at, offset = int(match[1]), int(match[2])
    is_lost = at < generation - 1  # what stood there was kept, and kept no longer
    if at < generation:
        at, offset = generation - 1, 0 if is_lost else offset
        page, offset, is_whole = _from(folder / OLDER, query, project, offset)
        if not is_whole:
            return LogPage(page, f"{at}-{offset}", is_lost)
        more, offset, _ = _from(folder / FILE, query, project, 0, len(page))
        return LogPage(page + more, f"{generation}-{offset}", is_lost)
    page, offset, _ = _from(folder / FILE, query, project, offset)
    return LogPage(page, f"{generation}-{offset}", is_lost)


def _last(folder: Path, query: LogQuery, project: str | None, generation: int) -> LogPage:
    kept: deque[LogEntry] = deque(maxlen=query.limit)
    offset = 0
    for name in (OLDER, FILE):
        offset = 0
        for line in _lines(folder / name, 0):
            offset += len(line)
            if (entry := _seen(line, query, project)) is not None:
                kept.append(entry)
    return LogPage(list(kept), f"{generation}-{offset}")


def _from(
    path: Path, query: LogQuery, project: str | None, offset: int, had: int = 0
) -> tuple[list[LogEntry], int, bool]:
    """Entries from an offset on, the offset behind them, and whether the file was read to its end.

    Offsets in the older file do not count its first line: they are those that the file had before.
    """
    found: list[LogEntry] = []
    begun = offset
    for line in _lines(path, offset):
        if had + len(found) >= query.limit or offset - begun >= PIECE_BYTES_MAX:
            return found, offset, False
        offset += len(line)
        if (entry := _seen(line, query, project)) is not None:
            found.append(entry)
    return found, offset, True


def _lines(path: Path, offset: int) -> Iterator[bytes]:
    """Whole lines from an offset on; one that is being written comes the next time."""
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


def _seen(line: bytes, query: LogQuery, project: str | None) -> LogEntry | None:
    """The entry of a line, if it was asked for and is the caller's to see."""
    wanted = query.request
    if wanted is not None and wanted.encode() not in line:
        return None
    try:
        entry = _entry(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None  # torn, when the disk was full
    if wanted is not None and not any(each == wanted or each.startswith(f"{wanted} ") for each in entry.requests):
        return None
    if project is not None and entry.project != project and not (entry.stage == START and not entry.requests):
        return None
    return LogEntry(entry.at, entry.stream, mask_known(entry.text), entry.stage, entry.project, entry.requests)
