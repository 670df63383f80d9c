"""Anthropic's Messages and message batches in this process. Jobs run until `finish` is called."""

from __future__ import annotations

import json
import re
import time
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any

from aiohttp import web
from fakes.provider_fake import FakeJob, ProviderFake, answer_to, refused

_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class AnthropicFake(ProviderFake):
    key = "sk-ant-secret-of-the-tests"
    behind_s = 0.0  # by which its clock is slow

    def add_routes(self, app: web.Application) -> None:
        at = "/v1/messages/batches"
        app.router.add_post(at, self._create)
        app.router.add_get(at, self._list)
        app.router.add_get(at + "/{id}", self._get)
        app.router.add_post(at + "/{id}/cancel", self._cancel)
        app.router.add_get(at + "/{id}/results", self._results)

    def is_ended(self, job: FakeJob) -> bool:
        return job.state == "ended"

    def end(self, job: FakeJob, *, expired: bool) -> None:
        job.state = "ended"
        job.details["undone"] = "expired" if expired else "canceled"

    async def _create(self, request: web.Request) -> web.Response:
        if (answer := self._refuse_key(request)) is not None:
            return answer
        rows = json.loads(await request.read())["requests"]
        names = [row["custom_id"] for row in rows]
        if len(set(names)) != len(names) or not all(_ID.fullmatch(name) for name in names):
            return refused(400, "invalid_request_error", "custom_id: must be unique, of 1 to 64 plain characters")
        if not rows or any("max_tokens" not in row["params"] for row in rows):
            return refused(400, "invalid_request_error", "requests: max_tokens is missing")
        id = f"msgbatch_{len(self.jobs):04d}"
        job = FakeJob(id, id, rows, "in_progress", time.time() - self.behind_s)
        self.jobs[id] = job
        return web.json_response(_view(job))

    async def _list(self, request: web.Request) -> web.Response:
        jobs = sorted(self.jobs.values(), key=lambda job: job.id, reverse=True)
        after = request.query.get("after_id")
        jobs = [job for job in jobs if after is None or job.id < after]
        limit = int(request.query.get("limit", 20))
        data = [_view(job) for job in jobs[:limit]]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
        date = format_datetime(datetime.fromtimestamp(time.time() - self.behind_s, UTC), usegmt=True)
        return web.json_response({"data": data, "has_more": len(jobs) > limit, **ends}, headers={"Date": date})

    async def _get(self, request: web.Request) -> web.Response:
        if (answer := self._refuse_key(request)) is not None:
            return answer
        job = self.jobs.get(request.match_info["id"])
        return refused(404, "not_found_error", "no such batch") if job is None else web.json_response(_view(job))

    async def _cancel(self, request: web.Request) -> web.Response:
        job = self.jobs.get(request.match_info["id"])
        if job is None:
            return refused(404, "not_found_error", "no such batch")
        if job.state == "ended":
            return refused(400, "invalid_request_error", "it has ended")
        job.state = "canceling"
        return web.json_response(_view(job))

    async def _results(self, request: web.Request) -> web.Response:
        job = self.jobs.get(request.match_info["id"])
        if job is None or job.state != "ended":
            return refused(404, "not_found_error", "no results")
        lines = [_line(job, index, kind) for index, kind in sorted(job.outcomes.items(), reverse=True)]
        return web.Response(body=b"".join(lines), headers={"Content-Type": "application/binary"})

    def _refuse_key(self, request: web.Request) -> web.Response | None:
        assert request.headers["anthropic-version"] == "2023-06-01"
        if request.headers.get("x-api-key") != self.key:
            return refused(401, "authentication_error", f"invalid x-api-key {request.headers.get('x-api-key')}")
        return None


def _view(job: FakeJob) -> dict[str, Any]:
    kinds = list(job.outcomes.values())
    undone = kinds.count("undone")
    name = job.details.get("undone", "canceled")
    counts = {"succeeded": kinds.count("ok"), "errored": kinds.count("error"), "canceled": 0, "expired": 0}
    counts[name] = undone
    counts["processing"] = len(job.rows) - len(kinds)
    created = datetime.fromtimestamp(job.created, UTC).isoformat().replace("+00:00", "Z")
    return {
        "id": job.id,
        "type": "message_batch",
        "processing_status": job.state,
        "request_counts": counts,
        "created_at": created,
        "results_url": None,
    }


def _line(job: FakeJob, index: int, kind: str) -> bytes:
    row = job.rows[index]
    if kind == "ok":
        result: dict[str, Any] = {"type": "succeeded", "message": message_for(row["params"])}
    elif kind == "error":
        error = {"type": "invalid_request_error", "message": "prompt is too long"}
        result = {"type": "errored", "error": {"type": "error", "error": error, "request_id": "req_1"}}
    else:
        result = {"type": job.details.get("undone", "canceled")}
    return json.dumps({"custom_id": row["custom_id"], "result": result}).encode() + b"\n"


def message_for(params: dict[str, Any]) -> dict[str, Any]:
    contents = [message["content"] for message in params["messages"] if message["role"] == "user"]
    blocks = [[{"text": each}] if isinstance(each, str) else each for each in contents]
    text = answer_to([block["text"] for each in blocks for block in each if "text" in block])
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": params["model"],
        "content": [{"type": "text", "text": text}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 5,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": 3,
        },
    }
