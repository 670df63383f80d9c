"""Copies of the files that cells name: written once for equal contents, with bounded memory, in both places."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest
from blake3 import blake3
from fakes.terms import SetTerm

from batchmill.errors import StorageFailed, StorageFull, TermOver
from batchmill.owned_files import OwnedFiles
from batchmill.store import media_copies
from batchmill.store.media_copies import FolderCopies, MediaCopies, ObjectCopies, Seen, SharedCopies, path_of
from batchmill.store.objects import StoreObjects


def digest_of(data: bytes) -> str:
    return blake3(data).hexdigest()


class RecordingPlace:
    """A place whose writes wait for each other while `gate` is closed."""

    def __init__(self, *known: str) -> None:
        self.known, self.written, self.gate = {*known}, list[str](), threading.Event()
        self.failing: Exception | None = None
        self.is_finished = False

    def has(self, digest: str, size_bytes: int) -> bool:
        return digest in self.known

    def write(self, digest: str, data: bytes) -> None:
        self.gate.wait()
        if self.failing is not None:
            raise self.failing
        self.written.append(digest)
        self.known.add(digest)

    def finish(self) -> None:
        self.is_finished = True


def keep(copies: MediaCopies, *contents: bytes) -> None:
    for data in contents:
        copies.keep(digest_of(data), data)


def test_equal_contents_are_written_once():
    """Also while the first is being written; their bytes count once."""
    place = RecordingPlace()
    with MediaCopies(place) as copies:
        keep(copies, b"one", b"two", b"one")
        place.gate.set()
        keep(copies, b"two", b"three", b"one")
        assert not place.is_finished
        copies.finish()
    assert sorted(place.written) == sorted(map(digest_of, (b"one", b"two", b"three")))
    assert place.is_finished and copies.size_bytes == len(b"onetwothree")


def test_what_waits_is_bounded(monkeypatch):
    """At most so many bytes, or contents, wait to be written; one more waits for the oldest."""
    for name, value, contents in (
        ("WAITING_BYTES_MAX", 10, [b"12345", b"67890", b"x"]), ("WAITING_MAX", 2, [b"a", b"b", b"c"]),
    ):  # fmt: skip
        monkeypatch.setattr(media_copies, name, value)
        place, kept = RecordingPlace(), []
        with MediaCopies(place) as copies:

            def keep_all(copies=copies, contents=contents, kept=kept) -> None:
                for data in contents:
                    kept.append(data)
                    keep(copies, data)

            working = threading.Thread(target=keep_all)
            working.start()
            assert copies._waiting_bytes <= 10 and len(copies._waiting) <= 2
            place.gate.set()
            working.join()
            copies.finish()
        assert sorted(place.written) == sorted(map(digest_of, contents))
        monkeypatch.undo()


def test_one_that_cannot_be_written_ends_it():
    """The error of a write comes out of the next call that waits for it."""
    place = RecordingPlace()
    place.failing = StorageFailed("the store is gone")
    place.gate.set()
    with pytest.raises(StorageFailed, match="is gone"), MediaCopies(place) as copies:
        keep(copies, b"one")
        copies.finish()
    assert not place.is_finished


def test_one_that_was_not_seen_is_written_whatever_the_filter_says():
    """The filter is full: each content is looked for, and only what is there is left out."""
    seen = Seen(bits=8)
    assert [seen.add(digest_of(bytes([n]))) for n in range(100)][-1]
    place = RecordingPlace(digest_of(b"old"))
    place.gate.set()
    with MediaCopies(place) as copies:
        copies._seen = seen
        keep(copies, b"old", b"new")
        copies.finish()
    assert place.written == [digest_of(b"new")]


def test_objects_of_an_earlier_attempt_are_not_put_again(tmp_path: Path):
    """A job that was cut off while it was sealed finds what it has put."""
    objects = StoreObjects(f"file://{tmp_path}")
    prefix = media_copies.prefix_of("job_1")
    with MediaCopies(ObjectCopies(objects, prefix)) as copies:
        keep(copies, b"one")
        copies.finish()
    before = (tmp_path / prefix / digest_of(b"one")).stat()
    with MediaCopies(ObjectCopies(objects, prefix)) as copies:
        keep(copies, b"one", b"two")
        copies.finish()
    assert (tmp_path / prefix / digest_of(b"one")).stat() == before
    assert {each.key: each.size_bytes for each in objects.infos(prefix)} == {
        prefix + digest_of(b"one"): 3, prefix + digest_of(b"two"): 3,
    }  # fmt: skip
    assert copies.size_bytes == 6


def test_files_appear_whole(tmp_path: Path):
    """Under the name of their content, for their user alone; a full disk ends it and leaves no part."""
    full = False

    def check_room() -> None:
        if full:
            raise StorageFull("no space is left")

    folder = tmp_path / "jobs" / "media"
    folder.parent.mkdir()
    with MediaCopies(FolderCopies(folder, SharedCopies(tmp_path / "shared"), check_room)) as copies:
        keep(copies, b"one")
        copies.finish()
    path = Path(path_of(str(folder), digest_of(b"one")))
    assert path.read_bytes() == b"one" and path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(b"onetwo")  # not what was written: it is replaced
    full = True
    with (
        pytest.raises(StorageFull),
        MediaCopies(FolderCopies(folder, SharedCopies(tmp_path / "shared"), check_room)) as copies,
    ):
        keep(copies, b"one")
        copies.finish()
    full = False
    with MediaCopies(FolderCopies(folder, SharedCopies(tmp_path / "shared"), check_room)) as copies:
        keep(copies, b"one")
        copies.finish()
    assert [name for _, _, names in os.walk(folder) for name in names] == [digest_of(b"one")]
    assert path.read_bytes() == b"one"


def test_what_a_killed_attempt_was_writing_is_removed(tmp_path: Path):
    """Parts have names that no later attempt writes: they would stay as long as the job."""
    folder = tmp_path / "media"
    part = Path(path_of(str(folder), digest_of(b"one"))).with_name("0.part")
    part.parent.mkdir(parents=True)
    part.write_bytes(b"on")
    with MediaCopies(FolderCopies(folder, SharedCopies(tmp_path / "shared"), lambda: None)) as copies:
        keep(copies, b"one")
        copies.finish()
    assert [name for _, _, names in os.walk(folder) for name in names] == [digest_of(b"one")]


def test_a_child_of_a_stopped_owner_leaves_what_its_successor_is_writing(tmp_path: Path):
    """A part that is not its own is not always a killed attempt's."""
    (part := tmp_path / "media" / "ab" / "0.part").parent.mkdir(parents=True)
    part.touch()
    with pytest.raises(TermOver):
        shared = SharedCopies(tmp_path / "shared")
        FolderCopies(tmp_path / "media", shared, lambda: None, OwnedFiles(SetTerm(lambda: 0.0)))
    assert part.exists()


