"""Secrets at rest: envelopes, and the key file that opens them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from fakes.terms import SetTerm

from batchmill.config import KEY_FILE
from batchmill.errors import InvalidConfig, TermOver
from batchmill.owned_files import OwnedFiles
from batchmill.services.secrets import box as key_ring
from batchmill.services.secrets.box import SecretBox


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / KEY_FILE


def test_what_is_sealed_is_opened_by_its_owner_only(path: Path) -> None:
    """A sealed secret opens for whom it was sealed, also after a restart, and for nobody it was moved to."""
    sealed = SecretBox(path).seal(b"hush", "one")
    assert b"hush" not in sealed
    assert SecretBox(path).open(sealed, "one") == b"hush"
    with pytest.raises(InvalidConfig, match="cannot be read"):
        SecretBox(path).open(sealed, "two")


def test_every_bit_of_a_sealed_secret_counts(path: Path) -> None:
    """A sealed secret of which any byte was changed, or that was cut, does not open."""
    box = SecretBox(path)
    sealed = box.seal(b"hush", "one")
    wrong = [sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :] for at in range(len(sealed))]
    wrong += [sealed[:length] for length in range(len(sealed))] + [sealed + b"\0"]
    for each in wrong:
        with pytest.raises(InvalidConfig) as caught:
            box.open(each, "one")
        assert caught.value.code == "secret_unreadable"


def test_each_secret_has_a_key_of_its_own(path: Path) -> None:
    """The same secret sealed twice has nothing in common but the form and the key's id."""
    box = SecretBox(path)
    first, second = box.seal(b"hush", "one"), box.seal(b"hush", "one")
    assert first[:9] == second[:9]
    assert first[9:21] != second[9:21] and first[21:69] != second[21:69] and first[69:81] != second[69:81]


def test_the_wrapped_key_of_another_does_not_fit(path: Path) -> None:
    """The envelope of one secret around the text of another opens for neither."""
    box = SecretBox(path)
    one, two = box.seal(b"hush", "one"), box.seal(b"quiet", "two")
    for owner in ("one", "two"):
        with pytest.raises(InvalidConfig):
            box.open(one[:69] + two[69:], owner)


def test_the_key_file_is_for_its_owner_alone(path: Path) -> None:
    """The key file is made with 0600; one that others may read, or that is a link, is refused."""
    SecretBox(path).seal(b"x", "one")
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == [KEY_FILE]
    path.chmod(0o640)
    with pytest.raises(InvalidConfig, match="chmod 600"):
        SecretBox(path).seal(b"x", "one")
    path.chmod(0o600)
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))
    with pytest.raises(InvalidConfig, match="cannot be read"):
        SecretBox(path).seal(b"x", "one")


def test_root_may_lend_the_key_file_to_a_group(path: Path) -> None:
    """A key file of root that one group may read, and nobody else, is private to a service."""
    cases = {
        (1000, 0o600): True, (1000, 0o640): False, (1000, 0o604): False, (1001, 0o600): False,
        (0, 0o440): True, (0, 0o400): True, (0, 0o640): True, (0, 0o444): False, (0, 0o460): False, (0, 0o450): False,
    }  # fmt: skip
    for (owner, mode), expected in cases.items():
        info = os.stat_result((stat.S_IFREG | mode, 0, 0, 1, owner, 0, 0, 0, 0, 0))
        assert key_ring.is_private(info, 1000) is expected, (owner, oct(mode))
    own = os.stat_result((stat.S_IFREG | 0o440, 0, 0, 1, 0, 0, 0, 0, 0, 0))
    assert not key_ring.is_private(own, 0)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"x" * 32, b"batchmill keys 1\n", b"batchmill keys 2\n" + b"ab" * 32 + b"\n",
        b"batchmill keys 1\n" + b"ab" * 31 + b"\n", b"batchmill keys 1\nnothex\n", b"\xff" * 100,
        b"batchmill keys 1\n" + (b"ab" * 32 + b"\n") * (key_ring.KEYS_MAX + 1),
    ],
)  # fmt: skip
def test_a_damaged_key_file_is_told(path: Path, data: bytes) -> None:
    """What is not a key file is called damaged, and is left as it is."""
    path.touch(mode=0o600)
    path.write_bytes(data)
    with pytest.raises(InvalidConfig, match="damaged"):
        SecretBox(path).seal(b"x", "one")
    assert path.read_bytes() == data


def test_a_missing_key_file_is_not_made_for_reading(path: Path) -> None:
    """Opening without the key file says that it is missing, and makes none."""
    sealed = SecretBox(path).seal(b"x", "one")
    path.unlink()
    with pytest.raises(InvalidConfig, match="is missing"):
        SecretBox(path).open(sealed, "one")
    assert not path.exists()


def test_a_rotation_wraps_keys_and_leaves_texts(path: Path) -> None:
    """After a rotation a secret lies under the new key, its text as it was; what was not rewrapped cannot be opened."""
    box = SecretBox(path)
    kept, left = box.seal(b"hush", "one"), box.seal(b"quiet", "two")
    box.begin_rotation()
    assert box.open(kept, "one") == b"hush" and not box.is_current(kept)
    fresh = box.rewrap(kept, "one")
    assert fresh[69:] == kept[69:] and fresh[:69] != kept[:69]
    box.end_rotation()
    assert SecretBox(path).open(fresh, "one") == b"hush"
    for each in (kept, left):
        with pytest.raises(InvalidConfig):
            box.open(each, "one" if each is kept else "two")


def test_the_key_file_is_replaced_as_a_whole(path: Path) -> None:
    """A new key file that a killed process left beside the old one is taken away by the next."""
    box = SecretBox(path)
    box.seal(b"x", "one")
    left = path.with_name(f".{KEY_FILE}.0123456789abcdef")
    left.write_bytes(b"half a key file")
    box.begin_rotation()
    assert not left.exists()


def test_a_replaced_owner_writes_no_key_file(path: Path) -> None:
    """Its successor may have made the file, or rotated its keys: secrets are sealed with keys that this one lacks."""
    left_s = -1.0
    box = SecretBox(path, OwnedFiles(SetTerm(lambda: left_s)))
    with pytest.raises(TermOver):
        box.seal(b"x", "one")
    assert not path.exists()
    successor = SecretBox(path)
    sealed, data = successor.seal(b"hush", "one"), path.read_bytes()
    for change in (box.begin_rotation, box.end_rotation):
        with pytest.raises(TermOver):
            change()
        assert path.read_bytes() == data and [each.name for each in path.parent.iterdir()] == [path.name]
    left_s = 1.0
    box.begin_rotation()
    assert SecretBox(path).open(sealed, "one") == b"hush" and path.read_bytes() != data


def test_no_key_shows_itself(path: Path) -> None:
    """Printing a ring of keys shows their ids at most."""
    key = key_ring.new_key()
    assert key.key.hex() not in repr(key_ring.Ring((key,))) and repr(key.key) not in repr(key_ring.Ring((key,)))
