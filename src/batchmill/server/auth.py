"""Authentication and rate limits: API keys, requests a minute, and the hosts and origins that a request may name."""

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

from batchmill.errors import Forbidden, InvalidInput, RateLimited, Refused, Unauthenticated, Unavailable
from batchmill.models import addresses
from batchmill.owner_term import ENDLESS, Term
from batchmill.ports.clock import Clock
from batchmill.server.admission_control import Proxies
from batchmill.services.keys import ANYBODY
from batchmill.services.token_buckets import TokenBuckets
from batchmill.types import Caller, Scope

FAILURE_RATE = (60, 1.0)  # wrong keys from one address: burst, per second; it never delays a valid key
TOKEN_CHARS_MAX = 4096
CACHED_HEADERS_MAX = 10_000  # Authorization headers whose key id is cached


class Keys(Protocol):
    """The part of `services.keys.KeyService` that the gate uses."""

    async def any_exist(self) -> bool: ...

    async def authenticate(self, token: str) -> Caller: ...

    def cached_caller(self, token: str | None) -> Caller | None: ...

    def valid_caller(self, key_id: str) -> Caller | None: ...


def token_of(headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """Return the key in the Authorization header: `Bearer KEY`, the bare KEY, or the password of `Basic`."""
    values = [value for name, value in headers if name == b"authorization"]
    if not values or len(values[0]) > TOKEN_CHARS_MAX:
        return None
    kind, _, rest = values[0].decode("latin-1").strip().partition(" ")
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
    """Authenticates a request as a Caller, or refuses it.

    `requests_per_minute` is for keys without a limit of their own. `proxies` find the client that sent a wrong key.
    """

    def __init__(
        self,
        keys: Keys,
        clock: Clock,
        requests_per_minute: int | None = None,
        proxies: Proxies | None = None,
        *,
        term: Term = ENDLESS,
    ) -> None:
        """Args: term: see `Database.term`. After it, another owner may have revoked keys that are cached here."""
        self._proxies, self._term = proxies or Proxies(), term
        self._keys, self._clock, self._per_minute = keys, clock, requests_per_minute
        self._requests, self._failures = TokenBuckets(), TokenBuckets()
        self._secret = secrets.token_bytes(16)
        self._key_ids: dict[bytes, str] = {}  # digest of a valid Authorization header -> the key's id

    async def admit(self, headers: Sequence[tuple[bytes, bytes]], address: str, scope: Scope) -> Caller:
        """Authenticate the caller and check its scope.

        Raises: Unauthenticated, Forbidden; RateLimited for too many wrong keys; Unavailable: see `check_owned`.
        """
        self.check_owned()
        caller = await self._caller(headers, address)
        if not caller.may(scope):
            raise Forbidden(f"this key has the scope {caller.scope.value}; the request needs {scope.value}")
        return caller

    def check_owned(self) -> None:
        """Raises: Unavailable once this process cannot be sure that it still owns the database."""
        if self._term.is_over():
            raise Unavailable(
                "this server does not reach its database, which another server may own by now; try again",
                code="database_silent",
            )

    def spend(self, caller: Caller) -> None:
        """Count a request of a caller. Raises: RateLimited."""
        per_minute = caller.requests_per_minute or self._per_minute
        if caller.minted_by:
            self._check_minting_keys(caller)
        if per_minute is not None:
            wait_s = self._requests.take(caller.key or "", per_minute, per_minute / 60, self._clock.monotonic())
            if wait_s:
                raise RateLimited(f"more than {per_minute:,} requests a minute", retry_after_s=wait_s)
        for key, rate in caller.minted_by:
            if (per_minute := rate or self._per_minute) is not None:
                self._requests.take(key, per_minute, per_minute / 60, self._clock.monotonic())

    def give_back(self, caller: Caller) -> None:
        """Do not count a request that `spend` counted."""
        for key in (caller.key or "", *(key for key, _ in caller.minted_by)):
            self._requests.give_back(key)

    def _check_minting_keys(self, caller: Caller) -> None:
        """Check the limits of the keys that minted this one: its requests count for them too. Raises: RateLimited."""
        for key, rate in caller.minted_by:
            if (per_minute := rate or self._per_minute) is not None:
                wait_s = self._requests.wait_s(key, per_minute, per_minute / 60, self._clock.monotonic())
                if wait_s:
                    raise RateLimited(
                        f"more than {per_minute:,} requests a minute of the key {key} and the keys it minted",
                        retry_after_s=wait_s,
                    )

    def cached_caller(self, authorization: bytes | None) -> Caller | None:
        """Return the caller if it is known without waiting; None: call `admit`, which waits, or refuses."""
        if self._term.is_over():
            return None
        if authorization is None:
            return self._keys.cached_caller(None)
        digest = blake2b(authorization, key=self._secret, digest_size=16).digest()
        key_id = self._key_ids.get(digest)
        if key_id is not None:
            return self._keys.valid_caller(key_id)
        caller = self._keys.cached_caller(token_of([(b"authorization", authorization)]))
        if caller is not None and caller.key is not None and len(self._key_ids) < CACHED_HEADERS_MAX:
            self._key_ids[digest] = caller.key
        return caller

    def has_room(self, caller: Caller) -> bool:
        """Whether `spend` would succeed now."""
        per_minute, now = caller.requests_per_minute or self._per_minute, self._clock.monotonic()
        if per_minute is not None and self._requests.wait_s(caller.key or "", per_minute, per_minute / 60, now):
            return False
        return not caller.minted_by or not any(
            self._requests.wait_s(key, per_minute, per_minute / 60, now)
            for key, rate in caller.minted_by
            if (per_minute := rate or self._per_minute) is not None
        )

    async def identify(self, headers: Sequence[tuple[bytes, bytes]], address: str) -> Caller | None:
        """Return the caller, or None without a valid key. For public operations that show more with a key."""
        if self._term.is_over():
            return None
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
        try:  # also for an address with too many wrong keys: all clients behind a proxy may share it
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
    """The host names of this server: those of the address it listens on, and `allowed` ("*": any)."""

    def __init__(self, bound: str, allowed: Sequence[str] = ()) -> None:
        self._any = "*" in allowed
        self._is_wildcard = is_wildcard(bound)
        names = {bound, *allowed}
        if self._is_wildcard or is_loopback(bound):
            names |= set(LOOPBACK_NAMES)
        if self._is_wildcard:
            names |= {socket.gethostname(), socket.getfqdn()}
        self._names = {name.lower().rstrip(".") for name in names}

    def check(self, method: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Raises: InvalidInput for another server's Host header, Forbidden for a request from another site's page."""
        hosts = [value for name, value in headers if name == b"host"]
        if len(hosts) != 1 or not self._is_ours(hosts[0].decode("latin-1")):
            host = hosts[0].decode("latin-1")[:80] if hosts else ""
            raise InvalidInput(
                f"{host!r} is not a name of this server: use the address it listens on, or add the name to "
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
        return self._any or name in self._names or (self._is_wildcard and _is_ip_address(name))


def _is_ip_address(name: str) -> bool:
    """Whether a host is an IP address. DNS rebinding needs a name, so an address is safe."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_wildcard(bound: str) -> bool:
    return _is_ip_address(bound) and addresses.is_wildcard_address(ipaddress.ip_address(bound))


def is_loopback(bound: str) -> bool:
    return bound.lower() == "localhost" or (_is_ip_address(bound) and addresses.is_local(ipaddress.ip_address(bound)))


def base_of(request: Request) -> str:
    """Return the server's URL as the client wrote it, and so one at which the client can reach it."""
    return f"{request.url.scheme}://{request.headers['host']}"
