"""Encrypts secrets at rest with envelope encryption: each secret has its own data key, wrapped by a key of a key file.

It uses AES-256-GCM. The owner of a secret is authenticated with it, so that one secret cannot replace another. The key
file is outside the database and can be outside the data directory. It has a first line, then one hex key per line.
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
from batchmill.errors import InvalidConfig, TermOver
from batchmill.owned_files import OwnedFiles, discard

KEY_BYTES = 32
KEY_ID_BYTES = 8
KEYS_MAX = 16  # the current key, and those of unfinished rotations
FIRST_LINE = "batchmill keys 1"
FILE_BYTES_MAX = 4096


class Key(Struct, frozen=True):
    """A key and its id. The id is part of sealed values and does not reveal the key."""

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
    """Read a key file. Raises: InvalidConfig if it is missing, invalid, or accessible to other users."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise InvalidConfig(
            f"the key file {path} is missing: restore it, or set its path with secrets.key_file",
            code="secret_unreadable",
        ) from None
    except OSError as error:
        raise InvalidConfig(f"the key file {path} cannot be read: {error.strerror}") from None
    try:
        info = os.fstat(file)
        if not is_private(info, os.geteuid()):
            raise InvalidConfig(
                f"the key file {path} must be accessible to you alone (chmod 600 {path}), or be root's and readable by "
                f"its group at most (chmod 440 {path})"
            )
        data = os.read(file, FILE_BYTES_MAX + 1)
    finally:
        os.close(file)
    ring = _parse(data)
    if ring is None:
        raise InvalidConfig(f"the key file {path} is damaged: restore a copy of it")
    return ring


def is_private(info: os.stat_result, user: int) -> bool:
    """Tell whether a file belongs to `user` alone, or is one that root lends to a service, which can only read it.

    systemd's credentials and a Kubernetes secret are such: root owns them, and a group or an access list reads them.
    """
    mode = stat.S_IMODE(info.st_mode)
    return (info.st_uid == user and not mode & 0o077) or (info.st_uid == 0 != user and not mode & 0o037)


def _parse(data: bytes) -> Ring | None:
    try:
        first, *lines = data.decode("ascii").splitlines()
        keys = tuple(_key(bytes.fromhex(line)) for line in lines)
    except ValueError:  # not ASCII, no line, or not hex
        return None
    if first != FIRST_LINE or not 1 <= len(keys) <= KEYS_MAX or any(len(each.key) != KEY_BYTES for each in keys):
        return None
    return Ring(keys)


