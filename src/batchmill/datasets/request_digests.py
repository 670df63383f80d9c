"""Hashes of whole requests: rows with equal ones may share a result, or take over that of an earlier job.

A request is canonical when its fields are sorted and written without blanks; numbers keep their digits. In a request
with a JSON schema only the outermost fields are sorted: engines write answers in the order of the schema's.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b, sha256
from typing import Any

import msgspec
from msgspec import Raw

FOLD_BYTES = 16
NO_FOLD = bytes(FOLD_BYTES)
DIGEST_BYTES = 32
NO_DIGEST = bytes(DIGEST_BYTES)  # of a row whose result is never taken over
_SCHEMA = b'"properties":'  # is in each schema with fields, and in no string
DETERMINISTIC_BIT = 1  # of a digest's last byte: equal requests get equal results

# The last byte of a digest with its last bit cleared, and set.
_LAST = [[bytes((each & ~DETERMINISTIC_BIT | bit,)) for each in range(256)] for bit in (0, DETERMINISTIC_BIT)]
_CLEARED = b"".join(_LAST[False])
# Floats and huge integers keep their digits: 1.0 and 1.00 may differ, 2**70 and 2**70 + 1 must differ.
_exact = msgspec.json.Decoder(float_hook=lambda digits: Raw(digits.encode())).decode
_sorted = msgspec.json.Encoder(order="deterministic").encode


def canonical_of(body: bytes | Raw, without: str | None = None) -> bytes | None:
    """A body with its fields in a fixed order; None for a number with too many digits: such a row equals no other.

    Args: without: the field that the resolved model replaces.
    """
    try:
        members: dict[str, Any] = _exact(body)
    except msgspec.ValidationError:
        return None
    members.pop(without, None)
    return _canonical(members)


def _canonical(members: dict[str, Any]) -> bytes:
    canonical = _sorted(members)
    return msgspec.json.encode(dict(sorted(members.items()))) if _SCHEMA in canonical else canonical


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


def digests_of(urls: Sequence[str], bodies: Sequence[bytes | Raw]) -> bytes:
    """What `digest_of` returns for many rows of functions: whether they are deterministic, their models say."""
    heads = {url: b"%b\0" % url.encode() for url in set(urls)}
    try:
        digests = [
            sha256(heads[url] + _canonical(_exact(body))).digest() for url, body in zip(urls, bodies, strict=True)
        ]
    except msgspec.ValidationError:
        pairs = zip(urls, map(canonical_of, bodies), strict=True)
        return b"".join([digest_of(url, body, is_deterministic=False) for url, body in pairs])
    data = bytearray().join(digests)
    data[DIGEST_BYTES - 1 :: DIGEST_BYTES] = data[DIGEST_BYTES - 1 :: DIGEST_BYTES].translate(_CLEARED)
    return bytes(data)
