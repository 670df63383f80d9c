"""How the code of deployed functions is kept from the rest of the machine."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from batchmill.errors import InvalidConfig

SHOWN_CHARS = 80  # of a value that is refused


class Isolation(Struct, frozen=True):
    """Functions run in namespaces of their own, made by bubblewrap."""

    program: str  # its path
    network: bool  # they have the machine's network, and not none
    data_dir: str  # where `environments` are theirs; nothing else of it is there for them
    readable: list[str] = []  # folders and files that all of them may read besides


class FunctionsEntry(Struct, frozen=True):
    """`[functions]`: how the code of deployed functions runs. The lists are about isolated ones alone."""

    isolate: Literal["none", "bubblewrap"] = "none"
    network: bool = True
    readable: list[str] = []
    pythons: list[str] = []
    secrets: list[str] = []

    @property
    def is_isolated(self) -> bool:
        return self.isolate != "none"

    def check(self) -> None:
        """Raises: InvalidConfig for a path that depends on where the server was started."""
        for name in ("readable", "pythons"):
            for place in getattr(self, name):
                if not place.startswith("/") or ".." in place.split("/"):
                    raise InvalidConfig(f"functions.{name}: {place[:SHOWN_CHARS]!r} is no absolute path")
