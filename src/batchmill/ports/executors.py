"""What starts workers, on this machine or on a cluster, and what they get."""

# pyright: reportReturnType=false
# The body of a protocol's method is its docstring.

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from msgspec import Struct

from batchmill.owner_term import PrefixTerm
from batchmill.types import ModelSpec, Provision
from batchmill.types.cluster import ClusterView, NodeWork

if TYPE_CHECKING:
    from batchmill.wire.messages import Start, ToOwner


class WorkerHandle(Protocol):
    """A worker process, for its owner. The messages are those of `wire.messages`."""

    @property
    def pid(self) -> int: ...

    def send(self, message: Struct) -> None:
        """Queue a message; never waits, and does nothing if the worker has exited."""

    def messages(self) -> AsyncIterator[ToOwner]:
        """Yield the worker's messages until it exits."""

    def is_frozen(self) -> bool:
        """Whether a signal has stopped it; it sends nothing until it is continued."""

    def kill(self) -> None:
        """Kill it at once."""

    async def wait(self) -> int:
        """Wait for its exit code, or minus the signal that ended it."""


@runtime_checkable
class PlacedHandle(Protocol):
    """A worker that a cluster places on one of its nodes."""

    waits: str  # why it has not started: the cluster is away, or has no room; empty: it has
    is_lost: bool  # it ended because its node or the cluster went away
    ending: str  # how it ended, if it has no exit code


class Provisions(Protocol):
    """Makes the provisions of workers: all that they get besides their model."""

    @property
    def storage_term(self) -> PrefixTerm:
        """How long workers may write to their object store."""

    async def of(self, model: ModelSpec) -> Provision:
        """Make the provision of a worker of this model. Raises: ModelFailed, naming a missing secret."""


class Executor(Protocol):
    """Starts workers."""

    async def start(self, start: Start) -> WorkerHandle:
        """Start a worker and send it `start`."""

    def sweep(self) -> None:
        """Kill the workers that a dead owner left behind."""


class NodeTasks(Protocol):
    """Runs pieces of a job's work on the nodes of a cluster, beside its workers."""

    at_once: int  # pieces; more wait
    store: str  # URL of the object store that nodes read and write

    async def run(self, work: NodeWork, *, project: str = "") -> bytes:
        """What the work returns: whatever runs on the node may have made it. Cancelling ends the work.

        Raises: Unavailable (`node_task_lost`) if its process or its node went away, another try may help; Unavailable
        (`cluster_unavailable`); BatchmillError (`node_task_failed`).
        """


@runtime_checkable
class ClusterExecutor(Protocol):
    """An executor whose workers run on a cluster."""

    tasks: NodeTasks | None  # None: nodes read and write no object store

    @property
    def is_local(self) -> bool:
        """Whether its nodes are this machine. False until that is known."""

    async def view(self, *, brief: bool = False) -> ClusterView:
        """The cluster, what runs there and what waits. `brief`: without asking it."""
