"""Drives main.py as a real process over a socket pair, as the worker does, one frame at a time."""

import contextlib
import json
import mmap
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import batchmill.function_runtime
from batchmill.function_runtime import frames, printing

PROGRAM = Path(batchmill.function_runtime.__file__).parent / "main.py"
TIMEOUT_S = 20
# Another interpreter to run the function's process with, as a deployment's own environment has one.
PYTHON = os.environ.get("BATCHMILL_FUNCTION_PYTHON", sys.executable)


def has_packages(*names):
    """Whether that interpreter finds these packages, without their import."""
    code = "import importlib.util, sys; sys.exit(not all(map(importlib.util.find_spec, sys.argv[1:])))"
    return subprocess.run([PYTHON, "-c", code, *names], check=False).returncode == 0


class Driver:
    """A function's process. `code` is written to app.py; `files` beside it."""

    def __init__(self, folder, code, *, source="app.py:f", files=None, python=PYTHON, env=None, **start):
        for name, text in {"app.py": code, **(files or {})}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(TIMEOUT_S)
        memory = os.memfd_create("progress")
        os.ftruncate(memory, printing.BYTES)
        self._progress = mmap.mmap(memory, printing.BYTES)
        self.log = folder.parent / f"{folder.name}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [python, str(PROGRAM), str(theirs.fileno()), str(memory)],
                pass_fds=[theirs.fileno(), memory],
                stdout=log,
                stderr=log,
                env=env,
            )
        theirs.close()
        os.close(memory)
        self._reader, self._came, self._next_id, self._held = frames.Reader(), [], 0, None
        defaults = {"batch_size": 0, "batch_window_s": None, "frame_columns": [], "received_shapes": False}
        self.send({"kind": "start", "source": source, "folder": str(folder), "memory_bytes": None, **defaults, **start})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.socket.close()

    def send(self, meta, buffers=()):
        data = b"".join(frames.pack(meta, buffers))
        if self._held is None:
            self.socket.sendall(data)
        else:
            self._held += data

    @contextlib.contextmanager
    def together(self):
        """What is sent in here arrives at once."""
        self._held = bytearray()
        yield
        data, self._held = self._held, None
        self.socket.sendall(data)

    def receive(self):
        """The next frame. Raises: EOFError when the process has gone, TimeoutError."""
        while not self._came:
            data = self.socket.recv(1 << 20)
            if not data:
                raise EOFError(self.log.read_text())
            self._came += self._reader.feed(data)
        return self._came.pop(0)

    def ready(self):
        """The interface; fails with what the process says."""
        meta, _ = self.receive()
        assert meta["kind"] == "ready", meta.get("message")
        self.ready_meta = meta
        return meta["interface"]

    def refused(self):
        """The message of a function that cannot be used; its process has ended."""
        meta, _ = self.receive()
        assert meta["kind"] == "failed", meta
        assert self.process.wait(TIMEOUT_S) == 1
        return meta["message"]

    def ask(self, calls, *, layout="positional", rows=None, from_job=False, exact=False, slot=-1, buffers=()):
        """Send an ask; returns its id."""
        self._next_id += 1
        text = calls if isinstance(calls, bytes) else json.dumps(calls).encode()
        count = rows if rows is not None else len(calls)
        meta = {
            "kind": "ask",
            "id": self._next_id,
            "rows": count,
            "layout": layout,
            "from_job": from_job,
            "staged": from_job,
            "exact": exact,
            "slot": slot,
        }
        self.send(meta, [text, *buffers])
        return self._next_id

    def answer(self, ask_id=None):
        """(values, errors) of the next ask that is answered whole, or of this one."""
        values, errors = [], {}
        while True:
            meta, buffers = self.receive()
            assert meta["kind"] == "results", meta
            assert ask_id is None or meta["id"] == ask_id
            assert meta["layout"] == "rows", meta
            ask_id = meta["id"]
            assert meta["first"] == len(values)
            self.last = meta
            part = json.loads(buffers[0])
            assert len(part) == meta["rows"]
            values += part
            errors.update({int(row): error for row, error in meta["errors"].items()})
            if len(values) >= self.rows.get(ask_id, len(values)):
                return values, errors

    rows: dict = {}

    def call(self, calls, **options):
        """(values, errors) of one ask."""
        ask_id = self.ask(calls, **options)
        self.rows = {ask_id: options.get("rows") or len(calls)}
        return self.answer(ask_id)

    def values(self, calls, **options):
        values, errors = self.call(calls, **options)
        assert errors == {}
        return values

    def blamed(self):
        count = struct.unpack_from("<I", self._progress)[0]
        return [struct.unpack_from("<QII", self._progress, 4 + 16 * at) for at in range(count)]

    def slot(self, number):
        """The id of the request that has begun and was given this slot."""
        return struct.unpack_from("<I", self._progress, printing.ENTRIES_BYTES + 4 * number)[0]

    def stop(self):
        self.send({"kind": "stop"})
        return self.process.wait(TIMEOUT_S)
