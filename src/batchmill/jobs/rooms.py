"""Has replicas wait for room on the machine, and asks for room to be made while some wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from batchmill.jobs.machine import Asked, Machine, Place, Room


class Rooms:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.make_room: Callable[[], None] = _nothing  # called while replicas wait, whenever something has changed
        self.use_of: Callable[[str], str] = _unknown  # pool key -> what uses it, for people
        self._heard: dict[Place, asyncio.Future[Room]] = {}

    async def take(self, asked: Asked, waits: Callable[[str], None]) -> Room:
        """Room for a replica, once there is some. `waits` hears for what, where there is none at once."""
        heard = self._heard[asked.place] = asyncio.get_running_loop().create_future()
        self.machine.ask(asked)
        try:
            self.review()
            if not heard.done():
                waits(self.why(asked.place))
            return await heard
        except asyncio.CancelledError:
            self._heard.pop(asked.place, None)
            if self.machine.holds(asked.place):
                self.machine.give_back(asked.place)
            else:
                self.machine.withdraw(asked.place)
            self.review()
            raise

    def give_back(self, place: Place) -> None:
        """The replica has ended."""
        self.machine.give_back(place)
        self.review()

    def review(self) -> None:
        """Room has come free, or somebody waits who did not, or a pool is needed no more."""
        for place, room in self.machine.allot():
            heard = self._heard.pop(place)
            if heard.cancelled():  # its replica has not yet noticed that it is to wait no more
                self.machine.give_back(place)
            else:
                heard.set_result(room)
        if self.machine.is_waited_for:
            self.make_room()

    def why(self, place: Place) -> str:
        """For what a replica waits; empty where it does not."""
        return self.machine.why(place, self.use_of)


def _nothing() -> None:
    """Nobody makes room."""


def _unknown(key: str) -> str:
    return "in use"
