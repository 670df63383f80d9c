"""1,000,000 rows of 600 bytes from and to an S3 server, against the same from and to files: the whole command.

The server is moto's, on this machine and without encryption: one process of Python, which limits the wall clock.
Processor time is that of batchmill's processes alone. Aim: no more than 1.3 of the processor time through files.
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import harness
import rows
from function_rows import check_output

from batchmill.object_store.urls import open_store

CPU_RATIO_AIM = 1.3
WORKERS = 2
BUCKET = "bench"
START_S = 20.0


class Store:
    """An S3 server with one bucket."""

    def __init__(self, port: int) -> None:
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_REGION": "us-east-1", "NO_PROXY": "*",
        }  # fmt: skip
        self.objects = open_store(f"s3://{BUCKET}", self.environment)


@contextmanager
def serve(log: Path) -> Iterator[Store]:
    """Run the server until the end of the context."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    try:
        harness.wait_until(lambda: has_bucket(port), START_S, "the S3 server")
        yield Store(port)
    finally:
        harness.end_group(process)


def has_bucket(port: int) -> bool:
    """Whether the server answers and has made the bucket."""
    try:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request, timeout=5).close()
    except OSError:
        return False
    return True


def run(source: str, output: str, folder: Path, environment: dict[str, str] | None = None) -> harness.Finished:
    """One whole command with a fresh data directory."""
    model = f"function:{harness.FOLDER / 'functions.py'}:nothing"
    command = [harness.BATCHMILL, "run", source, "--model", model, "--workers", str(WORKERS), "-o", output]
    return harness.run_whole([*command, "--data-dir", folder / "data"], log=folder / "log", env=environment)


def through_files(source: Path, expected: int) -> harness.Finished:
    with harness.work_folder() as folder:
        finished = run(str(source), str(folder / "out.jsonl"), folder)
        check_output(folder / "out.jsonl", expected)
        return finished


def through_objects(store: Store, name: str, expected: int) -> harness.Finished:
    with harness.work_folder() as folder:
        finished = run(f"s3://{BUCKET}/{name}", f"s3://{BUCKET}/out.jsonl", folder, store.environment)
        with (folder / "out.jsonl").open("wb") as file:
            for piece in store.objects.read(store.objects.head("out.jsonl")):
                file.write(piece)
        check_output(folder / "out.jsonl", expected)
        store.objects.delete("out.jsonl")
        return finished


def main() -> None:
    """Run the pairs and print both sides."""
    arguments = harness.parse_arguments(__doc__, rows=1_000_000, row_bytes=600)
    source = rows.chat_rows(arguments.rows, arguments.row_bytes)
    files, objects = [], []
    with harness.work_folder() as folder, serve(folder / "server.log") as store:
        store.objects.put_file(source.name, source)
        for number in range(arguments.pairs):
            files.append(through_files(source, arguments.rows))
            objects.append(through_objects(store, source.name, arguments.rows))
            print(f"  pair {number + 1}: files {shown(files[-1])}; objects {shown(objects[-1])}", flush=True)
    print(f"{arguments.rows:,} rows of {arguments.row_bytes} bytes, {WORKERS} workers, {arguments.pairs} pairs")
    for name, finished in (("files", files), ("objects", objects)):
        harness.print_side(f"{name}, processor time", [each.cpu_s for each in finished], "s")
        harness.print_side(f"{name}, wall clock", [each.wall_s for each in finished], "s")
    ratio = statistics.median(each.cpu_s for each in objects) / statistics.median(each.cpu_s for each in files)
    harness.print_limit("processor time through objects, of that through files", ratio, CPU_RATIO_AIM, "x")


def shown(finished: harness.Finished) -> str:
    return f"{finished.cpu_s:.2f} s of processor time in {finished.wall_s:.2f} s"


if __name__ == "__main__":
    main()
