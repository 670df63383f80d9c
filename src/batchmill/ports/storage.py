"""Where outcomes lie: sequences of blocks, and the objects of a store."""

# pyright: reportReturnType=false
# The body of a protocol's method is its docstring.

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from batchmill.types import SegmentRef


class SegmentSink(Protocol):
    """Takes a worker's finished blocks of one job. An OSError is final: nothing more can be appended.

    Concurrency: `sync` may run in a thread while another thread appends.
    """

    roll: int  # the number of the last segment; a later sink of the same job and worker goes on behind it

    @property
    def commit_delay_s(self) -> float:
        """How long appended blocks may wait for `sync` and their commit."""

    def append(self, blocks: bytes) -> SegmentRef:
        """Take whole blocks of one lease, and say where they will be. From now on they outlive this process, unless
        their commit has to carry them: then it follows within `commit_delay_s`. Raises: OSError.
        """

    def sync(self) -> None:
        """Return once earlier appends are durable, but for those that a commit carries. Raises: OSError."""

    def carried(self, ref: SegmentRef) -> bytes:
        """The blocks of a range that its commit must carry; empty if they are durable where `ref` says."""

    def acknowledge(self, ref: SegmentRef) -> None:
        """The owner has decided on the commit of this range: it is stored, or will never count."""

    def close(self) -> None:
        """Sync, and release what is open. Carried blocks stay known until they are acknowledged. Raises: OSError."""


class SegmentSource(Protocol):
    """Reads the segments of one job. All methods raise FileNotFoundError for a segment that is not there, and OSError.

    Concurrency: one thread at a time.
    """

    def names(self, worker: str = "") -> list[str]:
        """The segments that may hold blocks which no commit names, of one worker or of all; in order."""

    def size(self, name: str) -> int: ...

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Bytes of a segment; fewer only at its end."""

    def sync(self, name: str) -> None:
        """Make durable what a worker that has died wrote."""

    def where(self, name: str) -> str:
        """The place of a segment, for people. It need not exist."""

    def close(self) -> None:
        """Release what is open. Safe to call twice."""


class Objects(Protocol):
    """The objects below one address of an object store, by names in it. Concurrency: any thread.

    Raises, everywhere: StorageFailed if the store cannot be reached, refuses the credentials, or misses an object.
    """

    def put(self, name: str, data: bytes) -> None:
        """Create an object. Raises: StorageFailed if one of this name exists with other bytes."""

    def get(self, name: str) -> bytes: ...

    def list(self, prefix: str) -> Iterable[tuple[str, int]]:
        """The names that begin with `prefix`, with the size of each."""

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that do not exist are no error."""
