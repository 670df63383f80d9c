"""Admission control: limits on connections, on requests under way, on memory for bodies, and on slow bodies."""

from __future__ import annotations

import heapq
import ipaddress
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Protocol

from msgspec import Struct

from batchmill.config import ServerEntry
from batchmill.errors import InvalidConfig, Unavailable
from batchmill.models.addresses import unmapped

CONNECTIONS_MAX = 10_000  # if the limit of open files and server.connections_max allow it
FILES_SHARE = 3, 4  # connections may use 3/4 of the files that the process may open
# Connections chosen at once as candidates for eviction: at most 256, and at most 1/16 of all connections.
EVICTIONS_MAX, EVICTIONS_SHARE = 256, 16
EVICTION_RETRY_S = 1.0  # after a search without a candidate, no search for this long


class Stage(IntEnum):
    """What a connection is doing. Connections are evicted in this order; BUSY ones, which answer a request, never."""

    REFUSED = 0  # its request was refused; the client is still sending
    IDLE = 1  # between requests, or before the first
    ARRIVING = 2  # a head is arriving, or a body whose sender is not authenticated yet
    AUTHENTICATED_IDLE = 3  # as IDLE and ARRIVING, after a valid key on this connection
    AUTHENTICATED_ARRIVING = 4
    BUSY = 5


class Member(Protocol):
    """A connection."""

    address: str  # the address that it counts for
    is_authenticated: bool  # a request on it had a valid key
    project: str  # the project of that key
    since: float  # when it entered its stage, in monotonic seconds

    def stage(self) -> Stage: ...

    def end(self) -> None: ...


