"""Secrets at rest."""

from pathlib import Path

import pytest

from batchmill.errors import InvalidConfig
from batchmill.services.secret_box import KEY_FILE, SecretBox


def test_what_is_sealed_is_opened_by_its_owner_only(tmp_path: Path):
    """A sealed secret opens for whom it was sealed, also after a restart, and for nobody it was moved to."""
    sealed = SecretBox(tmp_path).seal(b"hush", "one")
    assert b"hush" not in sealed
    assert SecretBox(tmp_path).open(sealed, "one") == b"hush"
    with pytest.raises(InvalidConfig, match="cannot be read"):
        SecretBox(tmp_path).open(sealed, "two")
    with pytest.raises(InvalidConfig, match="cannot be read"):
        SecretBox(tmp_path).open(b"\x02" + sealed[1:], "one")
    with pytest.raises(InvalidConfig, match="cannot be read"):
        SecretBox(tmp_path).open(b"", "one")


def test_the_key_file_is_for_its_owner_alone(tmp_path: Path):
    """The key file is made with 0600, and one that others may read is refused."""
    SecretBox(tmp_path).seal(b"x", "one")
    path = tmp_path / KEY_FILE
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == [KEY_FILE]
    path.chmod(0o640)
    with pytest.raises(InvalidConfig, match="chmod 600"):
        SecretBox(tmp_path).seal(b"x", "one")


def test_a_damaged_key_file_is_told(tmp_path: Path):
    """A key file of another size is no key."""
    path = tmp_path / KEY_FILE
    path.touch(mode=0o600)
    with pytest.raises(InvalidConfig, match="damaged"):
        SecretBox(tmp_path).seal(b"x", "one")
