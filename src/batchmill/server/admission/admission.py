"""The bounds of one server together, and what one request holds of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from batchmill.config import ServerEntry
from batchmill.server.admission.addresses import Proxies
from batchmill.server.admission.connections import ConnectionPool, connections_for
from batchmill.server.admission.memory import BodyMemory, Hold, memory_for
from batchmill.server.admission.pace import Pace
from batchmill.server.admission.places import RequestPlaces, of_projects, of_strangers


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

    def place(self, project: str) -> Place:
        """For a request of a project. Raises: Unavailable."""
        self.places.take(project)
        return Place(self, self.places, project, Hold(self.memory, project))

    def strangers_place(self, peer: str, headers: Sequence[tuple[bytes, bytes]]) -> Place:
        """For a request that needs no key, and is whoever's the client is. Raises: Unavailable."""
        address = self.proxies.client(peer, headers)
        self.strangers.take(address)
        return Place(self, self.strangers, address, Hold(self.memory, ""))

    def vital_place(self) -> Place:
        """For a request that is answered whatever else is under way: it waits for nobody."""
        return Place(self, None, "", Hold(self.memory, ""))


class Place:
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
