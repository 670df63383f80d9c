import json
from collections.abc import AsyncIterator

import pytest
from contract.provider_suite import ProviderSuite, collect
from fakes.cohere_batches import CohereFake
from fakes.provider_fake import Wrong

from batchmill.engines.connections import Connections
from batchmill.engines.provider_batch.cohere import CohereBatches
from batchmill.engines.provider_batch.provider import JobRefused, RowReply, TryAgain
from batchmill.errors import InvalidRow
from batchmill.types import Limits, ModelSpec, Request

EMBEDDINGS = "/v1/embeddings"


@pytest.fixture
async def fake(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CohereFake]:
    monkeypatch.setenv("TEST_COHERE_KEY", CohereFake.key)
    async with CohereFake() as fake:
        yield fake


@pytest.fixture
async def provider(fake: CohereFake) -> AsyncIterator[CohereBatches]:
    connections = Connections(Limits(attempt_timeout_s=20))
    await connections.start()
    yield CohereBatches(model(fake), connections)
    await connections.stop()


def model(fake: CohereFake) -> ModelSpec:
    return ModelSpec(
        "vectors",
        "provider_batch",
        "embed-test",
        base_url=fake.base_url,
        api_key="env:TEST_COHERE_KEY",
        provider="cohere",
    )


def row(**fields: object) -> Request:
    return Request(EMBEDDINGS, json.dumps(fields).encode())


class TestCohere(ProviderSuite):
    name = "cohere"
    create = ("POST", "/v1/embed-jobs")
    look = ("GET", "/v1/embed-jobs/")
    tells_errors = False
    tells_undone = False

    def request(self, number: int) -> Request:
        text = "x" * (number % 1000 + 1)
        return row(input=[text]) if number % 2 else row(model="vectors", input=text)

    def wrong_request(self) -> Request:
        return row(input=["one", "two"])

    def check(self, number: int, reply: RowReply) -> None:
        assert reply.body is not None
        assert json.loads(reply.body) == {
            "object": "list",
            "data": [{"object": "embedding", "index": 0, "embedding": [float(number % 1000 + 1), 0.5]}],
            "model": "embed-test",
        }

    async def test_avro(self, provider, fake, tmp_path):
        """Results that are Avro are read as well as JSON lines."""
        fake.as_avro = True
        job = await self.submit(provider, tmp_path, [3, 4, 5])
        fake.finish()
        replies = await collect(provider, job)
        assert sorted(replies) == [3, 4, 5]
        self.check(4, replies[4])

    @pytest.mark.parametrize("as_avro", [False, True])
    async def test_without_ids(self, provider, fake, tmp_path, as_avro):
        """Where the texts' ids were not kept their order says whose a vector is."""
        fake.keeps_ids, fake.as_avro = False, as_avro
        job = await self.submit(provider, tmp_path, [3, 7, 5])
        fake.finish()
        replies = await collect(provider, job)
        for number in (3, 7, 5):
            self.check(number, replies[number])

    async def test_without_ids_and_incomplete(self, provider, fake, tmp_path):
        """With neither ids nor all of the vectors nobody can tell whose they are, and none counts."""
        fake.keeps_ids = False
        job = await self.submit(provider, tmp_path, [3, 7, 5])
        fake.finish()
        fake.datasets["job-0-out"]["parts"].pop()
        assert set(await collect(provider, job)) == {-1}

    async def test_a_part_cut_short(self, provider, fake, tmp_path):
        """A part that cannot be read to its end is to be fetched again."""
        job = await self.submit(provider, tmp_path, [3, 4])
        fake.finish()
        fake.fail("GET", "/files/", Wrong(200, b'{"id":"r3","text'))
        with pytest.raises(TryAgain):
            await collect(provider, job)

    async def test_files_get_no_key(self, provider, fake, tmp_path):
        """The key goes to Cohere alone: files lie elsewhere, and their addresses open them."""
        job = await self.submit(provider, tmp_path, [3])
        fake.finish()
        await collect(provider, job)
        received = [headers for _, path, headers in fake.calls if path.startswith("/files/")]
        assert received and all(fake.key not in str(headers) for headers in received)

    async def test_refused_texts(self, provider, fake, tmp_path):
        """A dataset that is not valid ends the submission with Cohere's words."""
        fake.validation = ["failed"]
        with pytest.raises(JobRefused, match="too long"):
            await self.submit(provider, tmp_path, [0])

    async def test_texts_that_are_still_read(self, provider, fake, tmp_path):
        """A job is made once Cohere has read the texts; before that nothing has happened yet."""
        fake.validation = ["queued", "processing", "validated"]
        upload = self.spool(provider, tmp_path, [0])
        job = await provider.upload(self.job([0]), upload)
        for _ in range(2):
            with pytest.raises(TryAgain) as caught:
                await provider.create(job, upload)
            assert caught.value.is_unseen and caught.value.retry_after_s
        assert (await provider.create(job, upload)).id == "job-0"

    async def test_uploaded_only(self, provider, fake, tmp_path):
        """A submission that got no further than its upload is found with its dataset and without an id."""
        uploaded = await provider.upload(self.job([0]), self.spool(provider, tmp_path, [0]))
        found = await provider.find(self.job([0]))
        assert found is not None and (found.id, found.input) == ("", uploaded.input)
        await provider.clean_up(uploaded)
        assert await provider.find(self.job([0])) is None

    async def test_the_order(self, provider, fake, tmp_path):
        """A job names the model, how texts are meant and cut, and carries the submission's tag."""
        await self.submit(provider, tmp_path, [0])
        order = fake.jobs["job-0"].details["order"]
        assert (order["model"], order["name"]) == ("embed-test", "bm-test-0001")
        assert (order["input_type"], order["truncate"]) == ("search_document", "END")

    def test_rows_that_mean_something_else_go_apart(self, provider):
        """Rows of another model, meaning or cut go in another job."""
        rows = [row(input="a"), row(input="a", input_type="search_query"), row(input="a", truncate="START")]
        assert len({provider.encode(0, each).group for each in rows}) == 3

    @pytest.mark.parametrize(
        "fields",
        [
            {"input": ""},
            {"input": [1, 2]},
            {"input": "a", "dimensions": 4},
            {"input": "a", "encoding_format": "base64"},
            {"input": "a", "input_type": "image"},
            {"input": "a", "truncate": "NONE"},
        ],
    )
    def test_what_is_refused(self, provider, fields):
        """What an embed job cannot do is refused by its name."""
        with pytest.raises(InvalidRow) as caught:
            provider.encode(0, row(**fields))
        assert "`" in caught.value.message
