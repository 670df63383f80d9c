"""Files of a hub are fetched within bounds, whatever the hub does."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.model_hub import ModelHub

from batchmill.errors import StorageFailed, TooLarge
from batchmill.jobs.intake import fetching, hub_fetching
from batchmill.types import DatasetSpec

NAME = "datasets/team/rows"
LINES = b'{"n": 1}\n'
LONG_S = 600.0
CHUNK_BYTES = 10 * 1024 * 1024  # that the hub's library writes at once


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with ModelHub() as served:
        for name, value in (served.environment() | {"HF_HOME": str(tmp_path / "hf")}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(hub_fetching, "WATCH_S", 0.02)
        served.repositories[NAME] = {"a.jsonl": LINES, "long.jsonl": bytes(2 * CHUNK_BYTES)}
        yield served


@pytest.fixture
def fetch(hub, tmp_path):
    home = tmp_path / "dataset"
    home.mkdir()

    def run(name, *, time_s=LONG_S, bytes_max=1 << 40):
        spec = DatasetSpec([f"hf://{NAME}@{hub.commit(NAME)}/{name}"], download_bytes_max=bytes_max)
        return fetching.fetch(spec, home, fetching.Bounds(None, "", time_s), lambda _: None)

    return run


def test_a_hub_that_does_not_answer_has_a_time(hub, fetch):
    """A download that stands still ends with the time of all inputs, and is fetched by the next attempt."""
    hub.held.clear()
    for time_s, left in ((-5.0, "0 s were left"), (2.0, "2 s were left")):  # earlier inputs may have taken all of it
        late = rf"'a.jsonl' of hf://datasets/team/rows was not downloaded in time \({left}"
        with pytest.raises(StorageFailed, match=late):
            fetch("a.jsonl", time_s=time_s)
    hub.held.set()
    fetched = fetch("a.jsonl")
    assert Path(fetched.paths[0]).read_bytes() == LINES


def test_a_download_without_progress_ends(hub, fetch, monkeypatch):
    """It does not wait for the time of all inputs."""
    monkeypatch.setattr(hub_fetching, "STALL_S", 0.1)
    hub.held.clear()
    with pytest.raises(StorageFailed, match="nothing came for 0 s; resume the job"):
        fetch("a.jsonl")


def test_a_file_has_the_size_that_was_allowed(hub, fetch):
    """A file that is too large is not begun; one that is larger than its hub said is stopped before its end."""
    with pytest.raises(TooLarge):
        fetch("a.jsonl", bytes_max=len(LINES) - 1)
    assert not [asked for asked in hub.asked if asked.startswith("GET /datasets")]
    hub.claimed["long.jsonl"] = 100
    hub.endless.add("long.jsonl")
    with pytest.raises(TooLarge, match="more than 1,000 bytes"):
        fetch("long.jsonl", bytes_max=1000)
