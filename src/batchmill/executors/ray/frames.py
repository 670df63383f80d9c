"""What the owner and its Ray driver say to each other. Messages of workers travel in it as bytes that nobody opens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import msgspec
from msgspec import Struct

from batchmill.types.cluster import ClusterNode
from batchmill.types.connectors import Storage
from batchmill.wire.messages import MESSAGE_BYTES_MAX, StoredFile

FRAME_BYTES_MAX = 2 * MESSAGE_BYTES_MAX
LENGTH_BYTES = 4
ITEM_BYTES = 8 * 1024 * 1024  # messages that travel together; a longer one travels alone
BEAT_S = 2.0  # between two beats of the driver
PIECE_BYTES = 96 * 1024  # of what an actor yields: over 100 KiB it would need room in the object store of its node
MORE, LAST = b"more", b"last"  # begin the pieces of a longer item; as a length, each is beyond that of any message
EXITED = b"exited"  # begins the last item of a worker, before its exit code
KILLED, LOST = -9, -1  # exit codes; lost: its node or the cluster has gone, or will go


class Connect(Struct, frozen=True, tag="connect"):
    """Owner: reach this cluster. The first frame."""

    address: str  # "local": start a cluster on this machine
    cpus: int | None = None  # of a local cluster; None: all cores


class Placement(Struct, frozen=True):
    """What Ray reserves for one worker."""

    cpus: float = 1.0
    gpus: int | None = None  # None: `gpus_by_flags`, if the cluster has any GPU
    gpus_by_flags: int = 0
    memory_bytes: int = 0
    resources: dict[str, float] = {}


class Launch(Struct, frozen=True, tag="launch"):
    """Owner: start an actor."""

    worker: int
    placement: Placement
    order: bytes  # of `WorkerOrder`


class NodeStore(Struct, frozen=True):
    """The object store that holds what the data directory holds, for nodes that do not see that."""

    storage: Storage
    cache: str  # `cluster.cache`
    cache_bytes: int
    data_dir: str


class NodeOrder(NodeStore, frozen=True):
    """… and what a worker's `Start` names of it."""

    files: list[StoredFile] = []


class WorkerOrder(Struct, frozen=True):
    """What an actor gets: the worker's `Start`, and what it needs of its node."""

    start: bytes  # a packed `Start`
    engine: str
    log: str
    probe: str  # a file in the data directory that every node must see …
    probe_text: str  # … with this content
    version: str  # of the owner's batchmill
    environment: dict[str, str] = {}
    node: NodeOrder | None = None  # None: it sees the data directory

    def __repr__(self) -> str:  # without secrets
        return f"WorkerOrder({self.engine})"


class Collect(Struct, frozen=True, tag="collect"):
    """Owner: bring what a dead worker left on its node."""

    worker: int
    node: str  # its id
    order: bytes  # of `CollectOrder`


class CollectOrder(Struct, frozen=True):
    url: str
    cache: str
    worker: str
    sizes: dict[str, dict[str, int]]  # job -> segment -> bytes of it that the owner has


class LeftSegment(Struct, frozen=True):
    """The end of a segment that is not in the store."""

    job: str
    name: str
    offset: int
    data: bytes


class Left(Struct, frozen=True):
    """What a worker left on its node, which the node has removed. Whatever runs there may have made it."""

    segments: list[LeftSegment] = []
    suspect: bytes | None = None  # the row that ran alone
    log: bytes = b""  # its end


class Deliver(Struct, frozen=True, tag="deliver"):
    """Owner: a message for a worker."""

    worker: int
    data: bytes


class Kill(Struct, frozen=True, tag="kill"):
    """Owner: kill this worker's actor."""

    worker: int


class RunTask(Struct, frozen=True, tag="run_task"):
    """Owner: run a piece of work on some node."""

    id: int
    order: bytes  # of `TaskOrder`
    term: str  # as `NodeWork.term`


class EndTask(Struct, frozen=True, tag="end_task"):
    """Owner: end it; there is no reply."""

    id: int


class TaskOrder(Struct, frozen=True):
    """What a task gets on its node."""

    target: str
    order: bytes
    files: list[StoredFile]
    node: NodeStore
    version: str  # of the owner's batchmill

    def __repr__(self) -> str:  # without credentials
        return f"TaskOrder({self.target})"


class TaskReply(Struct, frozen=True):
    """What a task returns. Whatever runs on its node may have made it."""

    answer: bytes = b""
    flaw: str = ""  # why there is no answer


class Inspect(Struct, frozen=True, tag="inspect"):
    """Owner: describe the cluster."""

    id: int
    probe: str
    probe_text: str
    node: NodeStore | None = None  # look at the store instead of the probe


class Connected(Struct, frozen=True, tag="connected"):
    """Driver: it has reached the cluster. `is_local`: it has started it. `demands_token`: others are refused."""

    address: str
    ray: str
    python: str
    batchmill: str
    is_local: bool
    demands_token: bool
    has_tls: bool


