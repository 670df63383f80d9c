"""Our S3 calls against moto's server: somebody else's reading of S3 and SageMaker."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from botocore.config import Config
from botocore.session import Session
from fakes.aws_batches import BedrockFake
from moto.server import ThreadedMotoServer

from batchmill.engines.connections import Connections
from batchmill.engines.provider_batch.aws import S3, Account, S3Object, classify, read_uri
from batchmill.engines.provider_batch.provider import JobGone, ProviderRefusal, TryAgain, Upload
from batchmill.engines.provider_batch.sagemaker import SageMakerBatches
from batchmill.errors import AuthRefused, ModelFailed, RouteFailed
from batchmill.types import Limits, ModelSpec, RemoteJob

REGION = "eu-central-2"
BUCKET = "bucket-of-tests"


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="module")
def theirs(moto: str) -> Iterator[object]:
    """botocore's own client, and a bucket."""
    client = Session().create_client(
        "s3",
        region_name=REGION,
        endpoint_url=moto,
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
        config=Config(proxies={}, s3={"addressing_style": "path"}),
    )
    client.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION})
    yield client
    client.close()


@pytest.fixture
async def connections() -> AsyncIterator[Connections]:
    connections = Connections(Limits(attempt_timeout_s=20))
    await connections.start()
    yield connections
    await connections.stop()


def model(moto: str) -> ModelSpec:
    arguments = {
        "access_key": "env:TEST_AWS_KEY",
        "secret_key": "env:TEST_AWS_KEY",
        "region": REGION,
        "s3": f"s3://{BUCKET}/runs",
        "s3_endpoint": moto,
        "instance_type": "ml.m5.xlarge",
    }
    return ModelSpec("m", "provider_batch", "m", base_url=moto, engine_args=arguments, provider="sagemaker")


@pytest.fixture
def s3(moto: str, theirs: object, connections: Connections, monkeypatch: pytest.MonkeyPatch) -> S3:
    monkeypatch.setenv("TEST_AWS_KEY", "testing-testing")
    return S3(Account(model(moto)), connections)


async def test_a_file_there_and_back(s3: S3, theirs, tmp_path: Path) -> None:
    """A file that was put is read by another client, and comes back line by line."""
    file = tmp_path / "file"
    data = b"".join(b'{"n":%d}\n' % n for n in range(2000))
    file.write_bytes(data)
    place = S3Object(BUCKET, "runs/a b+c/input.jsonl")
    await s3.put(place, file, len(data))
    assert theirs.get_object(Bucket=BUCKET, Key=place.key)["Body"].read() == data
    assert b"".join([line + b"\n" async for some in s3.lines(place) for line in some]) == data
    assert await s3.has(place)
    await s3.delete(place)
    assert not await s3.has(place)
    await s3.delete(place)


async def test_listing(s3: S3, theirs) -> None:
    """Every file below a name is listed, and no other."""
    for name in ("many/1", "many/2", "many/3 &<", "manyother"):
        theirs.put_object(Bucket=BUCKET, Key=name, Body=b"")
    found = [place.key async for place in s3.list(S3Object(BUCKET, "many/"))]
    assert found == ["many/1", "many/2", "many/3 &<"]


