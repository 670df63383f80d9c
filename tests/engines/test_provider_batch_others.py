"""The engine of provider batches with every provider but OpenAI: its fake from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from engines.provider_batch_support import FAST, Ground, HeldLease, batch_row
from fakes.anthropic_batches import AnthropicFake
from fakes.aws_batches import REGION, AwsFake, BedrockFake, SageMakerFake
from fakes.cohere_batches import CohereFake
from fakes.gemini_batches import GeminiFake
from fakes.provider_fake import LOST_REPLY, ProviderFake, Wrong

from batchmill.engines.connections import Connections
from batchmill.engines.provider_batch import load_provider
from batchmill.errors import RouteFailed, SubmitUnknown
from batchmill.models.addresses import Private
from batchmill.types import Limits, ModelSpec, RemoteJob, Row

ROWS = 9
STEPS_MAX = 60
FAKES = {
    "anthropic": AnthropicFake,
    "cohere": CohereFake,
    "gemini": GeminiFake,
    "sagemaker": SageMakerFake,
    "bedrock": BedrockFake,
}
CREATES = {
    "anthropic": ("POST", "/v1/messages/batches"),
    "cohere": ("POST", "/v1/embed-jobs"),
    "gemini": ("POST", ":batchGenerateContent"),
    "sagemaker": ("POST", "CreateTransformJob"),
    "bedrock": ("POST", "/model-invocation-job"),
}


@pytest.fixture(params=FAKES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
async def fake(name: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ProviderFake]:
    async with new_fake(name, monkeypatch) as fake:
        yield fake


def new_fake(name: str, monkeypatch: pytest.MonkeyPatch) -> ProviderFake:
    """A provider whose jobs end by themselves."""
    fake = FAKES[name]()
    fake.fates = []
    monkeypatch.setenv("TEST_PROVIDER_KEY", fake.key)
    if isinstance(fake, AwsFake):
        monkeypatch.setenv("TEST_AWS_ACCESS", fake.access_key)
    if isinstance(fake, CohereFake):
        fake.as_avro = True
    return fake


def model(name: str, fake: ProviderFake) -> ModelSpec:
    arguments = {name: value for name, value in FAST.items() if name != "queue_rest_s"}
    if isinstance(fake, AwsFake):
        arguments |= {
            "access_key": "env:TEST_AWS_ACCESS",
            "secret_key": "env:TEST_PROVIDER_KEY",
            "region": REGION,
            "s3": "s3://bucket-of-tests/runs",
            "s3_endpoint": f"{fake.base_url}/s3",
        }
    if name == "sagemaker":
        arguments["instance_type"] = "ml.m5.xlarge"
    if name == "bedrock":
        arguments |= {"role_arn": "arn:aws:iam::123456789012:role/batches", "rows_min": 1}
    return ModelSpec(
        "m",
        "provider_batch",
        "anthropic.claude-test" if name == "bedrock" else "remote-m",
        base_url=fake.base_url,
        api_key=None if isinstance(fake, AwsFake) else "env:TEST_PROVIDER_KEY",
        provider=name,
        engine_args=arguments,
        limits=Limits(attempt_timeout_s=5.0, connect_timeout_s=5.0),
    )


def rows_for(name: str) -> list[Row]:
    if name == "cohere":
        return [batch_row(number, url="/v1/embeddings", input="x" * (number + 1)) for number in range(ROWS)]
    return [batch_row(number) for number in range(ROWS)]


def check(name: str, ground: Ground) -> None:
    """Every row has its own answer."""
    outcomes = ground.outcomes()
    assert sorted(outcomes) == list(range(ROWS))
    for number, outcome in outcomes.items():
        assert outcome.error is None, outcome.error
        assert outcome.body is not None
        body = json.loads(outcome.body)
        match name:
            case "cohere":
                assert body["data"][0]["embedding"] == [number + 1, 0.5]
            case "sagemaker":
                assert body["echo"]["messages"][0]["content"] == f"text {number}"
            case _:
                assert body["choices"][0]["message"]["content"] == f"echo text {number}"


async def run(name: str, ground: Ground, fake: ProviderFake, lease: HeldLease) -> None:
    """The rows that have no outcome yet. Where the provider cannot say whether it has them, somebody resumes later."""
    for _ in range(3):
        rows = ground.undone(rows_for(name))
        if not rows:
            return
        lease = HeldLease(len(rows), dict(lease.notes))
        await ground.run((lease, rows))
        assert lease.failure is None or (name == "anthropic" and isinstance(lease.failure, SubmitUnknown))
        fake.finish()


async def test_a_lease_is_one_job(name: str, fake: ProviderFake, tmp_path: Path) -> None:
    """All rows of a lease go as one job, and each gets its own answer."""
    ground, lease = Ground(model(name, fake), tmp_path), HeldLease(ROWS)
    await ground.run((lease, rows_for(name)))
    check(name, ground)
    assert lease.states() == ["collected"]
    assert len(fake.jobs) == 1
    # Nothing of ours is left there.
    assert getattr(fake, "files", {}) == getattr(fake, "datasets", {}) == {}


async def test_files_that_stay(name: str, fake: ProviderFake, tmp_path: Path) -> None:
    """With `keep_files` what was uploaded stays there, and so do the results."""
    spec = model(name, fake)
    spec.engine_args["keep_files"] = True
    await Ground(spec, tmp_path).run((HeldLease(ROWS), rows_for(name)))
    if isinstance(fake, GeminiFake):
        assert (len(fake.files), fake.deleted) == (1, [])  # the results go with their batch
    elif name != "anthropic":
        assert len(getattr(fake, "files", None) or fake.datasets) >= 2


@pytest.mark.parametrize("wrong", [LOST_REPLY, Wrong(500), Wrong(429)])
async def test_creation_goes_wrong(name: str, fake: ProviderFake, tmp_path: Path, wrong: Wrong) -> None:
    """Whatever the call that creates a job meets, there is one job in the end."""
    fake.fail(*CREATES[name], wrong)
    ground = Ground(model(name, fake), tmp_path)
    await run(name, ground, fake, HeldLease(ROWS))
    check(name, ground)
    assert len(fake.jobs) == 1


async def test_rows_left_over_go_again(name: str, fake: ProviderFake, tmp_path: Path) -> None:
    """Rows that a job has not answered go in another one."""
    fake.fates = [{2: "undone", 3: "undone"}]
    ground = Ground(model(name, fake), tmp_path)
    await ground.run((HeldLease(ROWS), rows_for(name)))
    check(name, ground)
    # What fails as a whole goes again as a whole.
    again = ROWS if name in ("sagemaker", "cohere") else 2
    assert sorted(len(job.rows) for job in fake.jobs.values()) == sorted([ROWS, again])


async def test_killed_at_every_note(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a worker is killed beside a note, each row has one outcome, one job was paid, and nothing runs on."""
    for step in range(1, STEPS_MAX):
        async with new_fake(name, monkeypatch) as fake:
            ground, lease = Ground(model(name, fake), tmp_path), HeldLease(ROWS)
            lease.stop_at = step
            was_killed = await ground.start((lease, rows_for(name))).finish_or_die(lease)
            if was_killed:
                await run(name, ground, fake, lease)
            check(name, ground)
            assert len(fake.jobs) == 1, f"killed at step {step}"
            assert fake.running == []
        if not was_killed:
            return
    raise AssertionError("the worker never came to its end")


