"""One delivery of an event: a signed POST to an endpoint, and what came of it. Knows no outbox and no retries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import aiohttp
from msgspec import Struct

import batchmill
from batchmill.errors import InvalidInput
from batchmill.models.addresses import Private, read_url
from batchmill.models.guarded_http import GuardedHttp, refusal_of
from batchmill.models.secrets import Secret
from batchmill.ports import Clock
from batchmill.services.signing import signed_headers

TIMEOUT_S = 15.0
REST_MAX_S = 86_400.0  # an endpoint may ask for so much rest


class Answer(Struct, frozen=True):
    """What an endpoint said. `failure` is empty when it took the event; a category, never what it wrote."""

    status: int = 0  # 0: there was no reply
    failure: str = ""
    rest_s: float = 0.0  # Retry-After
    is_late: bool = False  # it was sent, and no reply came in time


class Courier:
    def __init__(self, clock: Clock, private: Private) -> None:
        self._clock, self._http = clock, GuardedHttp(private)

    def check(self, url: str) -> None:
        """Raises: InvalidInput, code `url_not_allowed`, for a URL that would never be called."""
        read_url(url, self._http.private)

    async def deliver(
        self,
        url: str,
        message_id: str,
        body: bytes,
        keys: Sequence[Secret],
        *,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send an event once, signed where there are keys. Never raises for what the other side does."""
        try:
            target = read_url(
                url, self._http.private
            )  # again: what is allowed may have changed since it was registered
        except InvalidInput as refused:
            return Answer(failure=refused.message)
        told = {
            "content-type": "application/json",
            "user-agent": f"batchmill/{batchmill.__version__}",
            **(headers or {}),
            **(signed_headers(message_id, int(self._clock.now()), body, keys) if keys else {}),
        }
        try:
            async with (
                self._http.session(target, TIMEOUT_S) as session,
                session.post(url, data=body, headers=told, allow_redirects=False) as reply,
            ):
                return _read(reply)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            is_late = isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError)
            return Answer(failure=_category(error), is_late=is_late)

    def close(self) -> None:
        self._http.close()


def _read(reply: aiohttp.ClientResponse) -> Answer:
    status = reply.status
    if 200 <= status < 300:
        return Answer(status)
    if 300 <= status < 400:
        return Answer(status, f"it answered {status}: redirects are not followed")
    rest = reply.headers.get("retry-after", "")
    return Answer(
        status, f"it answered {status}", min(float(rest), REST_MAX_S) if rest.isascii() and rest.isdigit() else 0.0
    )


def _category(error: BaseException) -> str:
    if reason := refusal_of(error):
        return f"it was not called: {reason}"
    match error:
        case TimeoutError():
            return f"it did not answer within {TIMEOUT_S:.0f} s"
        case aiohttp.ClientConnectorCertificateError():
            return "its certificate could not be verified"
        case aiohttp.ClientSSLError():
            return "no TLS connection could be made with it"
        case aiohttp.ClientConnectorDNSError():
            return "its name could not be resolved"
        case aiohttp.ClientConnectorError():
            return "it could not be reached"
        case _:
            return "its answer was no HTTP, or broke off"
