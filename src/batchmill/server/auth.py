"""Who asks and how often: keys, requests a minute, and the hosts and origins that a request may name."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
import secrets
import socket
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

from starlette.requests import Request

from batchmill.errors import Forbidden, InvalidInput, RateLimited, Refused, Unauthenticated
from batchmill.models import addresses
from batchmill.ports import Clock
from batchmill.server.admission_control import Proxies
from batchmill.services.keys import ANYBODY
from batchmill.services.token_buckets import TokenBuckets
from batchmill.types import Caller, Scope

FAILURE_RATE = (60, 1.0)  # wrong keys of one address: in a burst, per second; a right key is never held up
TOKEN_CHARS_MAX = 4096
SEALS_MAX = 10_000  # headers that need not be taken apart again


class Keys(Protocol):
    """What the gate asks of `services.keys.KeyService`."""

    async def any_exist(self) -> bool: ...

    async def authenticate(self, token: str) -> Caller: ...

    def known(self, token: str | None) -> Caller | None: ...

    def still(self, key_id: str) -> Caller | None: ...


def token_of(headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """The key in the Authorization header: `Bearer KEY`, the bare KEY, or the password of `Basic`."""
    found = [value for name, value in headers if name == b"authorization"]
    if not found or len(found[0]) > TOKEN_CHARS_MAX:
        return None
    kind, _, rest = found[0].decode("latin-1").strip().partition(" ")
    match kind.lower():
        case "bearer":
            return rest.strip()
        case "basic":
            try:
                return base64.b64decode(rest.strip(), validate=True).decode("latin-1").partition(":")[2]
            except (binascii.Error, ValueError):
                return None
    return kind if not rest else None


class Gate:
    """Lets a request in as a Caller, or says why not. `requests_per_minute`: of a key that has no limit of its own;
    `proxies` tell which client has sent a wrong one."""

    def __init__(
        self, keys: Keys, clock: Clock, requests_per_minute: int | None = None, proxies: Proxies | None = None
    ) -> None:
        self._proxies = proxies or Proxies()
        self._keys, self._clock, self._per_minute = keys, clock, requests_per_minute
        self._requests, self._failures = TokenBuckets(), TokenBuckets()
        self._secret = secrets.token_bytes(16)
        self._seals: dict[bytes, str] = {}  # of Authorization headers that were right -> the key's id

    async def admit(self, headers: Sequence[tuple[bytes, bytes]], address: str, scope: Scope) -> Caller:
        """Who asks, if they may. Raises: Unauthenticated, Forbidden; RateLimited for too many wrong keys."""
        caller = await self._caller(headers, address)
        if not caller.may(scope):
            raise Forbidden(f"this key has the scope {caller.scope.value}; the request needs {scope.value}")
        return caller

    def spend(self, caller: Caller) -> None:
        """Count a request of a caller. Raises: RateLimited."""
        per_minute = caller.requests_per_minute or self._per_minute
        if caller.minted_by:
            self._refuse_family(caller)
        if per_minute is not None:
            wait_s = self._requests.take(caller.key or "", per_minute, per_minute / 60, self._clock.monotonic())
            if wait_s:
                raise RateLimited(f"more than {per_minute:,} requests a minute", retry_after_s=wait_s)
        for key, rate in caller.minted_by:
            if (per_minute := rate or self._per_minute) is not None:
                self._requests.take(key, per_minute, per_minute / 60, self._clock.monotonic())

    def _refuse_family(self, caller: Caller) -> None:
        """A key pays for the requests of those that it minted. Raises: RateLimited where one of them cannot."""
        for key, rate in caller.minted_by:
            if (per_minute := rate or self._per_minute) is not None:
                wait_s = self._requests.wait_s(key, per_minute, per_minute / 60, self._clock.monotonic())
                if wait_s:
                    raise RateLimited(
                        f"more than {per_minute:,} requests a minute of the key {key} and the keys it minted",
                        retry_after_s=wait_s,
                    )

    def known(self, authorization: bytes | None) -> Caller | None:
        """Who asks, where that is known without waiting; None: `admit` finds out, or says what is wrong."""
        if authorization is None:
            return self._keys.known(None)
        seal = blake2b(authorization, key=self._secret, digest_size=16).digest()
        key_id = self._seals.get(seal)
        if key_id is not None:
            return self._keys.still(key_id)
        caller = self._keys.known(token_of([(b"authorization", authorization)]))
        if caller is not None and caller.key is not None and len(self._seals) < SEALS_MAX:
            self._seals[seal] = caller.key
        return caller

    def has_room(self, caller: Caller) -> bool:
        """`spend` would not raise now."""
        per_minute, now = caller.requests_per_minute or self._per_minute, self._clock.monotonic()
        if per_minute is not None and self._requests.wait_s(caller.key or "", per_minute, per_minute / 60, now):
            return False
        return not caller.minted_by or not any(
            self._requests.wait_s(key, per_minute, per_minute / 60, now)
            for key, rate in caller.minted_by
            if (per_minute := rate or self._per_minute) is not None
        )

    async def asker(self, headers: Sequence[tuple[bytes, bytes]], address: str) -> Caller | None:
        """Who asks, with a key or where none is needed. For what anybody may ask, and not everybody is told in full."""
        try:
            return await self._caller(headers, address)
        except Refused:
            return None

    async def _caller(self, headers: Sequence[tuple[bytes, bytes]], address: str) -> Caller:
        if not await self._keys.any_exist():
            return ANYBODY
        token, now = token_of(headers), self._clock.monotonic()
        if token is None:
            raise Unauthenticated("you did not provide an API key: send it as `Authorization: Bearer KEY`")
        try:  # also of an address with too many wrong ones: behind a proxy it is everybody's
            return await self._keys.authenticate(token)
        except Unauthenticated:
            wait_s = self._failures.take(self._proxies.client(address, headers), *FAILURE_RATE, now)
            if wait_s:
                raise RateLimited("too many requests with a wrong API key", retry_after_s=wait_s) from None
            raise


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
            host = hosts[0].decode("latin-1")[:80] if hosts else ""
            raise InvalidInput(
                f"this server is not called {host!r}: use the address it listens on, or add the name to "
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
