"""An ASGI middleware for vLLM (`--middleware request_times.RequestTimes`) that notes when requests come and go.

REQUEST_TIMES names the file; it gets one line a request: the arrival of the request and the end of its reply, in
seconds since the epoch. Only the server that batchmill starts pays for it.
"""

import os
import time

WORK_PREFIX = "/v1/"


class RequestTimes:
    """Notes the two times of every POST under /v1."""

    def __init__(self, app) -> None:
        self.app = app
        self.file = open(os.environ["REQUEST_TIMES"], "a", buffering=1)  # noqa: SIM115 - as long as the server lives

    async def __call__(self, scope, receive, send) -> None:
        """Pass the request on, and note when it came and when its reply was sent."""
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith(WORK_PREFIX):
            await self.app(scope, receive, send)
            return
        arrival = time.time()
        await self.app(scope, receive, send)
        self.file.write(f"{arrival:.6f} {time.time():.6f}\n")
