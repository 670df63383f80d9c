"""Why Ray has not placed a worker, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchmill.executors.ray.frames import Placement
from batchmill.types.machines import size_text

NAMES = {"CPU": "CPU", "GPU": "GPU"}


def waits_for(needs: Placement, nodes: Sequence[Mapping[str, Any]], free: Mapping[str, Mapping[str, float]]) -> str:
    """What a worker that was not placed lacks: "needs 2 GPUs; the cluster has 1 free"."""
    wanted = {"CPU": needs.cpus, "GPU": needs.gpus or 0, "memory": needs.memory_bytes, **needs.resources}
    alive = [node for node in nodes if node["Alive"]]
    parts = []
    for name, amount in wanted.items():
        if not amount:
            continue
        largest = max((node["Resources"].get(name, 0) for node in alive), default=0)
        here = [free.get(node["NodeID"], {}).get(name, 0) for node in alive]
        if largest < amount:
            parts.append(f"needs {_text(name, amount)}; no node of the cluster has more than {_text(name, largest)}")
        elif max(here, default=0) < amount:
            where = "" if sum(here) < amount else f", at most {_count(name, max(here))} on one node"
            parts.append(f"needs {_text(name, amount)}; the cluster has {_count(name, sum(here))} free{where}")
    return "; ".join(parts) or "its actor is being started"


def _text(name: str, amount: float) -> str:
    if name == "memory":
        return size_text(int(amount)) + " of memory"
    if name in NAMES:
        return f"{amount:g} {NAMES[name]}" + ("" if amount == 1 else "s")
    return f"{amount:g} of {name!r}"


def _count(name: str, amount: float) -> str:
    return size_text(int(amount)) if name == "memory" else f"{amount:g}"
