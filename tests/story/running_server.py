"""A `batchmill serve` process for the length of a test, on a port of its own that it keeps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Self

START_S, STOP_S = 60.0, 60.0
SHOWN_CHARS = 4000  # of a log, in a failure
OUR_FAULTS = ('"trace":', "internal error", "never retrieved", "was never awaited")


class RunningServer:
    """Serves `folder/batchmill.toml` with its data in `folder/data`. What it logs is in `folder/log`."""

    def __init__(self, folder: Path, *flags: str, env: dict[str, str] | None = None) -> None:
        self.folder, self._flags = folder, flags
        self.env = env or {}
        self.url = ""
        self.starts = 0
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def start(self) -> Self:
        """Return once it listens."""
        port = self.url.rpartition(":")[2] or "0"  # clients of the server before find this one
        words = [sys.executable, "-m", "batchmill", "serve", "--json", "--port", port, "--data-dir"]
        words += [str(self.folder / "data"), "--config", str(self.folder / "batchmill.toml"), *self._flags]
        self.starts += 1
        with (self.folder / "log").open("a") as log:
            self._process = subprocess.Popen(
                words, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True,
                start_new_session=True, env={**os.environ, **self.env},
            )  # fmt: skip
        process = self._process
        assert process.stdout is not None
        late = threading.Timer(START_S, process.kill)
        late.start()
        first = process.stdout.readline()
        late.cancel()
        assert first, f"the server did not start:\n{self.log[-SHOWN_CHARS:]}"
        self.url = json.loads(first)["url"]
        return self

    def kill(self) -> None:
        """End it at once: its workers find out by themselves."""
        self.signal(signal.SIGKILL)
        self.wait()

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def hold(self) -> None:
        """Stop it until it gets SIGCONT. Returns once it has stopped."""
        self.signal(signal.SIGSTOP)
        self.wait_until_held()

    def wait_until_held(self) -> None:
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)

    def wait(self) -> int:
        """Its exit code, once it has ended by itself."""
        assert self._process is not None and self._process.stdout is not None
        code = self._process.wait(STOP_S)
        self._process.stdout.close()
        return code

    def stop(self) -> int:
        """Ask it to end, as a service manager does; its exit code."""
        assert self._process is not None and self._process.stdout is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_S)
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            code = self.stop()
            is_sound = code == 0 and not any(word in self.log for word in OUR_FAULTS)
            assert kind is not None or is_sound, f"exit code {code}: {self.log[-SHOWN_CHARS:]}"
