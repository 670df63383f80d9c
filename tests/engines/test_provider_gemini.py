import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from contract.provider_suite import ProviderSuite, collect
from engines.provider_batch_support import FAST, Ground, HeldLease, batch_row
from fakes.gemini_batches import GeminiFake
from fakes.provider_fake import LOST_REPLY, Wrong
from msgspec.structs import replace

from batchmill.engines.connections import Connections
from batchmill.engines.provider_batch.gemini import GeminiBatches
from batchmill.engines.provider_batch.provider import JobGone, JobRefused, RowReply, TryAgain
from batchmill.errors import AuthRefused, InvalidRow, ModelFailed, RouteFailed, SubmitUnknown
from batchmill.types import Action, Connector, Limits, ModelSpec, RemoteJob, Request, Usage

CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"
UPLOAD, CREATE = ("POST", "/upload/"), ("POST", ":batchGenerateContent")


@pytest.fixture
async def fake(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GeminiFake]:
    monkeypatch.setenv("TEST_GEMINI_KEY", GeminiFake.key)
    async with GeminiFake() as fake:
        yield fake


@pytest.fixture
async def provider(fake: GeminiFake) -> AsyncIterator[GeminiBatches]:
    connections = Connections(Limits(attempt_timeout_s=20))
    await connections.start()
    yield GeminiBatches(model(fake), connections)
    await connections.stop()


def model(fake: GeminiFake, **arguments: str | float) -> ModelSpec:
    return ModelSpec(
        "writer",
        "provider_batch",
        "gemini-test",
        base_url=fake.base_url,
        api_key="env:TEST_GEMINI_KEY",
        provider="gemini",
        engine_args=dict(arguments),
        limits=Limits(attempt_timeout_s=5.0, connect_timeout_s=5.0),
    )


def chat(text: str, **fields: object) -> Request:
    return Request(CHAT, json.dumps({"messages": [{"role": "user", "content": text}], **fields}).encode())


def vector(**fields: object) -> Request:
    return Request(EMBEDDINGS, json.dumps(fields).encode())


class GeminiSuite(ProviderSuite):
    name = "gemini"
    tells_undone = False

    async def submit_one(self, provider: GeminiBatches, fake: GeminiFake, tmp_path: Path, line: object) -> RemoteJob:
        """A batch of one row, which ends with this line instead of its own."""
        job = await self.submit(provider, tmp_path, [7])
        fake.finish()
        data = line if isinstance(line, bytes) else json.dumps(line).encode()
        for _ in range(2):
            fake.fail("GET", "/download/", Wrong(200, data, {"Content-Type": "application/octet-stream"}))
        return job


