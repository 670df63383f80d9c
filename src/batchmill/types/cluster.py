"""Where workers run: `[cluster]` of the configuration, and the view of a cluster."""

from __future__ import annotations

import re

from msgspec import Struct

from batchmill.errors import InvalidConfig

EXECUTORS = ("ray",)
_ADDRESS = re.compile(r"auto|local|[A-Za-z0-9_.\-\[\]:]+:(?P<port>\d{1,5})", re.ASCII)
PORT_MAX = 65_535
SHOWN_CHARS = 80


class ClusterEntry(Struct, frozen=True):
    """`[cluster]`. `executor` None: workers are child processes of this machine's owner."""

    executor: str | None = None
    address: str = "auto"  # of Ray's head; auto: of the cluster that this machine is a node of; local: start one here
    python: str | None = None  # interpreter with `batchmill[ray]` for the driver; None: batchmill's own
    trusted_network: bool = False  # nobody else reaches the cluster: secrets are sent there without token and TLS
    cache: str = "~/.cache/batchmill"  # with [storage] objects: a folder of each node, for copies of objects

    def check(self) -> None:
        """Raises: InvalidConfig for a value that nobody could use."""
        if self.executor is not None and self.executor not in EXECUTORS:
            raise InvalidConfig(
                f'cluster.executor is "ray", not {self.executor[:SHOWN_CHARS]!r}; '
                "leave it out for workers on this machine"
            )
        if not self.cache.startswith(("/", "~/")) or ".." in self.cache.split("/"):
            raise InvalidConfig(
                f'cluster.cache is an absolute path or begins with "~/", not {self.cache[:SHOWN_CHARS]!r}'
            )
        if self.address.startswith("ray://"):
            raise InvalidConfig(
                f"cluster.address: {self.address[:SHOWN_CHARS]!r} is an address of Ray's client, which cannot stream; "
                'give "HOST:6379" of the head instead'
            )
        found = _ADDRESS.fullmatch(self.address)
        if found is None or int(found["port"] or 0) > PORT_MAX:
            raise InvalidConfig(
                f'cluster.address is "auto", "local" or "HOST:6379" of the head, not {self.address[:SHOWN_CHARS]!r}'
            )


class ClusterNode(Struct, frozen=True):
    """A node of the cluster. Versions are empty, and `flaw` says why, where it did not reply."""

    id: str
    address: str
    total: dict[str, float] = {}  # CPU, GPU, memory (bytes) and custom resources
    free: dict[str, float] = {}
    is_draining: bool = False
    ray: str = ""
    python: str = ""
    batchmill: str = ""
    clock_offset_s: float = 0.0  # against this machine
    sees_data: bool = False  # the data directory
    store_flaw: str = ""  # with [storage] objects: why the node cannot use the store, or its cache
    flaw: str = ""


class ClusterWorker(Struct, frozen=True):
    """A worker, on its node or on its way there."""

    model: str
    replica: int
    node: str = ""  # id; empty: it waits
    waits: str = ""


TASK_LOST, TASK_FAILED = "node_task_lost", "node_task_failed"


class NodeWork(Struct, frozen=True):
    """A piece of a job's work for any node of a cluster, which sees nothing of the data directory."""

    target: str  # MODULE:FUNCTION of batchmill, which takes `order` and a `NodePlace`, and returns bytes
    order: bytes
    paths: list[str]  # of files and folders of the data directory that it reads: they are in the object store
    term: str = ""  # see `Term.path`: it changes objects within it, and is ended with it


class NodePlace(Struct, frozen=True):
    """What a piece of work has on its node."""

    moved: dict[str, str]  # path in the data directory -> where it is here
    scratch: str  # an empty folder of its own
    store: str  # URL of the object store that holds the segments
    term: str  # see `Term.path`: how long it may change objects


class Check(Struct, frozen=True):
    """One row of `batchmill doctor`."""

    name: str
    is_ok: bool
    message: str  # with the way out, if it is not


class ClusterView(Struct, frozen=True):
    """The cluster as its owner sees it."""

    address: str
    nodes: list[ClusterNode] = []
    workers: list[ClusterWorker] = []
    checks: list[Check] = []