class Beat(Struct, frozen=True, tag="beat"):
    """Driver: it runs."""


class Item(Struct, frozen=True, tag="item"):
    """Driver: messages of a worker, each with its length before it."""

    worker: int
    data: bytes


class Waits(Struct, frozen=True, tag="waits"):
    """Driver: why a worker has not started. Empty: its actor runs."""

    worker: int
    why: str


class Exited(Struct, frozen=True, tag="exited"):
    """Driver: a worker's actor has ended. `is_lost`: its node or the cluster went away, it is no fault of its own."""

    worker: int
    code: int
    is_lost: bool = False
    why: str = ""
    node: str = ""  # id
    setup_flaw: str = ""  # its node cannot make an actor of batchmill's: it has none, or another one
    ending: str = ""  # how its process ended, if it has no exit code
    last_words: str = ""  # what it wrote before it had a log


class Collected(Struct, frozen=True, tag="collected"):
    """Driver: what a dead worker left: a packed `Left`, or why it could not be brought."""

    worker: int
    left: bytes = b""
    why: str = ""


class TaskEnded(Struct, frozen=True, tag="task_ended"):
    """Driver: a task has ended: with a packed `TaskReply`, or why without one."""

    id: int
    reply: bytes = b""
    why: str = ""
    is_lost: bool = False  # its process or node went away


class Inspected(Struct, frozen=True, tag="inspected"):
    """Driver: the cluster, and on which node each worker runs."""

    id: int
    nodes: list[ClusterNode] = []
    workers: dict[int, str] = {}  # worker -> id of its node
    flaw: str = ""


Command = Connect | Launch | Deliver | Kill | Inspect | Collect | RunTask | EndTask
Event = Connected | Beat | Item | Waits | Exited | Inspected | Collected | TaskEnded

_encoder = msgspec.msgpack.Encoder()
commands = msgspec.msgpack.Decoder(Command)
events = msgspec.msgpack.Decoder(Event)
orders = msgspec.msgpack.Decoder(WorkerOrder)
collect_orders = msgspec.msgpack.Decoder(CollectOrder)
node_stores = msgspec.msgpack.Decoder(NodeStore)
task_orders = msgspec.msgpack.Decoder(TaskOrder)
task_replies = msgspec.msgpack.Decoder(TaskReply)
lefts = msgspec.msgpack.Decoder(Left)


def encode(frame: Struct) -> bytes:
    return _encoder.encode(frame)


def pack(frame: Struct) -> bytes:
    """A frame with its length before it."""
    data = _encoder.encode(frame)
    assert len(data) <= FRAME_BYTES_MAX, f"a frame of {len(data)} bytes"
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


async def read_events(reader: asyncio.StreamReader) -> AsyncIterator[Struct]:
    """The driver's frames. Raises: ConnectionError."""
    while True:
        try:
            size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
            if size > FRAME_BYTES_MAX:
                raise ConnectionError(f"a frame of {size} bytes from the driver")
            data = await reader.readexactly(size)
        except asyncio.IncompleteReadError:
            return
        yield events.decode(data)


def join(messages: list[bytes]) -> bytes:
    """An item: messages, each with its length before it."""
    return b"".join([piece for each in messages for piece in (len(each).to_bytes(LENGTH_BYTES, "little"), each)])


def split(item: bytes) -> list[memoryview]:
    """The messages of an item. Raises: ConnectionError if it is no item."""
    view, at, found = memoryview(item), 0, []
    while at < len(view):
        end = at + LENGTH_BYTES + int.from_bytes(view[at : at + LENGTH_BYTES], "little")
        if end > len(view):
            raise ConnectionError("an item of a worker is cut off")
        found.append(view[at + LENGTH_BYTES : end])
        at = end
    return found


def cut(item: bytes) -> Iterator[bytes]:
    """What an actor yields for an item: its pieces, or itself if it is short."""
    if len(item) <= PIECE_BYTES:
        yield item
        return
    step = PIECE_BYTES - len(MORE)
    for at in range(0, len(item), step):
        yield (MORE if at + step < len(item) else LAST) + item[at : at + step]


class BadPiece(Exception):
    """An actor yielded what is no piece of an item."""


class Pieces:
    """Joins the pieces of an item."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size_bytes = 0

    def take(self, piece: bytes) -> bytes | None:
        """The item, once it is whole. Raises: BadPiece: nothing on a node is trusted."""
        if not piece.startswith((MORE, LAST)):
            if self._pieces:
                raise BadPiece("a piece of an item is missing")
            return piece
        self._pieces.append(piece[len(MORE) :])
        self._size_bytes += len(piece)
        if self._size_bytes > FRAME_BYTES_MAX - PIECE_BYTES:
            raise BadPiece(f"an item has more than {FRAME_BYTES_MAX - PIECE_BYTES} bytes")
        if piece.startswith(MORE):
            return None
        item = b"".join(self._pieces)
        self._pieces, self._size_bytes = [], 0
        return item