def test_a_child_of_a_stopped_owner_shares_nothing(tmp_path: Path):
    """It gives no file a name that its successor counts on, and takes none away: neither a damaged one nor its own."""
    left_s, home = 1.0, media_copies.shared_home(tmp_path, "default")
    owned = OwnedFiles(SetTerm(lambda: left_s))
    place = FolderCopies(tmp_path / "jobs" / "b" / "media", SharedCopies(home, owned), lambda: None, owned)
    copied(tmp_path, "a", b"one", b"two")
    damaged = Path(path_of(str(home), digest_of(b"two")))
    damaged.write_bytes(b"owt")
    left_s = 0.0
    for data in (b"one", b"two", b"three"):
        with pytest.raises(TermOver):
            place.write(digest_of(data), data)
    assert shared_names(tmp_path) == {digest_of(b"one"), digest_of(b"two")} and damaged.read_bytes() == b"owt"
    assert [name for _, _, names in os.walk(tmp_path / "jobs" / "b") for name in names] == []
    left_s = 1.0
    place.write(digest_of(b"two"), b"two")
    assert damaged.read_bytes() == b"two"


def copied(data_dir: Path, job: str, *contents: bytes, project: str = "default") -> list[os.stat_result]:
    """Copies of a job in the data directory."""
    folder, shared = data_dir / "jobs" / job / "media", SharedCopies(media_copies.shared_home(data_dir, project))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with MediaCopies(FolderCopies(folder, shared, lambda: None)) as copies:
        keep(copies, *contents)
        copies.finish()
    paths = [Path(path_of(str(folder), digest_of(data))) for data in contents]
    assert [path.read_bytes() for path in paths] == [*contents]
    return [path.stat() for path in paths]


