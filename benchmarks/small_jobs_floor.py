"""The least that the requests of `small_jobs.py` cost: uvicorn and Starlette, whose handlers do nothing.

The same 16 clients upload, create and poll. A batch has ended with the poll of a given number; nothing is checked,
stored, run or logged.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
from pathlib import Path

import harness
import processor_time
import small_jobs
import uvicorn
from live_server import Server
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

POLLS = 2  # of a job that ends within 40 ms


def serve(listener: socket.socket, polls: int) -> None:
    """Serve until the process is killed."""
    left: dict[str, int] = {}
    counts = {"completed": small_jobs.ROWS}

    def reply(**fields: object) -> Response:
        return Response(json.dumps(fields).encode(), media_type="application/json")

    async def upload(request: Request) -> Response:
        await request.body()
        return reply(id="file-1")

    async def create(request: Request) -> Response:
        await request.body()
        batch = f"batch_{os.urandom(8).hex()}"
        left[batch] = polls
        return reply(id=batch, status="in_progress")

    async def poll(request: Request) -> Response:
        batch = request.path_params["batch"]
        left[batch] -= 1
        if left[batch]:
            return reply(id=batch, status="in_progress")
        del left[batch]
        return reply(id=batch, status="completed", request_counts=counts)

    routes = [
        Route("/v1/files", upload, methods=["POST"]),
        Route("/v1/batches", create, methods=["POST"]),
        Route("/v1/batches/{batch}", poll),
    ]
    config = uvicorn.Config(Starlette(routes=routes), http="httptools", access_log=False, log_level="error")
    uvicorn.Server(config).run(sockets=[listener])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--polls", type=int, default=POLLS)
    arguments = parser.parse_args()
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sends without delay
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    process = multiprocessing.get_context("fork").Process(target=serve, args=(listener, arguments.polls), daemon=True)
    process.start()
    assert process.pid is not None
    server = Server(process, *listener.getsockname(), Path(tempfile.gettempdir()))  # type: ignore[arg-type]  # a process
    small_jobs.run_clients(server, 1.0, creates=True)
    before = processor_time.own_cpu_s(process.pid)
    rate, submit_ms = small_jobs.run_clients(server, arguments.seconds, creates=True)
    spent_s = processor_time.own_cpu_s(process.pid) - before
    process.kill()
    process.join()
    jobs = len(submit_ms)
    if not jobs:
        raise harness.CommandFailed("no job was created")
    median = statistics.median(submit_ms)
    print(f"{jobs} jobs, {arguments.polls} polls each: {rate:,.0f} jobs/s, submit p50 {median:.1f} ms")
    print(f"    server: {1000 * spent_s / jobs:.2f} ms of processor time a job, {2 + arguments.polls} requests")


if __name__ == "__main__":
    main()
