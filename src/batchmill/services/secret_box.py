"""Secrets at rest: encrypted with a key that lies in the data directory but not in its database.

AES-256-GCM; what a secret belongs to is authenticated with it, so that one cannot be put in another's place.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from batchmill.errors import InvalidConfig

KEY_FILE = "secrets.key"
KEY_BYTES = 32
NONCE_BYTES = 12
_VERSION = b"\x01"


class SecretBox:
    """Raises: InvalidConfig when the key file of the data directory cannot be used."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / KEY_FILE
        self._key: bytes | None = None  # read, or made, when the first secret comes

    def seal(self, plain: bytes, owner: str) -> bytes:
        """Encrypt what belongs to `owner`."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return _VERSION + nonce + AESGCM(self._load()).encrypt(nonce, plain, _VERSION + owner.encode())

    def open(self, sealed: bytes, owner: str) -> bytes:
        """What was sealed for `owner`. Raises: InvalidConfig when the key is another, or the text is not his."""
        nonce, text = sealed[1 : 1 + NONCE_BYTES], sealed[1 + NONCE_BYTES :]
        try:
            if sealed[:1] != _VERSION:
                raise InvalidTag
            return AESGCM(self._load()).decrypt(nonce, text, _VERSION + owner.encode())
        except InvalidTag:
            raise InvalidConfig(
                f"the secret of {owner} cannot be read with {self._path}: put back the file that it was written with, "
                "or give it a new secret",
                code="secret_unreadable",
            ) from None

    def _load(self) -> bytes:
        if self._key is None:
            if not self._path.exists():
                _create(self._path)
            self._key = _read(self._path)
        return self._key


def _create(path: Path) -> None:
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(file, secrets.token_bytes(KEY_BYTES))
        os.fsync(file)
    finally:
        os.close(file)
    os.rename(fresh, path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _read(path: Path) -> bytes:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise InvalidConfig(f"the key file {path} cannot be read: {error.strerror}") from None
    try:
        found = os.fstat(file)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise InvalidConfig(f"the key file {path} must belong to you alone: chmod 600 {path}")
        key = os.read(file, KEY_BYTES + 1)
    finally:
        os.close(file)
    if len(key) != KEY_BYTES:
        raise InvalidConfig(f"the key file {path} is damaged: it has not {KEY_BYTES} bytes")
    return key
