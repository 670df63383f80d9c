"""Peak memory of the server while a client downloads a result file of 1 GiB as Predibase's API has it.

The rows run through a stand-in for vLLM with long answers; the file is fetched by its signed link, as the `predibase`
package does, but read piece by piece. Beside it the same file from a bare uvicorn that reads and sends it. Aim: under
300 MiB resident.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import harness

MEMORY_AIM_MIB = 300
ANSWER_BYTES = 256 * 1024
MIB = 1024 * 1024
READ_BYTES = 1024 * 1024
JOB_S = 900.0
LOOK_S = 0.05
SLOW_S, SLOW_CLIENTS = 5.0, 4
JSON = {"Content-Type": "application/json"}
LONG_ANSWERS = harness.FOLDER / "long_answers"
CONFIG = """
[models.long]
engine = "vllm"
source = "{model}"
python = "{python}"

[server]
body_bytes_max = 67108864
"""
BARE = """
import sys, uvicorn
from starlette.applications import Starlette
from starlette.responses import FileResponse
from starlette.routing import Route
app = Starlette(routes=[Route("/file", lambda request: FileResponse(sys.argv[1]))])
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
"""


class Side:
    """A server, how it is reached, and the most memory its process held since `forget`."""

    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self.process, self.address = process, address

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """A call of the API; what it answered. Raises CommandFailed for an error."""
        connection = http.client.HTTPConnection(self.address, timeout=JOB_S)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        headers = {"Content-Type": "text/plain"} if isinstance(body, bytes) else JSON
        connection.request(method, path, data, headers)
        reply = connection.getresponse()
        received = reply.read()
        connection.close()
        if reply.status >= 300:
            raise harness.CommandFailed(f"{method} {path}: {reply.status} {received[:500]!r}")
        return json.loads(received) if received else None

    def forget(self) -> None:
        """Begin a new high-water mark."""
        Path("/proc", str(self.process.pid), "clear_refs").write_text("5")

    def peak_mib(self) -> float:
        return (harness.read_status(self.process.pid) or 0) / MIB

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        harness.end_group(self.process)


def serve(folder: Path) -> Side:
    """A batchmill server whose vLLM is the stand-in."""
    config = folder / "batchmill.toml"
    model = harness.ROOT / "examples" / "tiny-llm"
    config.write_text(CONFIG.format(model=model, python=sys.executable))
    command = [harness.BATCHMILL, "serve", "--json", "--port", "0", "--config", config, "--data-dir", folder / "data"]
    environment = {**os.environ, "PYTHONPATH": str(LONG_ANSWERS), "LONG_ANSWER_BYTES": str(ANSWER_BYTES)}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(word) for word in command], stdout=subprocess.PIPE, stderr=log, env=environment, start_new_session=True
        )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise harness.CommandFailed((folder / "log").read_text()[-2000:])
    return Side(process, json.loads(line)["url"].removeprefix("http://"))


def serve_bare(path: Path, port: int) -> Side:
    process = subprocess.Popen([sys.executable, "-c", BARE, str(path), str(port)], start_new_session=True)
    side = Side(process, f"127.0.0.1:{port}")

    def answers() -> bool:
        try:
            connection = http.client.HTTPConnection(side.address, timeout=5)
            connection.request("HEAD", "/file")
            return connection.getresponse().status < 500
        except OSError:
            return False

    harness.wait_until(answers, 30, "the bare server")
    return side


def path_of(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.path}?{parts.query}" if parts.query else parts.path


def upload(side: Side, rows: int) -> None:
    """A dataset called "long"."""
    lines = []
    for number in range(rows):
        body = {"model": "", "messages": [{"role": "user", "content": f"tell {number}"}]}
        row = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
        lines.append(json.dumps(row))
    arriving = side.ask("POST", "/v2/datasets/upload", {"fileName": "in.jsonl", "mimeType": "text/plain"})
    side.ask("PUT", path_of(arriving["presignedUrl"]), "\n".join(lines).encode())
    side.ask("PUT", "/v2/datasets/upload", {"name": "long", "uploadToken": arriving["uploadToken"]})

    def is_connected() -> bool:
        found = side.ask("GET", "/v1/datasets/name/long?connectionName=file_uploads")
        if found.get("lastError"):
            raise harness.CommandFailed(found["lastError"])
        return found["status"] == "connected"

    harness.wait_until(is_connected, 120, "the dataset")


def run(side: Side) -> str:
    """The id of a job over it, once it has ended."""
    settings = dict.fromkeys(["customArgs", "hfToken", "loraxImageTag", "quantization", "backend"])
    job = side.ask(
        "POST", "/v2/batch-inference", {"dataset": "long", "serverConfig": {"baseModel": "long", **settings}}
    )
    until = time.monotonic() + JOB_S
    while (status := side.ask("GET", f"/v2/batch-inference/{job['uuid']}")["status"]) in ("queued", "running"):
        if time.monotonic() > until:
            raise harness.CommandFailed(f"the job is {status} after {JOB_S:.0f} s")
        time.sleep(LOOK_S)
    if status != "completed":
        raise harness.CommandFailed(f"the job is {status}")
    return job["uuid"]


def fetch(side: Side, path: str) -> tuple[int, float, str]:
    """(bytes, seconds, sha256) of a download."""
    connection = http.client.HTTPConnection(side.address, timeout=JOB_S)
    began = time.perf_counter()
    connection.request("GET", path)
    reply = connection.getresponse()
    if reply.status != 200:
        raise harness.CommandFailed(f"{path}: {reply.status} {reply.read(500)!r}")
    size, digest = 0, hashlib.sha256()
    while piece := reply.read(READ_BYTES):
        size += len(piece)
        digest.update(piece)
    connection.close()
    return size, time.perf_counter() - began, digest.hexdigest()


def fetch_slowly(side: Side, path: str, seconds: float) -> None:
    """A client that takes little at a time: what is ready for it must not pile up."""
    connection = http.client.HTTPConnection(side.address, timeout=JOB_S)
    connection.request("GET", path)
    reply = connection.getresponse()
    until = time.monotonic() + seconds
    while time.monotonic() < until and reply.read(64 * 1024):
        time.sleep(0.01)
    connection.close()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def link(side: Side, job: str) -> str:
    """The path of a new link to a job's results."""
    return path_of(side.ask("GET", f"/v2/batch-inference/{job}/results")["url"])


