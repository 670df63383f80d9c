"""Results in parts: every row once, in order, and a manifest that never names half of them."""

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from finished_job import FinishedJob, quiet, write_requests

from batchmill.errors import Conflict, InvalidInput, LedgerBroken, StorageFailed
from batchmill.jobs.results.gathering import gather
from batchmill.jobs.results.parts.output_folders import (
    LocalFolder,
    ObjectFolder,
    Part,
    PartManifest,
    part_name,
    publish_manifest,
    read_manifest,
    seen_manifest,
)
from batchmill.jobs.results.parts.part_gathering import index_offloaded, part_offloaded, publish_offloaded
from batchmill.jobs.results.parts.part_orders import Indexed, PartOrder, PartsOrder, PublishOrder, Written
from batchmill.jobs.results.results import Manifest
from batchmill.object_store.store import ObjectStore
from batchmill.object_store.urls import parse_url
from batchmill.types import RowError
from batchmill.wire.rows.forms import OpenAIForm

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
    parts = PartsOrder(order, JOB, len(job.plans) - 1, attempt, scratch, None, "")
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
    """An attempt after the manifest was put, before anyone knew: the first parts stay, the new ones go."""
    job, output = folded_job(tmp_path), tmp_path / "out"
    job.run_all()
    gather_parts(job, output, 5)
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    (output / part_name("part", 7, JOB, "00000009")).write_bytes(b"cut off")
    (output / (part_name("part", 8, JOB, "00000009") + ".part")).write_bytes(b"cut")
    gather_parts(job, output, 5, "00000002")
    manifest = read_manifest(f"{output}/")
    assert manifest.attempt == "00000002"  # no attempt that began before can publish any more
    after = {path.name: path.read_bytes() for path in output.iterdir()}
    assert {**after, "manifest.json": b""} == {**before, "manifest.json": b""}
    assert content(output, manifest.parts).count(b"\n") == 12


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


def manifest_of(job: str, attempt: str, *, rows: int = 3, generation: int = 0, sha: str = "ab" * 32) -> PartManifest:
    part = Part(part_name("part", 0, job, attempt), 0, rows, rows, 9, sha)
    return PartManifest(job, generation, attempt, rows, rows, 0, [part], [])


@pytest.fixture(params=["folder", "objects"])
def folder(request, tmp_path) -> LocalFolder | ObjectFolder:
    (tmp_path / "out").mkdir()
    if request.param == "folder":
        return LocalFolder(f"{tmp_path}/out/")
    objects = ObjectFolder("memory:///", "")
    assert isinstance(objects._store, ObjectStore) and parse_url("memory:///").scheme == "memory"
    return objects


def put_part(folder: LocalFolder | ObjectFolder, tmp_path: Path, name: str) -> None:
    path = folder.writing_place(tmp_path) / name
    path.write_bytes(b"123456789")
    folder.put_part(path)


class Attempt:
    """One attempt to publish a part: it begins when it is made."""

    def __init__(self, folder: LocalFolder | ObjectFolder, mine: PartManifest, replaced_job: str | None = None) -> None:
        self._folder, self.mine, self._replaced_job = folder, mine, replaced_job
        self._seen = seen_manifest(
            folder, "out/", job=mine.job, generation=mine.generation, replaced_job=replaced_job
        )  # fmt: skip

    def publish(self) -> PartManifest:
        return publish_manifest(self._folder, "out/", self.mine, self._seen, self._replaced_job)


def published(
    folder: LocalFolder | ObjectFolder, tmp_path: Path, mine: PartManifest, replaced_job: str | None = None
) -> PartManifest:
    attempt = Attempt(folder, mine, replaced_job)
    put_part(folder, tmp_path, mine.parts[0].name)
    return attempt.publish()


def counted_names(folder: LocalFolder | ObjectFolder) -> list[str]:
    """The parts that the manifest counts, all of them there."""
    manifest = msgspec.json.decode(folder.read_manifest().data, type=PartManifest)
    assert manifest.names <= set(folder.names(bool))
    return sorted(manifest.names)


