"""How many connections may be open, which one is closed for a new one, and from which client a request comes.

Nothing is kept in order while requests come and go: connections are looked through once for many that are too many.
A client's address counts also behind proxies that the operator trusts.
"""

from __future__ import annotations

import heapq
import ipaddress
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Protocol

from batchmill.errors import InvalidConfig
from batchmill.models.addresses import unmapped

CONNECTIONS_MAX = 10_000  # where the limit of open files and server.connections_max allow for it
FILES_SHARE = 3, 4  # of the files that the process may open
VICTIMS, VICTIMS_SHARE = 256, 16  # that are chosen at once, and at most this part of all
LOOK_AGAIN_S = 1.0  # where none could go, so long nobody looks


class Stage(IntEnum):
    """What a connection is doing, in the order in which connections are ended. BUSY: a request is answered, and it
    stays."""

    REFUSED = 0  # only what follows a refusal is still coming
    IDLE = 1  # between requests, or before the first
    ARRIVING = 2  # a head, or a body before it is known whose it is
    KNOWN_IDLE = 3  # as IDLE and ARRIVING, where a key was right before
    KNOWN_ARRIVING = 4
    BUSY = 5


class Member(Protocol):
    """A connection."""

    address: str  # what it is counted as
    is_known: bool  # a request on it had a key
    project: str  # whose that was
    since: float  # when it came to its stage, of a monotonic clock

    def stage(self) -> Stage: ...

    def end(self) -> None: ...


