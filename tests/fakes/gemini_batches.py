"""Gemini's files and batches in this process, in the wire form of its REST API. Jobs run until `finish` is called.

What the real API does and a client may trip over: counts are texts, an unknown file is a 403, a wrong key is a 400,
lists without `pageSize` are empty, results have ids that cannot be deleted, and replies come in another order.
"""

from __future__ import annotations

import json
import re
import time
from datetime import UTC, datetime
from typing import Any

from aiohttp import web
from fakes.provider_fake import FakeJob, ProviderFake, answer_to

ENDS = ("SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED")
REQUEST_FIELDS = {
    "batchGenerateContent": {"contents", "systemInstruction", "generationConfig", "tools", "toolConfig",
                             "safetySettings"},
    "asyncBatchEmbedContent": {"content", "taskType", "outputDimensionality"},
}  # fmt: skip
FILE_ID_CHARS_MAX = 40


class GeminiFake(ProviderFake):
    """`prefix` of the states' names, `file_states` that looks at a new file bring, `partial` results of ended jobs."""

    key = "AIza-secret-of-the-tests"

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, dict[str, Any]] = {}  # uploads by name
        self.sessions: dict[str, dict[str, Any]] = {}
        self.deleted: list[str] = []
        self.prefix = "BATCH_STATE_"
        self.file_states = ["ACTIVE"]
        self.partial = True  # a batch that was cancelled or expired has a file with what was done
        self._ids = 0

    def add_routes(self, app: web.Application) -> None:
        app.router.add_post("/upload/v1beta/files", self._upload)
        app.router.add_get("/v1beta/files", self._list_files)
        app.router.add_get("/v1beta/files/{id}", self._file)
        app.router.add_delete("/v1beta/files/{id}", self._delete_file)
        app.router.add_get("/download/v1beta/files/{id}:download", self._download)
        app.router.add_post("/v1beta/{kind:models|tunedModels}/{model}:{method}", self._create)
        app.router.add_get("/v1beta/batches", self._list)
        app.router.add_get("/v1beta/batches/{id}", self._get)
        app.router.add_delete("/v1beta/batches/{id}", self._delete)
        app.router.add_post("/v1beta/batches/{id}:cancel", self._cancel)

    def is_ended(self, job: FakeJob) -> bool:
        return job.state in ENDS

    def end(self, job: FakeJob, *, expired: bool) -> None:
        job.state = "CANCELLED" if "cancel" in job.details else "EXPIRED" if expired else "SUCCEEDED"

    def fail_all(self, code: int, message: str) -> None:
        """Every running job fails as a whole."""
        for job in self.jobs.values():
            if not self.is_ended(job):
                job.state = "FAILED"
                job.details["error"] = {"code": code, "message": message}

    # files

    async def _upload(self, request: web.Request) -> web.Response:
        session = request.query.get("upload_id")
        if session is None:
            if (flaw := self._flaw(request)) is not None:
                return flaw
            assert request.headers["X-Goog-Upload-Protocol"] == "resumable"
            assert request.headers["X-Goog-Upload-Command"] == "start"
            about = (await request.json())["file"]
            id = f"session-{len(self.sessions)}"
            size = int(request.headers["X-Goog-Upload-Header-Content-Length"])
            self.sessions[id] = {"name": about["displayName"], "size": size}
            # Google's own host, also where a client calls through a proxy.
            url = f"https://generativelanguage.googleapis.com/upload/v1beta/files?upload_id={id}"
            return web.json_response({}, headers={"X-Goog-Upload-URL": url, "X-Goog-Upload-Status": "active"})
        assert request.headers["X-Goog-Upload-Command"] == "upload, finalize"
        assert request.headers["X-Goog-Upload-Offset"] == "0"
        data, begun = await request.read(), self.sessions.pop(session)
        if len(data) != begun["size"]:
            return refused(400, "INVALID_ARGUMENT", "the upload is not as long as was said")
        name = f"files/{self._id('f')}"
        self.files[name] = {"displayName": begun["name"], "data": data, "looks": list(self.file_states)}
        return web.json_response({"file": self._file_view(name)})

    async def _list_files(self, request: web.Request) -> web.Response:
        return self._page(request, "files", [self._file_view(name) for name in self.files])

    async def _file(self, request: web.Request) -> web.Response:
        name = f"files/{request.match_info['id']}"
        if name not in self.files:
            return no_file(name)
        looks = self.files[name]["looks"]
        view = self._file_view(name)
        if len(looks) > 1:
            looks.pop(0)
        return web.json_response(view)

    async def _delete_file(self, request: web.Request) -> web.Response:
        name = f"files/{request.match_info['id']}"
        if len(request.match_info["id"]) > FILE_ID_CHARS_MAX:
            text = "* DeleteFileRequest.name: File ID (name excluding 'files/') cannot be more than 40 characters."
            return refused(400, "INVALID_ARGUMENT", text)
        if self.files.pop(name, None) is None:
            return no_file(name)
        return web.json_response({})

    async def _download(self, request: web.Request) -> web.Response:
        assert request.query["alt"] == "media"
        if (flaw := self._flaw(request)) is not None:
            return flaw
        job = self.jobs.get("batches/" + request.match_info["id"].removeprefix("batch-"))
        if job is None or job.id in self.deleted or not self._has_results(job):
            return no_file(f"files/{request.match_info['id']}")
        lines = [line for index in sorted(job.outcomes, reverse=True) if (line := _line(job, index))]
        return web.Response(body=b"".join(lines), headers={"Content-Type": "application/octet-stream"})

    def _file_view(self, name: str) -> dict[str, Any]:
        file = self.files[name]
        return {
            "name": name,
            "displayName": file["displayName"],
            "mimeType": "application/jsonl",
            "sizeBytes": str(len(file["data"])),
            "state": file["looks"][0],
            "uri": f"https://generativelanguage.googleapis.com/v1beta/{name}",
            "source": "UPLOADED",
        }

    # batches

    async def _create(self, request: web.Request) -> web.Response:
        if (flaw := self._flaw(request)) is not None:
            return flaw
        method, batch = request.match_info["method"], (await request.json())["batch"]
        name = batch["inputConfig"]["fileName"]
        if name not in self.files:
            return no_file(name)
        if self.files[name]["looks"][0] != "ACTIVE":
            return refused(400, "FAILED_PRECONDITION", "the file is not in an ACTIVE state")
        rows = [json.loads(line) for line in self.files[name]["data"].splitlines()]
        assert len({row["key"] for row in rows}) == len(rows)
        for row in rows:
            assert set(row) == {"key", "request"}
            assert set(row["request"]) <= REQUEST_FIELDS[method], row["request"]
        id = f"batches/{self._id('b')}"
        details = {"model": f"{request.match_info['kind']}/{request.match_info['model']}", "input": name}
        self.jobs[id] = FakeJob(id, batch["displayName"], rows, "PENDING", time.time(), details=details)
        return web.json_response(self._view(self.jobs[id]))

    async def _list(self, request: web.Request) -> web.Response:
        views = [self._view(job) for job in self.jobs.values() if job.id not in self.deleted]
        return self._page(request, "operations", views)

    async def _get(self, request: web.Request) -> web.Response:
        if (flaw := self._flaw(request)) is not None:
            return flaw
        job = self._known(request)
        return no_batch() if job is None else web.json_response(self._view(job))

    async def _cancel(self, request: web.Request) -> web.Response:
        job = self._known(request)
        if job is None:
            return no_batch()
        if self.is_ended(job):
            return refused(400, "FAILED_PRECONDITION", "the batch has already completed")
        job.details["cancel"] = True
        return web.json_response({})

    async def _delete(self, request: web.Request) -> web.Response:
        job = self._known(request)
        if job is None:
            return no_batch()
        self.deleted.append(job.id)
        return web.json_response({})

    def _known(self, request: web.Request) -> FakeJob | None:
        job = self.jobs.get(f"batches/{request.match_info['id']}")
        return None if job is None or job.id in self.deleted else job

    def _has_results(self, job: FakeJob) -> bool:
        return job.state == "SUCCEEDED" or (self.is_ended(job) and self.partial and "error" not in job.details)

    def _view(self, job: FakeJob) -> dict[str, Any]:
        kinds = list(job.outcomes.values())
        counts = {
            "requestCount": len(job.rows),
            "successfulRequestCount": kinds.count("ok"),
            "failedRequestCount": kinds.count("error"),
            "pendingRequestCount": 0 if self.is_ended(job) else len(job.rows),
        }
        metadata = {
            "@type": "type.googleapis.com/google.ai.generativelanguage.v1main.GenerateContentBatch",
            "model": job.details["model"],
            "displayName": job.name,
            "createTime": datetime.fromtimestamp(job.created, UTC).isoformat().replace("+00:00", "Z"),
            "inputConfig": {"fileName": job.details["input"]},
            "batchStats": {name: str(count) for name, count in counts.items() if count},
            "state": self.prefix + job.state,
            "name": job.id,
        }
        view: dict[str, Any] = {"name": job.id, "metadata": metadata}
        if self.is_ended(job):
            view["done"] = True
        if self._has_results(job):
            output = {"responsesFile": f"files/batch-{job.id.removeprefix('batches/')}"}
            metadata["output"] = output
            view["response"] = {"@type": "type.googleapis.com/google.ai.generativelanguage.v1main.Output", **output}
        elif job.state in ("CANCELLED", "FAILED", "EXPIRED"):
            view["error"] = job.details.get("error", {"code": 1, "message": "The operation was cancelled."})
        return view

    def _page(self, request: web.Request, name: str, views: list[dict[str, Any]]) -> web.Response:
        if (flaw := self._flaw(request)) is not None:
            return flaw
        size, start = int(request.query.get("pageSize", 0)), int(request.query.get("pageToken", 0))
        page: dict[str, Any] = {name: views[start : start + size]} if views[start : start + size] else {}
        if size and start + size < len(views):
            page["nextPageToken"] = str(start + size)
        return web.json_response(page)

    def _flaw(self, request: web.Request) -> web.Response | None:
        assert "key" not in request.query
        if request.headers.get("x-goog-api-key") == self.key:
            return None
        reason = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "API_KEY_INVALID"}
        return refused(400, "INVALID_ARGUMENT", "API key not valid. Please pass a valid API key.", reason)

    def _id(self, kind: str) -> str:
        self._ids += 1
        return f"{kind}{self._ids:035d}"  # as long as Google's