def test_of_a_folder_with_other_files_only_wanted_names_are_held(folder, tmp_path):
    """A folder may hold any number of files of others: listing it for a job returns none of them."""
    for name in ("a.txt", "b.txt", "c.csv"):
        put_part(folder, tmp_path, name)
    seen = []
    assert folder.names(lambda name: seen.append(name) or name == "c.csv") == ["c.csv"]
    assert sorted(seen) == ["a.txt", "b.txt", "c.csv"]


def test_which_manifest_counts(folder, tmp_path):
    """Equal content keeps the first parts; another job's stay unless it is to be replaced; an older generation
    loses."""
    first, again = manifest_of(JOB, "00000001"), manifest_of(JOB, "00000002")
    assert published(folder, tmp_path, first) == first
    assert published(folder, tmp_path, again).parts == first.parts
    with pytest.raises(InvalidInput, match=f"the job {JOB} wrote out/manifest.json"):
        published(folder, tmp_path, manifest_of(OTHER_JOB, "00000003"))
    newer = manifest_of(JOB, "00000004", generation=1)
    assert published(folder, tmp_path, newer) == newer
    with pytest.raises(InvalidInput, match="another attempt"):
        published(folder, tmp_path, first)
    other = manifest_of(OTHER_JOB, "00000005")
    assert published(folder, tmp_path, other, JOB) == other
    assert sorted(folder.names(bool)) == sorted(["manifest.json", *counted_names(folder)])
    with pytest.raises(Conflict):
        folder.put_manifest(b"{}", scratch=f"manifest-{'a' * 20}-00000006.json", replaced=None)


@pytest.mark.parametrize("there", ["nothing", "another job's", "an earlier generation's"])
@pytest.mark.parametrize("is_equal", [True, False])
def test_of_two_live_attempts_the_second_loses(folder, tmp_path, there, is_equal):
    """Whatever both began with: the manifest names parts that are there. The second says so if its results differ."""
    replaced_job, generation = None, 0
    if there == "another job's":
        replaced_job = OTHER_JOB
        published(folder, tmp_path, manifest_of(OTHER_JOB, "00000001"))
    elif there == "an earlier generation's":
        generation = 1
        published(folder, tmp_path, manifest_of(JOB, "00000001"))
    old = manifest_of(JOB, "00000002", generation=generation)
    new = manifest_of(JOB, "00000003", generation=generation, sha="ab" * 32 if is_equal else "cd" * 32)
    slow, fast = (Attempt(folder, mine, replaced_job) for mine in (old, new))
    for mine in (old, new):
        put_part(folder, tmp_path, mine.parts[0].name)
    assert fast.publish() == new
    if is_equal:
        assert slow.publish() == new
    else:
        with pytest.raises(InvalidInput, match="another attempt"):
            slow.publish()
    assert counted_names(folder) == [new.parts[0].name]


def test_the_second_of_two_that_publish_at_once(folder, tmp_path):
    """An attempt that is overtaken between reading the manifest and putting its own loses, too."""

    class Overtaken(type(folder)):
        def put_manifest(self, *args, **options) -> None:
            assert fast.publish() == new
            super().put_manifest(*args, **options)

    published(folder, tmp_path, manifest_of(OTHER_JOB, "00000001"))
    old, new = manifest_of(JOB, "00000002"), manifest_of(JOB, "00000003", sha="cd" * 32)
    slow, fast = (Attempt(folder, mine, OTHER_JOB) for mine in (old, new))
    for mine in (old, new):
        put_part(folder, tmp_path, mine.parts[0].name)
    slow._folder = object.__new__(Overtaken)
    slow._folder.__dict__.update(folder.__dict__)
    with pytest.raises(InvalidInput, match="another attempt"):
        slow.publish()
    assert sorted(folder.names(bool)) == sorted(["manifest.json", new.parts[0].name])
    assert counted_names(folder) == [new.parts[0].name]


