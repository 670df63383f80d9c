"""Renders the rows of a table in processes that may be killed, while sealing converts them.

Rows stay in order, one line each. What a template does to one row is that row's fault: the others go on.
"""

from __future__ import annotations

import io
import os
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from types import TracebackType

import msgspec

from batchmill.children.frames import FRAME, frame, read_exactly, write_all
from batchmill.children.programs import ENVIRON
from batchmill.datasets.conversion import Converted
from batchmill.datasets.line_pieces import chunks_of, whole_lines
from batchmill.datasets.templates.messages import (
    CHECK_FRAME,
    KILLED_WEIGHT,
    REFUSED_FRAME,
    RENDER_CPU_S,
    RENDER_FRAME,
    REPLY_S,
    STOPPED_MAX,
    CheckOrder,
    Refusal,
    Rendered,
)
from batchmill.errors import InvalidDataset
from batchmill.optional import require
from batchmill.types import PromptTemplate
from batchmill.wire.rows.rendered_rows import with_fault

PROCESSES_MAX = 16
PROGRAM = "batchmill.datasets.templates.process"


class _Died(Exception):
    """The process has ended: because of a row, or of the template."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status

    @property
    def is_slow(self) -> bool:
        return self.status == -signal.SIGVTALRM

    @property
    def in_words(self) -> str:
        return f"signal {-self.status}" if self.status < 0 else f"exit status {self.status}"


class _Process:
    """One process with the compiled template."""

    def __init__(self, order: CheckOrder) -> None:
        self.chunk = b""  # that it renders
        environment = {name: os.environ[name] for name in ENVIRON if name in os.environ}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what Python says of the end of a killed process helps nobody
            bufsize=0,
            env=environment,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._orders, self._results = self._process.stdin, self._process.stdout
        self._write(frame(CHECK_FRAME, order))

    def check(self) -> Refusal | None:
        """What is wrong with the template; None: nothing. Raises: _Died."""
        kind, payload = self._receive()
        return msgspec.msgpack.decode(payload, type=Refusal) if kind == REFUSED_FRAME else None

    def send(self, chunk: bytes) -> None:
        self.chunk = chunk
        self._write(FRAME.pack(len(chunk), RENDER_FRAME) + chunk)

    def receive(self) -> Rendered:
        """Raises: _Died."""
        return msgspec.msgpack.decode(self._receive()[1], type=Rendered)

    def _write(self, data: bytes) -> None:
        with suppress(BrokenPipeError):  # reading its reply says so
            write_all(self._orders.fileno(), data)

    def _receive(self) -> tuple[int, bytes]:
        head = self._read(FRAME.size)
        size, kind = FRAME.unpack(head)
        return kind, self._read(size)

    def _read(self, size: int) -> bytes:
        poll = select.poll()
        poll.register(self._results, select.POLLIN)
        if not poll.poll(REPLY_S * 1000):
            self._process.kill()
        data = read_exactly(self._results.fileno(), size)
        if len(data) < size:
            raise _Died(self._process.wait())
        return data

    def close(self) -> None:
        self._orders.close()
        self._results.close()
        self._process.kill()
        self._process.wait()


class TemplateRenderer:
    """Renders one template. Its processes end with the context."""

    def __init__(
        self, template: PromptTemplate, *, may_be_constant: bool, line_bytes_max: int, processes: int
    ) -> None:  # fmt: skip
        if find_spec("jinja2") is None:
            require("jinja2", "a template", InvalidDataset)
        self._name = template.name
        self._order = CheckOrder(template, None, may_be_constant, line_bytes_max)
        self._count = max(1, min(processes, PROCESSES_MAX))
        self._idle: list[_Process] = []
        self._busy: deque[_Process] = deque()  # in the order of their chunks
        self._stopped = 0
        self._sample = ""

    def __enter__(self) -> TemplateRenderer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        for process in [*self._idle, *self._busy]:
            process.close()

    def check(self, columns: list[str]) -> None:
        """Raises: InvalidDataset if the template is none, or names other columns than these, or none of them."""
        self._idle.append(self._started(msgspec.structs.replace(self._order, columns=columns)))

    def _started(self, order: CheckOrder) -> _Process:
        process = _Process(order)
        try:
            refusal = process.check()
        except _Died as died:
            process.close()
            why = (
                "it takes too long to compile" if died.is_slow else f"compiling it ended its process ({died.in_words})"
            )
            raise InvalidDataset(f"{self._name}: {why}: make it simpler", code="invalid_template") from None
        except BaseException:
            process.close()
            raise
        if refusal is not None:
            process.close()
            raise InvalidDataset(refusal.message, code=refusal.code)
        return process

    def render(self, pieces: Iterator[Converted], *, are_whole_lines: bool) -> Iterator[Converted]:
        """Yield the pieces of one source with the prompts of their rows. Raises: InvalidDataset."""
        waiting: deque[Converted] = deque()  # of each busy process: what its piece says besides the lines
        for piece in pieces if are_whole_lines else whole_lines(pieces, self._order.line_bytes_max):
            for chunk in chunks_of(piece):
                if len(self._busy) == self._count:
                    yield self._next(waiting)
                self._send(chunk.data)
                waiting.append(chunk)
        while waiting:
            yield self._next(waiting)

    def _send(self, lines: bytes) -> None:
        process = self._idle.pop() if self._idle else self._started(self._order)
        self._busy.append(process)
        process.send(lines)

    def _next(self, waiting: deque[Converted]) -> Converted:
        process = self._busy[0]
        try:
            rendered = process.receive()
        except _Died:
            self._busy.popleft().close()
            data = self._one_by_one(process.chunk)
        else:
            self._idle.append(self._busy.popleft())
            data = rendered.data
            self._count_stopped(rendered.stopped, rendered.sample)
        return msgspec.structs.replace(waiting.popleft(), data=data)

    def _one_by_one(self, lines: bytes) -> bytes:
        """Render each line of a chunk alone, to find those that end a process."""
        rendered = []
        for line in io.BytesIO(lines):
            process = self._idle.pop() if self._idle else self._started(self._order)
            self._busy.appendleft(process)
            process.send(line)
            try:
                result = process.receive()
            except _Died as died:
                self._busy.popleft().close()
                code = "template_too_slow" if died.is_slow else "template_failed"
                cause = f"took more than {RENDER_CPU_S * 1000:g} ms" if died.is_slow else f"caused {died.in_words}"
                message = f"{self._name}: the row {cause}, and its process ended"
                rendered.append(with_fault(line.strip(), code, message) + b"\n")
                self._count_stopped(KILLED_WEIGHT, message)
            else:
                self._idle.append(self._busy.popleft())
                rendered.append(result.data)
                self._count_stopped(result.stopped, result.sample)
        return b"".join(rendered)

    def _count_stopped(self, rows: int, sample: str) -> None:
        self._stopped += rows
        self._sample = self._sample or sample
        if self._stopped > STOPPED_MAX:
            raise InvalidDataset(
                f"{self._sample}; so did many others, and the rest of the dataset is not tried: make the template "
                "simpler, or leave such rows out",
                code="template_too_slow",
            )