class TestGemini(GeminiSuite):
    create = CREATE
    look = ("GET", "/v1beta/batches/")

    def request(self, number: int) -> Request:
        return chat(f"m{number}")

    def wrong_request(self) -> Request:
        return Request("/v1/messages", b'{"messages":[]}')

    def check(self, number: int, reply: RowReply) -> None:
        assert reply.body is not None
        body = json.loads(reply.body)
        assert (body["object"], body["model"]) == ("chat.completion", "gemini-test-001")
        assert body["choices"][0]["message"]["content"] == f"echo m{number}"
        assert reply.usage == Usage(7, 2, 4)
        assert reply.request_id == "resp_1"

    def refusal(self, key: str) -> Wrong:
        details = [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "API_KEY_INVALID"}]
        error = {"code": 400, "message": f"API key not valid: {key}", "status": "INVALID_ARGUMENT", "details": details}
        return Wrong(400, {"error": error})

    async def test_no_address_holds_the_key(self, provider, fake, tmp_path):
        """The key goes into a header of every call, and into no address."""
        job = await self.submit(provider, tmp_path, [0, 1])
        fake.finish()
        await collect(provider, job)
        await provider.clean_up(job)
        await provider.clean_results(job)
        assert all(headers["x-goog-api-key"] == fake.key for _, _, headers in fake.calls)
        assert not any(fake.key in path or "key=" in path for _, path, _ in fake.calls)

    async def test_the_order(self, provider, fake, tmp_path):
        """A batch names its file and carries the submission's tag; the file has one line a row, with its key."""
        job = await self.submit(provider, tmp_path, [3, 9])
        remote = fake.jobs[job.id]
        assert (remote.name, remote.details["model"]) == ("bm-test-0001", "models/gemini-test")
        assert remote.details["input"] == job.input
        assert [row["key"] for row in remote.rows] == ["c3", "c9"]
        assert [file["displayName"] for file in fake.files.values()] == ["bm-test-0001"]

    async def test_an_upload_that_was_cut(self, provider, fake, tmp_path):
        """Of an upload that did not reach its end there is no file; one whose reply was lost is found by its name."""
        upload = self.spool(provider, tmp_path, [0])
        fake.fail("POST", "upload_id=", Wrong(500))
        with pytest.raises(TryAgain):
            await provider.upload(self.job([0]), upload)
        assert await provider.find(self.job([0])) is None
        fake.fail("POST", "upload_id=", LOST_REPLY)
        with pytest.raises(TryAgain):
            await provider.upload(self.job([0]), upload)
        found = await provider.find(self.job([0]))
        assert found is not None and (found.id, found.input) == ("", next(iter(fake.files)))
        await provider.clean_up(found)
        await provider.clean_up(found)  # what is not there any more needs no deleting
        assert await provider.find(self.job([0])) is None

    async def test_an_address_of_an_upload_that_is_none(self, provider, fake, tmp_path):
        """A reply without the address of the upload is to be asked for again."""
        fake.fail(*UPLOAD, Wrong(200, {}))
        with pytest.raises(TryAgain, match="no address"):
            await provider.upload(self.job([0]), self.spool(provider, tmp_path, [0]))

    async def test_a_refused_upload(self, provider, fake, tmp_path):
        """A file that Gemini does not take ends the submission with Gemini's words."""
        error = {"error": {"code": 400, "message": "the storage of the project is full", "status": "X"}}
        fake.fail(*UPLOAD, Wrong(400, error))
        with pytest.raises(JobRefused, match="storage of the project"):
            await provider.upload(self.job([0]), self.spool(provider, tmp_path, [0]))

    async def test_a_file_that_is_processed(self, provider, fake, tmp_path):
        """A batch is made once Gemini has processed the file; before that nothing has happened yet."""
        fake.file_states = ["PROCESSING", "PROCESSING", "ACTIVE"]
        upload = self.spool(provider, tmp_path, [0])
        job = await provider.upload(self.job([0]), upload)
        for _ in range(2):
            with pytest.raises(TryAgain) as caught:
                await provider.create(job, upload)
            assert caught.value.is_unseen and caught.value.retry_after_s
        assert (await provider.create(job, upload)).id
        fake.file_states = ["FAILED"]
        with pytest.raises(JobRefused, match="the uploaded file"):
            await self.submit(provider, tmp_path, [0], tag="bm-test-0002")

    async def test_a_file_that_has_expired(self, provider, fake, tmp_path):
        """Gemini keeps a file for 48 hours: a submission that waited longer uploads its rows again."""
        upload = self.spool(provider, tmp_path, [0])
        job = await provider.upload(self.job([0]), upload)
        fake.files.clear()
        created = await provider.create(job, upload)
        assert created.input in fake.files and created.input != job.input

    async def test_find_turns_pages(self, provider, fake, tmp_path):
        """A batch and a file are found among many, whatever the order of the lists."""
        job = await self.submit(provider, tmp_path, [0])
        for number in range(120):
            await self.submit(provider, tmp_path, [number], tag=f"bm-other-{number}")
        found = await provider.find(self.job([0]))
        assert found is not None and (found.id, found.input) == (job.id, job.input)
        last = await provider.find(self.job([0], tag="bm-other-119"))
        assert last is not None and last.id == next(reversed(fake.jobs))

    async def test_more_batches_than_are_searched(self, provider, fake, tmp_path, monkeypatch):
        """Where the account has more batches than are searched, nobody claims that ours is not among them."""
        monkeypatch.setattr("batchmill.engines.provider_batch.gemini.PAGE", 1)
        monkeypatch.setattr("batchmill.engines.provider_batch.gemini.PAGES_MAX", 2)
        for number in range(3):
            await self.submit(provider, tmp_path, [number], tag=f"bm-other-{number}")
        with pytest.raises(SubmitUnknown, match="bm-test-0001"):
            await provider.find(self.job([0]))

    async def test_twice(self, provider, fake, tmp_path):
        """Of two batches of one submission the known one stays, or else the most advanced; the other is cancelled."""
        first = await self.submit(provider, tmp_path, [0])
        fake.finish()
        second = await self.submit(provider, tmp_path, [0])
        found = await provider.find(self.job([0]))
        assert found is not None and found.id == first.id
        assert "cancel" in fake.jobs[second.id].details
        known = await provider.find(self.job([0], id=second.id))
        assert known is not None and known.id == second.id

    async def test_one_that_failed_and_one_that_runs(self, provider, fake, tmp_path):
        """A batch that failed is no reason to cancel the one of the same submission that runs."""
        await self.submit(provider, tmp_path, [0])
        fake.fail_all(13, "broken")
        second = await self.submit(provider, tmp_path, [0])
        found = await provider.find(self.job([0]))
        assert found is not None and found.id == second.id
        assert "cancel" not in fake.jobs[second.id].details

    @pytest.mark.parametrize("prefix", ["BATCH_STATE_", "JOB_STATE_"])
    async def test_names_of_states(self, provider, fake, tmp_path, prefix):
        """States are read under both of the names that Google uses."""
        fake.prefix = prefix
        job = await self.submit(provider, tmp_path, [0, 1])
        assert (job.state, job.remote_state) == ("submitted", "pending")
        fake.finish({1: "error"})
        job = await provider.refresh(job)
        assert (job.state, job.remote_state, job.completed, job.failed) == ("ended", "succeeded", 1, 1)

    @pytest.mark.parametrize("partial", [True, False])
    async def test_cancelled_with_results(self, provider, fake, tmp_path, partial):
        """A batch that was cancelled brings what it has, and says that the others were not run."""
        fake.partial = partial
        job = await provider.cancel(await self.submit(provider, tmp_path, [0, 1, 2]))
        assert job.state == "cancelling"
        fake.finish({2: "undone"})
        job = await provider.refresh(job)
        assert (job.state, job.remote_state) == ("ended", "cancelled")
        replies = await collect(provider, job, refused=True)
        assert sorted(replies) == ([0, 1] if partial else [])

    @pytest.mark.parametrize(("code", "rest"), [(3, None), (8, 600.0)])
    async def test_a_batch_that_failed(self, provider, fake, tmp_path, code, rest):
        """A failed batch is refused in Gemini's words; one that found no capacity may be submitted again later."""
        job = await self.submit(provider, tmp_path, [0])
        fake.fail_all(code, "line 1 is strange")
        job = await provider.refresh(job)
        assert (job.state, job.remote_state) == ("ended", "failed")
        with pytest.raises(JobRefused, match="failed: line 1 is strange") as caught:
            _ = [some async for some in provider.results(job)]
        assert caught.value.retry_after_s == rest

    async def test_results_that_are_gone(self, provider, fake, tmp_path):
        """Results that were deleted are gone, and so is a batch; deleting them again is no error."""
        job = await self.submit(provider, tmp_path, [0])
        fake.finish()
        fake.fail("GET", "/download/", Wrong(404, {"error": {"code": 404, "message": "no", "status": "NOT_FOUND"}}))
        with pytest.raises(JobGone):
            await collect(provider, job)
        await provider.clean_results(job)
        await provider.clean_results(job)
        with pytest.raises(JobGone):
            await collect(provider, job)

    async def test_another_order_of_replies(self, provider, fake, tmp_path):
        """Replies are matched by their keys: their order in the file says nothing."""
        numbers = [3, 5, 9]
        job = await self.submit(provider, tmp_path, numbers)
        fake.finish()
        for number, reply in (await collect(provider, job)).items():
            self.check(number, reply)

    async def test_a_key_beside_the_reply(self, provider, fake, tmp_path):
        """A key is also read where Gemini writes it for rows that were sent without a file."""
        job = await self.submit_one(provider, fake, tmp_path, {"metadata": {"key": "c7"}, "response": answer("a")})
        assert list(await collect(provider, job)) == [7]

    @pytest.mark.parametrize(
        "line",
        [
            {"response": {"candidates": []}},
            {"key": "somebody-else", "response": {"candidates": []}},
            {"key": "7", "error": {"code": 3}},
            {"key": 7, "error": {"code": 3}},
        ],
    )
    async def test_keys_that_are_none_of_ours(self, provider, fake, tmp_path, line):
        """A line without one of our keys belongs to no row, and its place in the file gives it none."""
        job = await self.submit_one(provider, fake, tmp_path, line)
        assert list(await collect(provider, job)) == [-1]

    @pytest.mark.parametrize(
        "line", [b'{"key":"c7","response":{"candi', b'{"key":"c7"}', b'{"key":"c7","response":"text"}']
    )
    async def test_lines_that_cannot_be_read(self, provider, fake, tmp_path, line):
        """A line that cannot be read is garbled, and still belongs to its row."""
        job = await self.submit_one(provider, fake, tmp_path, line)
        replies = await collect(provider, job)
        assert (list(replies), replies[7].is_garbled) == ([7], True)

    @pytest.mark.parametrize(
        ("error", "expected"),
        [
            ({"code": 3, "message": "too long"}, (400, "invalid_argument", False)),
            ({"code": 8, "message": "full"}, (429, "resource_exhausted", True)),
            ({"code": 14}, (503, "unavailable", True)),
            ({"code": 1}, (499, "cancelled", True)),
            ({"code": 12}, (501, "unimplemented", False)),
            ({"code": 400, "status": "INVALID_ARGUMENT"}, (400, "invalid_argument", False)),
            ({"code": 503}, (503, "http_503", True)),
            ({"code": "UNAVAILABLE"}, (503, "unavailable", True)),
            ({"code": {"strange": True}}, (500, "http_500", True)),
            ({}, (500, "http_500", True)),
        ],
    )
    async def test_errors_in_all_their_forms(self, provider, fake, tmp_path, error, expected):
        """A row's error is read with Google's codes and with HTTP's, and says whether the row may be sent again."""
        for line in ({"key": "c7", "error": error}, {"key": "c7", "response": {"error": error}}):
            job = await self.submit_one(provider, fake, tmp_path, line)
            reply = (await collect(provider, job))[7]
            assert reply.error is not None and reply.error.message
            assert (reply.status, reply.error.code, reply.is_undone) == expected
            assert json.loads(reply.body or b"") == {"error": error}

    async def test_a_reply_without_an_answer(self, provider, fake, tmp_path):
        """A reply with neither a candidate nor a reason for none is an error that keeps what was billed."""
        job = await self.submit_one(
            provider, fake, tmp_path, {"key": "c7", "response": {"usageMetadata": {"promptTokenCount": 9}}}
        )
        reply = (await collect(provider, job))[7]
        assert reply.error is not None and reply.error.code == "bad_response"
        assert (reply.usage, reply.is_undone, reply.is_garbled) == (Usage(9, 0, 0), False, False)

    async def test_how_long_to_wait(self, provider, fake, tmp_path):
        """A throttled call waits as long as Google's details request."""
        details = [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "33.5s"}]
        error = {"code": 429, "message": "quota", "status": "RESOURCE_EXHAUSTED", "details": details}
        fake.fail(*CREATE, Wrong(429, {"error": error}))
        with pytest.raises(TryAgain) as caught:
            await self.submit(provider, tmp_path, [0])
        assert (caught.value.retry_after_s, caught.value.is_unseen) == (33.5, True)

    async def test_no_permission(self, provider, fake, tmp_path):
        """Only a file that may not exist is a missing one: any other refusal concerns the key."""
        job = await self.submit(provider, tmp_path, [0])
        error = {"code": 403, "message": "The API is not enabled", "status": "PERMISSION_DENIED"}
        fake.fail("GET", "/v1beta/batches/", Wrong(403, {"error": error}))
        with pytest.raises(AuthRefused, match="not enabled"):
            await provider.refresh(job)

    @pytest.mark.parametrize("id", ["../models/x", "a/b", "a?b", "", "a%2Fb"])
    async def test_ids_that_lead_elsewhere(self, provider, fake, id):
        """An id that somebody adopted is one name, and never changes where a call goes."""
        with pytest.raises(JobGone):
            await provider.refresh(self.job([0], id=id))
        assert fake.calls == []

    async def test_an_id_without_its_collection(self, provider, fake, tmp_path):
        """An adopted id may be written with or without `batches/`."""
        job = await self.submit(provider, tmp_path, [0])
        assert (await provider.refresh(replace(job, id=job.id.removeprefix("batches/")))).id == job.id

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("gemini-2.5-flash", "models/gemini-2.5-flash"),
            ("models/gemini-2.5-flash", "models/gemini-2.5-flash"),
            ("tunedModels/mine-1", "tunedModels/mine-1"),
            ("gemini:x", None),
            ("corpora/x", None),
            ("models/../x", None),
            ("models/..", None),
        ],
    )
    def test_names_of_models(self, provider, name, expected):
        """A row's model is one of Gemini's names, and rows of different models go apart."""
        request = chat("a", model=name)
        if expected is None:
            with pytest.raises(InvalidRow, match="model"):
                provider.encode(0, request)
        else:
            assert provider.encode(0, request).group == f"c {expected}"

    def test_rows_that_go_apart(self, provider):
        """Rows of another model or of embeddings go in another batch."""
        rows = [chat("a"), chat("a", model="gemini-other"), vector(input="a")]
        assert len({provider.encode(0, each).group for each in rows}) == 3

    def test_streams_are_refused(self, provider):
        """A row that wants a stream is refused."""
        with pytest.raises(InvalidRow, match="stream"):
            provider.encode(0, chat("a", stream=True))