async def test_listing_turns_pages(connections: Connections, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many pages a listing has, every file is in it once."""
    monkeypatch.setenv("TEST_AWS_KEY", "testing-testing")
    async with BedrockFake() as fake:
        monkeypatch.setenv("TEST_AWS_ID", fake.access_key)
        monkeypatch.setenv("TEST_AWS_KEY", fake.key)
        spec = model(f"{fake.base_url}/s3")
        spec.engine_args["access_key"] = "env:TEST_AWS_ID"
        fake.page = 2
        fake.files = {f"{BUCKET}/many/{number} +/": b"" for number in range(5)}
        found = [place.key async for place in S3(Account(spec), connections).list(S3Object(BUCKET, "many/"))]
    assert found == [f"many/{number} +/" for number in range(5)]


async def test_what_is_not_there(s3: S3) -> None:
    """A file that is not there is refused with S3's own code."""
    with pytest.raises(ProviderRefusal) as caught:
        [some async for some in s3.lines(S3Object(BUCKET, "nothing"))]
    assert (caught.value.status, caught.value.reason) == (404, "NoSuchKey")


async def test_transform_jobs_of_moto(s3: S3, moto: str, connections: Connections, tmp_path: Path) -> None:
    """SageMaker as moto has it takes our order and tells of the job by its name; another name is nobody's."""
    provider = SageMakerBatches(model(moto), connections)
    file = tmp_path / "file"
    file.write_bytes(b'{"n":1}\n')
    upload = Upload(file, "", 1, 8)
    job = RemoteJob("bm-moto-1", "sagemaker", "intent", [(0, 1)], 1)
    assert await provider.find(job) is None
    job = await provider.create(await provider.upload(job, upload), upload)
    assert (await provider.refresh(job)).remote_state == "Completed"
    found = await provider.find(RemoteJob("bm-moto-1", "sagemaker", "intent", [(0, 1)], 1))
    assert found is not None and found.id == job.id
    with pytest.raises(JobGone):
        await provider.refresh(RemoteJob("x", "sagemaker", "submitted", id="nobody"))


@pytest.mark.parametrize("uri", ["", "s3://", "https://bucket/x", "s3://UPPER/x", "s3://b/x", "s3://bucket/ä"])
def test_places_that_are_none(uri: str) -> None:
    """What is not a place in S3 is refused with what one looks like."""
    with pytest.raises(ModelFailed, match="s3://BUCKET/PREFIX"):
        read_uri(uri)


@pytest.mark.parametrize(
    ("bucket", "url"),
    [
        ("bucket", "https://bucket.s3.eu-central-2.amazonaws.com/a/b%20c"),
        ("with.dots", "https://s3.eu-central-2.amazonaws.com/with.dots/a/b%20c"),
    ],
)
def test_addresses(moto: str, connections: Connections, bucket: str, url: str) -> None:
    """A bucket has a host of its own, unless its name would not fit that host's certificate."""
    spec = model(moto)
    del spec.engine_args["s3_endpoint"]
    assert S3(Account(spec), connections)._url(S3Object(bucket, "a/b c")) == url


XML = b"<Error><Code>%b</Code><Message>told</Message></Error>"
SORTED = {
    "slow down": (503, {}, XML % b"SlowDown", TryAgain),
    "throttled as 400": (400, {"x-amzn-errortype": "ThrottlingException"}, b"{}", TryAgain),
    "in trouble": (500, {}, b'{"__type":"InternalFailure"}', TryAgain),
    "timed out": (400, {}, XML % b"RequestTimeout", TryAgain),
    "wrong key": (403, {}, XML % b"SignatureDoesNotMatch", AuthRefused),
    "not allowed": (400, {}, b'{"__type":"a.b#AccessDeniedException","Message":"no"}', AuthRefused),
    "another region": (301, {"x-amz-bucket-region": "us-east-1"}, XML % b"PermanentRedirect", RouteFailed),
    "a wrong value": (400, {}, b'{"__type":"ValidationException","message":"bad"}', ProviderRefusal),
}


@pytest.mark.parametrize("name", SORTED)
def test_errors_are_sorted(name: str) -> None:
    """AWS says what went wrong by a code, whose status says little: throttling may be a 400."""
    status, headers, data, kind = SORTED[name]
    error = classify(status, headers, data)
    assert type(error) is kind
    assert error.message


def test_errors_of_somebody_else() -> None:
    """What is no error of AWS's is judged as any other reply."""
    assert classify(502, {}, b"<html>bad gateway</html>") is None
    assert classify(502, {}, b"<html>bad gateway") is None
    assert classify(502, {}, b"nothing") is None
