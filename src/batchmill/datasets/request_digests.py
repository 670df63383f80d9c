"""Hashes of whole requests: rows with equal ones may share a result, or take over that of an earlier job.

A request is canonical when its fields are sorted and written without blanks; numbers keep their digits.
"""

from __future__ import annotations

from hashlib import blake2b, sha256
from typing import Any

import msgspec
from msgspec import Raw

FOLD_BYTES = 16
NO_FOLD = bytes(FOLD_BYTES)
DIGEST_BYTES = 32
NO_DIGEST = bytes(DIGEST_BYTES)  # of a row whose result is never taken over
DETERMINISTIC_BIT = 1  # of a digest's last byte: equal requests get equal results

# The last byte of a digest with its last bit cleared, and set.
_LAST = [[bytes((each & ~DETERMINISTIC_BIT | bit,)) for each in range(256)] for bit in (0, DETERMINISTIC_BIT)]
# Floats and huge integers keep their digits: 1.0 and 1.00 may differ, 2**70 and 2**70 + 1 must differ.
_exact = msgspec.json.Decoder(float_hook=lambda digits: Raw(digits.encode())).decode


def canonical_of(body: bytes | Raw, without: str | None = None) -> bytes | None:
    """A body with its fields in a fixed order; None for a number with too many digits: such a row equals no other.

    Args: without: the field that the resolved model replaces.
    """
    try:
        members: dict[str, Any] = _exact(body)
    except msgspec.ValidationError:
        return None
    members.pop(without, None)
    return msgspec.json.encode(members, order="deterministic")


def fold_of(url: str, canonical: bytes | None, target: int) -> bytes:
    """128 bits that are equal for equal requests to one target of a job."""
    if canonical is None:
        return NO_FOLD
    return blake2b(b"%s\0%d\0" % (url.encode(), target) + canonical, digest_size=FOLD_BYTES).digest()


def digest_of(url: str, canonical: bytes | None, *, is_deterministic: bool) -> bytes:
    """SHA-256 of a request without its model, with DETERMINISTIC_BIT in the place of its last bit."""
    if canonical is None:
        return NO_DIGEST
    digest = sha256(b"%s\0%s" % (url.encode(), canonical)).digest()
    return digest[:-1] + _LAST[is_deterministic][digest[-1]]
