"""HTTP to places that somebody else named: the address is judged where the socket is made, whatever a name resolved to.

No proxies, no .netrc, no redirects, no cookies. A session speaks to one target only.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from batchmill.models.addresses import Private, Target, may_reach


class NotAllowed(OSError):
    """A socket that is not made. `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EACCES, reason)
        self.reason = reason


def open_session(target: Target, private: Private, *, timeout_s: float, connect_s: float) -> aiohttp.ClientSession:
    """A session for calls of `target`: pass `allow_redirects=False` with each of them."""

    def make_socket(address: Any) -> socket.socket:
        family, kind, protocol, _, place = address
        _check(place[0], target, private)
        return socket.socket(family=family, type=kind, proto=protocol)

    connector = aiohttp.TCPConnector(
        resolver=_Resolver(target, private), socket_factory=make_socket, use_dns_cache=False, force_close=True
    )
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=connect_s)
    return aiohttp.ClientSession(
        connector=connector,
        timeout=timeout,
        trust_env=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    )


def refusal_of(error: BaseException) -> str | None:
    """Why the guard made no socket, where that is what an error of a call comes from."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        if isinstance(at, NotAllowed):
            return at.reason
        seen.add(id(at))
        at = getattr(at, "os_error", None) or at.__cause__ or at.__context__
    return None


class _Resolver(AbstractResolver):
    """Resolves a name, and refuses it when any of its addresses is one that must not be called."""

    def __init__(self, target: Target, private: Private) -> None:
        self._target, self._private = target, private
        self._inner = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        for each in found:
            _check(each["host"], self._target, self._private)
        return found

    async def close(self) -> None:
        await self._inner.close()


def _check(place: str, target: Target, private: Private) -> None:
    address = ipaddress.ip_address(place.partition("%")[0])
    if reason := may_reach(address, target, private):
        raise NotAllowed(reason)