class TestGeminiEmbeddings(GeminiSuite):
    create = ("POST", ":asyncBatchEmbedContent")
    look = ("GET", "/v1beta/batches/")

    refusal = TestGemini.refusal

    def request(self, number: int) -> Request:
        text = "x" * (number % 1000 + 1)
        return vector(input=[text]) if number % 2 else vector(model="writer", input=text)

    def wrong_request(self) -> Request:
        return vector(input=["one", "two"])

    def check(self, number: int, reply: RowReply) -> None:
        assert reply.body is not None
        assert json.loads(reply.body) == {
            "object": "list",
            "data": [{"object": "embedding", "index": 0, "embedding": [float(number % 1000 + 1), 0.5]}],
            "model": "gemini-test",
            "usage": {"prompt_tokens": 4, "total_tokens": 4},
        }
        assert reply.usage == Usage(4, 0, 0)

    async def test_task_and_dimensions(self, fake, provider):
        """A row's task and dimensions are asked for; a row without a task has the model's."""
        mine = GeminiBatches(model(fake, task_type="RETRIEVAL_DOCUMENT"), Connections(Limits()))
        row = vector(input="a", dimensions=64, encoding_format="float")
        assert json.loads(mine.encode(0, row).data)["request"] == {
            "content": {"parts": [{"text": "a"}]},
            "taskType": "RETRIEVAL_DOCUMENT",
            "outputDimensionality": 64,
        }
        asked = json.loads(mine.encode(0, vector(input="a", task_type="CLUSTERING")).data)["request"]
        assert asked["taskType"] == "CLUSTERING"
        assert "taskType" not in json.loads(provider.encode(0, vector(input="a")).data)["request"]

    @pytest.mark.parametrize(
        "fields",
        [
            {"input": ""},
            {"input": [1, 2]},
            {"input": "a", "encoding_format": "base64"},
            {"input": "a", "dimensions": "64"},
            {"input": "a", "task_type": 7},
            {"input": "a", "task_type": "NOTHING"},
            {"input": "a", "user": "u"},
        ],
    )
    def test_what_is_refused(self, provider, fields):
        """What a batch of embeddings cannot do is refused by its name."""
        with pytest.raises(InvalidRow) as caught:
            provider.encode(0, vector(**fields))
        assert "`" in caught.value.message

    async def test_a_reply_without_a_vector(self, provider, fake, tmp_path):
        """A reply without a vector is an error of its row."""
        job = await self.submit_one(provider, fake, tmp_path, {"key": "e7", "response": {"embedding": {"values": []}}})
        reply = (await collect(provider, job))[7]
        assert reply.error is not None and reply.error.code == "bad_response"