async def test_closed_addresses(name: str, fake: ProviderFake) -> None:
    """Where private addresses are closed nothing goes to one, wherever a model says that its provider lies."""
    connections = Connections(Limits(), private=Private())
    await connections.start()
    provider = load_provider(model(name, fake), connections)
    with pytest.raises(RouteFailed, match="127.0.0.1"):
        await provider.find(RemoteJob("batchmill-1", name, "intent", [(0, 1)], 1))
    assert fake.calls == []
    await connections.stop()


async def test_anthropic_in_doubt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a batch that may be ours is running the job is in doubt; once it has ended, resuming goes on with it."""
    async with new_fake("anthropic", monkeypatch) as fake:
        fake.fates = None  # batches run on
        ground, lease = Ground(model("anthropic", fake), tmp_path), HeldLease(ROWS)
        rows = rows_for("anthropic")
        fake.fail(*CREATES["anthropic"], LOST_REPLY)
        await ground.run((lease, rows))
        assert isinstance(lease.failure, SubmitUnknown)
        assert "msgbatch_0000" in lease.failure.message
        assert ground.outcomes() == {}
        fake.finish()
        await ground.run((HeldLease(ROWS, dict(lease.notes)), ground.undone(rows)))
        check("anthropic", ground)
        assert len(fake.jobs) == 1


async def test_bedrock_takes_no_few_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rows than Bedrock takes fail the route, so that another may run them."""
    async with new_fake("bedrock", monkeypatch) as fake:
        spec = model("bedrock", fake)
        spec.engine_args["rows_min"] = 100
        ground, lease = Ground(spec, tmp_path), HeldLease(ROWS)
        await ground.run((lease, rows_for("bedrock")))
        assert isinstance(lease.failure, RouteFailed)
        assert "at least 100 rows" in lease.failure.message
        assert fake.jobs == {}


@pytest.mark.parametrize(
    ("missing", "statement", "extra"),
    [
        ("botocore", "load_provider(ModelSpec('m', 'provider_batch', 'm', provider='bedrock'), None)", "aws"),
        ("fastavro", "require(cohere.AVRO_READER, 'reading')", "cohere"),
    ],
)
def test_extras_that_are_not_installed(missing: str, statement: str, extra: str) -> None:
    """What is not installed is named with the extra that brings it."""
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from batchmill.engines.provider_batch import cohere, load_provider\n"
        "from batchmill.optional import require\n"
        "from batchmill.errors import BatchmillError\n"
        "from batchmill.types import ModelSpec\n"
        f"try:\n    {statement}\nexcept BatchmillError as error:\n    print(error.message)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert f"pip install 'batchmill[{extra}]'" in done.stdout
