"""Ranges go out to validators and what they find comes back in the order of the ranges, in bounded memory.

A validator that dies, whatever killed it, ends the sealing with an error that says where it was.
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

import msgspec

from batchmill.datasets.inspection import Inspector, ranges
from batchmill.datasets.orders import ByteRange, RangeEnd, RangeFailed, SealOrder, SourcePart, ValidatedChunk
from batchmill.datasets.validator import CHUNK_FRAME, END_FRAME, FRAME, frame, read_exactly, write_all
from batchmill.errors import InputChanged, InvalidDataset

ALONE_BYTES_MAX = 1024 * 1024  # a dataset up to this size is checked before a child would have started
PROCESSES_MAX = 64
AHEAD_MAX = 2  # ranges that a validator has been given: it never waits for the next
WINDOW = 4  # ranges under way, per validator, ahead of the first that is not done
HELD_BYTES_MAX = 32 * 1024 * 1024  # findings that wait for their turn
PIPE_BYTES = 1024 * 1024
VALIDATOR_DIED = "validator_died"
# Blocks of a few MiB come and go all the time: kept by glibc instead of being mapped anew, that is a fifth faster.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(64 * 1024 * 1024), "MALLOC_TRIM_THRESHOLD_": str(256 * 1024 * 1024)}

_chunk = msgspec.msgpack.Decoder(ValidatedChunk).decode
_end = msgspec.msgpack.Decoder(RangeEnd).decode
_failed = msgspec.msgpack.Decoder(RangeFailed).decode

Found = tuple[ByteRange, ValidatedChunk | RangeEnd]


@contextmanager
def validators(order: SealOrder, bytes_total: int) -> Iterator[Alone | Crew]:
    """What checks the lines of `bytes_total` bytes: this process, or children that have ended when the block ends."""
    if bytes_total <= ALONE_BYTES_MAX:
        yield Alone(order)
        return
    crew = Crew(order, max(1, min(order.processes, PROCESSES_MAX)))
    try:
        yield crew
    finally:
        crew.close()


class Alone:
    """This process checks everything itself."""

    def __init__(self, order: SealOrder) -> None:
        self._order = order

    def findings(self, parts: list[SourcePart]) -> Iterator[Found]:
        """Each chunk of each range, in order, and each range's end. Raises: InvalidDataset, InputChanged."""
        inspector = Inspector(self._order)
        try:
            for range_ in ranges(parts):
                for found in inspector.inspect(range_):
                    yield range_, found
        finally:
            inspector.close()


class Crew:
    """Child processes that share one seed, so that equal custom_ids have equal hashes in all of them."""

    def __init__(self, order: SealOrder, count: int) -> None:
        seed = str(int.from_bytes(os.urandom(4)) or 1)  # 0 would mean no seed
        environment = {**os.environ, **MALLOC, "PYTHONHASHSEED": seed}
        self._links = [ValidatorLink(environment) for _ in range(count)]
        for link in self._links:
            link.send(order)

    def findings(self, parts: list[SourcePart]) -> Iterator[Found]:
        """Each chunk of each range, in order, and each range's end. Raises: InvalidDataset, InputChanged."""
        waiting = ranges(parts)
        turn = 0  # the range whose findings are next
        held: dict[int, deque[tuple[ByteRange, int, bytes]]] = {}
        held_bytes = 0
        while self._give(waiting, turn):
            for link in self._ready(turn, crowded=held_bytes > HELD_BYTES_MAX):
                range_, kind, payload = link.receive()
                held.setdefault(range_.number, deque()).append((range_, kind, payload))
                held_bytes += len(payload)
            while findings := held.get(turn):
                range_, kind, payload = findings.popleft()
                held_bytes -= len(payload)
                found = _decoded(kind, payload)
                if isinstance(found, RangeEnd):
                    del held[turn]
                    turn += 1
                yield range_, found

    def _give(self, waiting: Iterator[ByteRange], turn: int) -> bool:
        """Hand out ranges that may be begun; whether any is still under way."""
        for _ in range(AHEAD_MAX):
            for link in self._links:
                if len(link.ranges) < AHEAD_MAX and self._last_given(turn) < turn + WINDOW * len(self._links):
                    range_ = next(waiting, None)
                    if range_ is not None:
                        link.send(range_)
                        link.ranges.append(range_)
        return any(link.ranges for link in self._links)

    def _last_given(self, turn: int) -> int:
        return max((link.ranges[-1].number for link in self._links if link.ranges), default=turn)

    def _ready(self, turn: int, *, crowded: bool) -> list[ValidatorLink]:
        """Links with something to read; while too much waits for its turn, only the one whose turn it is."""
        busy = {link.fd: link for link in self._links if link.ranges and not (crowded and link.ranges[0].number > turn)}
        poll = select.poll()
        for fd in busy:
            poll.register(fd, select.POLLIN)
        return [busy[fd] for fd, _ in poll.poll()]

    def close(self) -> None:
        for link in self._links:
            link.close()


class ValidatorLink:
    """One validator and the ranges it has been given."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "batchmill.datasets.validator"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=environment,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._orders = self._process.stdin
        self._findings = self._process.stdout
        self.fd = self._findings.fileno()
        self.ranges: deque[ByteRange] = deque()
        with suppress(OSError, AttributeError):  # a longer pipe is only faster; not every kernel grants one
            fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def send(self, message: SealOrder | ByteRange) -> None:
        try:
            write_all(self._orders.fileno(), frame(0, message))
        except BrokenPipeError:
            raise self._death() from None

    def receive(self) -> tuple[ByteRange, int, bytes]:
        """The next frame, whole, and the range it is about."""
        head = read_exactly(self.fd, FRAME.size)
        if len(head) < FRAME.size:
            raise self._death()
        size, kind = FRAME.unpack(head)
        payload = read_exactly(self.fd, size)
        if len(payload) < size:
            raise self._death()
        range_ = self.ranges[0]
        if kind == END_FRAME:
            self.ranges.popleft()
        return range_, kind, payload

    def _death(self) -> InvalidDataset:
        status = self._process.wait()
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        if not self.ranges:
            return InvalidDataset(f"a validator process ended by itself ({how})", code=VALIDATOR_DIED)
        at = self.ranges[0]
        return InvalidDataset(
            f"a validator process died ({how}) over bytes {at.start}-{at.end} of {at.part.source}; "
            "look at the lines there, or for what kills processes on this machine",
            code=VALIDATOR_DIED,
        )

    def close(self) -> None:
        """End the process; one that is idle ends by itself as its orders end."""
        self._orders.close()
        if self.ranges:
            self._process.kill()
        self._findings.close()
        self._process.wait()


def _decoded(kind: int, payload: bytes) -> ValidatedChunk | RangeEnd:
    if kind == CHUNK_FRAME:
        return _chunk(payload)
    if kind == END_FRAME:
        return _end(payload)
    failed = _failed(payload)
    if failed.changed:
        raise InputChanged(failed.message)
    raise InvalidDataset(failed.message, code=failed.code)
