"""Changes of files that an owner makes within its term, and none past it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from fakes.terms import SetTerm

from batchmill.errors import TermOver
from batchmill.owned_files import OwnedFiles, discard
from batchmill.owner_term import ENDLESS, PatientTerm


class Shared:
    """A folder that a successor sees too."""

    def __init__(self, home: Path) -> None:
        self.home, self.left = home, math.inf
        self.owned = OwnedFiles(SetTerm(lambda: self.left))
        (home / "folder").mkdir(parents=True)
        (home / "empty").mkdir()
        for name in ("file", "other", "folder/inner"):
            (home / name).write_text(name)

    def all(self) -> dict[str, str]:
        paths = sorted(self.home.rglob("*"))
        return {str(path.relative_to(self.home)): path.read_text() if path.is_file() else "" for path in paths}


def _publish(owned: OwnedFiles, path: Path) -> None:
    with owned.part(path) as part:
        part.write(b"new")
        part.publish()


CHANGES: dict[str, Callable[[OwnedFiles, Path], object]] = {
    "make_folder": lambda owned, home: owned.make_folder(home / "new" / "inner"),
    "open_new": lambda owned, home: owned.open_new(home / "file").close(),
    "part": lambda owned, home: _publish(owned, home / "file"),
    "create": lambda owned, home: owned.create(home / "new", b"new"),
    "create over": lambda owned, home: owned.create(home / "file", b"new"),
    "overwrite": lambda owned, home: owned.overwrite(home / "file", b"new"),
    "write": lambda owned, home: owned.write(home / "file", b"new"),
    "allocate": lambda owned, home: owned.allocate(home / "new", 4096),
    "move": lambda owned, home: owned.move(home / "file", home / "other"),
    "move_over": lambda owned, home: owned.move_over(home / "file", home / "folder", home / "aside"),
    "link": lambda owned, home: owned.link(home / "file", home / "other"),
    "link_new": lambda owned, home: owned.link_new(home / "file", home / "new"),
    "symlink_over": lambda owned, home: owned.symlink_over("other", home / "file"),
    "copy_tree": lambda owned, home: owned.copy_tree(home / "folder", home / "new"),
    "remove": lambda owned, home: owned.remove(home / "missing", home / "file"),
    "remove_durably": lambda owned, home: owned.remove_durably([home / "file"]),
    "remove_tree": lambda owned, home: owned.remove_tree(home / "folder"),
    "remove_empty": lambda owned, home: owned.remove_empty(home / "empty"),
}


def test_every_change_is_listed():
    """A method that is added is held to the rules below."""
    methods = {name for name in vars(OwnedFiles) if not name.startswith("_")}
    assert methods == {name.partition(" ")[0] for name in CHANGES}


@pytest.mark.parametrize("name", CHANGES)
def test_nothing_is_changed_past_the_term(tmp_path: Path, name: str):
    """Each change is made within the term; past it the files are as they were, temporary ones included."""
    shared = Shared(tmp_path / "data")
    before, shared.left = shared.all(), 0.0
    with pytest.raises(TermOver):
        CHANGES[name](shared.owned, shared.home)
    assert shared.all() == before
    shared.left = 0.1
    CHANGES[name](shared.owned, shared.home)
    after = {path: text for path, text in shared.all().items() if path != "other" or name != "link"}
    assert after != before and not any(path.endswith((".part", ".tmp")) for path in after)


def test_a_part_whose_term_ends_while_it_is_written_is_not_published(tmp_path: Path):
    """A successor may have published the same file by then."""
    shared = Shared(tmp_path / "data")
    with pytest.raises(TermOver), shared.owned.part(shared.home / "file") as part:
        part.write(b"new")
        shared.left = -1.0
        part.publish()
    assert shared.all()["file"] == "file" and "file.part" not in shared.all()


def test_a_removal_stops_where_the_term_ends(tmp_path: Path):
    """The term is checked before each file, not once for all."""
    shared, lefts = Shared(tmp_path / "data"), [1.0, -1.0]
    owned = OwnedFiles(SetTerm(lambda: lefts.pop(0)))
    with pytest.raises(TermOver):
        owned.remove(shared.home / "file", shared.home / "other")
    assert "file" not in shared.all() and "other" in shared.all()


def test_the_removal_of_a_folder_stops_where_the_term_ends(tmp_path: Path):
    """It may take minutes: a successor that makes the folder anew meanwhile keeps what it has written."""
    for checks in range(9):
        shared, lefts = Shared(tmp_path / str(checks)), [1.0] * checks
        (shared.home / "folder" / "deep").mkdir()
        (shared.home / "folder" / "deep" / "one").touch()
        (shared.home / "folder" / "link").symlink_to(shared.home, target_is_directory=True)
        owned, seen = OwnedFiles(SetTerm(lambda lefts=lefts: lefts.pop() if lefts else 0.0)), []
        for _ in range(2):
            with suppress(TermOver):
                owned.remove_tree(shared.home / "folder")
            seen.append(shared.all())
        assert seen[0] == seen[1] and {"file", "other", "empty"} <= seen[0].keys()
        assert len(seen[0]) == 8 - max(0, min(checks - 1, 5)), checks
    assert not (shared.home / "folder").exists()
    shared.owned.remove_tree(shared.home / "folder")  # it is gone
    shared.owned.remove_tree(shared.home / "file")  # and this is none
    assert shared.all() == {"file": "file", "other": "other", "empty": ""}


def test_a_patient_term_waits():
    """Work that takes long goes on once its owner is surely the owner again."""
    lefts = [0.0, -1.0, 1.0]
    term = PatientTerm(SetTerm(lambda: lefts.pop(0)))
    term.check()
    assert lefts == [] and PatientTerm(ENDLESS).left_s() == math.inf


def test_what_nobody_else_knows_is_discarded(tmp_path: Path):
    """A file, a folder, and what is gone already."""
    shared = Shared(tmp_path / "data")
    for name in ("file", "folder", "missing"):
        discard(shared.home / name)
    assert shared.all() == {"other": "other", "empty": ""}
