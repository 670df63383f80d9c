import os

import pytest

from batchmill.datasets.formats import kind, resolve
from batchmill.datasets.sources import describe, unchanged
from batchmill.errors import InvalidDataset


@pytest.fixture
def folder(tmp_path):
    for name in ("b.jsonl", "a.csv.gz", ".hidden.jsonl", "notes.txt", "old.tar.gz"):
        (tmp_path / name).write_text("x")
    (tmp_path / "sub.jsonl").mkdir()
    (tmp_path / "sub.jsonl" / "c.jsonl").write_text("x")
    return tmp_path


def test_files_folders_and_globs(folder, monkeypatch):
    """Files, folders and globs become absolute paths in name order, each file once."""
    monkeypatch.chdir(folder)
    a, b, notes = (str(folder / name) for name in ("a.csv.gz", "b.jsonl", "notes.txt"))
    assert resolve([str(folder)]) == [a, b]
    assert resolve(["b.jsonl", "a.csv.gz", "./b.jsonl"]) == [a, b]
    assert resolve(["*.jsonl"]) == [b]
    assert resolve(["**/*.jsonl"]) == [b, str(folder / "sub.jsonl" / "c.jsonl")]
    assert resolve(["notes.txt", "."]) == [a, b, notes]


def test_a_name_with_brackets_is_a_file(folder):
    """A file that is there is meant, even where its name could be a glob."""
    (folder / "x[1].jsonl").write_text("x")
    assert resolve([str(folder / "x[1].jsonl")]) == [str(folder / "x[1].jsonl")]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("nope.jsonl", "there is no file"), ("*.nope", "no file matches"), ("empty", "no file of a")],
)
def test_what_means_no_file(folder, monkeypatch, pattern, message):
    """A pattern that means no file is refused by name."""
    (folder / "empty").mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(InvalidDataset, match=message) as caught:
        resolve([pattern])
    assert caught.value.code == "no_input"
    with pytest.raises(InvalidDataset):
        resolve([])


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/a.b/x.JSONL", ("jsonl", None)),
        ("x.csv.zst", ("csv", "zstd")),
        ("x.gz", (None, "gzip")),
        ("x", (None, None)),
        ("x.parquet", ("parquet", None)),
    ],
)
def test_kinds(path, expected):
    """A name promises a format and a compression."""
    assert kind(path) == expected


def test_changes_are_seen(tmp_path):
    """A file whose size, time or inode differs, or that is gone, has changed."""
    path = tmp_path / "x"
    path.write_text("abc")
    file = describe(str(path))
    assert unchanged(file)
    os.utime(path, ns=(1, 1))
    assert not unchanged(file)
    path.unlink()
    assert not unchanged(file)


def test_what_is_no_file(tmp_path):
    """A pipe would be read only once: it is refused, as what is missing."""
    os.mkfifo(tmp_path / "pipe")
    for name, message in (("pipe", "not a regular file"), ("missing", "cannot be read")):
        with pytest.raises(InvalidDataset, match=message):
            describe(str(tmp_path / name))
