"""OpenAI's Files and Batches in this process, as the suite of all providers needs them. Jobs run until `finish`."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web
from fakes.provider_fake import FakeJob, ProviderFake


class OpenAIFake(ProviderFake):
    """`header` and `prefix` are those of its key: OpenAI's and Azure's differ. `base` begins its paths."""

    header, prefix, base = "Authorization", "Bearer ", "/v1"

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, tuple[str, bytes]] = {}

    def add_routes(self, app: web.Application) -> None:
        app.router.add_post(f"{self.base}/files", self._upload)
        app.router.add_get(f"{self.base}/files", self._files)
        app.router.add_get(f"{self.base}/files/{{id}}", self._file)
        app.router.add_delete(f"{self.base}/files/{{id}}", self._delete)
        app.router.add_get(f"{self.base}/files/{{id}}/content", self._content)
        app.router.add_post(f"{self.base}/batches", self._create)
        app.router.add_get(f"{self.base}/batches", self._batches)
        app.router.add_get(f"{self.base}/batches/{{id}}", self._batch)
        app.router.add_post(f"{self.base}/batches/{{id}}/cancel", self._cancel)

    def is_ended(self, job: FakeJob) -> bool:
        return job.state in ("completed", "expired", "cancelled")

    def end(self, job: FakeJob, *, expired: bool) -> None:
        job.state = "cancelled" if job.state == "cancelling" else "expired" if expired else "completed"
        for name in ("output", "error"):
            lines = [_line(row, job.outcomes[n]) for n, row in enumerate(job.rows) if _file_of(job.outcomes[n]) == name]
            if lines:
                job.details[f"{name}_file_id"] = self._keep(f"{name}.jsonl", b"".join(lines))

    def _keep(self, name: str, data: bytes) -> str:
        id = f"file-{len(self.files)}"
        self.files[id] = (name, data)
        return id

    def _flaw(self, request: web.Request) -> web.Response | None:
        if request.headers.get(self.header) == self.prefix + self.key:
            return None
        return _refused(401, "invalid_api_key", "Incorrect API key provided")

    async def _upload(self, request: web.Request) -> web.Response:
        if (flaw := self._flaw(request)) is not None:
            return flaw
        form = await request.post()
        assert form["purpose"] == "batch"
        part = form["file"]
        data = part.file.read()  # type: ignore[union-attr]
        id = self._keep(part.filename, data)  # type: ignore[union-attr]
        return web.json_response({"id": id, "object": "file", "status": "processed"})

    async def _files(self, request: web.Request) -> web.Response:
        data = [{"id": id, "filename": name, "status": "processed"} for id, (name, _) in self.files.items()]
        return web.json_response({"data": data, "has_more": False})

    async def _file(self, request: web.Request) -> web.Response:
        name, data = self.files[request.match_info["id"]]
        view = {"id": request.match_info["id"], "filename": name, "bytes": len(data), "status": "processed"}
        return web.json_response(view)

    async def _delete(self, request: web.Request) -> web.Response:
        self.files.pop(request.match_info["id"], None)
        return web.json_response({"deleted": True})

    async def _content(self, request: web.Request) -> web.Response:
        return web.Response(body=self.files[request.match_info["id"]][1])

    async def _create(self, request: web.Request) -> web.Response:
        if (flaw := self._flaw(request)) is not None:
            return flaw
        order = await request.json()
        rows = [json.loads(line) for line in self.files[order["input_file_id"]][1].splitlines()]
        assert {row["url"] for row in rows} == {order["endpoint"]}
        id = f"batch_{len(self.jobs)}"
        self.jobs[id] = FakeJob(id, id, rows, "in_progress", details={"order": order})
        return web.json_response(_view(self.jobs[id]))

    async def _batches(self, request: web.Request) -> web.Response:
        after = request.query.get("after")
        ids = sorted((id for id in self.jobs if after is None or id < after), reverse=True)
        return web.json_response({"data": [_view(self.jobs[id]) for id in ids[:2]], "has_more": len(ids) > 2})

    async def _batch(self, request: web.Request) -> web.Response:
        if (flaw := self._flaw(request)) is not None:
            return flaw
        job = self.jobs.get(request.match_info["id"])
        return _refused(404, "not_found", "No such batch") if job is None else web.json_response(_view(job))

    async def _cancel(self, request: web.Request) -> web.Response:
        job = self.jobs[request.match_info["id"]]
        if self.is_ended(job):
            return _refused(400, "invalid_request_error", "It has ended")
        job.state = "cancelling"
        return web.json_response(_view(job))


def _refused(status: int, code: str, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": code, "code": code}}, status=status)


def _view(job: FakeJob) -> dict[str, Any]:
    kinds = list(job.outcomes.values())
    counts = {"total": len(job.rows), "completed": kinds.count("ok"), "failed": len(kinds) - kinds.count("ok")}
    order, details = job.details["order"], job.details
    return {
        "id": job.id,
        "object": "batch",
        "status": job.state,
        "input_file_id": order["input_file_id"],
        "output_file_id": details.get("output_file_id"),
        "error_file_id": details.get("error_file_id"),
        "metadata": order["metadata"],
        "request_counts": counts,
    }


def _file_of(kind: str) -> str:
    return "output" if kind == "ok" else "error"


def _line(row: dict[str, Any], kind: str) -> bytes:
    if kind == "undone":
        error: Any = {"code": "batch_expired", "message": "This request could not be executed in time."}
        return json.dumps({"id": "x", "custom_id": row["custom_id"], "response": None, "error": error}).encode() + b"\n"
    if kind == "ok":
        text = row["body"]["messages"][0]["content"]
        choice = {"index": 0, "message": {"role": "assistant", "content": f"echo {text}"}, "finish_reason": "stop"}
        body = {"model": row["body"]["model"], "choices": [choice], "usage": {"prompt_tokens": 7}}
    else:
        body = {"error": {"message": "prompt is too long", "code": "context_length_exceeded"}}
    response = {"status_code": 200 if kind == "ok" else 400, "request_id": "req_1", "body": body}
    return json.dumps({"id": "x", "custom_id": row["custom_id"], "response": response, "error": None}).encode() + b"\n"
