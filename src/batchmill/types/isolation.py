"""How the code of deployed functions is isolated from the machine."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from batchmill.errors import InvalidConfig

SHOWN_CHARS = 80  # of an invalid value, in a message


class Isolation(Struct, frozen=True):
    """Functions run in their own namespaces, made by bubblewrap."""

    program: str  # its path
    network: bool  # True: the machine's network; False: no network
    data_dir: str  # they see only its `environments`
    readable: list[str] = []  # further folders and files that they may read


class FunctionsEntry(Struct, frozen=True):
    """`[functions]`: how the code of deployed functions runs. The lists apply only to isolated functions."""

    isolate: Literal["none", "bubblewrap"] = "none"
    network: bool = True
    readable: list[str] = []
    pythons: list[str] = []
    secrets: list[str] = []

    @property
    def is_isolated(self) -> bool:
        return self.isolate != "none"

    def check(self) -> None:
        """Raises: InvalidConfig for a path that is not absolute."""
        for name in ("readable", "pythons"):
            for path in getattr(self, name):
                if not path.startswith("/") or ".." in path.split("/"):
                    raise InvalidConfig(f"functions.{name}: {path[:SHOWN_CHARS]!r} is not an absolute path")
