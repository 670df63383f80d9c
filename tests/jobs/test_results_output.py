"""Which file may hold which results, and how a file comes to be."""

import hashlib
import os
import resource
import signal
import sys

import pytest
from written_dataset import RowKeys, write_dataset

from batchmill import part_files
from batchmill.errors import InvalidInput, StorageFailed, StorageFull
from batchmill.jobs.ledger.plan import PlanOrder, ShardRows, make
from batchmill.jobs.results.results import can_stream, check_output, errors_path, output_kind
from batchmill.part_files import PartFile


@pytest.mark.parametrize(
    ("name", "kind", "errors"),
    [
        ("out.jsonl", ("jsonl", ""), "out.errors.jsonl"),
        ("out.NDJSON", ("jsonl", ""), "out.errors.jsonl"),
        ("v1.2.jsonl.gz", ("jsonl", ".gz"), "v1.2.errors.jsonl"),
        ("out.csv.zst", ("csv", ".zst"), "out.errors.jsonl"),
        ("out.csv.jsonl", ("jsonl", ""), "out.csv.errors.jsonl"),
        ("out.parquet", ("parquet", ""), "out.errors.jsonl"),
    ],
)
def test_a_name_says_what_is_written(tmp_path, name, kind, errors):
    """The output's name decides its kind, its compression, and where the rows that failed go."""
    assert output_kind(tmp_path / name) == kind
    assert errors_path(tmp_path / name) == tmp_path / errors


@pytest.mark.parametrize("name", ["out", "out.txt", "out.gz", "jsonl", "out.parquet.gz"])
def test_a_name_that_says_nothing_is_refused(tmp_path, name):
    """A name without a known ending, or with one that makes no sense, is refused before a row runs."""
    with pytest.raises(InvalidInput, match="out|jsonl"):
        check_output(str(tmp_path / name), "jsonl")


def test_requests_become_jsonl_only(tmp_path):
    """Results of OpenAI rows have no columns; the message names the file they can go to."""
    check_output(str(tmp_path / "out.jsonl.gz"), "openai")
    for name in ("out.csv", "out.parquet"):
        with pytest.raises(InvalidInput, match=r"out\.jsonl"):
            check_output(str(tmp_path / name), "openai")
        check_output(str(tmp_path / name), "csv")


def test_parquet_needs_its_library_before_a_row_runs(tmp_path, monkeypatch):
    """Without pyarrow a Parquet output is refused when the job is submitted, not when it has ended."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InvalidInput, match="pip install"):
        check_output(str(tmp_path / "out.parquet"), "csv")
    check_output(str(tmp_path / "out.csv"), "csv")


def test_an_output_needs_a_place(tmp_path):
    """A folder is not an output, and one that is not there holds none."""
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(InvalidInput, match="is a folder"):
        check_output(str(tmp_path / "folder.jsonl"), "openai")
    with pytest.raises(InvalidInput, match="make it"):
        check_output(str(tmp_path / "nowhere" / "out.jsonl"), "openai")


def test_only_the_files_own_order_can_be_streamed(tmp_path):
    """Refused or folded rows, another order or another kind of file must wait for the end."""
    plans = {}
    for name, rows in {"plain": [RowKeys()] * 3, "refused": [RowKeys(), RowKeys(rejected=True)]}.items():
        (tmp_path / name).mkdir()
        written = write_dataset(tmp_path / name, rows, keys=False)
        order = PlanOrder(targets=[(0, None)], shard_rows=[ShardRows(4)])
        plans[name] = make(order, written.dataset, written.plan, lambda _: None)
    assert can_stream(tmp_path / "out.jsonl", plans["plain"])
    assert not can_stream(tmp_path / "out.jsonl", plans["refused"])
    assert not can_stream(tmp_path / "out.jsonl.gz", plans["plain"])
    assert not can_stream(tmp_path / "out.parquet", plans["plain"])


def test_a_part_becomes_the_file_when_it_is_whole(tmp_path):
    """Until it is published a file does not bear its name; then it has all its bytes, and its digest is known."""
    digest = hashlib.sha256()
    with PartFile(tmp_path / "a", digest=digest) as file:
        file.write(b"one")
        file.write(memoryview(b"two"))
        assert not (tmp_path / "a").exists()
        file.publish()
    assert digest.digest() == hashlib.sha256(b"onetwo").digest()
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"onetwo")]


def test_a_part_that_is_left_is_gone(tmp_path):
    """Without publishing nothing stays, and the file that was there before is untouched."""
    (tmp_path / "a").write_bytes(b"before")
    with pytest.raises(KeyError), PartFile(tmp_path / "a") as file:
        file.write(b"one")
        raise KeyError
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"before")]


def test_a_part_never_follows_a_link(tmp_path):
    """A link where the part goes is replaced: what it points to is not written."""
    (tmp_path / "precious").write_bytes(b"mine")
    os.symlink(tmp_path / "precious", tmp_path / "a.part")
    with PartFile(tmp_path / "a") as file:
        file.write(b"one")
        file.publish()
    assert (tmp_path / "precious").read_bytes() == b"mine"


def test_short_writes_are_written_on_and_a_full_disk_is_said(tmp_path, monkeypatch):
    """A write that ends early goes on where it stopped; when nothing more fits, that is StorageFull."""
    monkeypatch.setattr(part_files, "BUFFER_BYTES", 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with PartFile(tmp_path / "a") as file:
            file.write(b"x" * 4000)
            with pytest.raises(StorageFull, match="no room to write"):
                file.write(b"y" * 4000)
            assert file.part.stat().st_size == 4096
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert list(tmp_path.iterdir()) == []


def test_a_replaced_writer_publishes_nothing(tmp_path):
    """An owner that was stopped goes on after its successor has begun the same file: the successor's counts, whole."""
    old = PartFile(tmp_path / "a")
    old.write(b"old")
    new = PartFile(tmp_path / "a")
    new.write(b"n")
    new.flush()
    with pytest.raises(StorageFailed, match="another process"):
        old.publish()
    old.discard()
    assert not (tmp_path / "a").exists()
    new.write(b"ew")
    new.publish()
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"new")]


def test_a_late_writer_does_not_replace_its_successors_file(tmp_path):
    """Also once the successor has published, what the old writer has is dropped."""
    old, new = PartFile(tmp_path / "a"), PartFile(tmp_path / "a")
    new.write(b"new")
    new.publish()
    with pytest.raises(StorageFailed), old:
        old.publish()
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"new")]
