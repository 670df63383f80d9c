"""`batchmill storage owner`: whose the prefix of an object store is."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from batchmill.store import prefix_owner
from batchmill.store.prefix_owner import NAME, PrefixOwner
from batchmill.store.sql.database import Database


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the prefix."""
    monkeypatch.chdir(tmp_path)
    url = f"file://{tmp_path}/store"
    (tmp_path / "batchmill.toml").write_text(f'[storage]\nobjects = "{url}"\n[secrets]\nkey_file = "keys"\n')
    monkeypatch.setenv("BATCHMILL_DATA_DIR", str(tmp_path / "own"))
    return tmp_path / "store"


def claim(folder: Path, storage: Path) -> None:
    folder.mkdir()
    database = Database(folder / "batchmill.db")
    try:
        asyncio.run(prefix_owner.claim(database, f"file://{storage}", str(folder)))
    finally:
        database.close()


def test_whose_a_prefix_is(call: Any, storage: Path, tmp_path: Path) -> None:
    """It is shown; exit code 1 if it is another database's. Nothing changes."""
    result = call("storage", "owner")
    assert result.exit_code == 0 and "has no owner yet" in result.stdout
    claim(tmp_path / "other", storage)
    before = (storage / NAME).read_bytes()
    result = call("storage", "owner")
    assert result.exit_code == 1 and f"of {tmp_path}/other, renewed by" in result.stdout
    assert "storage owner --take-over" in result.stdout
    assert not json.loads(call("storage", "owner", "--json").stdout)["is_own"]
    assert (storage / NAME).read_bytes() == before


def test_a_prefix_is_taken_over(call: Any, storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a warning before the wait, where there is one, and only for a database that has an id."""
    for name in ("WATCH_S", "SETTLE_S"):
        monkeypatch.setattr(prefix_owner, name, 0.0)
    claim(tmp_path / "other", storage)
    result = call("storage", "owner", "--take-over")
    assert result.exit_code == 2 and "has no id yet" in result.stderr
    (storage / NAME).unlink()
    claim(tmp_path / "own", storage)
    result = call("storage", "owner", "--take-over")
    assert result.exit_code == 0 and "belongs to this database already" in result.stdout
    assert result.stderr == ""
    (storage / NAME).write_bytes(msgspec.json.encode(PrefixOwner("other", "a lost database")))
    result = call("storage", "owner", "--take-over")
    assert result.exit_code == 0 and "belongs to this database now" in result.stdout
    assert "each of the two removes objects that the other needs" in result.stderr
