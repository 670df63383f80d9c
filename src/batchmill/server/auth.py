"""Who is asking: the key of a request in each form that clients send it, its scope, and how often it may ask."""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

from batchmill.errors import Forbidden, RateLimited, Refused, Unauthenticated
from batchmill.ports import Clock
from batchmill.server.admission.addresses import Proxies
from batchmill.server.limits import Buckets
from batchmill.services.keys import ANYBODY
from batchmill.types import Caller, Scope

FAILURES_PER_MINUTE = 60  # wrong keys that one address may try; a right one is never held up
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
        self._requests, self._failures = Buckets(), Buckets()
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
            wait_s = self._requests.take(caller.key or "", per_minute, self._clock.monotonic())
            if wait_s:
                raise RateLimited(f"more than {per_minute:,} requests a minute", retry_after_s=wait_s)
        for key, rate in caller.minted_by:
            if (told := rate or self._per_minute) is not None:
                self._requests.take(key, told, self._clock.monotonic())

    def _refuse_family(self, caller: Caller) -> None:
        """A key pays for the requests of those that it minted. Raises: RateLimited where one of them cannot."""
        for key, rate in caller.minted_by:
            if (told := rate or self._per_minute) is not None:
                wait_s = self._requests.wait_s(key, told, self._clock.monotonic())
                if wait_s:
                    raise RateLimited(
                        f"more than {told:,} requests a minute of the key {key} and those that it minted, together",
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
        if per_minute is not None and self._requests.wait_s(caller.key or "", per_minute, now):
            return False
        return not caller.minted_by or not any(
            self._requests.wait_s(key, told, now)
            for key, rate in caller.minted_by
            if (told := rate or self._per_minute) is not None
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
            wait_s = self._failures.take(self._proxies.client(address, headers), FAILURES_PER_MINUTE, now)
            if wait_s:
                raise RateLimited("too many requests with a wrong API key", retry_after_s=wait_s) from None
            raise