def answer(text: str) -> dict[str, Any]:
    return {"candidates": [{"content": {"parts": [{"text": text}]}}]}


@pytest.mark.parametrize(
    ("end", "root", "version"),
    [
        ("", "", "v1beta"),
        ("/v1beta", "", "v1beta"),
        ("/v1alpha/", "", "v1alpha"),
        ("/v1beta/batches", "", "v1beta"),
        ("/v1beta/models/gemini-x:batchGenerateContent", "", "v1beta"),
        ("/google", "/google", "v1beta"),
        ("/google/v1beta", "/google", "v1beta"),
    ],
)
async def test_addresses(fake, end, root, version):
    """The address may be the host alone, or go on to the version and a model's method."""
    provider = GeminiBatches(replace(model(fake), base_url=fake.base_url + end), Connections(Limits()))
    assert provider._url("batches") == f"{fake.base_url}{root}/{version}/batches"


async def test_a_key_in_the_address(fake):
    """A key in the query of an address is refused: it would be in the logs of every proxy."""
    with pytest.raises(ModelFailed, match="x-goog-api-key"):
        GeminiBatches(replace(model(fake), base_url=f"{fake.base_url}/v1beta?key=abc"), Connections(Limits()))


async def test_a_task_that_is_none(fake):
    """A model's task is one of Gemini's, or the model does not start."""
    with pytest.raises(ModelFailed, match="CLUSTERING"):
        GeminiBatches(model(fake, task_type="clustering"), Connections(Limits()))


