"""An S3 server of the tests: moto's, on loopback, and an environment that leads to it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import moto.s3.models as moto_s3
from botocore.config import Config
from botocore.session import Session
from moto.core import DEFAULT_ACCOUNT_ID
from moto.server import ThreadedMotoServer

KEY = "testing"


@contextmanager
def s3_server() -> Iterator[str]:
    """The URL of a server."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def s3_environment(url: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": KEY, "AWS_REGION": "us-east-1",
        "NO_PROXY": "*",
    }  # fmt: skip


def put_many(bucket: str, keys: Iterable[str]) -> None:
    """Objects of a server of this process, without a request for each."""
    backend = moto_s3.s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    for key in keys:
        backend.put_object(bucket, key, b"x")


@functools.cache
def _session() -> Session:
    """It keeps the descriptions of services, which take 0.1 s to read."""
    return Session()


@contextmanager
def bucket_client(url: str, bucket: str) -> Iterator[Any]:
    """botocore's own client, and a bucket that is empty before and gone after."""
    client = _session().create_client(
        "s3", region_name="us-east-1", endpoint_url=url, aws_access_key_id=KEY, aws_secret_access_key=KEY,
        config=Config(proxies={}, s3={"addressing_style": "path"}),
    )  # fmt: skip
    client.create_bucket(Bucket=bucket)
    yield client
    while found := client.list_objects_v2(Bucket=bucket).get("Contents", ()):
        client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": each["Key"]} for each in found]})
    client.delete_bucket(Bucket=bucket)
    client.close()
