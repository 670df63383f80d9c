import json
from collections.abc import AsyncIterator

import pytest
from contract.provider_suite import ProviderSuite, collect
from fakes.aws_batches import REGION, SageMakerFake
from fakes.provider_fake import Wrong

from batchmill.engines.connections import Connections
from batchmill.engines.provider_batch.provider import JobRefused, RowReply
from batchmill.engines.provider_batch.sagemaker import SageMakerBatches, name_of
from batchmill.errors import ModelFailed
from batchmill.types import Action, Connector, Limits, ModelSpec, Request

KEYS = {"access_key": "env:TEST_AWS_ACCESS", "secret_key": "env:TEST_AWS_SECRET"}


@pytest.fixture
async def fake(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SageMakerFake]:
    monkeypatch.setenv("TEST_AWS_ACCESS", SageMakerFake.access_key)
    monkeypatch.setenv("TEST_AWS_SECRET", SageMakerFake.key)
    async with SageMakerFake() as fake:
        yield fake


@pytest.fixture
async def provider(fake: SageMakerFake) -> AsyncIterator[SageMakerBatches]:
    connections = Connections(Limits(attempt_timeout_s=20))
    await connections.start()
    yield SageMakerBatches(model(fake), connections)
    await connections.stop()


def model(fake: SageMakerFake, **arguments: str | int) -> ModelSpec:
    given = {
        **KEYS,
        "region": REGION,
        "s3": "s3://bucket-of-tests/runs",
        "s3_endpoint": f"{fake.base_url}/s3",
        "instance_type": "ml.m5.xlarge",
        **arguments,
    }
    return ModelSpec(
        "scorer", "provider_batch", "the-model", base_url=fake.base_url, engine_args=given, provider="sagemaker"
    )


