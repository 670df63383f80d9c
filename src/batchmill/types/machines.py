"""What replicas share of a machine, and what each takes, as people write it down."""

from __future__ import annotations

import re

from msgspec import Struct

from batchmill.errors import InvalidConfig
from batchmill.types.models import Needs, Scaling

REPLICAS_MAX = 1024
GPUS_MAX = 1024
MEMORY_MAX = 2**50
SHOWN_CHARS = 40  # of a value that is refused
LEAST_AND_MOST = {
    "replicas_min": (0, REPLICAS_MAX),
    "replicas_max": (1, REPLICAS_MAX),
    "cooldown_s": (0, 365 * 86_400),
    "scale_up_requests": (1, 10**9),
    "gpus": (0, GPUS_MAX),
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([kmgt]?i?)b?", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def size_of(size: int | str, place: str = "a size") -> int:
    """Bytes, given as a number or like "24GiB". Raises: InvalidConfig, which names `place`."""
    found = _SIZE.fullmatch(str(size).strip())
    size_bytes = int(float(found[1]) * _UNITS.get(found[2].lower(), 0)) if found is not None else 0
    if not 0 < size_bytes <= MEMORY_MAX:
        raise InvalidConfig(f'{place} is a number of bytes or like "24GiB", not {str(size)[:SHOWN_CHARS]!r}')
    return size_bytes


def size_text(size: int) -> str:
    """Bytes as people read them: 12 GiB, 1.5 GiB, 300 MiB."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if size >= factor:
            return f"{size / factor:.1f}".removesuffix(".0") + f" {unit}"
    return f"{size} bytes"


class ReplicaEntry(Struct, frozen=True, kw_only=True):
    """What `[models.NAME]` says of its replicas."""

    replicas_min: int | None = None
    replicas_max: int | None = None
    cooldown_s: float | None = None
    scale_up_requests: int | None = None
    memory: int | str | None = None
    gpus: int = 0

    @property
    def needs(self) -> Needs:
        """What one replica takes of the machine."""
        return Needs(0 if self.memory is None else size_of(self.memory), self.gpus)

    @property
    def scaling(self) -> Scaling | None:
        """None where nothing is said of it."""
        fields = {name: getattr(self, name) for name in Scaling.__struct_fields__ if getattr(self, name) is not None}
        return Scaling(**{"replicas_max": max(1, fields.get("replicas_min", 0))} | fields) if fields else None

    def check(self, place: str) -> None:
        """Raises: InvalidConfig for a value out of range."""
        for name, (least, most) in LEAST_AND_MOST.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise InvalidConfig(f"{place}.{name} must be {least} to {most:,}, not {value}")
        if self.memory is not None:
            size_of(self.memory, f"{place}.memory")
        scaling = self.scaling
        if scaling is not None and scaling.replicas_min > scaling.replicas_max:
            raise InvalidConfig(
                f"{place}.replicas_min is {scaling.replicas_min} and replicas_max {scaling.replicas_max}: "
                "the least is more than the most"
            )


class MachineEntry(Struct, frozen=True):
    """`[machine]`: what replicas of all models take together. None: no limit; of GPUs, those that are visible."""

    memory: int | str | None = None
    gpus: int | list[int | str] | None = None

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory is None else size_of(self.memory)

    def check(self) -> None:
        """Raises: InvalidConfig for a value out of range."""
        if self.memory is not None:
            size_of(self.memory, "machine.memory")
        if isinstance(self.gpus, int) and not 0 <= self.gpus <= GPUS_MAX:
            raise InvalidConfig(f"machine.gpus must be 0 to {GPUS_MAX:,}, not {self.gpus}")
        if isinstance(self.gpus, list) and len(set(map(str, self.gpus))) < len(self.gpus):
            raise InvalidConfig(f"machine.gpus names a device twice: {self.gpus}")
