"""`batchmill doctor` on the object store of `[storage]`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.faulty_objects import faulty_objects
from fakes.s3_server import bucket_client, s3_environment, s3_server

from batchmill.config import Config, StorageEntry
from batchmill.services.doctor import check_storage

BUCKET = "examined"


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as url, bucket_client(url, BUCKET):
        yield url


def config(folder: Path, *, key_file: Path | None = None) -> Config:
    return Config(folder / "data", folder, key_file=key_file, storage=StorageEntry(f"s3://{BUCKET}/batchmill"))


def test_a_store_that_can_be_used(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row is right, and nothing stays in the store."""
    for name, value in s3_environment(s3).items():
        monkeypatch.setenv(name, value)
    rows = list(check_storage(config(tmp_path, key_file=tmp_path / "keys")))
    assert len(rows) == 6 and all(row.is_ok for row in rows), rows
    assert [row.name for row in check_storage(config(tmp_path)) if not row.is_ok] == ["key file"]


def test_a_store_that_refuses(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row says what is refused, and what to do."""
    with faulty_objects(s3) as plan:
        plan.always["PUT"] = "denied"
        for name, value in s3_environment(plan.url).items():
            monkeypatch.setenv(name, value)
        (row,) = check_storage(config(tmp_path, key_file=tmp_path / "keys"))
    assert not row.is_ok and "credentials" in row.message