async def test_through_a_connector(fake, tmp_path):
    """A connector's URL and headers stand for address and key."""
    url = f"{fake.base_url}/v1beta/models/gemini-test:batchGenerateContent"
    action = Action("BATCH_PREDICT", "POST", url, {"x-goog-api-key": "${credential.key}"}, "{}")
    credential = {"key": "env:TEST_GEMINI_KEY"}
    connector = Connector("c", "c", "1", "http", [action], credential=credential, is_trusted=True)
    spec = ModelSpec("writer", "provider_batch", "gemini-test", connector=connector, provider="gemini")
    connections = Connections(Limits())
    await connections.start()
    assert (await TestGemini().submit(GeminiBatches(spec, connections), tmp_path, [0, 1])).id
    await connections.stop()


async def test_a_key_that_was_changed(fake, tmp_path, monkeypatch):
    """A key that is refused, with status 400 as Google does, is read again before the job is paused for it."""
    connections = Connections(Limits())
    await connections.start()
    provider = GeminiBatches(model(fake), connections)
    job = await TestGemini().submit(provider, tmp_path, [0, 1])
    fake.key = "AIza-another-key"
    with pytest.raises(AuthRefused):
        await provider.refresh(job)
    monkeypatch.setenv("TEST_GEMINI_KEY", fake.key)
    assert (await provider.refresh(job)).id == job.id
    await connections.stop()


