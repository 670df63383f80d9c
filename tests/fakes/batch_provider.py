"""A provider with OpenAI's Files and Batches, whose faults are told beforehand or drawn from a seed.

In this process as `async with BatchProvider() as provider`; by itself with `python -m fakes.batch_provider`: it
prints its address and tells what happened at `/_fake/state`. What it ran it has billed: `billed` counts the texts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

# What a call meets instead of its answer. "lost": it is done, and the reply does not arrive.
CALL_FAULTS = ("429", "429_now", "500", "503", "slow", "hung", "reset", "truncated", "html", "lost")
# What becomes of a batch. "completes" is the only one without a fault.
FATES = (
    "loses",  # some rows are in no file
    "repeats",  # some rows are there twice
    "strange",  # rows are there that nobody asked for
    "overloaded",  # completed, and some rows have status 500
    "bad_rows",  # completed, and some rows have errors in the error file
    "no_files",  # completed, without any file
    "garbled",  # one line of the output is cut
    "expires",  # half of the rows ran; the others are batch_expired
    "cancelled",  # somebody else cancels it half way
    "fails",  # refused after its upload was read, for one of its lines
    "refused",  # refused as a whole
    "queue_full",  # no room for its tokens now
    "never_ends",
)
QUIET_TURNS = 20  # of the event loop
OPERATIONS = ("upload", "create", "look", "cancel", "list", "files", "content", "delete")


@dataclass
class Batch:
    """One batch. It runs when it is looked at for the `looks`-th time."""

    id: str
    input: str
    endpoint: str
    metadata: dict[str, str]
    lines: list[dict[str, Any]]
    fate: str
    looks: int
    created_at: float = field(default_factory=time.time)
    status: str = "validating"
    output: str | None = None
    errors_file: str | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)
    completed: int = 0
    failed: int = 0

    @property
    def is_running(self) -> bool:
        return self.status not in ("completed", "failed", "expired", "cancelled")

    def view(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "input_file_id": self.input,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output,
            "error_file_id": self.errors_file,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "created_at": int(self.created_at),
            "metadata": self.metadata,
            "request_counts": {"total": len(self.lines), "completed": self.completed, "failed": self.failed},
        }


class BatchProvider:
    """`faults[operation]` is used up call by call, `fates` batch by batch; after them everything goes well.

    With `seed` and `rate` every further call meets a fault with that probability, and every further batch a fate; no
    more than `faults_max` of them in all.
    """

    def __init__(self, *, seed: int = 0, rate: float = 0.0, faults_max: int = 100, looks: int = 2) -> None:
        self.faults: dict[str, list[str]] = defaultdict(list)
        self.fates: list[str] = []
        self.files: dict[str, tuple[str, bytes, float]] = {}  # id -> (filename, bytes, created)
        self.batches: dict[str, Batch] = {}
        self.billed: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.met: Counter[str] = Counter()  # faults and fates that came to pass
        self.answer: Callable[[dict[str, Any]], str] = plain_answer  # the text of a reply, from the body of a row
        self.key: str | None = None  # what "Authorization" must say; None: anything
        self.on_call: Callable[[str, bool], Awaitable[None]] | None = None  # awaited before and after a call is done
        self.prefix, self.middlewares = "/v1", list[Any]()  # of its paths, and before its handlers
        self.file_states: list[str] = []  # what a file is said to be, look by look, before it is processed
        self._random, self._rate, self._left, self._looks = random.Random(seed), rate, faults_max, looks
        self._ids = 0
        self._at_work = 0  # calls that were heard, and are neither done nor left hanging
        self._closing = asyncio.Event()

    async def __aenter__(self) -> BatchProvider:
        app = web.Application(client_max_size=256 * 1024 * 1024, middlewares=self.middlewares)
        app.router.add_post(self.prefix + "/files", self._upload)
        app.router.add_get(self.prefix + "/files", self._list_files)
        app.router.add_get(self.prefix + "/files/{id}/content", self._content)
        app.router.add_get(self.prefix + "/files/{id}", self._file)
        app.router.add_delete(self.prefix + "/files/{id}", self._delete)
        app.router.add_post(self.prefix + "/batches", self._create)
        app.router.add_get(self.prefix + "/batches", self._list)
        app.router.add_get(self.prefix + "/batches/{id}", self._look)
        app.router.add_post(self.prefix + "/batches/{id}/cancel", self._cancel)
        app.router.add_get("/_fake/state", self._state)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing.set()
        await self._runner.cleanup()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}{self.prefix}"

    @property
    def running(self) -> list[str]:
        """Batches that somebody would have to pay for."""
        return [batch.id for batch in self.batches.values() if batch.is_running]

    @property
    def untended(self) -> list[str]:
        """Of those that run, the ones that nobody has asked to end."""
        return [id for id in self.running if self.batches[id].status != "cancelling"]

    async def settled(self) -> None:
        """Once a client that has gone is not heard any more: what it sent is done, or will never be."""
        quiet = 0
        while quiet < QUIET_TURNS:  # a call that was read as its connection closed begins a turn or two later
            assert self._runner.server is not None
            is_open = any(each.transport is not None for each in self._runner.server.connections)
            is_quiet = not self._at_work and not is_open
            quiet = quiet + 1 if is_quiet else 0
            await asyncio.sleep(0 if is_quiet else 0.001)

    # -- calls --------------------------------------------------------------------------------------------------------

    async def _upload(self, request: web.Request) -> web.StreamResponse:
        form = await request.post()  # of an upload that is cut off nothing is kept
        part = form["file"]
        assert isinstance(part, web.FileField), "a file is uploaded as one"
        name, data = part.filename, part.file.read()

        def do() -> dict[str, Any]:
            id = self._id("file")
            self.files[id] = (name, data, time.time())
            return self._file_view(id)

        return await self._answer(request, "upload", do)

    async def _list_files(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, "files", lambda: self._page(request, self.files, self._file_view))

    async def _file(self, request: web.Request) -> web.StreamResponse:
        id = request.match_info["id"]
        return await self._answer(request, "files", lambda: self._file_view(id) if id in self.files else None)

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        id = request.match_info["id"]

        def do() -> dict[str, Any] | None:
            return {"id": id, "object": "file", "deleted": True} if self.files.pop(id, None) else None

        return await self._answer(request, "delete", do)

    async def _content(self, request: web.Request) -> web.StreamResponse:
        found = self.files.get(request.match_info["id"])
        return await self._answer(request, "content", lambda: None if found is None else found[1])

    async def _create(self, request: web.Request) -> web.StreamResponse:
        order = await request.json()

        def do() -> dict[str, Any] | None:
            if order["input_file_id"] not in self.files:
                return None
            lines = [json.loads(line) for line in self.files[order["input_file_id"]][1].splitlines() if line.strip()]
            assert {line["url"] for line in lines} == {order["endpoint"]}, "a batch is of one endpoint"
            fate = self._fate()
            batch = Batch(
                self._id("batch"),
                order["input_file_id"],
                order["endpoint"],
                order.get("metadata") or {},
                lines,
                fate,
                self._looks,
            )
            self.batches[batch.id] = batch
            return batch.view()

        return await self._answer(request, "create", do)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(
            request, "list", lambda: self._page(request, self.batches, lambda id: self.batches[id].view())
        )

    async def _look(self, request: web.Request) -> web.StreamResponse:
        batch = self.batches.get(request.match_info["id"])

        def do() -> dict[str, Any] | None:
            if batch is None:
                return None
            self._advance(batch)
            return batch.view()

        return await self._answer(request, "look", do)

    async def _cancel(self, request: web.Request) -> web.StreamResponse:
        batch = self.batches.get(request.match_info["id"])
        if batch is not None and not batch.is_running:
            body = {"error": {"message": "Cannot cancel a batch that has ended", "type": "invalid_request_error"}}
            return web.json_response(body, status=400)

        def do() -> dict[str, Any] | None:
            if batch is None:
                return None
            batch.status = "cancelling"
            return batch.view()

        return await self._answer(request, "cancel", do)

    async def _state(self, _: web.Request) -> web.StreamResponse:
        """What a test of another process asks for."""
        batches = [{**batch.view(), "fate": batch.fate} for batch in self.batches.values()]
        state = {
            "billed": self.billed,
            "batches": batches,
            "files": list(self.files),
            "running": self.running,
            "calls": self.calls,
            "met": self.met,
        }
        return web.json_response(state)

    async def _answer(self, request: web.Request, operation: str, do: Any) -> web.StreamResponse:
        """Do what was asked, or what the next fault says."""
        self._at_work += 1
        try:
            return await self._do(request, operation, do)
        finally:
            self._at_work -= 1

    async def _do(self, request: web.Request, operation: str, do: Any) -> web.StreamResponse:
        self.calls[operation] += 1
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            error = {
                "message": "Incorrect API key provided",
                "type": "invalid_request_error",
                "code": "invalid_api_key",
            }
            return web.json_response({"error": error}, status=401)
        fault = self._fault(operation)
        if fault:
            self.met[fault] += 1
        if refusal := _refusal(fault):
            return refusal
        if fault == "hung":
            self._at_work -= 1
            await self._closing.wait()
            self._at_work += 1
        if fault == "slow":
            await asyncio.sleep(0.05)
        if fault == "reset":
            return self._cut(request)
        if self.on_call is not None:
            await self.on_call(operation, False)
        made = do()
        if self.on_call is not None:
            await self.on_call(operation, True)
        if fault == "lost":
            return self._cut(request)
        if made is None:
            return web.json_response(
                {"error": {"message": "No such object", "type": "invalid_request_error"}}, status=404
            )
        if fault == "html":
            return web.Response(text="<html>a proxy's page</html>", content_type="text/html")
        data = made if isinstance(made, bytes) else json.dumps(made).encode()
        if fault == "truncated":
            return await self._half(request, data)
        return web.Response(body=data, content_type="application/json")

    def _cut(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def _half(self, request: web.Request, data: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(len(data)), "Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(data[: len(data) // 2])
        return self._cut(request)

    def _fault(self, operation: str) -> str:
        if self.faults[operation]:
            return self.faults[operation].pop(0)
        if self._rate and self._left and self._random.random() < self._rate:
            self._left -= 1
            # A hung call costs a whole time limit each: one in ten is enough of them.
            return self._random.choice(
                [fault for fault in CALL_FAULTS if fault != "hung" or self._random.random() < 0.1]
            )
        return ""

    def _fate(self) -> str:
        if self.fates:
            fate = self.fates.pop(0)
        elif self._rate and self._left and self._random.random() < self._rate * 3:
            self._left -= 1
            fate = self._random.choice([fate for fate in FATES if fate not in ("never_ends", "refused", "fails")])
        else:
            fate = "completes"
        self.met[fate] += 1
        return fate

    def _page(self, request: web.Request, items: dict[str, Any], view: Any) -> dict[str, Any]:
        ids = list(reversed(items))
        after = request.query.get("after")
        if after in ids:
            ids = ids[ids.index(after) + 1 :]
        limit = int(request.query.get("limit", "20"))
        return {"object": "list", "data": [view(id) for id in ids[:limit]], "has_more": len(ids) > limit}

    def _file_view(self, id: str) -> dict[str, Any]:
        name, data, created = self.files[id]
        return {
            "id": id,
            "object": "file",
            "bytes": len(data),
            "created_at": int(created),
            "filename": name,
            "purpose": "batch",
            "status": self.file_states.pop(0) if self.file_states else "processed",
        }

    def _id(self, kind: str) -> str:
        self._ids += 1
        return f"{kind}_{self._ids}"

    # -- batches ------------------------------------------------------------------------------------------------------

    def _advance(self, batch: Batch) -> None:
        """One look further."""
        if not batch.is_running:
            return
        if batch.status == "cancelling":
            self._run(batch, batch.lines[: len(batch.lines) // 2], "cancelled")
            return
        batch.looks -= 1
        batch.status = "in_progress"
        if batch.looks > 0 or batch.fate == "never_ends":
            return
        half = batch.lines[: len(batch.lines) // 2]
        match batch.fate:
            case "expires":
                self._run(batch, half, "expired")
            case "cancelled":
                self._run(batch, half, "cancelled")
            case "fails":
                self._fail(batch, "invalid_json_line", "This line is not parseable", line=1)
            case "refused":
                self._fail(batch, "model_not_found", "The provided model is not supported by the Batch API.")
            case "queue_full":
                self._fail(batch, "token_limit_exceeded", "Enqueued token limit reached")
            case _:
                self._run(batch, batch.lines, "completed")

    def _fail(self, batch: Batch, code: str, message: str, *, line: int | None = None) -> None:
        batch.status = "failed"
        batch.errors = [{"code": code, "message": message, "line": line, "param": None}]

    def _run(self, batch: Batch, lines: list[dict[str, Any]], status: str) -> None:
        batch.status = status
        if batch.fate == "no_files":
            return
        lost = set(range(1, len(lines), 3)) if batch.fate == "loses" else set()
        output: list[bytes] = []
        errors: list[bytes] = []
        for index, line in enumerate(lines):
            if index in lost:
                continue
            if batch.fate == "bad_rows" and index % 5 == 0:
                errors.append(_error_line(line, 400, "invalid_value", "this row is bad"))
                continue
            if batch.fate == "overloaded" and index % 5 == 0:
                errors.append(_error_line(line, 500, "server_error", "try again"))
                continue
            output.append(self._output_line(line))
        if batch.fate == "repeats":
            output += output[::2]
        if batch.fate == "strange":
            output += [b'{"id":"x","custom_id":"who","response":{"status_code":200,"body":{}},"error":null}']
        if batch.fate == "garbled" and output:
            output[0] = output[0][: len(output[0]) * 2 // 3]
        if status in ("expired", "cancelled"):
            errors += [_undone_line(line, f"batch_{status}") for line in batch.lines[len(lines) :]]
        batch.completed, batch.failed = len(output), len(errors)
        if output:
            batch.output = self._store(output)
        if errors:
            batch.errors_file = self._store(errors)

    def _output_line(self, line: dict[str, Any]) -> bytes:
        text = text_of(line["body"])
        self.billed[text] += 1
        body = reply_of(line["body"], self.answer(line["body"]))
        response = {"status_code": 200, "request_id": f"req_{line['custom_id']}", "body": body}
        return json.dumps({"id": "br", "custom_id": line["custom_id"], "response": response, "error": None}).encode()

    def _store(self, lines: list[bytes]) -> str:
        id = self._id("file")
        self.files[id] = ("output.jsonl", b"\n".join(lines) + b"\n", time.time())
        return id


def text_of(body: dict[str, Any]) -> str:
    """What a row asks: its first message or its input. If it asks again: and for the how manieth time."""
    if "messages" not in body:
        return json.dumps(body.get("input"))
    first, *others = [message["content"] for message in body["messages"] if message["role"] == "user"]
    return f"{first} again {len(others)}" if others else str(first)


def plain_answer(body: dict[str, Any]) -> str:
    """One that says which row it answers."""
    return f"to {text_of(body)}"


def late_answer(body: dict[str, Any]) -> str:
    """JSON for row N of "text N", once it was asked for N % 4 + 1 times; otherwise none."""
    first, _, times = text_of(body).partition(" again ")
    number = int(first.rpartition(" ")[2])
    return json.dumps({"n": number}) if int(times or 0) >= number % 4 else f"not {number} yet"


def reply_of(body: dict[str, Any], text: str) -> dict[str, Any]:
    """A reply with this text."""
    if "input" in body:
        items = body["input"] if isinstance(body["input"], list) else [body["input"]]
        data = [{"object": "embedding", "index": index, "embedding": [0.5]} for index in range(len(items))]
        return {"object": "list", "model": body["model"], "data": data, "usage": {"prompt_tokens": len(items)}}
    return {
        "id": "chatcmpl",
        "object": "chat.completion",
        "model": body["model"],
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


def _error_line(line: dict[str, Any], status: int, code: str, message: str) -> bytes:
    body = {"error": {"message": message, "type": "invalid_request_error", "code": code}}
    response = {"status_code": status, "request_id": "req_bad", "body": body}
    return json.dumps({"id": "br", "custom_id": line["custom_id"], "response": response, "error": None}).encode()


def _undone_line(line: dict[str, Any], code: str) -> bytes:
    error = {"code": code, "message": "This request could not be executed in time."}
    return json.dumps({"id": "br", "custom_id": line["custom_id"], "response": None, "error": error}).encode()


def _refusal(fault: str) -> web.Response | None:
    """The replies that refuse a call without doing anything."""
    if fault not in ("429", "429_now", "500", "503"):
        return None
    headers = {"Retry-After": "0.05"} if fault in ("429_now", "503") else {}
    error = {"message": f"told to say {fault}", "type": "server_error", "code": None}
    return web.json_response({"error": error}, status=int(fault[:3]), headers=headers)


async def serve(arguments: argparse.Namespace) -> None:
    """Until it is killed."""
    async with BatchProvider(seed=arguments.seed, rate=arguments.rate, looks=arguments.looks) as provider:
        provider.answer = late_answer if arguments.answers_late else plain_answer
        print(provider.base_url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=0.0, help="of calls and batches that meet a fault")
    parser.add_argument("--looks", type=int, default=2, help="after which a batch has ended")
    parser.add_argument("--answers-late", action="store_true", help="only the fourth row of four is answered at once")
    asyncio.run(serve(parser.parse_args()))