def test_an_attempt_that_lost_leaves_no_part(folder, tmp_path):
    """Its parts came after those of the winner were listed: it removes them itself, and none that count."""
    old, new = manifest_of(JOB, "00000002"), manifest_of(JOB, "00000003", sha="cd" * 32)
    slow = Attempt(folder, old)
    published(folder, tmp_path, new)
    put_part(folder, tmp_path, old.parts[0].name)
    with pytest.raises(InvalidInput, match="another attempt") as refused:
        slow.publish()
    assert refused.value.code == "output_taken"
    assert sorted(folder.names(bool)) == sorted(["manifest.json", new.parts[0].name])
    equal = manifest_of(JOB, "00000004", sha="cd" * 32)
    late, fence = Attempt(folder, equal), Attempt(folder, manifest_of(JOB, "00000005", sha="cd" * 32))
    put_part(folder, tmp_path, fence.mine.parts[0].name)
    fence.publish()
    put_part(folder, tmp_path, equal.parts[0].name)
    assert late.publish().parts == new.parts
    assert sorted(folder.names(bool)) == sorted(["manifest.json", new.parts[0].name])


def test_parts_of_a_later_attempt_stay(folder, tmp_path):
    """Parts that are written after the manifest belong to an attempt that may still publish."""

    class Late(type(folder)):
        def put_manifest(self, *args, **options) -> None:
            super().put_manifest(*args, **options)
            later.append(Attempt(folder, manifest_of(JOB, "00000002", generation=1)))
            put_part(folder, tmp_path, later[0].mine.parts[0].name)

    later: list[Attempt] = []
    first = Attempt(folder, manifest_of(JOB, "00000001"))
    put_part(folder, tmp_path, first.mine.parts[0].name)
    late = object.__new__(Late)
    late.__dict__.update(folder.__dict__)
    first._folder = late
    first.publish()
    assert later[0].publish() == later[0].mine
    assert counted_names(folder) == [later[0].mine.parts[0].name]


def test_a_part_that_is_gone_is_not_published(folder, tmp_path):
    """A manifest never names a part that is not there; of an earlier attempt's parts neither."""
    first = manifest_of(JOB, "00000001")
    with pytest.raises(StorageFailed, match="was removed since"):
        Attempt(folder, first).publish()
    assert folder.read_manifest() is None
    published(folder, tmp_path, first)
    folder.remove([first.parts[0].name])
    again = manifest_of(JOB, "00000002")
    assert published(folder, tmp_path, again) == again
    assert counted_names(folder) == [again.parts[0].name]


def test_a_manifest_that_was_removed_meanwhile(folder, tmp_path):
    """It is not put again by an attempt that meant to replace it; the next attempt puts one."""
    published(folder, tmp_path, manifest_of(JOB, "00000001"))
    newer = manifest_of(JOB, "00000002", generation=1)
    attempt = Attempt(folder, newer)
    put_part(folder, tmp_path, newer.parts[0].name)
    folder.remove(["manifest.json"])
    with pytest.raises(InvalidInput, match="was removed while"):
        attempt.publish()
    assert published(folder, tmp_path, newer) == newer


def test_a_lock_that_is_held(tmp_path):
    """Whoever waits for another process too long says for what; a lock of the dead is free."""
    (tmp_path / "out").mkdir()
    folder = LocalFolder(f"{tmp_path}/out/", lock_s=0)
    lock = tmp_path / "out" / ".manifest.lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StorageFailed, match="has been replacing"):
            folder.put_manifest(b"{}", scratch="s.json", replaced=None)
    folder.put_manifest(b"{}", scratch="s.json", replaced=None)
    assert folder.names(bool) == ["manifest.json"]


