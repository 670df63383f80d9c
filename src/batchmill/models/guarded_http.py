"""HTTP to places that somebody else named: the address is judged where the socket is made, whatever a name resolved to.

No proxies, no .netrc, no redirects, no cookies.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from batchmill.models.addresses import Private, Target, flaw_of, may_reach, read_url

RESOLVING_MAX = 16  # names looked up at once: a resolver that hangs holds up nobody but its own callers
CONNECT_S = 5.0
ADDRESSES_S = 60  # how long a name's addresses are used without asking again
OPENED_MAX = 4096  # addresses remembered of names that the operator opened
ADMITTED_MAX = 1024  # places remembered as allowed by their text


class NotAllowed(OSError):
    """A socket that is not made. `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EACCES, reason)
        self.reason = reason


class GuardedHttp:
    """Makes sessions that reach only what `private` and the rules of `addresses` allow."""

    def __init__(self, private: Private) -> None:
        self.private = private
        self._threads = ThreadPoolExecutor(RESOLVING_MAX, thread_name_prefix="resolve")
        self._admitted: set[tuple[str, str]] = set()  # scheme and authority

    def session(self, target: Target, timeout_s: float) -> aiohttp.ClientSession:
        """A session for calls of this target alone; each passes `allow_redirects=False`. `timeout_s` is for a call."""

        def check(place: str) -> None:
            if reason := may_reach(_read(place), target, self.private):
                raise NotAllowed(reason)

        def make_socket(address: Any) -> socket.socket:
            check(address[4][0])
            return _new_socket(address)

        connector = aiohttp.TCPConnector(
            resolver=_TargetResolver(self, target), socket_factory=make_socket, use_dns_cache=False, force_close=True
        )
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,
        )

    def admit(self, url: str) -> None:
        """Pass where the text of a URL says nothing against it. What it leads to is judged when it is called.

        Raises: InvalidInput, code `url_not_allowed`.
        """
        if self.private.is_everywhere:
            return
        parts = urlsplit(url)
        place = (parts.scheme, parts.netloc)
        if place in self._admitted:
            return
        read_url(url, self.private)
        if len(self._admitted) < ADMITTED_MAX:
            self._admitted.add(place)

    def connections(self, *, keepalive_s: float, verify_tls: bool = True) -> aiohttp.TCPConnector:
        """Connections for a session that calls many places, and calls them again. Every URL must pass `admit` first.

        A name may be asked for once and called for a while: what counts is the address of each socket.
        """
        opened: set[str] = set()  # addresses of names that the operator opened: those may be private

        def make_socket(address: Any) -> socket.socket:
            place = str(address[4][0])
            at = _read(place)
            if reason := flaw_of(at, self.private.holds(at) or str(at) in opened):
                raise NotAllowed(reason)
            return _new_socket(address)

        return aiohttp.TCPConnector(
            limit=0,
            resolver=_Resolver(self, opened),
            socket_factory=make_socket,
            ttl_dns_cache=ADDRESSES_S,
            keepalive_timeout=keepalive_s,
            ssl=verify_tls,
        )

    async def look_up(self, host: str, port: int, family: int) -> list[ResolveResult]:
        """The addresses of a name, not judged."""
        found = await asyncio.get_running_loop().run_in_executor(
            self._threads, socket.getaddrinfo, host, port, family, socket.SOCK_STREAM, 0, socket.AI_ADDRCONFIG
        )
        return [
            ResolveResult(
                hostname=host, host=str(place[0]), port=port, family=family, proto=protocol, flags=socket.AI_NUMERICHOST
            )
            for family, _, protocol, _, place in found
        ]

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


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


def _read(place: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(place.partition("%")[0])


def _new_socket(address: Any) -> socket.socket:
    family, kind, protocol, _, _ = address
    return socket.socket(family=family, type=kind, proto=protocol)


class _TargetResolver(AbstractResolver):
    """Refuses a name of which any address must not be called."""

    def __init__(self, guard: GuardedHttp, target: Target) -> None:
        self._guard, self._target = guard, target

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._guard.look_up(host, port, family)
        for each in found:
            if reason := may_reach(_read(each["host"]), self._target, self._guard.private):
                raise NotAllowed(reason)
        return found

    async def close(self) -> None:
        """Nothing of its own to release."""


class _Resolver(AbstractResolver):
    """The same for any name; the addresses of those that the operator opened are added to `opened`."""

    def __init__(self, guard: GuardedHttp, opened: set[str]) -> None:
        self._guard, self._opened = guard, opened

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._guard.look_up(host, port, family)
        private = self._guard.private
        is_listed = host.lower() in private.names
        for each in found:
            at = _read(each["host"])
            if reason := flaw_of(at, is_listed or private.holds(at)):
                raise NotAllowed(reason)
            if is_listed and len(self._opened) < OPENED_MAX:
                self._opened.add(str(at))
        return found

    async def close(self) -> None:
        """Nothing of its own to release."""
