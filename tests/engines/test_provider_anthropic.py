import json
import time
from collections.abc import AsyncIterator

import pytest
from contract.provider_suite import ProviderSuite, collect
from fakes.anthropic_batches import AnthropicFake
from fakes.provider_fake import Wrong
from msgspec.structs import replace

from batchmill.engines.connections import Connections
from batchmill.engines.provider_batch.anthropic import AnthropicBatches, mark_of
from batchmill.engines.provider_batch.provider import JobRefused, RowReply
from batchmill.errors import InvalidRow, SubmitUnknown
from batchmill.types import Action, Connector, Limits, ModelSpec, Request, Usage

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


@pytest.fixture
async def fake(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AnthropicFake]:
    monkeypatch.setenv("TEST_ANTHROPIC_KEY", AnthropicFake.key)
    async with AnthropicFake() as fake:
        yield fake


@pytest.fixture
async def provider(fake: AnthropicFake) -> AsyncIterator[AnthropicBatches]:
    connections = Connections(Limits(attempt_timeout_s=20))
    await connections.start()
    yield AnthropicBatches(model(fake), connections)
    await connections.stop()


def model(fake: AnthropicFake, **arguments: str | int) -> ModelSpec:
    return ModelSpec(
        "writer",
        "provider_batch",
        "claude-test",
        base_url=fake.base_url,
        api_key="env:TEST_ANTHROPIC_KEY",
        engine_args=dict(arguments),
        provider="anthropic",
    )


class TestAnthropic(ProviderSuite):
    name = "anthropic"
    create = ("POST", "/v1/messages/batches")
    look = ("GET", "/v1/messages/batches/")
    finds_running = False

    def request(self, number: int) -> Request:
        if number % 2:
            body = {"model": "claude-other", "max_tokens": 9, "messages": [{"role": "user", "content": f"m{number}"}]}
            return Request(MESSAGES, json.dumps(body).encode())
        return Request(CHAT, json.dumps({"messages": [{"role": "user", "content": f"m{number}"}]}).encode())

    def wrong_request(self) -> Request:
        return Request("/v1/embeddings", b'{"input":"a"}')

    def check(self, number: int, reply: RowReply) -> None:
        assert reply.body is not None
        body = json.loads(reply.body)
        assert reply.usage == Usage(7, 2, 3)
        assert reply.request_id == "msg_1"
        if number % 2:
            assert (body["type"], body["model"]) == ("message", "claude-other")
            assert body["content"] == [{"type": "text", "text": f"echo m{number}"}]
        else:
            assert (body["object"], body["model"]) == ("chat.completion", "claude-test")
            assert body["choices"][0]["message"]["content"] == f"echo m{number}"

    async def test_running_batch_of_as_many_rows(self, provider, fake, tmp_path):
        """While a batch of as many rows runs nobody can tell whose it is: the error names it and what to look for."""
        await self.submit(provider, tmp_path, [0, 1], tag="bm-another")
        with pytest.raises(SubmitUnknown) as caught:
            await provider.find(self.job([0, 1]))
        assert "msgbatch_0000" in caught.value.message
        assert mark_of("bm-test-0001") in caught.value.message

    async def test_nothing_grows(self, provider, fake, tmp_path):
        """What is sent is as long as the upload that was counted, and every row in it carries its submission."""
        upload = self.spool(provider, tmp_path, [0, 1])
        await provider.create(self.job([0, 1]), upload)
        method, path, headers = fake.calls[0]
        assert int(headers["Content-Length"]) == upload.size_bytes
        mark = mark_of("bm-test-0001")
        assert [row["custom_id"] for row in fake.jobs["msgbatch_0000"].rows] == [f"{mark}-c0", f"{mark}-r1"]
        assert list(tmp_path.iterdir()) == [upload.path]

    async def test_a_second_one(self, provider, fake, tmp_path):
        """Once our batch is known by its id, another that runs puts nothing in doubt."""
        job = await self.submit(provider, tmp_path, [0, 1])
        fake.finish()
        await self.submit(provider, tmp_path, [0, 1], tag="bm-another")
        assert (await provider.find(self.job([0, 1], id=job.id))).id == job.id

    async def test_batches_of_other_sizes_do_not_matter(self, provider, fake, tmp_path):
        """A running batch of another number of rows is not ours."""
        await self.submit(provider, tmp_path, [0, 1, 2], tag="bm-another")
        assert await provider.find(self.job([0, 1])) is None

    async def test_clocks_that_differ(self, provider, fake, tmp_path):
        """A batch is found however far the provider's clock is from ours; older ones are not even looked at."""
        fake.behind_s = 7200.0
        await self.submit(provider, tmp_path, [0, 1])
        fake.finish()
        assert await provider.find(self.job([0, 1])) is not None
        fake.calls.clear()
        later = replace(self.job([0, 1]), created=time.time() + 3600)
        assert await provider.find(later) is None
        assert not any("/results" in path for _, path, _ in fake.calls)

    async def test_find_turns_pages(self, provider, fake, tmp_path):
        """A batch is found among many newer ones."""
        await self.submit(provider, tmp_path, [0, 1])
        for number in range(120):
            await self.submit(provider, tmp_path, [number], tag=f"bm-other-{number}")
        fake.finish()
        found = await provider.find(self.job([0, 1]))
        assert found is not None and found.id == "msgbatch_0000"

    async def test_a_refused_batch(self, provider, fake, tmp_path):
        """A batch that Anthropic will not take is refused in its words."""
        upload = self.spool(provider, tmp_path, [0])
        body = {"type": "error", "error": {"type": "invalid_request_error", "message": "requests: too many"}}
        fake.fail(*self.create, Wrong(400, body))
        with pytest.raises(JobRefused, match="too many"):
            await provider.create(self.job([0]), upload)

    async def test_rows_that_failed_there_are_sent_again(self, provider, fake, tmp_path):
        """A row that met an overloaded service was not paid for, and may be sent again."""
        job = await self.submit(provider, tmp_path, [0])
        fake.finish()
        line = {"type": "errored", "error": {"type": "error", "error": {"type": "overloaded_error", "message": "full"}}}
        data = json.dumps({"custom_id": f"{mark_of(job.tag)}-c0", "result": line}).encode()
        fake.fail("GET", "/results", Wrong(200, data))
        reply = (await collect(provider, job))[0]
        assert (reply.status, reply.is_undone) == (529, True)

    async def test_lines_that_cannot_be_read(self, provider, fake, tmp_path):
        """A line cut short is garbled, one of another submission has no number, and neither is lost in silence."""
        job = await self.submit(provider, tmp_path, [0])
        fake.finish()
        strange = b'{"custom_id":"somebody-else","result":{"type":"expired"}}\n{"custom_id":"b'
        fake.fail("GET", "/results", Wrong(200, strange))
        replies = [pair async for some in provider.results(job) for pair in some]
        assert [number for number, _ in replies] == [-1, -1]
        assert [reply.is_garbled for _, reply in replies] == [False, True]

    async def test_default_of_max_tokens(self, fake):
        """A chat that names no limit has the model's own, or 4,096 tokens."""
        for arguments, limit in (({}, 4096), ({"max_tokens": 77}, 77)):
            provider = AnthropicBatches(model(fake, **arguments), Connections(Limits()))
            line = json.loads(provider.encode(0, self.request(0)).data)
            assert line["params"]["max_tokens"] == limit

    async def test_streams_are_refused(self, provider):
        """A row that wants a stream is refused."""
        with pytest.raises(InvalidRow, match="stream"):
            provider.encode(0, Request(MESSAGES, b'{"stream":true,"max_tokens":1,"messages":[]}'))


