"""A remote service as a connector calls it: embeddings at once, and batches that end when a test says so."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from fakes.provider_fake import FakeJob, ProviderFake, refused

CREATED = 1_780_000_000.0  # seconds since the epoch
ENDED = ("completed", "failed", "cancelled", "expired")


class RemoteService(ProviderFake):
    """OpenAI's embeddings and batches. `gate` holds back every creation until it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.bodies: list[dict[str, Any]] = []  # of all POSTs with one
        self.asked = asyncio.Event()  # a creation has come

    def add_routes(self, app: web.Application) -> None:
        app.router.add_post("/v1/embeddings", self._embed)
        app.router.add_post("/v1/batches", self._create)
        app.router.add_get("/v1/batches/{id}", self._show)
        app.router.add_post("/v1/batches/{id}/cancel", self._cancel)
        app.router.add_post("/model-invocation-job", self._invoke)
        app.router.add_get("/model-invocation-job/{arn}", self._invocation)
        app.router.add_post("/model-invocation-job/{arn}/stop", self._invocation)
        for verb in ("Create", "Describe", "Stop"):
            app.router.add_post(f"/{verb}TransformJob", self._transform)

    def connector(self, **fields: Any) -> dict[str, Any]:
        """A connector to this service, as the documentation of ML Commons has it for OpenAI."""
        url, headers = f"{self.base_url}/v1", {"Authorization": "Bearer ${credential.openAI_key}"}
        actions = [
            {
                "action_type": "predict", "method": "POST", "url": f"{url}/embeddings", "headers": headers,
                "request_body": '{ "input": ${parameters.input}, "model": "${parameters.model}" }',
                "pre_process_function": "connector.pre_process.openai.embedding",
                "post_process_function": "connector.post_process.openai.embedding",
            },
            {
                "action_type": "batch_predict", "method": "POST", "url": f"{url}/batches", "headers": headers,
                "request_body": '{ "input_file_id": "${parameters.input_file_id}", '
                '"endpoint": "${parameters.endpoint}", "completion_window": "24h" }',
            },
            {
                "action_type": "batch_predict_status", "method": "GET", "url": url + "/batches/${parameters.id}",
                "headers": headers,
            },
            {
                "action_type": "cancel_batch_predict", "method": "POST",
                "url": url + "/batches/${parameters.id}/cancel", "headers": headers,
            },
        ]  # fmt: skip
        values = {
            "name": "OpenAI Embedding model",
            "description": "OpenAI embedding model for testing offline batch",
            "version": "1",
            "protocol": "http",
            "parameters": {
                "model": "text-embedding-ada-002",
                "input_file_id": "file-given",
                "endpoint": "/v1/embeddings",
            },
            "credential": {"openAI_key": self.key},
            "actions": actions,
        }
        return values | fields

    def transforms(self) -> dict[str, Any]:
        """A connector to the batch transform jobs of SageMaker, status and cancel left to be derived."""
        body = (
            '{ "TransformJobName": "${parameters.TransformJobName}", "TransformInput": ${parameters.TransformInput} }'
        )
        action = {
            "action_type": "batch_predict", "method": "POST", "url": f"{self.base_url}/CreateTransformJob",
            "headers": {"Authorization": "Bearer ${credential.openAI_key}"}, "request_body": body,
        }  # fmt: skip
        parameters = {"provider": "sagemaker", "TransformInput": {"DataSource": {"S3": "s3://here"}}}
        return self.connector(actions=[action], parameters=parameters)

    def invocations(self) -> dict[str, Any]:
        """A connector to the model invocation jobs of Bedrock, as Data Prepper calls it."""
        body = '{ "inputDataConfig": ${parameters.inputDataConfig}, "jobName": "${parameters.jobName}", '
        action = {
            "action_type": "batch_predict", "method": "POST", "url": f"{self.base_url}/model-invocation-job",
            "headers": {"Authorization": "Bearer ${credential.openAI_key}"},
            "request_body": body + '"outputDataConfig": ${parameters.outputDataConfig} }',
            "post_process_function": "connector.post_process.bedrock.batch_job_arn",
        }  # fmt: skip
        return self.connector(actions=[action], parameters={"provider": "bedrock"})

    def is_ended(self, job: FakeJob) -> bool:
        return job.state in ENDED

    def end(self, job: FakeJob, *, expired: bool) -> None:
        job.state = "expired" if expired else "completed"

    def _refusal(self, request: web.Request) -> web.Response | None:
        if request.headers.get("Authorization") == f"Bearer {self.key}":
            return None
        return refused(401, "invalid_api_key", "Incorrect API key provided")

    async def _embed(self, request: web.Request) -> web.Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        reply = await request.json()
        self.bodies.append(reply)
        texts = reply["input"] if isinstance(reply["input"], list) else [reply["input"]]
        vectors = [[float(len(text)), 0.5, -1.0] for text in texts]
        data = [{"object": "embedding", "index": at, "embedding": each} for at, each in enumerate(vectors)]
        usage = {"prompt_tokens": len(texts), "total_tokens": len(texts)}
        return web.json_response({"object": "list", "data": data, "model": reply["model"], "usage": usage})

    async def _create(self, request: web.Request) -> web.Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        reply = await request.json()
        self.bodies.append(reply)
        self.asked.set()
        await self.gate.wait()
        job = FakeJob(
            f"batch_{len(self.jobs) + 1}", reply["input_file_id"], [{}, {}, {}], "validating", CREATED, {}, reply
        )
        self.jobs[job.id] = job
        return web.json_response(self._shown(job))

    async def _show(self, request: web.Request) -> web.Response:
        job = self.jobs.get(request.match_info["id"])
        if job is None:
            return refused(404, "invalid_request_error", f"No batch found with id '{request.match_info['id']}'.")
        return web.json_response(self._shown(job))

    async def _cancel(self, request: web.Request) -> web.Response:
        job = self.jobs[request.match_info["id"]]
        if job.state in ENDED:
            return refused(409, "invalid_request_error", f"Cannot cancel a batch with status '{job.state}'.")
        job.state = "cancelling"
        return web.json_response(self._shown(job))

    async def _invoke(self, request: web.Request) -> web.Response:
        reply = await request.json()
        self.bodies.append(reply)
        arn = f"arn:aws:bedrock:eu-1:1:model-invocation-job/{reply['jobName']}"
        self.jobs[arn] = FakeJob(arn, reply["jobName"], [], "Submitted")
        return web.json_response({"jobArn": arn})

    async def _invocation(self, request: web.Request) -> web.Response:
        job = self.jobs[request.match_info["arn"]]
        if request.method == "POST":
            job.state = "Stopping"
            return web.Response()
        return web.json_response({"jobArn": job.id, "status": job.state})

    async def _transform(self, request: web.Request) -> web.Response:
        reply = await request.json()
        self.bodies.append(reply)
        name = reply["TransformJobName"]
        if request.path == "/CreateTransformJob":
            self.jobs[name] = FakeJob(name, name, [], "InProgress")
            return web.json_response({"TransformJobArn": f"arn:aws:sagemaker:eu-1:1:transform-job/{name}"})
        if request.path == "/StopTransformJob":
            self.jobs[name].state = "Stopping"
            return web.Response()
        return web.json_response({"TransformJobName": name, "TransformJobStatus": self.jobs[name].state})

    @staticmethod
    def _shown(job: FakeJob) -> dict[str, Any]:
        return {
            "id": job.id,
            "object": "batch",
            "endpoint": job.details["endpoint"],
            "errors": None,
            "input_file_id": job.name,
            "completion_window": "24h",
            "status": job.state,
            "output_file_id": "file-out" if job.state == "completed" else None,
            "created_at": int(job.created),
            "request_counts": {"total": len(job.rows), "completed": len(job.outcomes), "failed": 0},
            "metadata": None,
        }