def shared_names(data_dir: Path) -> set[str]:
    return {path.name for path in (data_dir / "media").glob("*/*/*")}


def test_jobs_of_a_project_share_files(tmp_path: Path):
    """Equal contents are one file, those of another project are not. It goes with the last job that has it."""
    one, two = digest_of(b"one"), digest_of(b"two")
    first = copied(tmp_path, "a", b"one", b"two")
    again = copied(tmp_path, "b", b"two", b"three")
    other = copied(tmp_path, "c", b"two", project="other")
    assert first[1].st_ino == again[0].st_ino != other[0].st_ino
    shared = media_copies.shared_home(tmp_path, "default")
    media_copies.remove_copies(tmp_path / "jobs" / "a" / "media", shared, OwnedFiles())
    assert one not in shared_names(tmp_path) and two in shared_names(tmp_path)
    assert Path(path_of(str(tmp_path / "jobs" / "b" / "media"), two)).read_bytes() == b"two"
    media_copies.remove_copies(tmp_path / "jobs" / "b" / "media", shared, OwnedFiles())
    assert shared_names(tmp_path) == {two}
    assert not list((tmp_path / "jobs" / "a").iterdir()) and not list((shared).glob("*/*"))


def test_what_a_kill_leaves_of_shared_files_is_swept(tmp_path: Path):
    """A file whose jobs are gone has one name left, which the sweep removes; those of jobs stay."""
    copied(tmp_path, "a", b"one", b"two")
    copied(tmp_path, "b", b"two")
    shutil.rmtree(tmp_path / "jobs" / "a")  # and a kill before the further names were looked at
    media_copies.sweep_shared(tmp_path, OwnedFiles())
    assert shared_names(tmp_path) == {digest_of(b"two")}


def test_a_shared_file_that_is_damaged_is_not_linked(tmp_path: Path):
    """The next job writes its own, which takes the place of the damaged one."""
    (first,) = copied(tmp_path, "a", b"one")
    Path(path_of(str(tmp_path / "jobs" / "a" / "media"), digest_of(b"one"))).write_bytes(b"two")
    (second,) = copied(tmp_path, "b", b"one")
    (third,) = copied(tmp_path, "c", b"one")
    assert first.st_ino != second.st_ino == third.st_ino


@pytest.mark.parametrize("reason", [errno.EMLINK, errno.EPERM, errno.EXDEV])
def test_where_files_cannot_be_linked_each_job_has_its_own(tmp_path: Path, monkeypatch, reason: int):
    """As on file systems without further names; a file with as many as it may have is shared no more."""
    (first,) = copied(tmp_path, "a", b"one")

    def refused(source: object, target: object) -> None:
        raise OSError(reason, os.strerror(reason))

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refused)
        (second,) = copied(tmp_path, "b", b"one")
    (third,) = copied(tmp_path, "c", b"one")
    assert first.st_ino != second.st_ino
    assert (third.st_ino == first.st_ino) == (reason != errno.EMLINK)
