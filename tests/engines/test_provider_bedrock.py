import json
from collections.abc import AsyncIterator

import pytest
from contract.provider_suite import ProviderSuite, collect
from fakes.aws_batches import REGION, BedrockFake
from fakes.provider_fake import Wrong
from msgspec.structs import replace

from batchmill.engines.connections import Connections
from batchmill.engines.provider_batch.aws import Account
from batchmill.engines.provider_batch.bedrock import BedrockBatches, usage_of
from batchmill.engines.provider_batch.provider import JobRefused, RowReply, Upload
from batchmill.errors import InvalidRow
from batchmill.models import secrets
from batchmill.types import Connector, Limits, ModelSpec, Provision, Request, Usage

CLAUDE = "anthropic.claude-test-v1:0"
ROLE = "arn:aws:iam::123456789012:role/batches"
CHAT = "/v1/chat/completions"


@pytest.fixture
async def fake(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[BedrockFake]:
    monkeypatch.setenv("TEST_AWS_ACCESS", BedrockFake.access_key)
    monkeypatch.setenv("TEST_AWS_SECRET", BedrockFake.key)
    async with BedrockFake() as fake:
        yield fake


@pytest.fixture
async def provider(fake: BedrockFake) -> AsyncIterator[BedrockBatches]:
    connections = Connections(Limits(attempt_timeout_s=20))
    await connections.start()
    yield BedrockBatches(model(fake), connections)
    await connections.stop()


def model(fake: BedrockFake, source: str = CLAUDE, **arguments: str | int) -> ModelSpec:
    given = {
        "access_key": "env:TEST_AWS_ACCESS",
        "secret_key": "env:TEST_AWS_SECRET",
        "region": REGION,
        "s3": "s3://bucket-of-tests/runs",
        "s3_endpoint": f"{fake.base_url}/s3",
        "role_arn": ROLE,
        "rows_min": 1,
        **arguments,
    }
    return ModelSpec("writer", "provider_batch", source, base_url=fake.base_url, engine_args=given, provider="bedrock")


class TestBedrock(ProviderSuite):
    name = "bedrock"
    create = ("POST", "/model-invocation-job")
    look = ("GET", "/model-invocation-job/")

    def request(self, number: int) -> Request:
        messages = [{"role": "user", "content": f"m{number}"}]
        if number % 2:
            return Request("/v1/messages", json.dumps({"max_tokens": 9, "messages": messages}).encode())
        return Request(CHAT, json.dumps({"model": "writer", "messages": messages}).encode())

    def wrong_request(self) -> Request:
        return Request(CHAT, b'{"n":2,"messages":[{"role":"user","content":"a"}]}')

    def unknown_id(self) -> str:
        return "arn:aws:bedrock:eu-central-2:123456789012:model-invocation-job/nobodynobody"

    def check(self, number: int, reply: RowReply) -> None:
        assert reply.body is not None
        body = json.loads(reply.body)
        assert (reply.usage, reply.request_id) == (Usage(7, 2, 3), "msg_1")
        if number % 2:
            assert body["content"] == [{"type": "text", "text": f"echo m{number}"}]
        else:
            assert body["choices"][0]["message"]["content"] == f"echo m{number}"

    def refusal(self, key: str) -> Wrong:
        body = {"message": f"The security token {key} is expired"}
        return Wrong(403, body, {"x-amzn-ErrorType": "ExpiredTokenException:http://internal"})

    async def test_the_order(self, provider, fake, tmp_path):
        """An invocation job names the model, the role and the files; its name and token are the submission's tag."""
        job = await self.submit(provider, tmp_path, [0])
        order = fake.jobs["job000000000"].details["order"]
        assert (order["jobName"], order["clientRequestToken"]) == ("bm-test-0001", "bm-test-0001")
        assert (order["modelId"], order["roleArn"], order["timeoutDurationInHours"]) == (CLAUDE, ROLE, 24)
        assert job.input == "s3://bucket-of-tests/runs/bm-test-0001/input.jsonl"
        assert fake.jobs["job000000000"].rows[0]["modelInput"]["anthropic_version"] == "bedrock-2023-05-31"

    async def test_created_twice(self, provider, fake, tmp_path):
        """The same token is the same job."""
        first = await self.submit(provider, tmp_path, [0, 1])
        second = await self.submit(provider, tmp_path, [0, 1])
        assert first.id == second.id

    async def test_other_jobs_of_like_names(self, provider, fake, tmp_path):
        """A job whose name only holds the tag is not ours; pages are turned to find ours."""
        for tag in ("bm-test-00011", "bm-test-00012", "bm-test-0001"):
            await self.submit(provider, tmp_path, [0], tag=tag)
        found = await provider.find(self.job([0]))
        assert found is not None and found.id.endswith("job000000002")

    async def test_too_few_rows(self, fake, tmp_path):
        """Fewer rows than Bedrock takes are refused before anything is sent, with the ways out."""
        connections = Connections(Limits())
        provider = BedrockBatches(model(fake, rows_min=100), connections)
        with pytest.raises(JobRefused, match="at least 100 rows"):
            await provider.upload(self.job([0]), self.spool(provider, tmp_path, [0]))
        assert fake.calls == []

    async def test_no_room(self, provider, fake, tmp_path):
        """An account that may run no more jobs at once is to be asked later."""
        upload = self.spool(provider, tmp_path, [0])
        job = await provider.upload(self.job([0]), upload)
        body = {"message": "Too many jobs"}
        fake.fail(*self.create, Wrong(400, body, {"x-amzn-ErrorType": "ServiceQuotaExceededException"}))
        with pytest.raises(JobRefused) as caught:
            await provider.create(job, upload)
        assert caught.value.retry_after_s is not None

    async def test_records_that_cannot_be_read(self, provider, fake, tmp_path):
        """A record cut short is garbled; one of somebody else has no number."""
        job = await self.submit(provider, tmp_path, [0])
        fake.finish()
        name = next(name for name in fake.files if name.endswith("input.jsonl.out"))
        fake.files[name] = b'{"recordId":"CALL0000001","modelOutput":{}}\n{"recordId":"r'
        replies = [pair async for some in provider.results(job) for pair in some]
        assert [number for number, _ in replies] == [-1, -1]
        assert [reply.is_garbled for _, reply in replies] == [False, True]

    async def test_other_families(self, fake, tmp_path):
        """Bodies for models that are not Anthropic's go as they are, and come back as they are."""
        connections = Connections(Limits())
        await connections.start()
        provider = BedrockBatches(model(fake, "amazon.titan-embed-text-v2:0"), connections)
        upload = self.spool_of(provider, tmp_path, b'{"inputText":"hi","dimensions":256}')
        job = await provider.create(await provider.upload(self.job([3]), upload), upload)
        fake.finish()
        reply = (await collect(provider, job))[3]
        assert json.loads(reply.body) == {"echo": {"inputText": "hi", "dimensions": 256}}
        with pytest.raises(InvalidRow, match="/v1/messages"):
            provider.encode(0, Request("/v1/messages", b"{}"))
        await connections.stop()

    def spool_of(self, provider, tmp_path, body):
        line = provider.encode(3, Request("/v1/embeddings", body))
        path = tmp_path / "upload"
        path.write_bytes(line.data + b"\n")
        return Upload(path, line.group, 1, path.stat().st_size)

    def test_models_go_apart(self, provider):
        """Rows that name different models go in different jobs."""
        groups = {
            provider.encode(0, Request("/v1/x", json.dumps({"model": name}).encode())).group
            for name in ("writer", "meta.llama-test", "amazon.nova-test")
        }
        assert groups == {CLAUDE, "meta.llama-test", "amazon.nova-test"}


USAGES = {
    "anthropic": ({"type": "message", "usage": {"input_tokens": 3, "output_tokens": 2}}, Usage(3, 0, 2)),
    "nova": ({"usage": {"inputTokens": 5, "outputTokens": 6, "cacheReadInputTokenCount": 1}}, Usage(5, 1, 6)),
    "llama": ({"prompt_token_count": 7, "generation_token_count": 8}, Usage(7, 0, 8)),
    "titan": ({"inputTextTokenCount": 4, "results": [{"tokenCount": 9}]}, Usage(4, 0, 9)),
    "embeddings": ({"inputTextTokenCount": 4}, Usage(4, 0, 0)),
    "openai": ({"usage": {"prompt_tokens": 1, "completion_tokens": 2}}, Usage(1, 0, 2)),
    "none": ({"text": "a"}, None),
}


@pytest.mark.parametrize("family", USAGES)
def test_usage(family: str) -> None:
    """Each family of models counts tokens in its own fields."""
    reply, usage = USAGES[family]
    assert usage_of(reply) == usage


def test_a_region_among_the_credentials() -> None:
    """ML Commons lets a region stand beside the keys: it counts where no parameter says one."""
    keys = {"access_key": "secret:connector/c/access_key", "secret_key": "secret:connector/c/secret_key"}
    received = {"region": "secret:connector/c/region"}
    secrets.take(Provision({"secret:connector/c/region": "eu-west-3"}))
    connector = Connector("c", "c", "1", "aws_sigv4", [], credential=keys | received)
    spec = ModelSpec("m", "provider_batch", "m", provider="bedrock", connector=connector)
    assert Account(spec).region == "eu-west-3"
    other = replace(connector, parameters={"region": "us-east-2"})
    assert Account(replace(spec, connector=other)).region == "us-east-2"
