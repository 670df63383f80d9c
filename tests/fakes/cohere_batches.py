"""Cohere's datasets and embed jobs in this process. Vectors are `[length of the text, 0.5]`."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import fastavro
from aiohttp import web
from fakes.provider_fake import FakeJob, ProviderFake

SCHEMA = {
    "type": "record",
    "name": "embedding",
    "fields": [
        {"name": "id", "type": ["null", "string"]},
        {"name": "text", "type": "string"},
        {
            "name": "embeddings",
            "type": {
                "type": "record",
                "name": "vectors",
                "fields": [{"name": "float", "type": {"type": "array", "items": "float"}}],
            },
        },
    ],
}


class CohereFake(ProviderFake):
    """`as_avro`: how parts are written; `keeps_ids`: whether they hold the texts' ids."""

    def __init__(self) -> None:
        super().__init__()
        self.datasets: dict[str, dict[str, Any]] = {}
        self.as_avro = False
        self.keeps_ids = True
        self.validation = ["validated"]  # what the looks at a new dataset bring

    def add_routes(self, app: web.Application) -> None:
        app.router.add_post("/v1/datasets", self._add)
        app.router.add_get("/v1/datasets", self._datasets)
        app.router.add_get("/v1/datasets/{id}", self._dataset)
        app.router.add_delete("/v1/datasets/{id}", self._delete)
        app.router.add_post("/v1/embed-jobs", self._create)
        app.router.add_get("/v1/embed-jobs", self._jobs)
        app.router.add_get("/v1/embed-jobs/{id}", self._job)
        app.router.add_post("/v1/embed-jobs/{id}/cancel", self._cancel)
        app.router.add_get("/files/{id}/{part}", self._file)

    def is_ended(self, job: FakeJob) -> bool:
        return job.state in ("complete", "cancelled", "failed")

    def end(self, job: FakeJob, *, expired: bool) -> None:
        if job.state == "cancelling":
            job.state = "cancelled"
        elif set(job.outcomes.values()) - {"ok"}:
            job.state = "failed"
        else:
            job.state = "complete"
            half = (len(job.rows) + 1) // 2
            parts = [part for part in (job.rows[:half], job.rows[half:]) if part]
            job.details["output"] = f"{job.id}-out"
            self.datasets[f"{job.id}-out"] = {"name": "out", "parts": parts}

    def _flaw(self, request: web.Request) -> web.Response | None:
        if request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"message": "invalid api token"}, status=401)
        return None

    async def _add(self, request: web.Request) -> web.Response:
        if (flaw := self._flaw(request)) is not None:
            return flaw
        form = await request.post()
        data = form["data"].file.read()  # type: ignore[union-attr]
        assert request.query["type"] == "embed-input"
        keep = request.query.getall("keep_fields")
        rows = [json.loads(line) for line in data.splitlines()]
        rows = [{name: row[name] for name in ("text", *keep)} for row in rows]
        id = f"dataset-{len(self.datasets)}"
        name = request.query["name"]
        assert re.fullmatch(r"[\w-]+", name)
        self.datasets[id] = {"name": name, "rows": rows, "looks": list(self.validation)}
        return web.json_response({"id": id})

    async def _datasets(self, request: web.Request) -> web.Response:
        offset, limit = int(request.query["offset"]), int(request.query["limit"])
        views = [self._view(id) for id, dataset in self.datasets.items() if "rows" in dataset]
        return web.json_response({"datasets": views[offset : offset + limit]})

    async def _dataset(self, request: web.Request) -> web.Response:
        id = request.match_info["id"]
        if id not in self.datasets:
            return web.json_response({"message": "no such dataset"}, status=404)
        return web.json_response({"dataset": self._view(id, is_looked_at=True)})

    async def _delete(self, request: web.Request) -> web.Response:
        self.datasets.pop(request.match_info["id"], None)
        return web.json_response({})

    def _view(self, id: str, *, is_looked_at: bool = False) -> dict[str, Any]:
        dataset = self.datasets[id]
        looks = dataset.get("looks", ["validated"])
        status = looks.pop(0) if is_looked_at and len(looks) > 1 else looks[0]
        parts = [
            {"id": f"{id}-{n}", "url": f"{self.base_url}/files/{id}/{n}", "num_rows": len(part)}
            for n, part in enumerate(dataset.get("parts", []))
        ]
        error = "a text is too long" if status == "failed" else None
        return {
            "id": id,
            "name": dataset["name"],
            "validation_status": status,
            "validation_error": error,
            "dataset_parts": parts,
        }

    async def _file(self, request: web.Request) -> web.Response:
        assert "Authorization" not in request.headers
        rows = self.datasets[request.match_info["id"]]["parts"][int(request.match_info["part"])]
        found = [
            {
                "text": row["text"],
                "embeddings": {"float": [float(len(row["text"])), 0.5]},
                **({"id": row["id"]} if self.keeps_ids else {"id": None} if self.as_avro else {}),
            }
            for row in rows
        ]
        if not self.as_avro:
            return web.Response(body=b"".join(json.dumps(each).encode() + b"\n" for each in found))
        data = io.BytesIO()
        fastavro.writer(data, fastavro.parse_schema(SCHEMA), found)
        return web.Response(body=data.getvalue())

    async def _create(self, request: web.Request) -> web.Response:
        if (flaw := self._flaw(request)) is not None:
            return flaw
        order = await request.json()
        dataset = self.datasets[order["dataset_id"]]
        if dataset["looks"] != ["validated"]:
            return web.json_response({"message": "dataset is not validated"}, status=400)
        assert order["embedding_types"] == ["float"]
        id = f"job-{len(self.jobs)}"
        self.jobs[id] = FakeJob(id, order["name"], dataset["rows"], "processing", details={"order": order})
        return web.json_response({"job_id": id, "meta": {}})

    async def _jobs(self, request: web.Request) -> web.Response:
        return web.json_response({"embed_jobs": [_job_view(job) for job in self.jobs.values()]})

    async def _job(self, request: web.Request) -> web.Response:
        if (flaw := self._flaw(request)) is not None:
            return flaw
        job = self.jobs.get(request.match_info["id"])
        if job is None:
            return web.json_response({"message": "no such job"}, status=404)
        return web.json_response(_job_view(job))

    async def _cancel(self, request: web.Request) -> web.Response:
        job = self.jobs[request.match_info["id"]]
        if self.is_ended(job):
            return web.json_response({"message": "it has ended"}, status=400)
        job.state = "cancelling"
        return web.Response()


def _job_view(job: FakeJob) -> dict[str, Any]:
    order = job.details["order"]
    output = {"output_dataset_id": job.details["output"]} if "output" in job.details else {}
    return {
        "job_id": job.id,
        "name": job.name,
        "status": job.state,
        "created_at": "2026-05-01T00:00:00Z",
        "input_dataset_id": order["dataset_id"],
        "model": order["model"],
        "truncate": order["truncate"],
        **output,
    }