def write(path: Path, ring: Ring, owned: OwnedFiles = OwnedFiles()) -> None:
    """Replace the key file by this ring. It is durable on return. Raises: InvalidConfig; TermOver where a successor may
    have written keys that are not in this ring.
    """
    if len(ring.keys) > KEYS_MAX:
        raise InvalidConfig(
            f"the key file {path} has {KEYS_MAX} keys of unfinished rotations: fix the cause of their failure first"
        )
    text = "".join(f"{line}\n" for line in (FIRST_LINE, *(each.key.hex() for each in ring.keys)))
    new_path = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        _write_new(new_path, text.encode())
        faults.point("after_key_file")
        owned.move(new_path, path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        for leftover in path.parent.glob(f".{path.name}.*"):  # left by a killed process: it contains a key
            owned.remove(leftover)
    except TermOver:
        discard(new_path)
        raise
    except OSError as error:
        discard(new_path)
        raise InvalidConfig(f"the key file {path} cannot be written: {error.strerror}") from None


def _write_new(path: Path, data: bytes) -> None:
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
    """The parts of a sealed secret: version, key id, nonce and data key, nonce and text."""

    key_id: bytes
    wrap_nonce: bytes
    wrapped: bytes
    rest: bytes  # its nonce and text

    @classmethod
    def read(cls, sealed: bytes) -> _Envelope:
        """Raises: InvalidTag for a value that is too short."""
        nonce_at = 1 + KEY_ID_BYTES
        key_at = nonce_at + NONCE_BYTES
        end = key_at + _WRAPPED_BYTES
        if sealed[:1] != _ENVELOPE or len(sealed) < end + NONCE_BYTES + TAG_BYTES:
            raise InvalidTag
        return cls(sealed[1:nonce_at], sealed[nonce_at:key_at], sealed[key_at:end], sealed[end:])

    def write(self) -> bytes:
        return _ENVELOPE + self.key_id + self.wrap_nonce + self.wrapped + self.rest


class SecretBox:
    """Raises, everywhere: InvalidConfig if the key file cannot be used.

    The process that owns a data directory has the only one, so that every `seal` uses the key of `begin_rotation`.
    Store a sealed value in the transaction that seals it, so that a rotation does not miss it.

    Concurrency: `seal`, `open` and `rewrap` from any thread.
    """

    def __init__(self, path: Path, owned: OwnedFiles = OwnedFiles()) -> None:
        """Args: `path`: the key file, which is created with the first secret."""
        self.path, self._owned = path, owned
        self._ring: Ring | None = None

    def seal(self, plain: bytes, owner: str) -> bytes:
        """Encrypt a secret of `owner`."""
        ring = self._load(creates=True)
        data_key, nonce = secrets.token_bytes(KEY_BYTES), secrets.token_bytes(NONCE_BYTES)
        text = AESGCM(data_key).encrypt(nonce, plain, _ENVELOPE + owner.encode())
        return _wrap(ring, data_key, owner, nonce + text)

    def open(self, sealed: bytes, owner: str) -> bytes:
        """Decrypt a secret of `owner`. Raises: InvalidConfig (`secret_unreadable`) if the key or owner is wrong."""
        ring = self._load()
        try:
            envelope = _Envelope.read(sealed)
            data_key = _unwrap(ring, envelope, owner)
            nonce, text = envelope.rest[:NONCE_BYTES], envelope.rest[NONCE_BYTES:]
            return AESGCM(data_key).decrypt(nonce, text, _ENVELOPE + owner.encode())
        except InvalidTag:
            raise InvalidConfig(
                f"the secret of {owner} cannot be read with {self.path}: restore the key file that encrypted it, "
                "or set a new secret",
                code="secret_unreadable",
            ) from None

    def is_current(self, sealed: bytes) -> bool:
        """Tell whether a value is sealed with the current key."""
        return sealed[:1] == _ENVELOPE and sealed[1 : 1 + KEY_ID_BYTES] == self._load().current.id

    def rewrap(self, sealed: bytes, owner: str) -> bytes:
        """Wrap a secret with the current key. The text itself is not encrypted again. Raises: as `open`."""
        self.open(sealed, owner)  # verifies the owner and the integrity
        envelope, ring = _Envelope.read(sealed), self._load()
        return _wrap(ring, _unwrap(ring, envelope, owner), owner, envelope.rest)

    # -- rotation -----------------------------------------------------------------------------------------------------

    @property
    def exists(self) -> bool:
        """Tell whether there is a key file."""
        return self._ring is not None or self.path.exists()

    def begin_rotation(self) -> None:
        """Create a new current key, durably. Values of older keys can still be opened."""
        ring = self._load(creates=True)
        new_ring = Ring((new_key(), *ring.keys))
        write(self.path, new_ring, self._owned)
        self._ring = new_ring

    def end_rotation(self) -> int:
        """Remove all keys except the current one. Returns how many. Call it once all values are durably rewrapped."""
        ring = self._load()
        new_ring = Ring(ring.keys[:1])
        write(self.path, new_ring, self._owned)
        self._ring = new_ring
        return len(ring.keys) - 1

    def _load(self, *, creates: bool = False) -> Ring:
        if self._ring is None:
            if creates and not self.path.exists():
                write(self.path, Ring((new_key(),)), self._owned)
            self._ring = read(self.path)
        return self._ring


def _wrap(ring: Ring, data_key: bytes, owner: str, rest: bytes) -> bytes:
    current, nonce = ring.current, secrets.token_bytes(NONCE_BYTES)
    wrapped = AESGCM(current.key).encrypt(nonce, data_key, _ENVELOPE + current.id + owner.encode())
    return _Envelope(current.id, nonce, wrapped, rest).write()


def _unwrap(ring: Ring, envelope: _Envelope, owner: str) -> bytes:
    """Return the data key. Raises: InvalidTag."""
    key = ring.find(envelope.key_id)
    if key is None:
        raise InvalidTag
    return AESGCM(key.key).decrypt(envelope.wrap_nonce, envelope.wrapped, _ENVELOPE + key.id + owner.encode())
