"""The GPUs of this machine: which are there, and which of them models may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from batchmill.errors import InvalidConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"
DEALT = "BATCHMILL_GPUS"  # the ids of a worker's own devices, with commas between; not set: nobody deals them


def visible(env: Mapping[str, str]) -> list[str]:
    """The ids of those that a process with this environment sees."""
    visible_devices = env.get(VISIBLE)
    if visible_devices is not None:
        return [name.strip() for name in visible_devices.split(",") if name.strip()]
    paths = Path("/dev").glob("nvidia[0-9]*")
    return [str(number) for number in sorted(int(path.name[6:]) for path in paths if path.name[6:].isdecimal())]


def shared(devices: int | Sequence[int | str] | None, env: Mapping[str, str]) -> list[str] | None:
    """The ids of those that models share, given what `[machine]` says. None: nobody deals them.

    Raises: InvalidConfig where more are told than are visible.
    """
    there = visible(env)
    if devices is None:  # what another maker's driver shows has no ids that we know
        return None if not there and Path("/dev/kfd").exists() else there
    if isinstance(devices, int):
        if there and devices > len(there):
            raise InvalidConfig(f"machine.gpus is {devices} and {len(there)} are visible: {', '.join(there)}")
        return there[:devices] if there else [str(number) for number in range(devices)]
    return [str(each) for each in devices]
