"""S3, SageMaker's transform jobs and Bedrock's invocation jobs in this process; signatures are checked by botocore."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Any
from xml.sax.saxutils import escape

from aiohttp import web
from botocore.auth import S3SigV4Auth, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from fakes.anthropic_batches import message_for
from fakes.provider_fake import FakeJob, ProviderFake, answer_to

REGION = "eu-central-2"
_SCOPE = re.compile(r"Credential=([^/]+)/(\d{8})/([^/]+)/([^/]+)/aws4_request, SignedHeaders=([^,]+), Signature=(\w+)")


class AwsFake(ProviderFake):
    access_key, key = "AKIAOFTHETESTS", "the-secret-key-of-the-tests"

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, bytes] = {}  # "bucket/key"
        self.page = 1000

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/s3/{bucket}/", self._list)
        for method in ("PUT", "GET", "DELETE"):
            app.router.add_route(method, "/s3/{bucket}/{key:.+}", self._file)
        self.add_api(app)

    def add_api(self, app: web.Application) -> None:
        raise AssertionError("override add_api")

    async def flaw_of(self, request: web.Request) -> web.Response | None:
        """What is wrong with the signature of a call."""
        found = _SCOPE.search(request.headers.get("Authorization", ""))
        if found is None or found[1] != self.access_key:
            return self.aws_error(403, "UnrecognizedClientException", "The security token is invalid")
        signed = found[5].split(";")
        headers = {name: request.headers[name] for name in signed if name not in ("host", "x-amz-date")}
        body = await request.read()
        url = f"http://127.0.0.1:{self.port}{request.raw_path}"
        again = AWSRequest(request.method, url, headers, body)
        again.context["timestamp"] = request.headers["X-Amz-Date"]
        again.headers["X-Amz-Date"] = request.headers["X-Amz-Date"]
        signer = (S3SigV4Auth if found[4] == "s3" else SigV4Auth)(
            Credentials(self.access_key, self.key), found[4], found[3]
        )
        signature = signer.signature(signer.string_to_sign(again, signer.canonical_request(again)), again)
        if signature != found[6] or found[3] != REGION:
            return self.aws_error(403, "SignatureDoesNotMatch", "The signature does not match")
        return None

    @staticmethod
    def aws_error(status: int, code: str, message: str) -> web.Response:
        return web.json_response({"__type": f"com.amazon#{code}", "message": message}, status=status)

    async def _file(self, request: web.Request) -> web.Response:
        if (flaw := await self.flaw_of(request)) is not None:
            return flaw
        name = f"{request.match_info['bucket']}/{request.match_info['key']}"
        if request.method == "PUT":
            self.files[name] = await request.read()
            return web.Response()
        if request.method == "DELETE":
            self.files.pop(name, None)
            return web.Response(status=204)
        if name not in self.files:
            text = "<Error><Code>NoSuchKey</Code><Message>The specified key does not exist.</Message></Error>"
            return web.Response(status=404, text=text, content_type="application/xml")
        return web.Response(body=self.files[name])

    async def _list(self, request: web.Request) -> web.Response:
        if (flaw := await self.flaw_of(request)) is not None:
            return flaw
        bucket = request.match_info["bucket"]
        prefix, after = request.query["prefix"], request.query.get("continuation-token", "")
        names = sorted(name[len(bucket) + 1 :] for name in self.files if name.startswith(f"{bucket}/{prefix}"))
        names = [name for name in names if name > after]
        page = names[: self.page]
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if len(names) > len(page) else ""
        keys = "".join(f"<Contents><Key>{escape(name)}</Key></Contents>" for name in page)
        text = f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{keys}{token}</ListBucketResult>'
        return web.Response(text=text, content_type="application/xml")

    def read_lines(self, uri: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.files[uri.removeprefix("s3://")].splitlines()]

    def write_lines(self, uri: str, lines: list[Any]) -> None:
        data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        self.files[uri.removeprefix("s3://")] = data


class SageMakerFake(AwsFake):
    """Answers every row with `{"echo": row}`."""

    def add_api(self, app: web.Application) -> None:
        app.router.add_post("/", self._call)

    def is_ended(self, job: FakeJob) -> bool:
        return job.state in ("Completed", "Failed", "Stopped")

    def end(self, job: FakeJob, *, expired: bool) -> None:
        if job.state == "Stopping":
            job.state = "Stopped"
        elif set(job.outcomes.values()) - {"ok"}:
            job.state = "Failed"
            job.details["reason"] = "ClientError: a record was too large"
        else:
            job.state = "Completed"
            folder = job.details["order"]["TransformOutput"]["S3OutputPath"]
            self.write_lines(f"{folder}/input.jsonl.out", [_answer_of(row) for row in job.rows])

    async def _call(self, request: web.Request) -> web.Response:
        if (flaw := await self.flaw_of(request)) is not None:
            return flaw
        assert request.headers["Content-Type"] == "application/x-amz-json-1.1"
        order = await request.json()
        name = order["TransformJobName"]
        match request.headers["X-Amz-Target"]:
            case "SageMaker.CreateTransformJob":
                return self._create(name, order)
            case "SageMaker.DescribeTransformJob" if name in self.jobs:
                return web.json_response(self._view(self.jobs[name]))
            case "SageMaker.StopTransformJob" if name in self.jobs:
                job = self.jobs[name]
                if job.state != "InProgress":
                    return self.aws_error(400, "ValidationException", f"The job is in status {job.state}")
                job.state = "Stopping"
                return web.Response()
        return self.aws_error(400, "ValidationException", "Could not find requested job with name: nobody")

    def _create(self, name: str, order: dict[str, Any]) -> web.Response:
        assert re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", name)
        if name in self.jobs:
            return self.aws_error(400, "ResourceInUse", "Job name must be unique")
        assert order["TransformInput"]["SplitType"] == order["TransformOutput"]["AssembleWith"] == "Line"
        rows = self.read_lines(order["TransformInput"]["DataSource"]["S3DataSource"]["S3Uri"])
        self.jobs[name] = FakeJob(name, name, rows, "InProgress", details={"order": order})
        return web.json_response({"TransformJobArn": self._arn(name)})

    def _arn(self, name: str) -> str:
        return f"arn:aws:sagemaker:{REGION}:123456789012:transform-job/{name}"

    def _view(self, job: FakeJob) -> dict[str, Any]:
        reason = {"FailureReason": job.details["reason"]} if "reason" in job.details else {}
        return {
            "TransformJobName": job.name,
            "TransformJobArn": self._arn(job.name),
            "TransformJobStatus": job.state,
            "CreationTime": 1.78e9,
            **reason,
        }


class BedrockFake(AwsFake):
    """Answers rows for Anthropic's models as Messages do, others with `{"echo": …}`."""

    def add_api(self, app: web.Application) -> None:
        app.router.add_post("/model-invocation-job", self._create)
        app.router.add_get("/model-invocation-jobs", self._jobs)
        app.router.add_get("/model-invocation-job/{id}", self._get)
        app.router.add_post("/model-invocation-job/{id}/stop", self._stop)

    def is_ended(self, job: FakeJob) -> bool:
        return job.state in ("Completed", "PartiallyCompleted", "Failed", "Stopped", "Expired")

    def end(self, job: FakeJob, *, expired: bool) -> None:
        job.state = "Stopped" if job.state == "Stopping" else "Expired" if expired else "Completed"
        order = job.details["order"]
        folder = f"{order['outputDataConfig']['s3OutputDataConfig']['s3Uri']}{job.id}"
        records = [self._record(order["modelId"], row, job.outcomes[n]) for n, row in enumerate(job.rows)]
        self.write_lines(f"{folder}/input.jsonl.out", list(reversed(records)))
        self.write_lines(f"{folder}/manifest.json.out", [{"totalRecordCount": len(records)}])

    def _record(self, model: str, row: dict[str, Any], kind: str) -> dict[str, Any]:
        if kind == "ok":
            body = row["modelInput"]
            params = body | {"model": model}
            return row | {"modelOutput": message_for(params) if "anthropic." in model else {"echo": body}}
        if kind == "error":
            return row | {"error": {"errorCode": 400, "errorMessage": "Bad request", "expired": False}}
        return row | {"error": {"errorCode": 400, "errorMessage": "It expired", "expired": True, "retryable": False}}

    async def _create(self, request: web.Request) -> web.Response:
        if (flaw := await self.flaw_of(request)) is not None:
            return flaw
        order = await request.json()
        for job in self.jobs.values():
            if job.details["order"]["clientRequestToken"] == order["clientRequestToken"]:
                return web.json_response({"jobArn": self._arn(job)})
        rows = self.read_lines(order["inputDataConfig"]["s3InputDataConfig"]["s3Uri"])
        assert all(re.fullmatch(r"[a-zA-Z0-9]{11}", row["recordId"]) for row in rows)
        id = f"job{len(self.jobs):09d}"
        self.jobs[id] = FakeJob(id, order["jobName"], rows, "Submitted", details={"order": order})
        return web.json_response({"jobArn": self._arn(self.jobs[id])})

    async def _jobs(self, request: web.Request) -> web.Response:
        if (flaw := await self.flaw_of(request)) is not None:
            return flaw
        named = [job for job in self.jobs.values() if request.query["nameContains"] in job.name]
        first = int(request.query.get("nextToken", "0"))
        page = named[first : first + 1]
        token = {"nextToken": str(first + 1)} if len(named) > first + 1 else {}
        return web.json_response({"invocationJobSummaries": [self._view(job) for job in page], **token})

    async def _get(self, request: web.Request) -> web.Response:
        if (flaw := await self.flaw_of(request)) is not None:
            return flaw
        job = self.jobs.get(request.match_info["id"])
        if job is None:
            return self.aws_error(404, "ResourceNotFoundException", "The specified job cannot be found.")
        return web.json_response(self._view(job))

    async def _stop(self, request: web.Request) -> web.Response:
        if (flaw := await self.flaw_of(request)) is not None:
            return flaw
        job = self.jobs.get(request.match_info["id"])
        if job is None:
            return self.aws_error(404, "ResourceNotFoundException", "The specified job cannot be found.")
        if self.is_ended(job):
            return self.aws_error(409, "ConflictException", "The job has ended")
        job.state = "Stopping"
        return web.json_response({})

    def _arn(self, job: FakeJob) -> str:
        return f"arn:aws:bedrock:{REGION}:123456789012:model-invocation-job/{job.id}"

    def _view(self, job: FakeJob) -> dict[str, Any]:
        kinds = list(job.outcomes.values())
        now = datetime.now(UTC).isoformat()
        return {
            "jobArn": self._arn(job),
            "jobName": job.name,
            "modelId": job.details["order"]["modelId"],
            "status": job.state,
            "submitTime": now,
            "successRecordCount": kinds.count("ok"),
            "errorRecordCount": kinds.count("error"),
        }


def _answer_of(row: dict[str, Any]) -> dict[str, Any]:
    """An echo; the reply of a chat model to texts that have an answer."""
    texts = [message["content"] for message in row.get("messages", []) if message["role"] == "user"]
    if not texts or not texts[0].startswith("late "):
        return {"echo": row}
    choice = {"index": 0, "message": {"role": "assistant", "content": answer_to(texts)}, "finish_reason": "stop"}
    return {"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
