"""What `batchmill doctor` says of a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from batchmill import __version__
from batchmill.executors.ray.frames import Connected
from batchmill.types.cluster import Check, ClusterNode

CLOCK_S_MAX = 2.0  # between a node and the owner's machine
OPEN_CLUSTER = (
    "the cluster takes everyone who reaches it: it demands no token or has no TLS, so no secret is sent to a worker "
    "there. "
    "Set RAY_AUTH_MODE=token and RAY_USE_TLS=1 on every node and here, or say `trusted_network = true` in [cluster] "
    "if nobody else reaches its network"
)


def checks(
    connected: Connected, nodes: Sequence[ClusterNode], data_dir: Path, *, trusted: bool, store: str | None = None
) -> list[Check]:
    """The rows of a cluster that was reached. Args: store: the URL that its nodes use instead of the data directory."""
    silent = [node for node in nodes if node.flaw]
    heard = [node for node in nodes if not node.flaw]
    is_closed = connected.is_local or (connected.demands_token and connected.has_tls)
    clocks = [f"{node.address} is {node.clock_offset_s:+.1f} s off" for node in heard
              if abs(node.clock_offset_s) > CLOCK_S_MAX]  # fmt: skip
    return [
        Check("reachable", True, f"{len(nodes)} node{'s' * (len(nodes) != 1)} at {connected.address}"),
        Check("nodes reply", not silent, "; ".join(f"{each.address}: {each.flaw}" for each in silent) or "all"),
        _same("Ray", connected.ray, [(each.address, each.ray) for each in heard]),
        _same("Python", connected.python, [(each.address, each.python) for each in heard]),
        _same("batchmill", __version__, [(each.address, each.batchmill) for each in heard]),
        Check("authentication", is_closed or trusted, _authentication(connected, trusted=trusted)),
        Check("clocks", not clocks, f"{'; '.join(clocks)}: run NTP on the nodes" if clocks else "within 2 s"),
        _shared_folder(heard, data_dir) if store is None else _shared_store(heard, store),
    ]


def _shared_folder(nodes: Sequence[ClusterNode], data_dir: Path) -> Check:
    blind = [node.address for node in nodes if not node.sees_data]
    flaw = f"{', '.join(blind)} do not see {data_dir}: mount the same folder at the same path, or set storage.objects"
    return Check("shared folder", not blind, flaw if blind else f"every node sees {data_dir}")


def _shared_store(nodes: Sequence[ClusterNode], store: str) -> Check:
    flaws = [f"{node.address}: {node.store_flaw}" for node in nodes if node.store_flaw]
    way_out = (
        "give the nodes credentials that read and write there (AWS_* in Ray's environment, or their machine's role)"
    )
    message = f"{'; '.join(flaws)}; {way_out}" if flaws else f"every node reads and writes {store}"
    return Check("object store on nodes", not flaws, message)


def _authentication(connected: Connected, *, trusted: bool) -> str:
    if connected.is_local:
        return "the cluster was started here, with a token of its own"
    if connected.demands_token and connected.has_tls:
        return "token and TLS"
    return "none is needed: cluster.trusted_network" if trusted else OPEN_CLUSTER


def _same(what: str, ours: str, theirs: Sequence[tuple[str, str]]) -> Check:
    others = [f"{address} has {version}" for address, version in theirs if version != ours]
    text = f"{'; '.join(others)} and this machine {ours}: install the same version" if others else ours
    return Check(f"version of {what}", not others, text)
