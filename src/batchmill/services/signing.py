"""Standard Webhooks: how a delivery is signed, and what a secret looks like. Pure.

Source: https://github.com/standard-webhooks/standard-webhooks, version 1; openai's `webhooks.unwrap` checks the same.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Iterable

from batchmill.errors import InvalidInput
from batchmill.models.secrets import Secret

PREFIX = "whsec_"
KEY_BYTES = 32
KEY_BYTES_MIN, KEY_BYTES_MAX = 24, 64
HINT_CHARS = 4


def new_secret() -> Secret:
    return Secret(PREFIX + base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode())


def check_secret(secret: Secret) -> None:
    """Raises: InvalidInput for what receivers could not verify with; it does not show the secret."""
    try:
        size = len(_key_of(secret))
    except (ValueError, binascii.Error):
        size = 0
    if not KEY_BYTES_MIN <= size <= KEY_BYTES_MAX:
        raise InvalidInput(
            f"a webhook's secret is {PREFIX} and then the base64 of {KEY_BYTES_MIN} to {KEY_BYTES_MAX} random bytes: "
            f"echo {PREFIX}$(openssl rand -base64 {KEY_BYTES})",
            code="invalid_secret",
        )


def _key_of(secret: Secret) -> bytes:
    text = secret.reveal()
    if not text.startswith(PREFIX):
        raise ValueError("no prefix")
    return base64.b64decode(text.removeprefix(PREFIX), validate=True)


def hint_of(secret: Secret) -> str:
    """Enough of a secret to tell it from another."""
    return f"{PREFIX}…{secret.reveal()[-HINT_CHARS:]}"


def signed_headers(message_id: str, sent: int, body: bytes, keys: Iterable[Secret]) -> dict[str, str]:
    """The headers of a delivery, with one signature for each secret that is valid at the time `sent` (epoch, s)."""
    signed = f"{message_id}.{sent}.".encode() + body
    digests = [hmac.digest(_key_of(key), signed, hashlib.sha256) for key in keys]
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(sent),
        "webhook-signature": " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests),
    }
