"""Results in parts: every row once, in order, and a manifest that never names half of them."""

import hashlib
import json
import os
from pathlib import Path

import msgspec
import pytest
from finished_job import FinishedJob, quiet, write_requests

from batchmill.errors import Conflict, InvalidInput, LedgerBroken
from batchmill.jobs.results.gathering import gather
from batchmill.jobs.results.output_folders import (
    LocalFolder,
    ObjectFolder,
    Part,
    PartManifest,
    part_name,
    publish_manifest,
    read_manifest,
    remove_uncounted,
)
from batchmill.jobs.results.part_gathering import index_offloaded, part_offloaded, publish_offloaded
from batchmill.jobs.results.part_orders import Indexed, PartOrder, PartsOrder, PublishOrder, Written
from batchmill.jobs.results.results import Manifest
from batchmill.object_store.store import ObjectStore
from batchmill.object_store.urls import parse_url
from batchmill.types import RowError
from batchmill.wire.forms import OpenAIForm

JOB, OTHER_JOB = "job_" + "a" * 20, "job_" + "b" * 20
CONTENTS = ["a", "b", "a", "c", "b", "a", "d", "e", "c", "f", "g", "h"]
encode, decode = msgspec.json.encode, msgspec.json.decode


def folded_job(folder: Path) -> FinishedJob:
    """12 requests of which 5 repeat an earlier one, planned in another order than the file's."""
    return FinishedJob(folder / "job", write_requests(folder / "in.jsonl", CONTENTS), OpenAIForm(), keys=True)


def gather_parts(
    job: FinishedJob, output: Path, part_rows: int, attempt: str = "00000001", unrun: RowError | None = None
) -> Manifest:
    order = msgspec.structs.replace(job.order(output, unrun=unrun), output=f"{output}/")
    scratch = str(job.home / f"parts-{attempt}")
    parts = PartsOrder(order, JOB, len(job.plans) - 1, attempt, scratch, None)
    indexed = decode(index_offloaded(encode(parts), quiet), type=Indexed)
    ranges = [(first, min(first + part_rows, indexed.rows)) for first in range(0, indexed.rows, part_rows)]
    written = [
        decode(part_offloaded(encode(PartOrder(parts, number, first, end)), quiet), type=Written)
        for number, (first, end) in reversed(list(enumerate(ranges)))  # they end in any order
    ][::-1]
    return decode(publish_offloaded(encode(PublishOrder(parts, indexed, written)), quiet), type=Manifest)


def content(output: Path, parts: list[Part]) -> bytes:
    for part in parts:
        data = (output / part.name).read_bytes()
        assert (len(data), data.count(b"\n")) == (part.bytes, part.rows)
        assert hashlib.sha256(data).hexdigest() == part.sha256
    return b"".join((output / part.name).read_bytes() for part in parts)


@pytest.mark.parametrize("part_rows", [1, 5, 12, 100])
def test_parts_have_the_bytes_of_one_file(tmp_path, part_rows):
    """Of permuted, folded and failed rows: the parts, one after the other, are the file, and so are the errors."""
    job, output = folded_job(tmp_path), tmp_path / "out"
    job.run_all(failed={1, 6})
    whole = gather(job.order(tmp_path / "one.jsonl"), quiet)
    found = gather_parts(job, output, part_rows)
    manifest = read_manifest(f"{output}/")
    assert content(output, manifest.parts) == (tmp_path / "one.jsonl").read_bytes()
    assert content(output, manifest.errors) == (tmp_path / "one.errors.jsonl").read_bytes()
    assert [part.first for part in manifest.parts] == list(range(0, 12, part_rows))
    for name in ("rows", "ok", "failed", "folded", "causes"):
        assert getattr(found, name) == getattr(whole, name)
    assert sorted(os.listdir(output)) == sorted(
        ["manifest.json", *(part.name for part in (*manifest.parts, *manifest.errors))]
    )
    assert not list(job.home.glob("parts-*"))


def test_rows_that_never_ran(tmp_path):
    """A job that ended early has errors for the rest; without that a missing row stops everything."""
    job, output = folded_job(tmp_path), tmp_path / "out"
    job.commit(job.block([0, 1]))
    with pytest.raises(LedgerBroken, match="have no outcome"):
        gather_parts(job, output, 5)
    unrun = RowError("unrun", "it never ran")
    gather(job.order(tmp_path / "one.jsonl", unrun=unrun), quiet)
    gather_parts(job, output, 5, unrun=unrun)
    manifest = read_manifest(f"{output}/")
    assert content(output, manifest.parts) == (tmp_path / "one.jsonl").read_bytes()
    assert content(output, manifest.errors) == (tmp_path / "one.errors.jsonl").read_bytes()


