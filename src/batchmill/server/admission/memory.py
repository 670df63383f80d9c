"""Bytes of bodies that are in memory: counted for the server and each project, and refused beyond a bound."""

from __future__ import annotations

from batchmill.errors import Unavailable

MEMORY_BYTES_MAX = 256 * 1024 * 1024  # of the server, unless a setting says more; a project may have half of it
PARSED_TIMES = 8  # what is parsed takes several times the bytes it came in
STREAM_BYTES = 256 * 1024  # of an upload, however long it is: what is on its way between socket and disk


def memory_for(body_bytes_max: int, told: int | None) -> int:
    """The bound of the server: room for four bodies of the largest size, unless it is told."""
    return max(MEMORY_BYTES_MAX, 4 * body_bytes_max) if told is None else told


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
