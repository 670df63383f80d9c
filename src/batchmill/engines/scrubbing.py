"""Secrets taken out of bytes that are handed on, also where one lies across two pieces."""

from __future__ import annotations

from collections.abc import Sequence

MASK = b"***"
BYTES_MIN = 8  # a shorter secret is likely to be part of something else in an answer


class Scrubber:
    """One stream of bytes. What might be the beginning of a secret is kept back until the next piece."""

    def __init__(self, secrets: Sequence[bytes]) -> None:
        self.secrets = [secret for secret in secrets if len(secret) >= BYTES_MIN]
        self._kept = b""

    def feed(self, piece: bytes) -> bytes:
        """What may be handed on now."""
        if not self.secrets:
            return piece
        data = scrub(self._kept + piece, self.secrets)
        keep = max(_beginning(data, secret) for secret in self.secrets)
        self._kept = data[len(data) - keep :]
        return data[: len(data) - keep]

    def rest(self) -> bytes:
        """What is left at the end."""
        kept, self._kept = self._kept, b""
        return kept


def scrub(data: bytes, secrets: Sequence[bytes]) -> bytes:
    """`data` without the secrets."""
    for secret in secrets:
        if secret in data:
            data = data.replace(secret, MASK)
    return data


def _beginning(data: bytes, secret: bytes) -> int:
    """How many bytes at the end of `data` are the beginning of `secret`."""
    for length in range(min(len(secret) - 1, len(data)), 0, -1):
        if data.endswith(secret[:length]):
            return length
    return 0