# the engine with this provider


def ground(fake: GeminiFake, home: Path, **arguments: str | float) -> Ground:
    return Ground(model(fake, **{**FAST, **arguments}), home)


async def test_nothing_stays(fake, tmp_path):
    """Once a batch was read its upload and the batch are deleted, and its results with it."""
    fake.fates = []
    await ground(fake, tmp_path).run((HeldLease(2), [batch_row(number) for number in range(2)]))
    assert (fake.files, fake.deleted) == ({}, list(fake.jobs))


async def test_a_part_of_a_file_is_refused(fake, tmp_path):
    """Rows that Gemini refuses have its errors and are not sent again; those that met an overload are."""
    fake.fates = [{1: "error", 2: "overloaded"}]
    mine, rows = ground(fake, tmp_path), [batch_row(number) for number in range(4)]
    await mine.run((HeldLease(4), rows))
    outcomes = mine.outcomes()
    failed = {number: each.error.code for number, each in outcomes.items() if each.error is not None}
    assert failed == {1: "invalid_argument"}
    assert outcomes[1].status == 400
    assert sorted(len(job.rows) for job in fake.jobs.values()) == [1, 4]


async def test_rows_without_a_reply(fake, tmp_path):
    """A row whose reply never comes is sent again, three times in all, and then counts as lost by the provider."""
    fake.fates = [{1: "lost"}, {0: "lost"}, {0: "lost"}]
    mine, lease = ground(fake, tmp_path), HeldLease(3)
    fake.end = lambda job, *, expired: setattr(job, "state", "SUCCEEDED")  # type: ignore[method-assign]
    await mine.run((lease, [batch_row(number) for number in range(3)]))
    outcomes = mine.outcomes()
    assert {number: each.error is None for number, each in outcomes.items()} == {0: True, 1: False, 2: True}
    assert outcomes[1].error is not None and outcomes[1].error.code == "provider_lost_row"
    assert lease.states() == ["collected"] * 3


