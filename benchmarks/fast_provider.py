"""A provider with OpenAI's Files and Batches that answers at once: every batch has ended when it has been created.

`python benchmarks/fast_provider.py --port N`. It reads of each line its custom_id, and knows no faults.
"""

from __future__ import annotations

import argparse
import asyncio
import time

import msgspec
from aiohttp import web
from msgspec import Struct

REPLY = (
    b'{"id":"batch_req","custom_id":"%b","response":{"status_code":200,"request_id":"req","body":{"id":"chatcmpl",'
    b'"object":"chat.completion","model":"bench","choices":[{"index":0,"message":{"role":"assistant","content":'
    b'"an answer of a few words"},"finish_reason":"stop"}],"usage":{"prompt_tokens":60,"completion_tokens":6}}},'
    b'"error":null}'
)


class _Line(Struct, gc=False):
    custom_id: str


class FastProvider:
    """Files and batches in memory; a file that has been read is dropped with its batch."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}
        self._batches: dict[str, dict[str, object]] = {}
        self._began = 0.0  # seconds since the epoch, of the first upload
        self._decoder = msgspec.json.Decoder(_Line)

    async def upload(self, request: web.Request) -> web.Response:
        """A multipart form, cut by hand: its file is the last part."""
        self._began = self._began or time.time()
        data = await request.read()
        boundary = b"\r\n--" + request.headers["Content-Type"].partition("boundary=")[2].encode()
        start = data.index(b"\r\n\r\n", data.index(b"filename=")) + 4
        id = f"file-{len(self._files)}"
        self._files[id] = data[start : data.rindex(boundary, 0, len(data) - 4)]
        return web.json_response({"id": id, "object": "file", "status": "processed"})

    async def create(self, request: web.Request) -> web.Response:
        """The batch, and its output with it."""
        order = await request.json()
        lines = self._files[order["input_file_id"]].splitlines()
        decode = self._decoder.decode
        output = f"output-{len(self._batches)}"
        self._files[output] = b"\n".join([REPLY % decode(line).custom_id.encode() for line in lines])
        id = f"batch-{len(self._batches)}"
        self._batches[id] = {
            "id": id,
            "object": "batch",
            "status": "completed",
            "created_at": int(time.time()),
            "output_file_id": output,
            "request_counts": {"total": len(lines), "completed": len(lines), "failed": 0},
            **order,
        }
        return web.json_response(self._batches[id])

    async def look(self, request: web.Request) -> web.Response:
        return web.json_response(self._batches[request.match_info["id"]])

    async def began(self, _: web.Request) -> web.Response:
        return web.Response(text=str(self._began))

    async def content(self, request: web.Request) -> web.Response:
        return web.Response(body=self._files.pop(request.match_info["id"]))

    async def delete(self, request: web.Request) -> web.Response:
        self._files[request.match_info["id"]] = b""
        return web.json_response({"id": request.match_info["id"], "deleted": True})


async def serve(port: int) -> None:
    """Until it is killed."""
    provider = FastProvider()
    app = web.Application(client_max_size=1024**3)
    app.add_routes(
        [
            web.post("/v1/files", provider.upload),
            web.get("/v1/files/{id}/content", provider.content),
            web.delete("/v1/files/{id}", provider.delete),
            web.post("/v1/batches", provider.create),
            web.get("/v1/batches/{id}", provider.look),
            web.get("/v1/began", provider.began),
        ]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    asyncio.run(serve(parser.parse_args().port))