def compare(side: Side, bare: Side, job: str, pairs: int) -> float:
    """Download the file from both, in pairs; the median of bare seconds / batchmill's."""
    ratios = []
    for _ in range(pairs):
        size, seconds, digest = fetch(side, link(side, job))
        bare_size, bare_seconds, bare_digest = fetch(bare, "/file")
        assert (size, digest) == (bare_size, bare_digest), "both send the same bytes"
        ratios.append(bare_seconds / seconds)
        rates = f"batchmill {size / MIB / seconds:,.0f} MiB/s, bare {size / MIB / bare_seconds:,.0f} MiB/s"
        print(f"{size / MIB:,.0f} MiB: {rates}", flush=True)
    return statistics.median(ratios)


def fetch_by_many(side: Side, job: str, clients: int) -> None:
    """Slow clients beside one another."""
    slow = [
        threading.Thread(target=fetch_slowly, args=(side, path, SLOW_S))
        for path in [link(side, job) for _ in range(clients)]
    ]
    for each in slow:
        each.start()
    for each in slow:
        each.join()


def main() -> None:
    arguments = harness.parse_arguments(__doc__ or "", pairs=3, mib=1024)
    with harness.work_folder() as folder:
        side = serve(folder)
        try:
            upload(side, arguments.mib * MIB // ANSWER_BYTES)
            job = run(side)
            print(f"peak while the job ran: {side.peak_mib():.0f} MiB", flush=True)
            (file,) = (folder / "data").glob("jobs/*/results.jsonl")
            bare = serve_bare(file, free_port())
            try:
                side.forget()
                ratio = compare(side, bare, job, arguments.pairs)
                fetch_by_many(side, job, SLOW_CLIENTS)
                print(f"speed beside the bare server: {ratio:.2f} x (median)")
                received = f"{side.peak_mib():.0f} MiB, {SLOW_CLIENTS} slow clients among them"
                print(f"peak while downloading: {received} (aim: {MEMORY_AIM_MIB})")
            finally:
                bare.close()
        finally:
            side.close()


if __name__ == "__main__":
    main()
