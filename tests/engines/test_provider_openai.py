"""OpenAI's batches, and Azure's in both its forms, by the suite of all providers."""

import json
from collections.abc import AsyncIterator

import pytest
from contract.provider_suite import ProviderSuite
from fakes.openai_batches import OpenAIFake

from batchmill.engines.connections import Connections
from batchmill.engines.provider_batch import load_provider
from batchmill.engines.provider_batch.provider import ProviderApi, RowReply
from batchmill.types import Limits, ModelSpec, Request

CHAT = "/v1/chat/completions"


class AzureFake(OpenAIFake):
    header, prefix, base = "api-key", "", "/openai/v1"


class OldAzureFake(AzureFake):
    base = "/openai"


class OpenAISuite(ProviderSuite):
    kind: type[OpenAIFake] = OpenAIFake
    arguments: dict[str, str] = {}
    create = ("POST", "/batches")
    look = ("GET", "/batches/")

    @pytest.fixture
    async def fake(self, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OpenAIFake]:
        monkeypatch.setenv("TEST_OPENAI_KEY", self.kind.key)
        async with self.kind() as fake:
            yield fake

    @pytest.fixture
    async def provider(self, fake: OpenAIFake) -> AsyncIterator[ProviderApi]:
        connections = Connections(Limits(attempt_timeout_s=20))
        await connections.start()
        spec = ModelSpec(
            "writer",
            "provider_batch",
            "remote",
            base_url=fake.base_url + fake.base,
            api_key="env:TEST_OPENAI_KEY",
            provider=self.name,
            engine_args=dict(self.arguments),
        )
        yield load_provider(spec, connections)
        await connections.stop()

    def request(self, number: int) -> Request:
        return Request(CHAT, json.dumps({"messages": [{"role": "user", "content": f"m{number}"}]}).encode())

    def wrong_request(self) -> Request:
        return Request("/elsewhere", b"{}")

    def check(self, number: int, reply: RowReply) -> None:
        assert reply.body is not None
        body = json.loads(reply.body)
        assert (body["model"], body["choices"][0]["message"]["content"]) == ("remote", f"echo m{number}")
        assert reply.usage is not None and reply.usage.input_tokens == 7
        assert reply.request_id == "req_1"


class TestOpenAI(OpenAISuite):
    name = "openai"


class TestAzure(OpenAISuite):
    name = "azure"
    kind = AzureFake


class TestAzureByVersion(OpenAISuite):
    name = "azure"
    kind = OldAzureFake
    arguments = {"api_version": "2025-03-01-preview"}

    async def test_every_call_names_the_version(self, provider, fake, tmp_path):
        """The older API is asked with its version, and knows paths without `/v1`."""
        await self.submit(provider, tmp_path, [0])
        assert all("api-version=2025-03-01-preview" in path for _, path, _ in fake.calls)
        assert fake.jobs["batch_0"].details["order"]["endpoint"] == "/chat/completions"
