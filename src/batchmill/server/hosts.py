"""Whose name a request used for this server. A page in a browser cannot choose it: that defeats DNS rebinding."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence

from starlette.requests import Request

from batchmill.errors import Forbidden, InvalidInput
from batchmill.models import addresses

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]{1,253})(?::[0-9]{1,5})?")
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class Hosts:
    """The names of this server: those of the address it listens on, and `allowed` ("*": any)."""

    def __init__(self, bound: str, allowed: Sequence[str] = ()) -> None:
        self._any = "*" in allowed
        self._is_everywhere = is_everywhere(bound)
        names = {bound, *allowed}
        if self._is_everywhere or is_loopback(bound):
            names |= set(LOOPBACK_NAMES)
        if self._is_everywhere:
            names |= {socket.gethostname(), socket.getfqdn()}
        self._names = {name.lower().rstrip(".") for name in names}

    def check(self, method: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Raises: InvalidInput for a Host that is none of ours, Forbidden for a page of another site."""
        hosts = [value for name, value in headers if name == b"host"]
        if len(hosts) != 1 or not self._is_ours(hosts[0].decode("latin-1")):
            told = hosts[0].decode("latin-1")[:80] if hosts else ""
            raise InvalidInput(
                f"this server is not called {told!r}: use the address it listens on, or add the name to "
                "server.allowed_hosts",
                code="invalid_host",
            )
        if method in SAFE_METHODS:
            return
        for name, value in headers:
            if name == b"origin" and not self._is_ours(value.decode("latin-1").partition("://")[2]):
                raise Forbidden("a page of another site may not call this server", code="cross_origin")
            if name == b"sec-fetch-site" and value not in (b"same-origin", b"none"):
                raise Forbidden("a page of another site may not call this server", code="cross_origin")

    def _is_ours(self, text: str) -> bool:
        match = _HOST.fullmatch(text)
        if match is None:
            return False
        name = match[1].strip("[]").lower().rstrip(".")
        return self._any or name in self._names or (self._is_everywhere and _is_address(name))


def _is_address(name: str) -> bool:
    """A page's own name is never an address, so an address is no rebound name."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_everywhere(bound: str) -> bool:
    return _is_address(bound) and addresses.is_every(ipaddress.ip_address(bound))


def is_loopback(bound: str) -> bool:
    return bound.lower() == "localhost" or (_is_address(bound) and addresses.is_local(ipaddress.ip_address(bound)))


def base_of(request: Request) -> str:
    """The server's address as whoever asks has written it, and so the one that he can reach it by."""
    return f"{request.url.scheme}://{request.headers['host']}"