async def test_replies_without_keys(fake, tmp_path):
    """Replies without keys are read twice, then given to no row; the rows are sent again."""
    data = b"".join(json.dumps({"response": answer(str(each))}).encode() + b"\n" for each in range(2))
    for _ in range(2):
        fake.fail("GET", "/download/", Wrong(200, data, {"Content-Type": "application/octet-stream"}))
    fake.fates = []
    mine, lease = ground(fake, tmp_path), HeldLease(2)
    await mine.run((lease, [batch_row(number) for number in range(2)]))
    for number, outcome in mine.outcomes().items():
        assert json.loads(outcome.body or b"")["choices"][0]["message"]["content"] == f"echo text {number}"
    assert "2 unreadable lines" in lease.jobs[0].message


async def test_a_row_that_fits_no_file(fake, tmp_path):
    """A row that is larger than a file may be fails by itself; the others go in as many files as they need."""
    fake.fates = []
    mine = ground(fake, tmp_path, bytes_max=400)
    rows = [batch_row(0), batch_row(1, messages=[{"role": "user", "content": "x" * 500}])]
    rows += [batch_row(number, messages=[{"role": "user", "content": "y" * 200}]) for number in (2, 3)]
    await mine.run((HeldLease(4), rows))
    outcomes = mine.outcomes()
    assert {number for number, each in outcomes.items() if each.error is not None} == {1}
    assert outcomes[1].error is not None and outcomes[1].error.code == "row_too_large"
    assert len(fake.jobs) > 1
    assert all(len(file["data"]) <= 400 for file in fake.files.values())


async def test_a_batch_without_capacity(fake, tmp_path):
    """A batch for which the account has no room is submitted again, as often as it takes."""
    mine, lease = ground(fake, tmp_path, poll_max_s=0.02), HeldLease(2)
    running = mine.start((lease, [batch_row(number) for number in range(2)]))
    for tries in range(1, 4):
        await fake.until(lambda tries=tries: len(fake.jobs) == tries)
        fake.fail_all(8, "too many tokens are queued")
    await fake.until(lambda: len(fake.jobs) == 4)
    fake.finish()
    await running.finish()
    assert all(each.error is None for each in mine.outcomes().values())


async def test_a_batch_that_fails_twice(fake, tmp_path):
    """A batch that fails as a whole, and again, fails the route in Gemini's words."""
    mine, lease = ground(fake, tmp_path), HeldLease(2)
    running = mine.start((lease, [batch_row(number) for number in range(2)]))
    for tries in (1, 2):
        await fake.until(lambda tries=tries: len(fake.jobs) == tries)
        fake.fail_all(3, "the model has no batches")
    await running.finish()
    assert isinstance(lease.failure, RouteFailed)
    assert "the model has no batches" in lease.failure.message
    assert mine.outcomes() == {}


async def test_cancelled_by_us(fake, tmp_path):
    """A job that is cancelled cancels its batch, and keeps what it had done."""
    mine, lease = ground(fake, tmp_path), HeldLease(3)
    running = mine.start((lease, [batch_row(number) for number in range(3)]))
    await fake.until(lambda: bool(fake.jobs))
    lease.end("over")
    await fake.until(lambda: "cancel" in next(iter(fake.jobs.values())).details)
    fake.finish({2: "undone"})
    await running.finish()
    assert sorted(mine.outcomes()) == [0, 1]
    assert lease.has_left and fake.running == []