@pytest.mark.parametrize("end", ["", "/v1", "/v1/messages"])
async def test_addresses(fake, end):
    """The address may be the host alone, or go on to where the batches lie."""
    spec = replace(model(fake), base_url=fake.base_url + end)
    assert AnthropicBatches(spec, Connections(Limits()))._url == f"{fake.base_url}/v1/messages/batches"


async def test_through_a_connector(fake, tmp_path):
    """A connector's URL and headers stand for address and key."""
    headers = {"x-api-key": "${credential.key}"}
    action = Action("BATCH_PREDICT", "POST", f"{fake.base_url}/v1/messages/batches", headers, "{}")
    credential = {"key": "env:TEST_ANTHROPIC_KEY"}
    connector = Connector("c", "c", "1", "http", [action], credential=credential, is_trusted=True)
    spec = ModelSpec("writer", "provider_batch", "claude-test", connector=connector, provider="anthropic")
    connections = Connections(Limits())
    await connections.start()
    assert (await TestAnthropic().submit(AnthropicBatches(spec, connections), tmp_path, [0, 1])).id
    await connections.stop()


async def test_a_key_that_was_changed(fake, tmp_path, monkeypatch):
    """A key that is refused is read again before the job is paused for it."""
    connections = Connections(Limits())
    await connections.start()
    provider = AnthropicBatches(model(fake), connections)
    job = await TestAnthropic().submit(provider, tmp_path, [0, 1])
    fake.key = "sk-ant-another-key"
    monkeypatch.setenv("TEST_ANTHROPIC_KEY", fake.key)
    assert (await provider.refresh(job)).id == job.id
    await connections.stop()