def test_refused_rows_are_in_their_parts(tmp_path):
    """Rows that validation refused are errors of the part that has their range."""
    path = write_requests(tmp_path / "in.jsonl", ["x"] * 6)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1], lines[4] = b"not json\n", b"nor this\n"
    path.write_bytes(b"".join(lines))
    job, output = FinishedJob(tmp_path / "job", path, OpenAIForm()), tmp_path / "out"
    job.run_all()
    gather_parts(job, output, 2)
    manifest = read_manifest(f"{output}/")
    assert [(part.first, part.rows) for part in manifest.errors] == [(0, 1), (4, 1)]
    gather(job.order(tmp_path / "one.jsonl"), quiet)
    assert content(output, manifest.errors) == (tmp_path / "one.errors.jsonl").read_bytes()


def test_a_second_attempt_changes_nothing(tmp_path):
    """An attempt after the manifest was put, before anyone knew: the manifest stays, the new parts go."""
    job, output = folded_job(tmp_path), tmp_path / "out"
    job.run_all()
    gather_parts(job, output, 5)
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    (output / part_name("part", 7, JOB, "00000009")).write_bytes(b"cut off")
    (output / (part_name("part", 8, JOB, "00000009") + ".part")).write_bytes(b"cut")
    gather_parts(job, output, 5, "00000002")
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before


def test_a_retry_replaces_the_manifest(tmp_path):
    """A new generation has parts of its own; those of the earlier one go after the manifest is replaced."""
    job, output = folded_job(tmp_path), tmp_path / "out"
    job.run_all(failed={1, 6})
    gather_parts(job, output, 5)
    old = read_manifest(f"{output}/")
    job.again([1, 6])
    job.run_all()
    gather_parts(job, output, 5, "00000002")
    manifest = read_manifest(f"{output}/")
    assert (manifest.generation, manifest.failed, manifest.errors) == (1, 0, [])
    assert len(content(output, manifest.parts).splitlines()) == 12
    assert not {part.name for part in (*old.parts, *old.errors)}.intersection(os.listdir(output))


def manifest_of(job: str, attempt: str, *, rows: int = 3, generation: int = 0) -> PartManifest:
    part = Part(part_name("part", 0, job, attempt), 0, rows, rows, 9, "ab" * 32)
    return PartManifest(job, generation, rows, rows, 0, [part], [])


@pytest.fixture(params=["folder", "objects"])
def folder(request, tmp_path) -> LocalFolder | ObjectFolder:
    (tmp_path / "out").mkdir()
    if request.param == "folder":
        return LocalFolder(f"{tmp_path}/out/")
    objects = ObjectFolder("memory:///")
    assert isinstance(objects._store, ObjectStore) and parse_url("memory:///").scheme == "memory"
    return objects


def put_part(folder: LocalFolder | ObjectFolder, tmp_path: Path, name: str) -> None:
    path = folder.writing_place(tmp_path) / name
    path.write_bytes(b"123456789")
    folder.put_part(path)


def test_which_manifest_counts(folder, tmp_path):
    """Equal content keeps the first; another job's stays unless it is to be replaced; an older generation loses."""
    first, again = manifest_of(JOB, "00000001"), manifest_of(JOB, "00000002")
    assert publish_manifest(folder, "out/", first, None) == first
    assert publish_manifest(folder, "out/", again, None) == first
    with pytest.raises(InvalidInput, match="written by something else"):
        publish_manifest(folder, "out/", manifest_of(OTHER_JOB, "00000003"), None)
    newer = manifest_of(JOB, "00000004", generation=1)
    assert publish_manifest(folder, "out/", newer, None) == newer
    with pytest.raises(InvalidInput, match="written by something else"):
        publish_manifest(folder, "out/", first, None)
    other = manifest_of(OTHER_JOB, "00000005")
    assert publish_manifest(folder, "out/", other, JOB) == other
    with pytest.raises(Conflict):
        folder.put_manifest(b"{}", scratch=f"manifest-{'a' * 20}-00000006.json", overwrite=False)


def test_only_own_parts_are_removed(folder, tmp_path):
    """What goes are parts of this job and of the replaced one; other files in the folder stay."""
    counted = manifest_of(JOB, "00000001")
    names = [
        counted.parts[0].name,
        part_name("part", 0, JOB, "00000002"),
        part_name("errors", 0, OTHER_JOB, "00000001"),
    ]
    strange = [part_name("part", 0, "job_" + "c" * 20, "00000001"), "part-00000.jsonl", "notes.txt"]
    for name in (*names, *strange):
        put_part(folder, tmp_path, name)
    remove_uncounted(folder, counted, OTHER_JOB)
    assert sorted(folder.names()) == sorted([names[0], *strange])


def test_a_strange_manifest_is_not_touched(folder, tmp_path):
    """A manifest.json that is not batchmill's is refused by name."""
    folder.put_manifest(b'{"a": 1}', scratch="s.json", overwrite=False)
    with pytest.raises(InvalidInput, match="not a manifest of batchmill"):
        publish_manifest(folder, "out/", manifest_of(JOB, "00000001"), JOB)
    assert json.loads(folder.read_manifest()) == {"a": 1}


def test_a_job_without_rows(folder):
    """A manifest may name no part."""
    empty = PartManifest(JOB, 0, 0, 0, 0, [], [])
    assert publish_manifest(folder, "out/", empty, None) == empty
    remove_uncounted(folder, empty, None)
    assert folder.names() == ["manifest.json"]
