"""Secrets at rest: envelopes. Each has a data key of its own; a key of the key file wraps that.

AES-256-GCM; what a secret belongs to is authenticated with it, so that one cannot be put in another's place. The key
file lies outside the database, and may lie outside the data directory. See `key_ring` for its form.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
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


NONCE_BYTES = 12
TAG_BYTES = 16
_ENVELOPE = b"\x02"
_WRAPPED_BYTES = KEY_BYTES + TAG_BYTES


class _Envelope(Struct, frozen=True):
    """A sealed secret taken apart: version, id of the key, nonce and data key, nonce and text."""

    key_id: bytes
    wrap_nonce: bytes
    wrapped: bytes
    rest: bytes  # its nonce and text

    @classmethod
    def read(cls, sealed: bytes) -> _Envelope:
        """Raises: InvalidTag for what is too short."""
        at = 1 + KEY_ID_BYTES
        middle = at + NONCE_BYTES
        end = middle + _WRAPPED_BYTES
        if sealed[:1] != _ENVELOPE or len(sealed) < end + NONCE_BYTES + TAG_BYTES:
            raise InvalidTag
        return cls(sealed[1:at], sealed[at:middle], sealed[middle:end], sealed[end:])

    def write(self) -> bytes:
        return _ENVELOPE + self.key_id + self.wrap_nonce + self.wrapped + self.rest


class SecretBox:
    """Raises, everywhere: InvalidConfig when the key file cannot be used.

    There is one for each process that owns a data directory: a key that `begin_rotation` makes is known to all who
    seal. Whoever seals hands the bytes to the database in the same step, so that a rotation misses none.

    Concurrency: `seal`, `open` and `rewrap` from any thread.
    """

    def __init__(self, path: Path) -> None:
        """`path`: of the key file; it is made with the first secret."""
        self.path = path
        self._ring: Ring | None = None

    def seal(self, plain: bytes, owner: str) -> bytes:
        """Encrypt what belongs to `owner`."""
        ring = self._load(makes=True)
        data_key, nonce = secrets.token_bytes(KEY_BYTES), secrets.token_bytes(NONCE_BYTES)
        text = AESGCM(data_key).encrypt(nonce, plain, _ENVELOPE + owner.encode())
        return _wrap(ring, data_key, owner, nonce + text)

    def open(self, sealed: bytes, owner: str) -> bytes:
        """What was sealed for `owner`. Raises: InvalidConfig (`secret_unreadable`): the key or the owner is another."""
        ring = self._load()
        try:
            envelope = _Envelope.read(sealed)
            data_key = _unwrap(ring, envelope, owner)
            nonce, text = envelope.rest[:NONCE_BYTES], envelope.rest[NONCE_BYTES:]
            return AESGCM(data_key).decrypt(nonce, text, _ENVELOPE + owner.encode())
        except InvalidTag:
            raise InvalidConfig(
                f"the secret of {owner} cannot be read with {self.path}: put back the file that it was written with, "
                "or give it a new secret",
                code="secret_unreadable",
            ) from None

    def is_current(self, sealed: bytes) -> bool:
        """It needs none of the older keys."""
        return sealed[:1] == _ENVELOPE and sealed[1 : 1 + KEY_ID_BYTES] == self._load().current.id

    def rewrap(self, sealed: bytes, owner: str) -> bytes:
        """The same secret under the current key. The text itself is not encrypted anew. Raises: as `open`."""
        self.open(sealed, owner)  # proves that the secret is this owner's, and whole
        envelope, ring = _Envelope.read(sealed), self._load()
        return _wrap(ring, _unwrap(ring, envelope, owner), owner, envelope.rest)

    # -- rotation -----------------------------------------------------------------------------------------------------

    @property
    def exists(self) -> bool:
        """There is a key file."""
        return self._ring is not None or self.path.exists()

    def begin_rotation(self) -> None:
        """Have a new current key, written durably first; what older ones sealed can still be opened."""
        ring = self._load(makes=True)
        fresh = Ring((new_key(), *ring.keys))
        write(self.path, fresh)
        self._ring = fresh

    def end_rotation(self) -> int:
        """Forget all keys but the current one; how many. Whatever counts has been rewrapped, and that is durable."""
        ring = self._load()
        kept = Ring(ring.keys[:1])
        write(self.path, kept)
        self._ring = kept
        return len(ring.keys) - 1

    def _load(self, *, makes: bool = False) -> Ring:
        if self._ring is None:
            if makes and not self.path.exists():
                write(self.path, Ring((new_key(),)))
            self._ring = read(self.path)
        return self._ring


def _wrap(ring: Ring, data_key: bytes, owner: str, rest: bytes) -> bytes:
    current, nonce = ring.current, secrets.token_bytes(NONCE_BYTES)
    wrapped = AESGCM(current.key).encrypt(nonce, data_key, _ENVELOPE + current.id + owner.encode())
    return _Envelope(current.id, nonce, wrapped, rest).write()


def _unwrap(ring: Ring, envelope: _Envelope, owner: str) -> bytes:
    """The data key. Raises: InvalidTag."""
    key = ring.find(envelope.key_id)
    if key is None:
        raise InvalidTag
    return AESGCM(key.key).decrypt(envelope.wrap_nonce, envelope.wrapped, _ENVELOPE + key.id + owner.encode())
