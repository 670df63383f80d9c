"""What the figures of live requests share: `batchmill serve` with a model, its engine's socket, and timed requests."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import harness
from llm_speed import MODEL, engine_environment

CHAT = "/v1/chat/completions"
REPLY_S = 300.0  # the first request waits for the engine
TEXT = "Say: one small example"
JSON = {"Content-Type": "application/json"}


class Server:
    """A running `batchmill serve`, as its clients see it."""

    def __init__(self, process: subprocess.Popen[bytes], host: str, port: int, log: Path) -> None:
        self.process, self.host, self.port, self.log = process, host, port, log

    def connect(self) -> http.client.HTTPConnection:
        """A connection that is kept alive."""
        return http.client.HTTPConnection(self.host, self.port, timeout=REPLY_S)

    def engine_socket(self) -> str:
        """The Unix socket of the engine server below it."""
        for pid in harness.tree_of(self.process.pid):
            try:
                words = Path("/proc", str(pid), "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue  # it ended meanwhile
            for word in words:
                if word.startswith("--uds="):
                    return word.removeprefix("--uds=")
        raise harness.CommandFailed("no engine server is running")


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=REPLY_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@contextmanager
def serving(config: str) -> Iterator[Server]:
    """A server in a folder of its own, with this configuration."""
    with harness.work_folder() as folder:
        (folder / "batchmill.toml").write_text(config)
        command = [harness.BATCHMILL, "serve", "--json", "--port", "0", "--config", folder / "batchmill.toml"]
        command += ["--data-dir", folder / "data"]
        with (folder / "log").open("wb") as log:
            environment = {**os.environ, **engine_environment()}
            process = subprocess.Popen(
                [str(word) for word in command],
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            if not first:
                raise harness.CommandFailed((folder / "log").read_text()[-2000:])
            host, _, port = json.loads(first)["url"].removeprefix("http://").rpartition(":")
            yield Server(process, host, int(port), folder / "log")
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(harness.STOP_GRACE_S * 3)
            except subprocess.TimeoutExpired:
                harness.end_group(process)


def llm_config(*, in_flight_max: int = 0, **engine_args: str) -> str:
    """The configuration of a server with `examples/tiny-llm` as the model `tiny`."""
    flags = {"max-model-len": 2048, **engine_args}
    lines = ["[models.tiny]", 'engine = "vllm"', f'source = "{MODEL}"']
    lines += ["engine_args = { " + ", ".join(f'"{name}" = {json.dumps(value)}' for name, value in flags.items()) + " }"]
    if in_flight_max:
        lines += [f"limits = {{ in_flight_max = {in_flight_max} }}"]
    return "\n".join(lines) + "\n"


def function_config(name: str, workers: int) -> str:
    """The configuration of a server with one of `functions.py` as a model."""
    source = f"{harness.FOLDER / 'functions.py'}:{name}"
    return f'[models.{name}]\nengine = "function"\nsource = "{source}"\nworkers = {workers}\n'


def chat_body(tokens: int) -> bytes:
    """A chat request that is answered with exactly so many tokens."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": TEXT}], "temperature": 0}
    return json.dumps({**body, "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}).encode()


def ask(connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None) -> dict:
    """One request with JSON, its reply as JSON. Raises CommandFailed for any status but 200."""
    connection.request(method, path, body, JSON if body is not None else {})
    reply = connection.getresponse()
    data = reply.read()
    if reply.status != 200:
        raise harness.CommandFailed(f"{method} {path}: {reply.status} {data[:500]!r}")
    return json.loads(data)


def time_chat(connection: http.client.HTTPConnection, body: bytes) -> float:
    """Milliseconds of one chat request."""
    began = time.perf_counter()
    ask(connection, "POST", CHAT, body)
    return (time.perf_counter() - began) * 1000


def upload(connection: http.client.HTTPConnection, source: Path) -> str:
    """The id of the batch file that `source` has become; it is sent as it is read."""
    boundary = "boundary-of-a-benchmark"
    part = f'--{boundary}\r\nContent-Disposition: form-data; name="{{}}"{{}}\r\n\r\n'
    head = (part.format("purpose", "") + "batch\r\n" + part.format("file", '; filename="in.jsonl"')).encode()
    tail = f"\r\n--{boundary}--\r\n".encode()

    def pieces() -> Iterator[bytes]:
        yield head
        with source.open("rb") as file:
            while piece := file.read(1 << 20):
                yield piece
        yield tail

    length = str(len(head) + source.stat().st_size + len(tail))
    media = f"multipart/form-data; boundary={boundary}"
    connection.request("POST", "/v1/files", pieces(), {"Content-Type": media, "Content-Length": length})
    reply = connection.getresponse()
    data = reply.read()
    if reply.status != 200:
        raise harness.CommandFailed(f"POST /v1/files: {reply.status} {data[:500]!r}")
    return json.loads(data)["id"]


def start_batch(connection: http.client.HTTPConnection, source: Path) -> str:
    """The id of a batch over a file of chat rows."""
    asked = {"input_file_id": upload(connection, source), "endpoint": CHAT, "completion_window": "24h"}
    return ask(connection, "POST", "/v1/batches", json.dumps(asked).encode())["id"]


def named_rows(source: Path, model: str) -> Path:
    """The same rows, naming their model: a server has no default."""

    def write(path: Path) -> None:
        with source.open("rb") as lines, path.open("wb") as file:
            file.writelines(line.replace(b'"model":""', b'"model":"%b"' % model.encode(), 1) for line in lines)

    return harness.made_input(f"{model}-{source.name}", write)


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