class ConnectionPool:
    """Holds at most `connections_max` connections, and at most half as many without a key from one address.

    `is_exempt`: whether an address has many clients behind it (a proxy), so that the limit per address does not apply.
    """

    def __init__(
        self, connections_max: int, clock: Callable[[], float], is_exempt: Callable[[str], bool] = lambda _: False
    ) -> None:
        self._max, self._address_max = connections_max, max(1, connections_max // 2)
        self._candidates_max = max(1, min(EVICTIONS_MAX, connections_max // EVICTIONS_SHARE))
        self._clock, self._is_exempt = clock, is_exempt
        self._members: dict[Member, None] = {}
        self._anonymous: Counter[str] = Counter()  # address -> connections without a key
        self._authenticated: Counter[str] = Counter()  # project -> connections with a key
        # Candidates for eviction by address; None: among all connections.
        self._candidates: dict[str | None, deque[tuple[Stage, Member]]] = {}
        self._no_candidates_at: dict[str | None, float] = {}  # address -> when a search found no candidate
        self.ended = 0

    def __len__(self) -> int:
        return len(self._members)

    def add(self, member: Member) -> bool:
        """Add a connection, evicting another if needed. False: the pool is full and nothing can be evicted."""
        address = member.address
        if self._anonymous[address] >= self._address_max and not self._is_exempt(address):
            self._evict_one(address)
        if len(self._members) >= self._max and not self._evict_one(None):
            return False
        self._members[member] = None
        self._count(member, 1)
        return True

    def mark_authenticated(self, member: Member) -> None:
        """Count a connection for its project after its first valid key. Call it before `is_known` is set."""
        if member in self._members:
            _add(self._anonymous, member.address, -1)
            _add(self._authenticated, member.project, 1)

    def remove(self, member: Member) -> None:
        if member in self._members:
            del self._members[member]
            self._count(member, -1)

    def _count(self, member: Member, more: int) -> None:
        if member.is_authenticated:
            _add(self._authenticated, member.project, more)
        else:
            _add(self._anonymous, member.address, more)

    def _connection_count(self, member: Member) -> int:
        """How many connections the owner of this one has: its project, or its address."""
        return self._authenticated[member.project] if member.is_authenticated else self._anonymous[member.address]

    def _evict_one(self, address: str | None) -> bool:
        chosen = self._candidates.get(address)
        for _ in range(2):
            while chosen:
                chosen_at, member = chosen.popleft()
                if member in self._members and member.stage() <= chosen_at:  # else it has become active since
                    self.remove(member)
                    self.ended += 1
                    member.end()
                    return True
            chosen = self._candidates[address] = self._choose(address)
        del self._candidates[address]
        return False

    def _choose(self, address: str | None) -> deque[tuple[Stage, Member]]:
        """Choose candidates for eviction: by stage, then by the owner with the most connections, then the oldest."""
        now = self._clock()
        if now - self._no_candidates_at.get(address, -EVICTION_RETRY_S) < EVICTION_RETRY_S:
            return deque()
        if len(self._candidates) > EVICTIONS_MAX:
            self._candidates = {address: deque()}
        candidates: Iterable[tuple[tuple[int, int, float], tuple[Stage, Member]]] = (
            ((int(stage), -self._connection_count(member), member.since), (stage, member))
            for member in self._members
            if (address is None or member.address == address) and (stage := member.stage()) is not Stage.BUSY
        )
        chosen = deque(each for _, each in heapq.nsmallest(self._candidates_max, candidates, key=lambda each: each[0]))
        if chosen:
            self._no_candidates_at.pop(address, None)
        else:
            self._no_candidates_at = {
                name: since for name, since in self._no_candidates_at.items() if now - since < EVICTION_RETRY_S
            }
            self._no_candidates_at[address] = now
        return chosen


def _add(counter: Counter[str], name: str, more: int) -> None:
    counter[name] += more
    if not counter[name]:
        del counter[name]


def connections_for(files: int, configured: int | None) -> int:
    """Return how many connections a process takes that may open `files` files."""
    share, whole = FILES_SHARE
    return max(1, min(configured or CONNECTIONS_MAX, files * share // whole))


PROXIES_MAX = 256  # entries of server.trusted_proxies
FORWARDED_MAX = 64  # addresses of X-Forwarded-For that are read, from the right
SCHEMES = {b"http": "http", b"https": "https"}
IPV6_PREFIX = 64  # a client with one address of such a network usually has all of them

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Proxies:
    """The trusted reverse proxies. `entries` are addresses and networks ("10.0.0.0/8"). Raises: InvalidConfig."""

    def __init__(self, entries: Sequence[str] = ()) -> None:
        if len(entries) > PROXIES_MAX:
            raise InvalidConfig(f"server.trusted_proxies has {len(entries)} entries; {PROXIES_MAX} at most")
        self._networks = [_network(entry) for entry in entries]

    def trusts(self, peer: str) -> bool:
        """Whether the peer is a proxy whose X-Forwarded-For and X-Forwarded-Proto are trusted."""
        if not self._networks:
            return False
        address = _address(peer)
        return address is not None and self._is_proxy(address)

    def client(self, peer: str, headers: Sequence[tuple[bytes, bytes]]) -> str:
        """Return the client address that a request counts for: the peer's, or the one that trusted proxies forward.

        This is the rightmost address of X-Forwarded-For that is not a trusted proxy; a client can forge the addresses
        left of it. An IPv6 address counts as its /64 network.
        """
        if not self.trusts(peer):
            return group_of(peer)
        forwarded_for = b",".join(value for name, value in headers if name == b"x-forwarded-for").decode("latin-1")
        for each in reversed(forwarded_for.split(",")[-FORWARDED_MAX:]):
            address = _address(each.strip())
            if address is None:
                break
            if not self._is_proxy(address):
                return _group(address)
        return group_of(peer)

    def scheme(self, peer: str, headers: Sequence[tuple[bytes, bytes]], own: str) -> str:
        """Return the scheme that the client used: `own`, or the X-Forwarded-Proto of a trusted proxy."""
        if not self.trusts(peer):
            return own
        forwarded_proto = next((value for name, value in headers if name == b"x-forwarded-proto"), b"")
        return SCHEMES.get(forwarded_proto.strip().lower(), own)

    def _is_proxy(self, address: Address) -> bool:
        return any(address.version == network.version and address in network for network in self._networks)


def group_of(peer: str) -> str:
    """Return the name that an address counts as; a text that is not an address is returned unchanged."""
    if ":" not in peer:
        return peer
    address = _address(peer)
    return peer if address is None else _group(address)


def _group(address: Address) -> str:
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(ipaddress.ip_network((address, IPV6_PREFIX), strict=False))


def _address(text: str) -> Address | None:
    """Parse an address. An IPv4-mapped IPv6 address becomes the IPv4 address; a zone is dropped."""
    try:
        address = ipaddress.ip_address(text.strip("[]").partition("%")[0])
    except ValueError:
        return None
    return unmapped(address)


def _network(entry: str) -> Network:
    try:
        return ipaddress.ip_network(entry)
    except ValueError as error:
        raise InvalidConfig(f"server.trusted_proxies: {entry[:80]!r} is not an address or a network: {error}") from None


REQUESTS_MAX = 5000  # requests under way at once, all projects together
RESERVE = 1000  # further slots, for projects with fewer than FLOOR requests
FLOOR = 50
ANONYMOUS_MAX, ANONYMOUS_RESERVE, ANONYMOUS_FLOOR = 800, 200, 8  # the same for requests without a key, by address


class RequestLimiter:
    """Limits the requests under way of each name (a project, an address). Pure.

    A name that is alone may have all slots. With several names, a name gets no slot beyond its even share once three
    quarters are taken, so that slots come free for the others. `floor` slots of each name are never given to others.
    """

    def __init__(self, requests_max: int = REQUESTS_MAX, reserve: int = RESERVE, floor: int = FLOOR) -> None:
        self._max, self._reserve, self._floor = requests_max, reserve, floor
        self._held: dict[str, int] = {}
        self.total = 0

    def try_take(self, name: str) -> bool:
        """Take a slot if one is free. The caller then calls `leave` once."""
        held = self._held.get(name, 0)
        if held < self._floor:
            has_room = self.total < self._max + self._reserve
        elif self.total >= self._max:
            has_room = False
        else:
            names = len(self._held)
            has_room = names == 1 or self.total < self._max * 3 // 4 or held < self._max // names
        if has_room:
            self._held[name] = held + 1
            self.total += 1
        return has_room

    def take(self, name: str) -> None:
        """Raises: Unavailable."""
        if not self.try_take(name):
            raise Unavailable(
                f"too many requests are under way: {self._held.get(name, 0):,} of yours, {self.total:,} in all; "
                f"the limit is {self._max:,}, shared between all clients; try again",
                code="too_many_requests",
            )

    def leave(self, name: str) -> None:
        held = self._held[name] - 1
        self.total -= 1
        if held:
            self._held[name] = held
        else:
            del self._held[name]

    def held(self, name: str) -> int:
        return self._held.get(name, 0)


def project_limiter(connections_max: int) -> RequestLimiter:
    """The limit for requests with a key. Each occupies a connection; some connections stay free for new clients."""
    return RequestLimiter(_share(REQUESTS_MAX, connections_max), _share(RESERVE, connections_max))


def anonymous_limiter(connections_max: int) -> RequestLimiter:
    """The limit for requests that need no key."""
    share = _share(ANONYMOUS_MAX, connections_max), _share(ANONYMOUS_RESERVE, connections_max)
    return RequestLimiter(*share, ANONYMOUS_FLOOR)


def _share(slots: int, connections_max: int) -> int:
    """Scale a number of slots down if there are fewer connections than usual."""
    return max(1, slots * min(connections_max, CONNECTIONS_MAX) // CONNECTIONS_MAX)


MEMORY_BYTES_MAX = 256 * 1024 * 1024  # for all bodies, unless a setting raises it; a project may have half of it
PARSED_TIMES = 8  # a parsed body takes several times the memory of its bytes
STREAM_BYTES = 256 * 1024  # of an upload of any length: what is on its way between socket and disk


def memory_for(body_bytes_max: int, configured: int | None) -> int:
    """Return the memory limit for bodies: the configured one, or enough for four bodies of the largest size."""
    return max(MEMORY_BYTES_MAX, 4 * body_bytes_max) if configured is None else configured


class BodyMemory:
    """Counts the memory of request bodies. Nothing waits here: a body that does not fit is refused for now. Pure."""

    def __init__(self, bytes_max: int = MEMORY_BYTES_MAX) -> None:
        self.bytes_max, self.project_bytes_max = bytes_max, bytes_max // 2
        self._held: dict[str, int] = {}
        self.total = 0

    def has_room(self, project: str, size: int) -> bool:
        return self.total + size <= self.bytes_max and self._held.get(project, 0) + size <= self.project_bytes_max

    def take(self, project: str, size: int) -> None:
        """Count `size` bytes; the caller gives them back with `give`. Raises: Unavailable."""
        if not self.has_room(project, size):
            raise Unavailable(
                f"too many bodies are in memory: {self._held.get(project, 0):,} bytes of this project, "
                f"{self.total:,} in all; {size:,} more would exceed server.body_memory_bytes_max, of which a "
                f"project may have {self.project_bytes_max:,}; try again",
                code="body_memory_full",
            )
        self._held[project] = self._held.get(project, 0) + size
        self.total += size

    def give(self, project: str, size: int) -> None:
        held = self._held[project] - size
        self.total -= size
        if held:
            self._held[project] = held
        else:
            del self._held[project]

    def held(self, project: str) -> int:
        return self._held.get(project, 0)


class Hold:
    """The memory that one request holds, until `release`."""

    __slots__ = ("_memory", "_project", "bytes")

    def __init__(self, memory: BodyMemory, project: str) -> None:
        self._memory, self._project = memory, project
        self.bytes = 0

    def grow_to(self, size: int) -> None:
        """Hold at least `size` bytes. A single request always fits. Raises: Unavailable."""
        more = min(size, self._memory.project_bytes_max) - self.bytes
        if more > 0:
            self._memory.take(self._project, more)
            self.bytes += more

    def shrink_to(self, size: int) -> None:
        less = self.bytes - size
        if less > 0:
            self._memory.give(self._project, less)
            self.bytes = size

    def move(self, project: str) -> None:
        """Count the memory for another project from now on. Raises: Unavailable."""
        size = self.bytes
        self.release()
        self._project = project
        self.grow_to(size)

    def release(self) -> None:
        self.shrink_to(0)


WINDOW_S = 30.0  # time spent waiting for the client over which the rate is measured
SPREAD = 1 / 3  # random lengthening of a window, so that bodies that began together are not refused together
NO_BODY_S = 5.0  # for the few bytes that a client may send where a request has no body


class Pace(Struct, frozen=True):
    """The pace of bodies: `total_s` for a body that is read whole, `rate_min` bytes a second for every body."""

    total_s: float = 300.0
    rate_min: int = 1024
    window_s: float = WINDOW_S


class BodyPacer:
    """Measures how fast one body arrives. `jitter` returns 0 to 1."""

    def __init__(self, pace: Pace, total_s: float | None, jitter: Callable[[], float] = random.random) -> None:
        self._pace, self._left_s = pace, total_s
        self._window_s = pace.window_s * (1 + SPREAD * jitter())
        self._waited_s, self._bytes = 0.0, 0

    @property
    def patience_s(self) -> float:
        """How long to wait for the next piece before `late` is called."""
        window_s = self._window_s - self._waited_s
        return window_s if self._left_s is None else min(window_s, self._left_s)

    def waited(self, seconds: float, size: int) -> None:
        """Count a wait of `seconds` that brought `size` bytes."""
        self._waited_s += seconds
        self._bytes += size
        if self._left_s is not None:
            self._left_s -= seconds

    def late(self) -> str:
        """Return why the body is refused now; empty: it continues, and a new window begins when this one ends."""
        if self._left_s is not None and self._left_s <= 0:
            return "the body did not end in time: server.body_timeout_s is the limit"
        if self._waited_s < self._window_s:
            return ""
        if self._bytes < self._pace.rate_min * self._waited_s:
            return (
                f"the body arrived at less than {self._pace.rate_min:,} bytes a second for {self._waited_s:.0f} s: "
                "server.body_rate_min is the minimum"
            )
        self._waited_s, self._bytes = 0.0, 0
        return ""


class Admission:
    def __init__(self, entry: ServerEntry, *, files: int, clock: Callable[[], float]) -> None:
        """Args: files: how many files the process may open; clock: monotonic seconds. Raises: InvalidConfig."""
        self.proxies = Proxies(entry.trusted_proxies)
        self.memory = BodyMemory(memory_for(entry.body_bytes_max, entry.body_memory_bytes_max))
        self.body_bytes_max = entry.body_bytes_max
        self.pace = Pace(entry.body_timeout_s, entry.body_rate_min)
        self.connections_max = connections_for(files, entry.connections_max)
        self.project_requests, self.anonymous_requests = (
            project_limiter(self.connections_max),
            anonymous_limiter(self.connections_max),
        )
        self.pool = ConnectionPool(self.connections_max, clock, self.proxies.trusts)

    def slot(self, project: str) -> RequestSlot:
        """Take a slot for a request of a project. Raises: Unavailable."""
        self.project_requests.take(project)
        return RequestSlot(self, self.project_requests, project, Hold(self.memory, project))

    def anonymous_slot(self, peer: str, headers: Sequence[tuple[bytes, bytes]]) -> RequestSlot:
        """Take a slot for a request that needs no key; it counts for the client's address. Raises: Unavailable."""
        address = self.proxies.client(peer, headers)
        self.anonymous_requests.take(address)
        return RequestSlot(self, self.anonymous_requests, address, Hold(self.memory, ""))

    def vital_slot(self) -> RequestSlot:
        """Return a slot for a request that is always answered; no limit applies."""
        return RequestSlot(self, None, "", Hold(self.memory, ""))


class RequestSlot:
    """The slot and memory that one request holds, until `leave`."""

    __slots__ = ("_admission", "_limiter", "_name", "hold")

    def __init__(self, admission: Admission, limiter: RequestLimiter | None, name: str, hold: Hold) -> None:
        self._admission, self._limiter, self._name, self.hold = admission, limiter, name, hold

    def move(self, project: str) -> None:
        """Count the request for this project from now on, as a link names it. Raises: Unavailable."""
        self._admission.project_requests.take(project)
        if self._limiter is not None:
            self._limiter.leave(self._name)
        self._limiter, self._name = self._admission.project_requests, project
        self.hold.move(project)

    def leave(self) -> None:
        limiter, self._limiter = self._limiter, None
        if limiter is not None:
            limiter.leave(self._name)
        self.hold.release()
