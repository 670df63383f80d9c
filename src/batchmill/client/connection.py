"""What both transports over httpx2 share: the server's address, timeouts and errors."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from urllib.request import getproxies

import httpx2
from msgspec import Struct

from batchmill.client.messages import Broken, HttpRequest
from batchmill.errors import InvalidInput

SERVER, API_KEY = "BATCHMILL_SERVER", "BATCHMILL_API_KEY"
CONNECT_S = 10.0
FIXED_HEADERS = {"accept": "application/json", "accept-encoding": "identity", "user-agent": "batchmill-python"}


class Address(Struct, frozen=True):
    """A server's address, and the headers of every request."""

    base_url: str
    headers: dict[str, str]


def address(base_url: str | None, api_key: str | None, environ: Mapping[str, str] = os.environ) -> Address:
    """Raises: InvalidInput if there is no address, or an invalid one."""
    url = base_url or environ.get(SERVER, "")
    key = api_key or environ.get(API_KEY, "")
    if not url:
        raise InvalidInput(f"no server is named: give base_url, or set {SERVER}", code="no_server")
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise InvalidInput(f"{url!r} is not an address of a server: {error}", code="invalid_server") from None
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query or parsed.userinfo:
        raise InvalidInput(
            f"{url!r} is not an address of a server: it looks like http://127.0.0.1:8000", code="invalid_server"
        )
    if not (key.isascii() and key.isprintable()):
        raise InvalidInput("the API key holds characters that no key has", code="invalid_key")
    headers = dict(FIXED_HEADERS) | ({"authorization": f"Bearer {key}"} if key else {})
    return Address(url.rstrip("/").removesuffix("/v1"), headers)


def trusted(base_url: str) -> ssl.SSLContext | bool:
    """What certificates are checked against: for http:// none are read, which takes longer than a request. Nothing is
    trusted then. A proxy may be reached by TLS.
    """
    is_plain = base_url.lower().startswith("http://")
    has_tls_proxy = any(proxy.lower().startswith("https://") for proxy in getproxies().values())
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if is_plain and not has_tls_proxy else True


def timeout(request: HttpRequest, timeout_s: float) -> httpx2.Timeout:
    """The timeout in seconds without a byte."""
    read_s = None if request.is_long else timeout_s
    return httpx2.Timeout(connect=min(CONNECT_S, timeout_s), read=read_s, write=timeout_s, pool=None)


def broken(error: httpx2.TransportError, base_url: str) -> Broken:
    """An error of httpx2 as one of ours."""
    was_sent = not isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout)
    what = "stopped answering" if was_sent else "cannot be reached"
    return Broken(f"the server {base_url} {what}: {error or type(error).__name__}", was_sent=was_sent)