class TestSageMaker(ProviderSuite):
    name = "sagemaker"
    create = ("POST", "CreateTransformJob")
    look = ("POST", "DescribeTransformJob")
    tells_errors = False
    tells_undone = False

    def request(self, number: int) -> Request:
        return Request("/v1/anything", json.dumps({"features": [number, 1]}).encode())

    def wrong_request(self) -> Request:
        return Request("/v1/chat/completions", b'{"stream":true}')

    def check(self, number: int, reply: RowReply) -> None:
        assert reply.body is not None
        assert json.loads(reply.body) == {"echo": {"features": [number, 1]}}

    def refusal(self, key: str) -> Wrong:
        body = {"__type": "AccessDeniedException", "message": f"not allowed with {key}"}
        return Wrong(400, body)

    async def test_the_order(self, provider, fake, tmp_path):
        """A transform job names the model, the machine and the files, and its name is the submission's tag."""
        job = await self.submit(provider, tmp_path, [0])
        order = fake.jobs["bm-test-0001"].details["order"]
        assert order["ModelName"] == "the-model"
        assert order["TransformResources"] == {"InstanceType": "ml.m5.xlarge", "InstanceCount": 1}
        assert order["TransformInput"]["ContentType"] == order["TransformOutput"]["Accept"] == "application/json"
        assert job.input == "s3://bucket-of-tests/runs/bm-test-0001/input.jsonl"
        assert job.id.startswith("arn:aws:sagemaker:")

    async def test_a_name_that_is_taken(self, provider, fake, tmp_path):
        """To create a job twice is to create it once: the name is ours alone."""
        first = await self.submit(provider, tmp_path, [0, 1])
        second = await self.submit(provider, tmp_path, [0, 1])
        assert first.id == second.id
        assert len(fake.jobs) == 1

    async def test_uploaded_only(self, provider, fake, tmp_path):
        """A submission that got no further than its upload is found with its file and without an id."""
        uploaded = await provider.upload(self.job([0]), self.spool(provider, tmp_path, [0]))
        found = await provider.find(self.job([0]))
        assert found is not None and (found.id, found.input) == ("", uploaded.input)
        await provider.clean_up(uploaded)
        assert await provider.find(self.job([0])) is None

    async def test_too_few_lines(self, provider, fake, tmp_path):
        """Where there are not as many answers as rows, none counts: nobody can tell whose they are."""
        job = await self.submit(provider, tmp_path, [0, 1, 2])
        fake.finish()
        fake.files["bucket-of-tests/runs/bm-test-0001/output/input.jsonl.out"] = b'{"a":1}\n\n{"a":2}\n'
        with pytest.raises(JobRefused, match="2 lines for 3 rows"):
            await collect_strictly(provider, job)

    async def test_answers_that_are_text(self, provider, fake, tmp_path):
        """An answer that is not JSON is kept as the text that it is."""
        job = await self.submit(provider, tmp_path, [0])
        fake.finish()
        fake.files["bucket-of-tests/runs/bm-test-0001/output/input.jsonl.out"] = b"0.75,yes\n"
        assert (await collect(provider, job))[0].body == b'{"response":"0.75,yes"}'

    async def test_failed(self, provider, fake, tmp_path):
        """A job that failed says why."""
        job = await self.submit(provider, tmp_path, [0])
        fake.finish({0: "error"})
        with pytest.raises(JobRefused, match="Failed: ClientError"):
            await collect_strictly(provider, job)

    async def test_no_room(self, provider, fake, tmp_path):
        """An account without room for another machine is to be asked later."""
        upload = self.spool(provider, tmp_path, [0])
        job = await provider.upload(self.job([0]), upload)
        fake.fail(*self.create, Wrong(400, {"__type": "ResourceLimitExceeded", "message": "0 instances"}))
        with pytest.raises(JobRefused) as caught:
            await provider.create(job, upload)
        assert caught.value.retry_after_s is not None

    async def test_through_a_connector(self, fake, tmp_path, monkeypatch):
        """A connector's parameters, credential and URL stand for what engine arguments would say."""
        monkeypatch.setenv("TEST_AWS_SECRET", fake.key)
        parameters = {
            "region": REGION,
            "service_name": "sagemaker",
            "ModelName": "of-the-connector",
            "TransformResources": '{"InstanceCount": 2, "InstanceType": "ml.c5.large"}',
            "TransformOutput": '{"S3OutputPath": "s3://bucket-of-tests/there", "Accept": "text/csv"}',
            "s3_endpoint": f"{fake.base_url}/s3",
        }
        action = Action("BATCH_PREDICT", "POST", f"{fake.base_url}/CreateTransformJob", {}, "{}")
        connector = Connector("c", "c", "1", "aws_sigv4", [action], parameters=parameters, credential=KEYS)
        spec = ModelSpec("scorer", "provider_batch", "x", connector=connector, provider="sagemaker")
        connections = Connections(Limits())
        await connections.start()
        await self.submit(SageMakerBatches(spec, connections), tmp_path, [0])
        await connections.stop()
        order = fake.jobs["bm-test-0001"].details["order"]
        assert order["ModelName"] == "of-the-connector"
        assert order["TransformResources"] == {"InstanceCount": 2, "InstanceType": "ml.c5.large"}
        assert order["TransformOutput"]["Accept"] == "text/csv"
        assert order["TransformOutput"]["S3OutputPath"] == "s3://bucket-of-tests/there/bm-test-0001/output"

    async def test_keys_of_the_machine(self, fake, tmp_path, monkeypatch):
        """Without keys of its own a model uses those that AWS's tools would find; a stranger's connector never does."""
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", fake.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", fake.key)
        spec = model(fake, access_key="", secret_key="")
        connections = Connections(Limits())
        await connections.start()
        assert (await self.submit(SageMakerBatches(spec, connections), tmp_path, [0])).id
        action = Action("BATCH_PREDICT", "POST", f"{fake.base_url}/CreateTransformJob", {}, "{}")
        parameters = {name: str(value) for name, value in spec.engine_args.items()}
        stranger = Connector("c", "c", "1", "aws_sigv4", [action], parameters=parameters, credential={"roleArn": "r"})
        theirs = ModelSpec("scorer", "provider_batch", "x", connector=stranger, provider="sagemaker")
        with pytest.raises(ModelFailed, match="roleArn"):
            await self.submit(SageMakerBatches(theirs, connections), tmp_path, [0])
        await connections.stop()

    @pytest.mark.parametrize(
        ("argument", "expected"), [("s3", "s3"), ("instance_type", "instance_type"), ("region", "region")]
    )
    def test_what_is_missing(self, fake, monkeypatch, argument, expected):
        """A model that lacks what SageMaker needs says which argument to give."""
        for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
            monkeypatch.delenv(name, raising=False)
        spec = model(fake)
        del spec.engine_args[argument]
        with pytest.raises(ModelFailed, match=expected):
            SageMakerBatches(spec, Connections(Limits()))


async def collect_strictly(provider, job):
    return [some async for some in provider.results(job)]


@pytest.mark.parametrize("tag", ["bm-1-2", "a" * 63, "a" * 64, "with_underscore", "-begins", "ends-"])
def test_names_of_jobs(tag: str) -> None:
    """Whatever the tag, the job's name is one that AWS takes, and the same each time."""
    name = name_of(tag)
    assert len(name) <= 63
    assert name == name_of(tag)
    assert name.replace("-", "").isalnum() and not name.startswith("-") and not name.endswith("-")
