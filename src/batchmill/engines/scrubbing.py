"""Secrets taken out of bytes that are handed on, also where one lies across two pieces."""

from __future__ import annotations

from collections.abc import Sequence

MASK = b"***"


class Scrubber:
    """One stream of bytes. What might be the beginning of a secret is kept back until the next piece.

    Args: secrets: what is taken out, the longest first: `redaction.known`.
    """

    def __init__(self, secrets: Sequence[bytes]) -> None:
        self.secrets = secrets
        self._kept = b""

    def feed(self, piece: bytes) -> bytes:
        """What may be handed on now."""
        if not self.secrets:
            return piece
        data = self._kept + piece
        for secret in self.secrets:
            if secret in data:
                data = data.replace(secret, MASK)
        keep = max(_beginning(data, secret) for secret in self.secrets)
        self._kept = data[len(data) - keep :]
        return data[: len(data) - keep]

    def rest(self) -> bytes:
        """What is left at the end."""
        kept, self._kept = self._kept, b""
        return kept


def _beginning(data: bytes, secret: bytes) -> int:
    """How many bytes at the end of `data` are the beginning of `secret`."""
    first = secret[:1]
    at = data.find(first, max(0, len(data) - len(secret) + 1))
    while at >= 0:
        if secret.startswith(data[at:]):
            return len(data) - at
        at = data.find(first, at + 1)
    return 0
