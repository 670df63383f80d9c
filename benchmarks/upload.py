"""Upload of a large file: POST /v1/files of `batchmill serve` against a bare uvicorn that copies a body to a file.

Both are sent the same bytes by the same client, with sendfile. batchmill reads a form, finds its end, makes the file
and its record durable and answers then; the bare copy does none of this. Aims: at least 0.6 x, under 300 MiB resident.
"""

from __future__ import annotations

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

import harness

RATIO_AIM, MEMORY_AIM_MIB = 0.6, 300
GET_EVERY_S = 0.010
BOUNDARY = "boundary-of-a-benchmark"
MIB = 1024 * 1024
CONFIG = '[models.nothing]\nengine = "function"\nsource = "{functions}:nothing"\n'


class Side:
    """A server process and the address it printed."""

    def __init__(self, command: list[str | Path], log: Path, *, is_json: bool = False) -> None:
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [str(word) for word in command], stdout=subprocess.PIPE, stderr=file, start_new_session=True
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode().strip()
        if not line:
            raise harness.CommandFailed(log.read_text()[-2000:])
        self.url = json.loads(line)["url"] if is_json else line
        self.address = self.url.removeprefix("http://")

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        harness.end_group(self.process)


def form_around(name: str) -> tuple[bytes, bytes]:
    """What stands before and behind the bytes of a file in a form."""
    part = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{{}}"{{}}\r\n\r\n'
    head = part.format("purpose", "") + "batch\r\n" + part.format("file", f'; filename="{name}"')
    return head.encode(), f"\r\n--{BOUNDARY}--\r\n".encode()


def send(side: Side, source: Path, *, as_form: bool) -> tuple[float, bytes]:
    """Post a file; (seconds from the first byte sent to the last received, the body of the reply)."""
    head, tail = form_around("in.jsonl") if as_form else (b"", b"")
    media = f"multipart/form-data; boundary={BOUNDARY}" if as_form else "application/octet-stream"
    size = source.stat().st_size
    request = (
        f"POST /v1/files HTTP/1.1\r\nHost: {side.address}\r\nContent-Type: {media}\r\n"
        f"Content-Length: {len(head) + size + len(tail)}\r\nConnection: close\r\n\r\n"
    )
    host, port = side.address.split(":")
    with socket.create_connection((host, int(port))) as sock, source.open("rb") as file:
        began = time.perf_counter()
        sock.sendall(request.encode() + head)
        sent = 0
        while sent < size:
            sent += os.sendfile(sock.fileno(), file.fileno(), sent, size - sent)
        sock.sendall(tail)
        reply = http.client.HTTPResponse(sock)
        reply.begin()
        body = reply.read()
        seconds = time.perf_counter() - began
    if reply.status != 200:
        raise harness.CommandFailed(f"{reply.status}: {body[:500]!r}")
    return seconds, body


def delete(side: Side, file_id: str) -> None:
    connection = http.client.HTTPConnection(side.address, timeout=60)
    connection.request("DELETE", f"/v1/files/{file_id}")
    connection.getresponse().read()
    connection.close()


def rate(side: Side, source: Path, *, as_form: bool) -> float:
    """MiB/s of one upload; the disk is at rest before, and what was written is removed afterwards."""
    os.sync()
    seconds, body = send(side, source, as_form=as_form)
    if as_form:
        file = json.loads(body)
        if file["bytes"] != source.stat().st_size:
            raise harness.CommandFailed(f"bytes are missing: {file}")
        delete(side, file["id"])
    return source.stat().st_size / MIB / seconds


def gets_beside(side: Side, source: Path) -> list[float]:
    """Milliseconds of GETs, one every 10 ms, while a file is uploaded."""
    took: list[float] = []
    done = threading.Event()

    def ask() -> None:
        connection = http.client.HTTPConnection(side.address, timeout=60)
        while not done.wait(GET_EVERY_S):
            began = time.perf_counter()
            connection.request("GET", "/v1/files?limit=1")
            connection.getresponse().read()
            took.append(1000 * (time.perf_counter() - began))
        connection.close()

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        _, body = send(side, source, as_form=True)
    finally:
        done.set()
        asking.join()
    delete(side, json.loads(body)["id"])
    return sorted(took)


def write_lines(path: Path, size: int) -> None:
    """JSON lines of about 600 bytes, cut at `size`."""
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 500}]})
    with path.open("wb") as file:
        number = 0
        while file.tell() < size:
            some = range(number, number + 1000)
            file.write("".join(f'{{"custom_id":"r{n:09}","url":"/v1/x","body":{body}}}\n' for n in some).encode())
            number += 1000
        file.truncate(size)


def main() -> None:
    """Upload in turn to each server and print the medians."""
    arguments = harness.parse_arguments(__doc__, pairs=5, mib=1024)
    source = harness.made_input(f"upload-{arguments.mib}.jsonl", lambda path: write_lines(path, arguments.mib * MIB))
    with harness.work_folder() as folder:
        config = folder / "batchmill.toml"
        config.write_text(CONFIG.format(functions=harness.FOLDER / "functions.py"))
        serve = ["serve", "--json", "--port", "0", "--config", config, "--data-dir", folder / "data"]
        copy = [sys.executable, harness.FOLDER / "peers" / "plain_copy.py", folder / "copy"]
        ours = Side([harness.BATCHMILL, *serve], folder / "log", is_json=True)
        plain, durable = Side(copy, folder / "plain.log"), Side([*copy, "sync"], folder / "durable.log")
        try:
            figures = harness.alternate(
                arguments.pairs,
                {
                    "POST /v1/files": lambda: rate(ours, source, as_form=True),
                    "plain copy": lambda: rate(plain, source, as_form=False),
                    "plain copy with fsync": lambda: rate(durable, source, as_form=False),
                },
            )
            took = gets_beside(ours, source)
            memory = harness.read_status(ours.process.pid)
        finally:
            for side in (ours, plain, durable):
                side.close()
    for name, values in figures.items():
        harness.print_side(name, values, "MiB/s")
    for name in list(figures)[1:]:
        harness.print_ratio(figures["POST /v1/files"], figures[name], RATIO_AIM, name)
    harness.print_limit("most memory of the server", (memory or 0) / MIB, MEMORY_AIM_MIB, "MiB")
    print(
        f"GETs beside an upload: {len(took)}, median {statistics.median(took):.1f} ms, "
        f"p99 {took[int(0.99 * len(took))]:.1f} ms, max {took[-1]:.1f} ms"
    )


if __name__ == "__main__":
    main()
