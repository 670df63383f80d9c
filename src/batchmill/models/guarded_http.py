"""HTTP to places that somebody else named: the address is judged where the socket is made, whatever a name resolved to.

No proxies, no .netrc, no redirects, no cookies. A session speaks to one target only.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from batchmill.models.addresses import Private, Target, may_reach

RESOLVING_MAX = 16  # names looked up at once: a resolver that hangs holds up nobody but its own callers
CONNECT_S = 5.0


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

    def session(self, target: Target, timeout_s: float) -> aiohttp.ClientSession:
        """A session for calls of `target`; each passes `allow_redirects=False`. `timeout_s` is for a whole call."""

        def make_socket(address: Any) -> socket.socket:
            family, kind, protocol, _, place = address
            self._check(place[0], target)
            return socket.socket(family=family, type=kind, proto=protocol)

        connector = aiohttp.TCPConnector(
            resolver=_Resolver(self, target), socket_factory=make_socket, use_dns_cache=False, force_close=True
        )
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,
        )

    async def resolve(self, host: str, port: int, family: int, target: Target) -> list[ResolveResult]:
        """The addresses of a name. Raises: NotAllowed when any of them must not be called."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            self._threads, socket.getaddrinfo, host, port, family, socket.SOCK_STREAM, 0, socket.AI_ADDRCONFIG
        )
        for _, _, _, _, place in found:
            self._check(str(place[0]), target)
        return [
            ResolveResult(
                hostname=host, host=str(place[0]), port=port, family=family, proto=protocol, flags=socket.AI_NUMERICHOST
            )
            for family, _, protocol, _, place in found
        ]

    def _check(self, place: str, target: Target) -> None:
        address = ipaddress.ip_address(place.partition("%")[0])
        if reason := may_reach(address, target, self.private):
            raise NotAllowed(reason)

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


class _Resolver(AbstractResolver):
    def __init__(self, guard: GuardedHttp, target: Target) -> None:
        self._guard, self._target = guard, target

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return await self._guard.resolve(host, port, family, self._target)

    async def close(self) -> None:
        """Nothing of its own to release."""
