"""The GPUs of this machine: which are there, and which of them models may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from batchmill.errors import InvalidConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"
DEALT = "BATCHMILL_GPUS"  # the ids of a worker's own devices, with commas between; not set: nobody deals them


def visible(env: Mapping[str, str]) -> list[str]:
    """The ids of those that a process with this environment sees."""
    told = env.get(VISIBLE)
    if told is not None:
        return [name.strip() for name in told.split(",") if name.strip()]
    paths = Path("/dev").glob("nvidia[0-9]*")
    return [str(number) for number in sorted(int(path.name[6:]) for path in paths if path.name[6:].isdecimal())]


def shared(told: int | Sequence[int | str] | None, env: Mapping[str, str]) -> list[str] | None:
    """The ids of those that models share, given what `[machine]` says. None: nobody deals them.

    Raises: InvalidConfig where more are told than are visible.
    """
    there = visible(env)
    if told is None:  # what another maker's driver shows has no ids that we know
        return None if not there and Path("/dev/kfd").exists() else there
    if isinstance(told, int):
        if there and told > len(there):
            raise InvalidConfig(f"machine.gpus is {told} and {len(there)} are visible: {', '.join(there)}")
        return there[:told] if there else [str(number) for number in range(told)]
    return [str(each) for each in told]