class ConnectionPool:
    """At most `connections_max` members, and of one address half as many that have shown no key.

    `is_exempt`: of addresses behind which there are many clients.
    """

    def __init__(
        self, connections_max: int, clock: Callable[[], float], is_exempt: Callable[[str], bool] = lambda _: False
    ) -> None:
        self._max, self._address_max = connections_max, max(1, connections_max // 2)
        self._victims_max = max(1, min(VICTIMS, connections_max // VICTIMS_SHARE))
        self._clock, self._is_exempt = clock, is_exempt
        self._members: dict[Member, None] = {}
        self._strangers: Counter[str] = Counter()  # connections without a key by address
        self._known: Counter[str] = Counter()  # those with a key by project
        self._victims: dict[str | None, deque[tuple[Stage, Member]]] = {}  # chosen by address, or of all
        self._barren: dict[str | None, float] = {}  # where nothing could go -> when that was
        self.ended = 0

    def __len__(self) -> int:
        return len(self._members)

    def add(self, member: Member) -> bool:
        """False: there is no room, and no connection that could go for it."""
        address = member.address
        if self._strangers[address] >= self._address_max and not self._is_exempt(address):
            self._end_one(address)
        if len(self._members) >= self._max and not self._end_one(None):
            return False
        self._members[member] = None
        self._count(member, 1)
        return True

    def know(self, member: Member) -> None:
        """It has shown a key: `member.is_known` was False until now, and its `project` unknown."""
        if member in self._members:
            _add(self._strangers, member.address, -1)
            _add(self._known, member.project, 1)

    def remove(self, member: Member) -> None:
        if member in self._members:
            del self._members[member]
            self._count(member, -1)

    def _count(self, member: Member, more: int) -> None:
        if member.is_known:
            _add(self._known, member.project, more)
        else:
            _add(self._strangers, member.address, more)

    def _crowd(self, member: Member) -> int:
        """How many there are of whoever has this one."""
        return self._known[member.project] if member.is_known else self._strangers[member.address]

    def _end_one(self, address: str | None) -> bool:
        chosen = self._victims.get(address)
        for _ in range(2):
            while chosen:
                chosen_at, member = chosen.popleft()
                if member in self._members and member.stage() <= chosen_at:  # else it has done something since
                    self.remove(member)
                    self.ended += 1
                    member.end()
                    return True
            chosen = self._victims[address] = self._choose(address)
        del self._victims[address]
        return False

    def _choose(self, address: str | None) -> deque[tuple[Stage, Member]]:
        """Those that go first; of one stage those of the address or the project that has the most, the oldest first."""
        now = self._clock()
        if now - self._barren.get(address, -LOOK_AGAIN_S) < LOOK_AGAIN_S:
            return deque()
        if len(self._victims) > VICTIMS:
            self._victims = {address: deque()}
        found: Iterable[tuple[tuple[int, int, float], tuple[Stage, Member]]] = (
            ((int(stage), -self._crowd(member), member.since), (stage, member))
            for member in self._members
            if (address is None or member.address == address) and (stage := member.stage()) is not Stage.BUSY
        )
        chosen = deque(each for _, each in heapq.nsmallest(self._victims_max, found, key=lambda each: each[0]))
        if chosen:
            self._barren.pop(address, None)
        else:
            self._barren = {name: when for name, when in self._barren.items() if now - when < LOOK_AGAIN_S}
            self._barren[address] = now
        return chosen


def _add(counter: Counter[str], name: str, more: int) -> None:
    counter[name] += more
    if not counter[name]:
        del counter[name]


def connections_for(files: int, told: int | None) -> int:
    """How many connections a process that may open so many files takes."""
    share, whole = FILES_SHARE
    return max(1, min(told or CONNECTIONS_MAX, files * share // whole))


PROXIES_MAX = 256  # entries of server.trusted_proxies
FORWARDED_MAX = 64  # addresses of X-Forwarded-For that are looked at, from the right
SCHEMES = {b"http": "http", b"https": "https"}
IPV6_PREFIX = 64  # whoever has one address of such a network has them all

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Proxies:
    """`entries` are addresses and networks ("10.0.0.0/8"). Raises: InvalidConfig."""

    def __init__(self, entries: Sequence[str] = ()) -> None:
        if len(entries) > PROXIES_MAX:
            raise InvalidConfig(f"server.trusted_proxies has {len(entries)} entries; {PROXIES_MAX} at most")
        self._networks = [_network(entry) for entry in entries]

    def trusts(self, peer: str) -> bool:
        """The peer of a connection is a proxy whose X-Forwarded-For and X-Forwarded-Proto are believed."""
        if not self._networks:
            return False
        address = _address(peer)
        return address is not None and self._is_proxy(address)

    def client(self, peer: str, headers: Sequence[tuple[bytes, bytes]]) -> str:
        """Who is counted for a request: the peer or, behind trusted proxies, the address that they tell.

        That is the rightmost of X-Forwarded-For that is no trusted proxy: what stands left of it anybody may have
        written. Of IPv6 it is the whole /64.
        """
        if not self.trusts(peer):
            return group_of(peer)
        told = b",".join(value for name, value in headers if name == b"x-forwarded-for").decode("latin-1")
        for each in reversed(told.split(",")[-FORWARDED_MAX:]):
            address = _address(each.strip())
            if address is None:
                break
            if not self._is_proxy(address):
                return _group(address)
        return group_of(peer)

    def scheme(self, peer: str, headers: Sequence[tuple[bytes, bytes]], own: str) -> str:
        """What the client's own connection speaks: `own`, or what a trusted proxy tells of its own in
        X-Forwarded-Proto."""
        if not self.trusts(peer):
            return own
        told = next((value for name, value in headers if name == b"x-forwarded-proto"), b"")
        return SCHEMES.get(told.strip().lower(), own)

    def _is_proxy(self, address: Address) -> bool:
        return any(address.version == network.version and address in network for network in self._networks)


def group_of(peer: str) -> str:
    """What an address is counted as; a text that is none is counted as it is."""
    if ":" not in peer:
        return peer
    address = _address(peer)
    return peer if address is None else _group(address)


def _group(address: Address) -> str:
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(ipaddress.ip_network((address, IPV6_PREFIX), strict=False))


def _address(text: str) -> Address | None:
    """An IPv4 address that is written as IPv6 is the IPv4 address; a zone is left out."""
    try:
        address = ipaddress.ip_address(text.strip("[]").partition("%")[0])
    except ValueError:
        return None
    return unmapped(address)


def _network(entry: str) -> Network:
    try:
        return ipaddress.ip_network(entry)
    except ValueError as error:
        raise InvalidConfig(f"server.trusted_proxies: {entry[:80]!r} is no address and no network: {error}") from None
