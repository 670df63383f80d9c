"""Distributes byte ranges to validator processes and returns their results in order, in bounded memory.

If a validator dies, sealing ends with an error that names the range it was checking.
"""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain

import msgspec

from batchmill.children.frames import FRAME, frame, read_exactly, write_all
from batchmill.datasets.checking.inspection import Inspector, ranges
from batchmill.datasets.checking.validator import CHUNK_FRAME, END_FRAME
from batchmill.datasets.orders import ByteRange, RangeEnd, RangeFailed, SealOrder, SourcePart, ValidatedChunk
from batchmill.errors import InvalidDataset

INLINE_BYTES_MAX = 1024 * 1024  # a dataset up to this size is checked faster than a child starts
PROCESSES_MAX = 64
QUEUED_MAX = 2  # ranges sent to a validator at once, so that it never waits for the next
WINDOW = 4  # ranges in progress, per validator, from the first unfinished one on
HELD_BYTES_MAX = 32 * 1024 * 1024  # results that wait for those of an earlier range
PIPE_BYTES = 1024 * 1024
VALIDATOR_DIED = "validator_died"
# Blocks of a few MiB are allocated all the time: it is a fifth faster if glibc keeps them than if it maps them anew.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(64 * 1024 * 1024), "MALLOC_TRIM_THRESHOLD_": str(256 * 1024 * 1024)}

_chunk = msgspec.msgpack.Decoder(ValidatedChunk).decode
_end = msgspec.msgpack.Decoder(RangeEnd).decode
_failed = msgspec.msgpack.Decoder(RangeFailed).decode

RangeResult = tuple[ByteRange, ValidatedChunk | RangeEnd]


@contextmanager
def validators(order: SealOrder, bytes_total: int) -> Iterator[InlineValidator | ValidatorPool]:
    """Provide what checks `bytes_total` bytes: this process, or child processes that end with the context."""
    if bytes_total <= INLINE_BYTES_MAX:
        yield InlineValidator(order)
        return
    pool = ValidatorPool(order, max(1, min(order.processes, PROCESSES_MAX)))
    try:
        yield pool
    finally:
        pool.close()


class InlineValidator:
    """Checks everything in this process."""

    def __init__(self, order: SealOrder) -> None:
        self._order = order

    def check(self, parts: list[SourcePart]) -> Iterator[RangeResult]:
        """Yield each chunk of each range, in order, and each range's end. Raises: InvalidDataset, InputChanged."""
        return self.check_ranges(ranges(parts))

    def check_ranges(self, wanted: Iterator[ByteRange]) -> Iterator[RangeResult]:
        """As `check`, for some ranges that follow each other."""
        inspector = Inspector(self._order)
        try:
            for range_ in wanted:
                for result in inspector.inspect(range_):
                    yield range_, result
        finally:
            inspector.close()


class ValidatorPool:
    """Child processes."""

    def __init__(self, order: SealOrder, count: int) -> None:
        environment = {**os.environ, **MALLOC}
        self._links = [ValidatorLink(environment) for _ in range(count)]
        for link in self._links:
            link.send(order)

    def check(self, parts: list[SourcePart]) -> Iterator[RangeResult]:
        """Yield each chunk of each range, in order, and each range's end. Raises: InvalidDataset, InputChanged."""
        return self.check_ranges(ranges(parts))

    def check_ranges(self, wanted: Iterator[ByteRange]) -> Iterator[RangeResult]:
        """As `check`, for some ranges that follow each other."""
        first = next(wanted, None)
        if first is None:
            return
        waiting = chain([first], wanted)
        turn = first.number  # of the range whose results come next
        held: dict[int, deque[tuple[ByteRange, int, bytes]]] = {}
        held_bytes = 0
        while self._send_ranges(waiting, turn):
            for link in self._readable(turn, only_turn=held_bytes > HELD_BYTES_MAX):
                range_, kind, payload = link.receive()
                held.setdefault(range_.number, deque()).append((range_, kind, payload))
                held_bytes += len(payload)
            while frames := held.get(turn):
                range_, kind, payload = frames.popleft()
                held_bytes -= len(payload)
                result = _decode(kind, payload)
                if isinstance(result, RangeEnd):
                    del held[turn]
                    turn += 1
                yield range_, result

    def _send_ranges(self, waiting: Iterator[ByteRange], turn: int) -> bool:
        """Send the ranges that may begin. Return whether any range is in progress."""
        for _ in range(QUEUED_MAX):
            for link in self._links:
                if len(link.ranges) < QUEUED_MAX and self._last_sent(turn) < turn + WINDOW * len(self._links):
                    range_ = next(waiting, None)
                    if range_ is not None:
                        link.send(range_)
                        link.ranges.append(range_)
        return any(link.ranges for link in self._links)

    def _last_sent(self, turn: int) -> int:
        return max((link.ranges[-1].number for link in self._links if link.ranges), default=turn)

    def _readable(self, turn: int, *, only_turn: bool) -> list[ValidatorLink]:
        """Wait for links with something to read. `only_turn`: too many results are held; read only those of `turn`."""
        busy = {
            link.fd: link for link in self._links if link.ranges and not (only_turn and link.ranges[0].number > turn)
        }
        poll = select.poll()
        for fd in busy:
            poll.register(fd, select.POLLIN)
        return [busy[fd] for fd, _ in poll.poll()]

    def close(self) -> None:
        for link in self._links:
            link.close()


class ValidatorLink:
    """One validator process and the ranges it is checking."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "batchmill.datasets.checking.validator"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=environment,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._orders = self._process.stdin
        self._results = self._process.stdout
        self.fd = self._results.fileno()
        self.ranges: deque[ByteRange] = deque()
        with suppress(OSError, AttributeError):  # a longer pipe is only faster; some kernels refuse it
            fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def send(self, message: SealOrder | ByteRange) -> None:
        try:
            write_all(self._orders.fileno(), frame(0, message))
        except BrokenPipeError:
            raise self._died() from None

    def receive(self) -> tuple[ByteRange, int, bytes]:
        """Read the next whole frame. Returns: its range, its kind, its payload."""
        head = read_exactly(self.fd, FRAME.size)
        if len(head) < FRAME.size:
            raise self._died()
        size, kind = FRAME.unpack(head)
        payload = read_exactly(self.fd, size)
        if len(payload) < size:
            raise self._died()
        range_ = self.ranges[0]
        if kind == END_FRAME:
            self.ranges.popleft()
        return range_, kind, payload

    def _died(self) -> InvalidDataset:
        status = self._process.wait()
        cause = f"signal {-status}" if status < 0 else f"exit status {status}"
        if not self.ranges:
            return InvalidDataset(f"a validator process exited unexpectedly ({cause})", code=VALIDATOR_DIED)
        current = self.ranges[0]
        return InvalidDataset(
            f"a validator process died ({cause}) on bytes {current.start}-{current.end} of {current.part.source}; "
            "check the lines there, and whether something kills processes on this machine",
            code=VALIDATOR_DIED,
        )

    def close(self) -> None:
        """End the process; an idle one ends by itself when its stdin closes."""
        self._orders.close()
        if self.ranges:
            self._process.kill()
        self._results.close()
        self._process.wait()


def _decode(kind: int, payload: bytes) -> ValidatedChunk | RangeEnd:
    if kind == CHUNK_FRAME:
        return _chunk(payload)
    if kind == END_FRAME:
        return _end(payload)
    raise _failed(payload).error()
