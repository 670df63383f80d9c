"""The POST of a webhook to an address that the guard allows. The first delivery loads it: aiohttp imports slowly."""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp

from batchmill.models.addresses import Private, Target
from batchmill.models.guarded_http import GuardedHttp, refusal_of
from batchmill.services.webhooks.sender import DeliveryResult

TIMEOUT_S = 15.0
RETRY_AFTER_MAX_S = 86_400.0  # the longest Retry-After that is honoured


class WebhookHttp:
    def __init__(self, private: Private) -> None:
        self._http = GuardedHttp(private)

    async def post(self, target: Target, url: str, body: bytes, headers: Mapping[str, str]) -> DeliveryResult:
        """Errors of the endpoint are returned, not raised."""
        try:
            async with (
                self._http.session(target, TIMEOUT_S) as session,
                session.post(url, data=body, headers=headers, allow_redirects=False) as reply,
            ):
                return _read(reply)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            is_late = isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError)
            return DeliveryResult(failure=_category(error), is_late=is_late)

    def close(self) -> None:
        self._http.close()


def _read(reply: aiohttp.ClientResponse) -> DeliveryResult:
    status = reply.status
    if 200 <= status < 300:
        return DeliveryResult(status)
    if 300 <= status < 400:
        return DeliveryResult(status, f"it answered {status}: redirects are not followed")
    retry_after = reply.headers.get("retry-after", "")
    is_number = retry_after.isascii() and retry_after.isdigit()
    retry_after_s = min(float(retry_after), RETRY_AFTER_MAX_S) if is_number else 0.0
    return DeliveryResult(status, f"it answered {status}", retry_after_s)


def _category(error: BaseException) -> str:
    if reason := refusal_of(error):
        return f"it was not called: {reason}"
    match error:
        case TimeoutError():
            return f"it did not answer within {TIMEOUT_S:.0f} s"
        case aiohttp.ClientConnectorCertificateError():
            return "its certificate could not be verified"
        case aiohttp.ClientSSLError():
            return "no TLS connection could be made to it"
        case aiohttp.ClientConnectorDNSError():
            return "its name could not be resolved"
        case aiohttp.ClientConnectorError():
            return "it could not be reached"
        case _:
            return "its reply was not valid HTTP, or was cut off"
