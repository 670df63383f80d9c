"""A folder on a disk and one in memory: whoever seals and plans there finds the same."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from batchmill.datasets import layout
from batchmill.datasets.folders import DiskFolder, Folder, MemoryFolder
from batchmill.datasets.sealed import SealedRows
from batchmill.datasets.sealing import SealOrder, seal
from batchmill.errors import InputChanged, StorageFull
from batchmill.jobs.ledger.plan import PlanOrder, PlanReader, ShardRows, iter_rejected, make
from batchmill.types import DatasetSpec

LINE = '{"custom_id":"r%d","method":"POST","url":"/v1/chat/completions","body":{"model":"%s","messages":[{"role":"user","content":"%d"}]}}\n'  # noqa: E501


@pytest.fixture(params=[DiskFolder, MemoryFolder])
def folder(request, tmp_path) -> Folder:
    (tmp_path / "dataset").mkdir()
    return request.param(tmp_path / "dataset")


def contents(folder: Folder) -> dict[str, bytes]:
    return {name: folder.read(name) for name in folder.names()}


def test_files_by_name(folder):
    """Each file is read as it was written, whole or by ranges; one that is missing is a FileNotFoundError."""
    with folder.create("a") as file:
        file.write(b"0123")
        file.write(b"456789")
    folder.write("b", b"first")
    folder.write("b", b"second")
    assert contents(folder) == {"a": b"0123456789", "b": b"second"}
    source = folder.source("a")
    buffer = bytearray(4)
    assert (source.size_bytes, source.read_at(2, 5), source.read_at(8, 20)) == (10, b"234", b"89")
    assert (source.read_into(memoryview(buffer), 6), bytes(buffer)) == (4, b"6789")
    source.close()
    with folder.open("a") as file:
        assert file.read() == b"0123456789"
    assert (bytes(folder.view("a")), folder.size("b")) == (b"0123456789", 6)
    folder.rename("a", "c")
    folder.remove("b")
    folder.remove("b")
    folder.sync()
    assert folder.names() == ["c"]
    folder.remove_durably("c", "d")
    assert folder.names() == []
    for read in (folder.open, folder.source, folder.view, folder.read, folder.size):
        with pytest.raises(FileNotFoundError):
            read("c")


def test_a_part_counts_once_it_is_published(folder):
    """Without that, nothing is left of it, and an earlier file stays."""
    digest = sha256()
    with folder.part("a", digest) as part:
        part.write(b"one ")
        part.write(b"two")
        part.publish()
    with pytest.raises(ZeroDivisionError), folder.part("a") as part:
        part.write(b"three")
        raise ZeroDivisionError
    assert contents(folder) == {"a": b"one two"} and digest.digest() == sha256(b"one two").digest()


def test_a_folder_that_is_not_there_has_no_files(tmp_path):
    assert DiskFolder(tmp_path / "none").names() == []


@pytest.mark.parametrize("keys", [False, True])
def test_a_dataset_and_its_plan_are_the_same_in_memory(tmp_path, keys):
    """Sealing and planning write the same bytes, with refused and repeated rows; their readers read the same."""
    lines = [LINE % (n, "m", n % 7) for n in range(30)] + ["no json\n", LINE % (3, "m", 1)]
    (tmp_path / "in.jsonl").write_text("".join(lines))
    order = SealOrder(DatasetSpec([str(tmp_path / "in.jsonl")]), targets={"m": (0, 0)}, keys=keys, fold="all")
    plan_order = PlanOrder([(0, None)], [ShardRows(4)], keys=keys)
    written = []
    for kind in (DiskFolder, MemoryFolder):
        dataset, plan = kind(tmp_path / "dataset"), kind(tmp_path / "plan")
        for path in (dataset.path, plan.path):
            path.mkdir(exist_ok=True)
        report = seal(order, dataset, lambda _: None)
        make(plan_order, dataset, plan, lambda _: None)
        reader = PlanReader(plan)
        reader.check()
        rows = SealedRows(dataset)
        seen = list(iter_rejected(dataset)), list(reader.row_numbers(0, reader.leaders)), list(reader.followers())
        written.append((contents(dataset), contents(plan), report, seen, rows.read(4, 9), rows.read_many([20, 3])))
        rows.close()
        rows.close()
    assert written[0] == written[1]
    assert [each.code for each in written[0][3][0]] == ["invalid_json", "duplicate_custom_id"]


def test_rows_are_checked_against_an_index_in_memory(tmp_path):
    """What a worker gets of a small job is enough to read it, and to find that its input has changed."""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(LINE % (n, "m", n) for n in range(5)))
    made = MemoryFolder(tmp_path / "dataset")
    seal(SealOrder(DatasetSpec([str(path)]), targets={"m": (0, 0)}), made, lambda _: None)
    rows = SealedRows(MemoryFolder(made.path, {name: made.files[name] for name in layout.INDEX}))
    assert len(rows.read(0, 5)) == 5
    path.write_text(path.read_text().replace("r3", "x3"))
    with pytest.raises(InputChanged):
        rows.read(0, 5)
    rows.close()


def test_memory_has_no_room_for_what_grows_with_the_rows():
    with pytest.raises(StorageFull):
        MemoryFolder(Path("dataset")).on_disk()
