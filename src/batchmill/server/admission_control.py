"""Who is let in: places by project and address, memory for bodies, and the pace at which bodies come."""

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


def connections_for(files: int, configured: int | None) -> int:
    """How many connections a process that may open so many files takes."""
    share, whole = FILES_SHARE
    return max(1, min(configured or CONNECTIONS_MAX, files * share // whole))


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
        forwarded_for = b",".join(value for name, value in headers if name == b"x-forwarded-for").decode("latin-1")
        for each in reversed(forwarded_for.split(",")[-FORWARDED_MAX:]):
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
        forwarded_proto = next((value for name, value in headers if name == b"x-forwarded-proto"), b"")
        return SCHEMES.get(forwarded_proto.strip().lower(), own)

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


REQUESTS_MAX = 5000  # under way at once, of all projects
RESERVE = 1000  # besides these, for projects that hold fewer than FLOOR
FLOOR = 50
STRANGERS_MAX, STRANGERS_RESERVE, STRANGERS_FLOOR = 800, 200, 8  # of requests that need no key, by address


class RequestPlaces:
    """Counts the requests of each name (a project, an address). Pure.

    One that is alone may have all places. Where several ask, none is let in beyond its even share once three quarters
    are taken, so that places come free for the others; and each has `floor` places that the rest never get.
    """

    def __init__(self, requests_max: int = REQUESTS_MAX, reserve: int = RESERVE, floor: int = FLOOR) -> None:
        self._max, self._reserve, self._floor = requests_max, reserve, floor
        self._held: dict[str, int] = {}
        self.total = 0

    def try_take(self, name: str) -> bool:
        """Whether there was a place; whoever took one calls `leave` once."""
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
                f"at most {self._max:,} are, shared between all who ask; try again",
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


def of_projects(connections_max: int) -> RequestPlaces:
    """The places of requests with a key. Each keeps a connection: some are always left for who comes."""
    return RequestPlaces(_share(REQUESTS_MAX, connections_max), _share(RESERVE, connections_max))


def of_strangers(connections_max: int) -> RequestPlaces:
    """The places of requests that need no key."""
    share = _share(STRANGERS_MAX, connections_max), _share(STRANGERS_RESERVE, connections_max)
    return RequestPlaces(*share, STRANGERS_FLOOR)


def _share(places: int, connections_max: int) -> int:
    """Fewer of them where there are fewer connections than usual."""
    return max(1, places * min(connections_max, CONNECTIONS_MAX) // CONNECTIONS_MAX)


MEMORY_BYTES_MAX = 256 * 1024 * 1024  # of the server, unless a setting says more; a project may have half of it
PARSED_TIMES = 8  # what is parsed takes several times the bytes it came in
STREAM_BYTES = 256 * 1024  # of an upload, however long it is: what is on its way between socket and disk


def memory_for(body_bytes_max: int, configured: int | None) -> int:
    """The bound of the server: room for four bodies of the largest size, unless it is told."""
    return max(MEMORY_BYTES_MAX, 4 * body_bytes_max) if configured is None else configured


class BodyMemory:
    """Counts what requests hold. Nothing waits here: what does not fit is told to come again. Pure."""

    def __init__(self, bytes_max: int = MEMORY_BYTES_MAX) -> None:
        self.bytes_max, self.project_bytes_max = bytes_max, bytes_max // 2
        self._held: dict[str, int] = {}
        self.total = 0

    def has_room(self, project: str, size: int) -> bool:
        return self.total + size <= self.bytes_max and self._held.get(project, 0) + size <= self.project_bytes_max

    def take(self, project: str, size: int) -> None:
        """Raises: Unavailable; whoever took bytes gives them back."""
        if not self.has_room(project, size):
            raise Unavailable(
                f"too many bodies are in memory: {self._held.get(project, 0):,} bytes of this project's, "
                f"{self.total:,} in all, and {size:,} more would be above server.body_memory_bytes_max, of which a "
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
    """What one request holds of the memory, until `release`."""

    __slots__ = ("_memory", "_project", "bytes")

    def __init__(self, memory: BodyMemory, project: str) -> None:
        self._memory, self._project = memory, project
        self.bytes = 0

    def grow_to(self, size: int) -> None:
        """Hold `size` bytes, if it is more than it holds. One request alone always fits. Raises: Unavailable."""
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
        """It is this project's from now on. Raises: Unavailable."""
        size = self.bytes
        self.release()
        self._project = project
        self.grow_to(size)

    def release(self) -> None:
        self.shrink_to(0)


WINDOW_S = 30.0  # of waiting for the client, over which the rate is measured
SPREAD = 1 / 3  # a window is longer by up to so much of it, so that bodies that began at once are not refused at once
NO_BODY_S = 5.0  # for the few bytes that may come where a request has no body


class Pace(Struct, frozen=True):
    """`total_s` of a body that is read whole; `rate_min` bytes a second of every body."""

    total_s: float = 300.0
    rate_min: int = 1024
    window_s: float = WINDOW_S


class BodyPacer:
    """Measures one body: it is told how long a wait was, and how much came of it. `jitter`: from 0 to 1."""

    def __init__(self, pace: Pace, total_s: float | None, jitter: Callable[[], float] = random.random) -> None:
        self._pace, self._left_s = pace, total_s
        self._window_s = pace.window_s * (1 + SPREAD * jitter())
        self._waited_s, self._bytes = 0.0, 0

    @property
    def patience_s(self) -> float:
        """How long to wait for the next piece before `late` is asked."""
        window_s = self._window_s - self._waited_s
        return window_s if self._left_s is None else min(window_s, self._left_s)

    def waited(self, seconds: float, size: int) -> None:
        self._waited_s += seconds
        self._bytes += size
        if self._left_s is not None:
            self._left_s -= seconds

    def late(self) -> str:
        """Why the client is left now; empty: it goes on, and a new window begins once this one is over."""
        if self._left_s is not None and self._left_s <= 0:
            return "the body did not end in time: server.body_timeout_s says how long it may take"
        if self._waited_s < self._window_s:
            return ""
        if self._bytes < self._pace.rate_min * self._waited_s:
            return (
                f"less than {self._pace.rate_min:,} bytes a second of the body came for {self._waited_s:.0f} s: "
                "server.body_rate_min is the least"
            )
        self._waited_s, self._bytes = 0.0, 0
        return ""


class Admission:
    def __init__(self, entry: ServerEntry, *, files: int, clock: Callable[[], float]) -> None:
        """Args: files: how many the process may open; clock: monotonic seconds. Raises: InvalidConfig."""
        self.proxies = Proxies(entry.trusted_proxies)
        self.memory = BodyMemory(memory_for(entry.body_bytes_max, entry.body_memory_bytes_max))
        self.body_bytes_max = entry.body_bytes_max
        self.pace = Pace(entry.body_timeout_s, entry.body_rate_min)
        self.connections_max = connections_for(files, entry.connections_max)
        self.places, self.strangers = of_projects(self.connections_max), of_strangers(self.connections_max)
        self.pool = ConnectionPool(self.connections_max, clock, self.proxies.trusts)

    def place(self, project: str) -> RequestSlot:
        """For a request of a project. Raises: Unavailable."""
        self.places.take(project)
        return RequestSlot(self, self.places, project, Hold(self.memory, project))

    def strangers_place(self, peer: str, headers: Sequence[tuple[bytes, bytes]]) -> RequestSlot:
        """For a request that needs no key, and is whoever's the client is. Raises: Unavailable."""
        address = self.proxies.client(peer, headers)
        self.strangers.take(address)
        return RequestSlot(self, self.strangers, address, Hold(self.memory, ""))

    def vital_place(self) -> RequestSlot:
        """For a request that is answered whatever else is under way: it waits for nobody."""
        return RequestSlot(self, None, "", Hold(self.memory, ""))


class RequestSlot:
    """What one request holds, until `leave`."""

    __slots__ = ("_admission", "_name", "_places", "hold")

    def __init__(self, admission: Admission, places: RequestPlaces | None, name: str, hold: Hold) -> None:
        self._admission, self._places, self._name, self.hold = admission, places, name, hold

    def move(self, project: str) -> None:
        """It turned out to be this project's: a link says so. Raises: Unavailable."""
        self._admission.places.take(project)
        if self._places is not None:
            self._places.leave(self._name)
        self._places, self._name = self._admission.places, project
        self.hold.move(project)

    def leave(self) -> None:
        places, self._places = self._places, None
        if places is not None:
            places.leave(self._name)
        self.hold.release()
