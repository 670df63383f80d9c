"""A real `batchmill serve` on a free port, as a process of its own: waited for until it answers, ended by its id."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

UP_S = 60.0
END_S = 60.0


class RunningServer:
    """Its configuration, data and log lie in `folder`; paths in the configuration are relative to it."""

    def __init__(self, folder: Path, config: str = "", *, env: Mapping[str, str] | None = None) -> None:
        self.folder, self._env = folder, dict(env or {})
        self.data_dir, self.log = folder / "data", folder / "serve.log"
        (folder / "batchmill.toml").write_text(config)
        self.url = ""  # "http://127.0.0.1:PORT"; the openai package wants url + "/v1"
        self.grpc = ""  # "127.0.0.1:PORT", of one started with `--grpc-port`
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def start(self, *words: str) -> RunningServer:
        """Start it, on the port it had before if it ran before, and return once it answers."""
        port = self.url.rpartition(":")[2] or "0"
        line = [sys.executable, "-m", "batchmill", "--json", "--data-dir", str(self.data_dir), "serve", "--port", port]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*line, *words], cwd=self.folder, env=self._environment(), stdout=subprocess.PIPE, stderr=log,
                text=True, start_new_session=True,
            )  # fmt: skip
        assert self._process.stdout is not None
        output = select.select([self._process.stdout], [], [], UP_S)[0] and self._process.stdout.readline()
        message = json.loads(output) if output else {}
        if message.get("type") != "serving":
            self.kill()
            raise AssertionError(f"the server did not start: {message}\n{self.log.read_text()}")
        self.url, self.grpc = message["url"], message.get("grpc", "")
        return self

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("BATCHMILL_")}
        vllm = {name: os.environ[name] for name in ("BATCHMILL_VLLM_PYTHON",) if name in os.environ}
        return kept | vllm | self._env

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Its exit code."""
        assert self._process is not None
        code = self._process.wait(END_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code

    def stop(self) -> int:
        """SIGTERM, and wait until it has drained; its exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> int:
        """SIGKILL, at once; its exit code."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended, and is no child of this process
                self.signal(signal.SIGKILL)
        return self.wait()

    def close(self) -> None:
        """However it stands: nothing of it is left."""
        if self._process is not None and self._process.poll() is None:
            self.signal(signal.SIGTERM)
            try:
                self.wait()
            except subprocess.TimeoutExpired:
                self.kill()

    def logged(self) -> list[dict[str, Any]]:
        """The lines of its log so far that are JSON."""
        lines = self.log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]


@contextlib.contextmanager
def running_server(
    folder: Path, config: str = "", *words: str, env: Mapping[str, str] | None = None
) -> Iterator[RunningServer]:
    """A server that answers for as long as the context lasts. `words` are further flags of `batchmill serve`."""
    server = RunningServer(folder, config, env=env)
    try:
        yield server.start(*words)
    finally:
        server.close()