@contextmanager
def no_root() -> Iterator[None]:
    """Root may open every file: then as another user, who is nobody."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.mark.parametrize(("mode", "is_free"), [(0o444, True), (0o000, False)])
def test_a_lock_that_another_user_has_left(mode, is_free):
    """One that can be read is taken; of a private one the error says that it is to be deleted."""
    with tempfile.TemporaryDirectory() as name:
        lock = Path(name, ".manifest.lock")
        lock.touch()
        lock.chmod(mode)
        Path(name).chmod(0o777)
        with no_root():
            folder = LocalFolder(f"{name}/", lock_s=0)
            if is_free:
                folder.put_manifest(b"{}", scratch="s.json", replaced=None)
            else:
                with pytest.raises(StorageFailed, match="lock is another user's: delete it"):
                    folder.put_manifest(b"{}", scratch="s.json", replaced=None)
        assert folder.names(bool) == ["manifest.json" if is_free else ".manifest.lock"]


def test_a_lock_that_cannot_be_removed():
    """In a folder where users remove only their own files, another user's lock is taken, stays, and is free again."""
    with tempfile.TemporaryDirectory() as name:
        lock = Path(name, ".manifest.lock")
        lock.touch()
        lock.chmod(0o444)
        Path(name).chmod(0o1777)
        with no_root():
            folder = LocalFolder(f"{name}/", lock_s=0)
            folder.put_manifest(b"{}", scratch="s.json", replaced=None)
            folder.put_manifest(b"[]", scratch="s.json", replaced=folder.read_manifest().info)
        assert folder.read_manifest().data == b"[]"


@pytest.mark.parametrize("kind", ["pipe", "readable pipe", "link", "folder"])
def test_a_lock_that_is_no_file(kind):
    """A pipe, a link or a folder of that name is named, with the way out; nobody waits for its other end."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        lock = Path(name, ".manifest.lock")
        if "pipe" in kind:
            os.mkfifo(lock)
            lock.chmod(0o444 if kind == "readable pipe" else 0o666)
        elif kind == "link":
            lock.symlink_to("elsewhere")
        else:
            lock.mkdir()
        with no_root(), pytest.raises(StorageFailed, match="lock is no regular file: delete it"):
            LocalFolder(f"{name}/", lock_s=0).put_manifest(b"{}", scratch="s.json", replaced=None)
        assert os.listdir(name) == [".manifest.lock"]


def test_a_new_folder_is_durable(tmp_path, monkeypatch):
    """The name of the folder is synced in its parent before a part is in it."""
    synced: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    LocalFolder(f"{tmp_path}/out/").writing_place(tmp_path)
    assert synced == [str(tmp_path)]


def test_only_own_parts_are_removed(folder, tmp_path):
    """What goes are parts of this job and of the replaced one; other files in the folder stay."""
    counted = manifest_of(JOB, "00000001")
    names = [part_name("part", 0, JOB, "00000002"), part_name("errors", 0, OTHER_JOB, "00000001")]
    strange = [part_name("part", 0, "job_" + "c" * 20, "00000001"), "part-00000.jsonl", "notes.txt"]
    for name in (*names, *strange):
        put_part(folder, tmp_path, name)
    published(folder, tmp_path, counted, OTHER_JOB)
    assert sorted(folder.names(bool)) == sorted([counted.parts[0].name, "manifest.json", *strange])


def test_a_strange_manifest_is_not_touched(folder):
    """A manifest.json that is not batchmill's is refused by name, before a part is written."""
    folder.put_manifest(b'{"a": 1}', scratch="s.json", replaced=None)
    with pytest.raises(InvalidInput, match="not a manifest of batchmill"):
        Attempt(folder, manifest_of(JOB, "00000001"), JOB)
    assert json.loads(folder.read_manifest().data) == {"a": 1}


def test_a_job_without_rows(folder):
    """A manifest may name no part."""
    empty = PartManifest(JOB, 0, "00000001", 0, 0, 0, [], [])
    assert Attempt(folder, empty).publish() == empty
    assert folder.names(bool) == ["manifest.json"]
