"""HTTP to URLs of callers. Each socket checks the address that it connects to, so that DNS rebinding has no effect.

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

from batchmill.models.addresses import Private, Target, find_address_flaw, read_url, refusal_for

RESOLVING_MAX = 16  # concurrent name lookups, so that a resolver that hangs delays only its own callers
CONNECT_S = 5.0
ADDRESSES_S = 60  # how long the addresses of a name are cached
ALLOWED_MAX = 4096  # cached addresses of host names that the operator allows
ADMITTED_MAX = 1024  # cached origins whose text is allowed


class NotAllowed(OSError):
    """A connection to this address is refused. `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EACCES, reason)
        self.reason = reason


class GuardedHttp:
    """Makes sessions that reach only what `private` and the rules of `addresses` allow."""

    def __init__(self, private: Private) -> None:
        self.private = private
        self._threads = ThreadPoolExecutor(RESOLVING_MAX, thread_name_prefix="resolve")
        self._admitted_origins: set[tuple[str, str]] = set()  # scheme and authority

    def session(self, target: Target, timeout_s: float) -> aiohttp.ClientSession:
        """A session for calls of one target. Each call must pass `allow_redirects=False`, and has `timeout_s`."""

        def check(ip: str) -> None:
            if reason := refusal_for(_parse_ip(ip), target, self.private):
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
        """Check the text of a URL. The addresses of its host are checked when it is called.

        Raises: InvalidInput, code `url_not_allowed`.
        """
        if self.private.is_everywhere:
            return
        parts = urlsplit(url)
        origin = (parts.scheme, parts.netloc)
        if origin in self._admitted_origins:
            return
        read_url(url, self.private)
        if len(self._admitted_origins) < ADMITTED_MAX:
            self._admitted_origins.add(origin)

    def connections(self, *, keepalive_s: float, verify_tls: bool = True) -> aiohttp.TCPConnector:
        """A connection pool for a session with many targets. Every URL must pass `admit` first.

        Addresses of a name are cached for a while. Each socket checks its address.
        """
        allowed: set[str] = set()  # addresses of host names that the operator allows: they may be private

        def make_socket(address: Any) -> socket.socket:
            text = str(address[4][0])
            ip = _parse_ip(text)
            if reason := find_address_flaw(ip, self.private.holds(ip) or str(ip) in allowed):
                raise NotAllowed(reason)
            return _new_socket(address)

        return aiohttp.TCPConnector(
            limit=0,
            resolver=_Resolver(self, allowed),
            socket_factory=make_socket,
            ttl_dns_cache=ADDRESSES_S,
            keepalive_timeout=keepalive_s,
            ssl=verify_tls,
        )

    async def look_up(self, host: str, port: int, family: int) -> list[ResolveResult]:
        """Resolve a name, without a check of the addresses."""
        results = await asyncio.get_running_loop().run_in_executor(
            self._threads, socket.getaddrinfo, host, port, family, socket.SOCK_STREAM, 0, socket.AI_ADDRCONFIG
        )
        return [
            ResolveResult(
                hostname=host,
                host=str(address[0]),
                port=port,
                family=family,
                proto=protocol,
                flags=socket.AI_NUMERICHOST,
            )
            for family, _, protocol, _, address in results
        ]

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def refusal_of(error: BaseException) -> str | None:
    """The reason of a refused address, if that caused the error of a call; None otherwise."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, NotAllowed):
            return cause.reason
        seen.add(id(cause))
        cause = getattr(cause, "os_error", None) or cause.__cause__ or cause.__context__
    return None


def _parse_ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(address.partition("%")[0])


def _new_socket(address: Any) -> socket.socket:
    family, kind, protocol, _, _ = address
    return socket.socket(family=family, type=kind, proto=protocol)


class _TargetResolver(AbstractResolver):
    """Refuses a name if any of its addresses may not be called."""

    def __init__(self, guard: GuardedHttp, target: Target) -> None:
        self._guard, self._target = guard, target

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        results = await self._guard.look_up(host, port, family)
        for result in results:
            if reason := refusal_for(_parse_ip(result["host"]), self._target, self._guard.private):
                raise NotAllowed(reason)
        return results

    async def close(self) -> None:
        """Nothing of its own to release."""


class _Resolver(AbstractResolver):
    """The same for any name. Adds the addresses of names that the operator allows to `allowed`."""

    def __init__(self, guard: GuardedHttp, allowed: set[str]) -> None:
        self._guard, self._allowed = guard, allowed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        results = await self._guard.look_up(host, port, family)
        private = self._guard.private
        is_listed = host.lower() in private.names
        for result in results:
            ip = _parse_ip(result["host"])
            if reason := find_address_flaw(ip, is_listed or private.holds(ip)):
                raise NotAllowed(reason)
            if is_listed and len(self._allowed) < ALLOWED_MAX:
                self._allowed.add(str(ip))
        return results

    async def close(self) -> None:
        """Nothing of its own to release."""
