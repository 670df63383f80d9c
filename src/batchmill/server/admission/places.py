"""Places of requests that are under way: shared by project, and by address where no key says whose a request is."""

from __future__ import annotations

from batchmill.errors import Unavailable
from batchmill.server.admission.connections import CONNECTIONS_MAX

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
