"""The GPUs of this machine: the visible ones, and the ones that models share. The cores of a worker on a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from batchmill.errors import InvalidConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"
CORES = "BATCHMILL_CORES"  # how many cores a worker on a cluster was given; unset if its model does not say
ASSIGNED = "BATCHMILL_GPUS"  # ids of the GPUs assigned to a worker, separated by commas; unset if GPUs are not assigned


def visible(env: Mapping[str, str]) -> list[str]:
    """The ids of the GPUs that a process with this environment sees."""
    visible_devices = env.get(VISIBLE)
    if visible_devices is not None:
        return [name.strip() for name in visible_devices.split(",") if name.strip()]
    paths = Path("/dev").glob("nvidia[0-9]*")
    return [str(number) for number in sorted(int(path.name[6:]) for path in paths if path.name[6:].isdecimal())]


def shared(devices: int | Sequence[int | str] | None, env: Mapping[str, str]) -> list[str] | None:
    """The ids of the GPUs that models share, from the setting in `[machine]`. None: GPUs are not assigned.

    Raises: InvalidConfig if the setting has more GPUs than are visible.
    """
    available = visible(env)
    if devices is None:  # AMD's driver shows no ids here
        return None if not available and Path("/dev/kfd").exists() else available
    if isinstance(devices, int):
        if available and devices > len(available):
            raise InvalidConfig(f"machine.gpus is {devices} and {len(available)} are visible: {', '.join(available)}")
        return available[:devices] if available else [str(number) for number in range(devices)]
    return [str(each) for each in devices]
