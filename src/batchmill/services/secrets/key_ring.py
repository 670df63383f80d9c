"""The key file: the keys that wrap secrets, the current one first. For its owner alone, and replaced as a whole.

Form: a line `batchmill keys 1`, then a key a line, in hex.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from pathlib import Path

from msgspec import Struct

from batchmill import faults
from batchmill.errors import InvalidConfig

KEY_BYTES = 32
KEY_ID_BYTES = 8
KEYS_MAX = 16  # the current one, and those of rotations that did not come to their end
FIRST_LINE = "batchmill keys 1"
FILE_BYTES_MAX = 4096


class Key(Struct, frozen=True):
    """A key and its id, which stands in what it seals and says nothing of the key."""

    key: bytes
    id: bytes

    def __repr__(self) -> str:
        return f"Key({self.id.hex()})"


class Ring(Struct, frozen=True):
    keys: tuple[Key, ...]

    @property
    def current(self) -> Key:
        return self.keys[0]

    def find(self, key_id: bytes) -> Key | None:
        return next((each for each in self.keys if each.id == key_id), None)


def new_key() -> Key:
    return _key(secrets.token_bytes(KEY_BYTES))


def _key(key: bytes) -> Key:
    return Key(key, hashlib.sha256(b"batchmill key id\0" + key).digest()[:KEY_ID_BYTES])


def read(path: Path) -> Ring:
    """Raises: InvalidConfig for a file that is not there, not its owner's alone, or no key file."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise InvalidConfig(
            f"the key file {path} is not there: put it back where it was, or say where it is with secrets.key_file",
            code="secret_unreadable",
        ) from None
    except OSError as error:
        raise InvalidConfig(f"the key file {path} cannot be read: {error.strerror}") from None
    try:
        found = os.fstat(file)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise InvalidConfig(f"the key file {path} must belong to you alone: chmod 600 {path}")
        data = os.read(file, FILE_BYTES_MAX + 1)
    finally:
        os.close(file)
    ring = _parse(data)
    if ring is None:
        raise InvalidConfig(f"the key file {path} is damaged: put back a copy of it")
    return ring


def _parse(data: bytes) -> Ring | None:
    try:
        first, *lines = data.decode("ascii").splitlines()
        keys = tuple(_key(bytes.fromhex(line)) for line in lines)
    except ValueError:  # no ASCII, no line, no hex
        return None
    if first != FIRST_LINE or not 1 <= len(keys) <= KEYS_MAX or any(len(each.key) != KEY_BYTES for each in keys):
        return None
    return Ring(keys)


def write(path: Path, ring: Ring) -> None:
    """Put this ring in the file's place; durable on return. Raises: InvalidConfig."""
    if len(ring.keys) > KEYS_MAX:
        raise InvalidConfig(
            f"the key file {path} holds {KEYS_MAX} keys of rotations that did not come to their end: mend what kept "
            "them from it first"
        )
    text = "".join(f"{line}\n" for line in (FIRST_LINE, *(each.key.hex() for each in ring.keys)))
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        _write_fresh(fresh, text.encode())
        faults.point("after_key_file")
        os.rename(fresh, path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        for leftover in path.parent.glob(f".{path.name}.*"):  # of a process that was killed here: it holds a key
            leftover.unlink()
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise InvalidConfig(f"the key file {path} cannot be written: {error.strerror}") from None


def _write_fresh(path: Path, data: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, data)
        os.fsync(file)
    finally:
        os.close(file)
