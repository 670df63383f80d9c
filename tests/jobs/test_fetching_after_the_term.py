"""A download that outlasts its owner's term: the files of the dataset may be a successor's by then."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fakes.model_hub import ModelHub
from fakes.web_files import WebFile, web_files

from batchmill.datasets import layout
from batchmill.datasets.folders import DiskFolder
from batchmill.errors import TermOver
from batchmill.jobs.intake import fetching, hub_fetching
from batchmill.owner_term import Term
from batchmill.types import DatasetSpec, Seal, SealedFile

BOUNDS, SUCCESSORS = fetching.Bounds(None, ""), b'{"of": "the successor"}\n'


class Fetching(Term):
    """The term of an owner. Its folder raises where that of a child would wait."""

    def __init__(self, home: Path) -> None:
        home.mkdir()
        self._left_s = math.inf
        self.folder = DiskFolder(home, self)

    def left_s(self) -> float:
        return self._left_s

    def end(self) -> None:
        """Have a successor fetch the same inputs into the same files."""
        self._left_s = -1.0
        for path in self.folder.path.glob(layout.FETCHED):
            if path.is_file():
                path.write_bytes(SUCCESSORS)


@pytest.fixture
def term(tmp_path: Path) -> Fetching:
    return Fetching(tmp_path / "dataset")


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_file_of_a_web_server(term: Fetching, pieces: int) -> None:
    """Neither later bytes nor the end of the download change what the successor has."""
    with web_files() as web:
        web.files["/a.jsonl"] = WebFile(bytes(pieces * 1024 * 1024))
        spec = DatasetSpec([f"{web.url}/a.jsonl"], private_hosts=["127.0.0.1"], download_bytes_max=1 << 40)
        with pytest.raises(TermOver):
            fetching.fetch(spec, term.folder, BOUNDS, lambda _: None if term.is_over() else term.end())
    found = list(term.folder.path.iterdir())
    assert len(found) == 2 and all(path.read_bytes() == SUCCESSORS for path in found), found


def test_a_file_of_a_hub(term: Fetching, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that was downloaded does not get its name."""
    run_watched = hub_fetching._run_watched

    async def end_then_run(child: Any, order: bytes, file: Any, target: Path, check_size: Any) -> Any:
        target.touch()
        term.end()
        return await run_watched(child, order, file, target, check_size)

    monkeypatch.setattr(hub_fetching, "_run_watched", end_then_run)
    with ModelHub() as hub:
        for name, value in (hub.environment() | {"HF_HOME": str(tmp_path / "hf")}).items():
            monkeypatch.setenv(name, value)
        hub.repositories["datasets/team/rows"] = {"a.jsonl": b'{"n": 1}\n'}
        commit = hub.commit("datasets/team/rows")
        spec = DatasetSpec([f"hf://datasets/team/rows@{commit}/a.jsonl"], download_bytes_max=1 << 40)
        with pytest.raises(TermOver):
            fetching.fetch(spec, term.folder, BOUNDS, lambda _: None)
    assert [path.read_bytes() for path in term.folder.path.iterdir() if path.is_file()] == [SUCCESSORS]


def test_files_that_no_row_is_read_from(term: Fetching) -> None:
    """They are removed by the owner alone."""
    path = term.folder.path / layout.FETCHED.replace("*", "000000.jsonl")
    path.touch()
    (term.folder.path / layout.SEAL).write_bytes(msgspec.json.encode(Seal(0, 0, "", "jsonl", [], [], [])))
    term.end()
    fetched = fetching.Fetched(term.folder, [str(path)], {str(path): SealedFile("https://example.com/a", 0, 0, 0)})
    with pytest.raises(TermOver):
        fetched.tidy()
    assert path.read_bytes() == SUCCESSORS
