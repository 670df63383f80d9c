"""The resources of a machine and of replicas, as the configuration gives them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

from batchmill.errors import InvalidConfig
from batchmill.types.models import Needs, Scaling

REPLICAS_MAX = 1024
GPUS_MAX = CPUS_MAX = 1024
RESOURCE_MAX = 1_000_000
RAYS_OWN = frozenset({"CPU", "GPU", "memory", "object_store_memory"})
PARALLEL = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")
MEMORY_MAX = 2**50
SHOWN_CHARS = 40  # of an invalid value, in a message
RANGES = {
    "replicas_min": (0, REPLICAS_MAX),
    "replicas_max": (1, REPLICAS_MAX),
    "cooldown_s": (0, 365 * 86_400),
    "scale_up_requests": (1, 10**9),
    "gpus": (0, GPUS_MAX),
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([kmgt]?i?)b?", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def size_of(size: int | str, path: str = "a size") -> int:
    """Return the bytes of a number or a text like "24GiB". Raises: InvalidConfig, with `path`."""
    match = _SIZE.fullmatch(str(size).strip())
    size_bytes = int(float(match[1]) * _UNITS.get(match[2].lower(), 0)) if match is not None else 0
    if not 0 < size_bytes <= MEMORY_MAX:
        raise InvalidConfig(f'{path} must be a number of bytes or like "24GiB", not {str(size)[:SHOWN_CHARS]!r}')
    return size_bytes


def size_text(size: int) -> str:
    """Format bytes: 12 GiB, 1.5 GiB, 300 MiB."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if size >= factor:
            return f"{size / factor:.1f}".removesuffix(".0") + f" {unit}"
    return f"{size} bytes"


def gpus_by_flags(engine_args: Mapping[str, str | int | float | bool | None]) -> int:
    """GPUs of one server of a language model by its flags. The engine refuses values that are not numbers."""
    flags = {name.lstrip("-").replace("_", "-"): value for name, value in engine_args.items()}
    count = 1
    for name in PARALLEL:
        value = str(flags.get(name, 1))
        count *= max(1, int(value)) if value.isdecimal() else 1
    return count


class ReplicaEntry(Struct, frozen=True, kw_only=True):
    """The settings of `[models.NAME]` about replicas."""

    replicas_min: int | None = None
    replicas_max: int | None = None
    cooldown_s: float | None = None
    scale_up_requests: int | None = None
    memory: int | str | None = None
    gpus: int = 0
    cpus: float | None = None
    resources: dict[str, float] = {}

    @property
    def needs(self) -> Needs:
        """Return the resources of one replica."""
        return Needs(0 if self.memory is None else size_of(self.memory), self.gpus, self.cpus, self.resources)

    @property
    def scaling(self) -> Scaling | None:
        """Return the scaling; None if no setting of it is given."""
        fields = {name: getattr(self, name) for name in Scaling.__struct_fields__ if getattr(self, name) is not None}
        return Scaling(**{"replicas_max": max(1, fields.get("replicas_min", 0))} | fields) if fields else None

    def check(self, path: str) -> None:
        """Raises: InvalidConfig for a value out of range."""
        for name, (minimum, maximum) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not minimum <= value <= maximum:
                raise InvalidConfig(f"{path}.{name} must be {minimum} to {maximum:,}, not {value}")
        if self.memory is not None:
            size_of(self.memory, f"{path}.memory")
        if self.cpus is not None and not 0 <= self.cpus <= CPUS_MAX:
            raise InvalidConfig(f"{path}.cpus must be 0 to {CPUS_MAX:,}, not {self.cpus}")
        for name, amount in self.resources.items():
            if name in RAYS_OWN or not 0 < amount <= RESOURCE_MAX:
                raise InvalidConfig(
                    f"{path}.resources: {name[:SHOWN_CHARS]!r} = {amount}; it names a custom resource of the nodes, "
                    f"more than 0 and at most {RESOURCE_MAX:,}. CPUs, GPUs and memory are `cpus`, `gpus` and `memory`"
                )
        scaling = self.scaling
        if scaling is not None and scaling.replicas_min > scaling.replicas_max:
            raise InvalidConfig(
                f"{path}.replicas_min = {scaling.replicas_min} is more than replicas_max = {scaling.replicas_max}"
            )


class MachineEntry(Struct, frozen=True):
    """`[machine]`: the resources for the replicas of all models. None: no memory limit; all visible GPUs."""

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
            raise InvalidConfig(f"machine.gpus lists a device twice: {self.gpus}")