def _line(job: FakeJob, index: int) -> bytes:
    row = job.rows[index]
    match job.outcomes[index]:
        case "ok":
            answer: dict[str, Any] = {"response": response_to(row["request"])}
        case "error":
            answer = {"error": {"code": 3, "message": "the request is too long"}}
        case "overloaded":
            answer = {"error": {"code": 503, "message": "the model is overloaded", "status": "UNAVAILABLE"}}
        case _:
            return b""
    return json.dumps(answer | {"key": row["key"]}).encode() + b"\n"


def response_to(request: dict[str, Any]) -> dict[str, Any]:
    if "content" in request:
        text = request["content"]["parts"][0]["text"]
        return {"embedding": {"values": [float(len(text)), 0.5]}, "tokenCount": "4"}
    turns = [turn["parts"] for turn in request["contents"] if turn["role"] == "user"]
    text = answer_to([part["text"] for parts in turns for part in parts if "text" in part])
    return {
        "candidates": [{"content": {"role": "model", "parts": [{"text": text}]}, "finishReason": "STOP", "index": 0}],
        "usageMetadata": {
            "promptTokenCount": 7,
            "cachedContentTokenCount": 2,
            "candidatesTokenCount": 3,
            "thoughtsTokenCount": 1,
            "totalTokenCount": 11,
        },
        "modelVersion": "gemini-test-001",
        "responseId": "resp_1",
    }


def refused(status: int, name: str, message: str, *details: dict[str, Any]) -> web.Response:
    """An error as Google's services write it."""
    error = {"code": status, "message": message, "status": name, "details": list(details)}
    return web.json_response({"error": error}, status=status)


def no_file(name: str) -> web.Response:
    id = re.sub("^files/", "", name)
    text = f"You do not have permission to access the File {id} or it may not exist."
    return refused(403, "PERMISSION_DENIED", text)


def no_batch() -> web.Response:
    return refused(404, "NOT_FOUND", "Requested entity was not found.")
