"""A function behind Ray Serve: `serve_ray.py PORT`. Runs in Ray's own environment."""

from __future__ import annotations

import signal
import sys

import ray
from ray import serve
from starlette.requests import Request


@serve.deployment(num_replicas=1, max_ongoing_requests=100)
class Double:
    async def __call__(self, request: Request) -> dict:
        return {"data": 2 * (await request.json())["data"]}


if __name__ == "__main__":
    ray.init(include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1]), "access_log": False})
    serve.run(Double.bind(), logging_config={"enable_access_log": False})
    signal.sigwait({signal.SIGTERM})
    serve.shutdown()
    ray.shutdown()
