"""Delivers one event: a signed POST to a webhook endpoint (Standard Webhooks), and its result."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

import batchmill
from batchmill.errors import InvalidInput
from batchmill.models.addresses import Private, read_url
from batchmill.models.secrets import Secret
from batchmill.optional import require
from batchmill.ports.clock import Clock

if TYPE_CHECKING:
    from batchmill.services.webhooks.post import WebhookHttp

PREFIX = "whsec_"
KEY_BYTES = 32
KEY_BYTES_MIN, KEY_BYTES_MAX = 24, 64
HINT_CHARS = 4  # of the secret's end


def new_secret() -> Secret:
    return Secret(PREFIX + base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode())


def check_secret(secret: Secret) -> None:
    """Raises: InvalidInput for a secret that receivers could not verify with. The message does not show the secret."""
    try:
        size = len(_key_of(secret))
    except (ValueError, binascii.Error):
        size = 0
    if not KEY_BYTES_MIN <= size <= KEY_BYTES_MAX:
        raise InvalidInput(
            f"a webhook's secret is {PREFIX} and the base64 of {KEY_BYTES_MIN} to {KEY_BYTES_MAX} random bytes: "
            f"echo {PREFIX}$(openssl rand -base64 {KEY_BYTES})",
            code="invalid_secret",
        )


def _key_of(secret: Secret) -> bytes:
    text = secret.reveal()
    if not text.startswith(PREFIX):
        raise ValueError("no prefix")
    return base64.b64decode(text.removeprefix(PREFIX), validate=True)


def hint_of(secret: Secret) -> str:
    """Return the end of a secret, which tells it from others without showing it."""
    return f"{PREFIX}…{secret.reveal()[-HINT_CHARS:]}"


def signed_headers(message_id: str, sent: int, body: bytes, keys: Iterable[Secret]) -> dict[str, str]:
    """Return the headers of a delivery, with one signature per secret. `sent`: the time, in seconds since the epoch."""
    content = f"{message_id}.{sent}.".encode() + body
    digests = [hmac.digest(_key_of(key), content, hashlib.sha256) for key in keys]
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(sent),
        "webhook-signature": " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests),
    }


HTTP = "batchmill.services.webhooks.post:WebhookHttp"  # it needs aiohttp


class DeliveryResult(Struct, frozen=True):
    """How an endpoint answered. `failure` is empty on success, else a category: never the text of the reply."""

    status: int = 0  # 0: no reply
    failure: str = ""
    retry_after_s: float = 0.0
    is_late: bool = False  # the request was sent, but the reply timed out


class WebhookSender:
    def __init__(self, clock: Clock, private: Private) -> None:
        self._clock, self._private = clock, private
        self._http: WebhookHttp | None = None  # since the first delivery

    def check(self, url: str) -> None:
        """Raises: InvalidInput, code `url_not_allowed`, for a URL that would never be called."""
        read_url(url, self._private)

    async def deliver(
        self,
        url: str,
        message_id: str,
        body: bytes,
        keys: Sequence[Secret],
        *,
        headers: Mapping[str, str] | None = None,
    ) -> DeliveryResult:
        """Send an event once, signed if there are keys. Errors of the endpoint are returned, not raised."""
        try:
            target = read_url(url, self._private)  # the allowed hosts may have changed since it was registered
        except InvalidInput as error:
            return DeliveryResult(failure=error.message)
        fields = {
            "content-type": "application/json",
            "user-agent": f"batchmill/{batchmill.__version__}",
            **(headers or {}),
            **(signed_headers(message_id, int(self._clock.now()), body, keys) if keys else {}),
        }
        if self._http is None:
            self._http = require(HTTP, "a webhook")(self._private)
        return await self._http.post(target, url, body, fields)

    def close(self) -> None:
        if self._http is not None:
            self._http.close()
