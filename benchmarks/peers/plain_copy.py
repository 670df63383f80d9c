"""A bare uvicorn that writes the body of a request to a file: the least that an upload can cost. FILE [sync]"""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import uvicorn


class PlainCopy:
    def __init__(self, path: str, *, sync: bool) -> None:
        self._path, self._sync = path, sync

    async def __call__(self, scope, receive, send) -> None:
        with open(self._path, "wb", buffering=0) as file:
            while True:
                message = await receive()
                file.write(message.get("body", b""))
                if not message.get("more_body"):
                    break
            if self._sync:
                os.fsync(file.fileno())
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"{}"})


def main() -> None:
    sock = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{sock.getsockname()[1]}", flush=True)
    app = PlainCopy(sys.argv[1], sync="sync" in sys.argv[2:])
    config = uvicorn.Config(app, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False)
    asyncio.run(uvicorn.Server(config).serve(sockets=[sock]))


if __name__ == "__main__":
    main()
