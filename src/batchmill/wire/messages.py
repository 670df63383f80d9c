"""The messages between the owner and its workers, and their framing: length-prefixed msgpack."""

from __future__ import annotations

import asyncio
import math
from array import array

import msgspec
from msgspec import Struct

from batchmill.types import (
    AdapterSet,
    CallStats,
    Commit,
    EngineStats,
    FunctionRequest,
    Lease,
    LiveHead,
    LiveRequest,
    MediaBounds,
    ModelSpec,
    Provision,
    ReplyRules,
    SegmentPlace,
    SegmentRef,
)
from batchmill.types.models import Charge, Poison, Suspect
from batchmill.wire.error_statuses import Raised
from batchmill.wire.rows.forms import OpenAIForm, TableForm

MESSAGE_BYTES_MAX = 64 * 1024 * 1024
GRANTS_REQUESTED_MAX = 8  # of one job, at once
LIVE_REQUESTS_BYTES = 32 * 1024 * 1024  # of the bodies in one message; a longer body is sent alone
LIVE_AHEAD_BYTES = 1024 * 1024  # of an answer that a worker sends ahead of its owner's FlowCredit


class StoredFile(Struct, frozen=True):
    """A file or folder of the owner's data directory that is kept in its object store."""

    path: str  # there
    object: str  # what the names of its objects begin with
    bytes: int


class Start(Struct, frozen=True, tag="start"):
    """Owner: host the engine of this model. The first message."""

    worker: str  # unique for all time: names this worker's segments
    model: ModelSpec
    home: str  # folder for logs and the engine's files
    replica: int = 0  # the number of this worker among the model's: engines that share devices use it
    provision: Provision = Provision()
    gpus: list[str] | None = None  # the devices of this worker; None: devices are not assigned
    poison: Poison = Poison()
    is_owned_for_a_time: bool = False  # begin nothing but while a Renewed is valid
    is_stored_for_a_time: bool = False  # put no object but while a Renewed is valid


class Open(Struct, frozen=True, tag="open"):
    """Owner: prepare for grants of this job; this is how its rows are read and written."""

    job: str
    identity: str
    form: OpenAIForm | TableForm
    dataset: str  # folder of the sealed dataset
    segments: SegmentPlace  # where to write outcomes to
    is_small: bool = False  # commits carry the outcomes
    adapters: AdapterSet = AdapterSet()
    project: str = ""
    stores: dict[str, str] = {}  # the variables that its object stores are reached with; not shown in any log
    inputs: list[str] = []  # local files that the dataset reads
    files: list[StoredFile] = []  # for a worker that does not see the data directory: what this message names of it
    replies: ReplyRules = ReplyRules()
    media: MediaBounds = MediaBounds()
    index: dict[str, bytes] = {}  # the files of `dataset`, by name, of a small job that is not unpacked
    moved: dict[str, str] = {}  # files or folders of the dataset -> where a worker that does not see them has them

    def __repr__(self) -> str:  # without the variables
        return f"Open({self.job})"


class Grant(Struct, frozen=True, tag="grant"):
    """Owner: run these rows under this lease.

    `positions` and `rows` are packed u32; they are empty if both count up from `position` and `row` without a gap.
    """

    lease: Lease
    seq: int
    base: int  # plan position that commits count from
    n: int
    position: int = 0
    row: int = 0
    positions: bytes = b""
    rows: bytes = b""
    isolated: bool = False  # run one row at a time, after noting its position: an earlier worker died on this shard
    quarantined: list[int] = []  # positions that killed too many workers: they become errors without running
    priority: int = 0  # of the job: rows of a higher priority go first
    share: float = 1.0  # the job's share of this worker, among jobs of the same priority
    row_cost: float = 1.0  # the expected cost of one row, in tokens if it has any
    notes: dict[str, bytes] = {}  # of the shard: see ports.engines.LeaseHandle
    is_over: bool = False  # the job ends: collect results that a provider has of these rows, and begin nothing
    over: str = ""  # why, if its rows do not go on elsewhere


class Ack(Struct, frozen=True, tag="ack"):
    """Owner: the result of a commit that carried blocks, which the worker holds until then, or that was refused.

    Other commits need no reply: each of them costs a worker on a cluster a call of its actor.
    """

    lease: Lease
    seq: int
    counted: bool
    ref: SegmentRef


class SetShare(Struct, frozen=True, tag="set_share"):
    """Owner: a job's priority or share has changed, also for rows that were granted before."""

    job: str
    priority: int
    share: float
    row_cost: float


class Allow(Struct, frozen=True, tag="allow"):
    """Owner: rows of this job may cost this much more. Before the first of these messages there is no budget."""

    job: str
    usd: float
    is_lean: bool = False  # return the unused part of each row's reservation at once
    is_reply: bool = False  # to a Spending that wants some: it is all that there is now


class FailRows(Struct, frozen=True, tag="fail_rows"):
    """Owner: stop retrying rows of this job: those that wait for a retry, and those that fail from now on."""

    job: str


class Revoke(Struct, frozen=True, tag="revoke"):
    """Owner: begin no more rows of this job. Rows in flight may finish; then send Released."""

    job: str
    is_over: bool = False  # the job ends without the remaining rows; otherwise it may be resumed
    over: str = ""  # as in Grant


class Noted(Struct, frozen=True, tag="noted"):
    """Owner: the result of a Note. `is_kept` False: another worker has the lease, or the note could not be written."""

    id: int
    is_kept: bool
    reason: str = ""  # a states.PauseReason, if it could not be written
    message: str = ""


class Provide(Struct, frozen=True, tag="provide"):
    """Owner: secrets have changed; use these from now on."""

    provision: Provision


class Learn(Struct, frozen=True, tag="learn"):
    """Owner: the known requests that killed engines of this model have changed."""

    poison: Poison


class AnswerLive(Struct, frozen=True, tag="answer_live"):
    """Owner: answer this live request, ahead of every row."""

    id: int
    request: LiveRequest
    files: list[StoredFile] = []  # as in Open


class FunctionRequests(Struct, frozen=True, tag="function_requests"):
    """Owner: answer these calls of a deployed function, in any order. They arrived in one turn of the owner's loop."""

    asks: list[FunctionRequest]


class Abandon(Struct, frozen=True, tag="abandon"):
    """Owner: the answer to this live request is not needed any more."""

    id: int


class FlowCredit(Struct, frozen=True, tag="flow_credit"):
    """Owner: this many more bytes of the answer were passed on. A worker sends at most LIVE_AHEAD_BYTES ahead."""

    id: int
    bytes: int


class Renewed(Struct, frozen=True, tag="renewed"):
    """Owner: when the Heartbeat of time `at` arrived, the database was its own for `left_s` more.

    The worker begins nothing after `at + left_s` of its own clock: by then, another process may be the owner. It puts
    no object after `at + storage_left_s`, or once there is a reason not to: see `owner_term.PrefixTerm`.
    """

    at: float
    left_s: float
    storage_left_s: float = math.inf
    storage_refusal: str = ""


class Drain(Struct, frozen=True, tag="drain"):
    """Owner: no more grants will come; record what is in flight, then exit."""


class Ready(Struct, frozen=True, tag="ready"):
    """Worker: the engine has started."""

    pid: int


class RequestRows(Struct, frozen=True, tag="request_rows"):
    """Worker: there is room for so many more grants of this job. There is always room for a job's first grant."""

    job: str
    grants: int = 1  # GRANTS_REQUESTED_MAX at most


class Record(Struct, frozen=True, tag="commit"):
    """Worker: these outcomes are durable; count them."""

    commit: Commit


class Note(Struct, frozen=True, tag="note"):
    """Worker: store this note with the lease, and confirm it with Noted. Empty `data`: delete the note."""

    id: int  # of this worker's notes
    lease: Lease
    key: str
    data: bytes


class Spending(Struct, frozen=True, tag="spending"):
    """Worker: the spending here of a job with a budget."""

    job: str
    returned: float  # USD of its allowance that it returns
    needs: float  # USD that the next row may cost, while it waits for them; 0: no row waits
    reserved: int  # rows in flight
    done: int = 0  # rows that ended here, counted or not
    beyond: float = 0.0  # USD that rows without a limit may cost above their reservation, estimated from earlier rows
    allowances_seen: int = 0  # Allow messages received before this message
    takes_all: bool = False  # the whole allowance is handed over together
    wants: float = 0.0  # USD for rows that are asked for again: the reply has what there is of it now


class LeaseReleased(Struct, frozen=True, tag="lease_released"):
    """Worker: all outcomes of this lease have been sent, and no more will come; its other rows stay undone."""

    lease: Lease


class Released(Struct, frozen=True, tag="released"):
    """Worker: after a Revoke, no row of this job is in flight here, and all outcomes have been sent."""

    job: str


class Heartbeat(Struct, frozen=True, tag="heartbeat"):
    """Worker: it is alive; the statistics of its engine."""

    stats: EngineStats
    at: float = 0.0  # of the worker's clock, see `owner_term`


class Failed(Struct, frozen=True, tag="failed"):
    """Worker: it cannot go on. `job` names the only affected job; None: all jobs of the engine."""

    code: str
    message: str
    reason: str  # a states.PauseReason
    job: str | None = None


class StorageBroken(Struct, frozen=True, tag="storage_broken"):
    """Worker: writing outcomes has failed. It ends; another worker may be able to write."""

    why: str


class EngineDied(Struct, frozen=True, tag="engine_died"):
    """Worker: the engine's server died, and is restarted."""

    at: float  # seconds since the epoch
    how: str
    in_flight: dict[str, int]  # project -> its requests that were in flight


class Suspected(Struct, frozen=True, tag="suspected"):
    """Worker: the engine died with only this request in flight."""

    suspect: Suspect


class Charged(Struct, frozen=True, tag="charged"):
    """Worker: a death of the engine is charged to this project, or the charge is taken back."""

    charge: Charge
    is_taken_back: bool = False


class Head(Struct, frozen=True, tag="head"):
    """Worker: the answer to a live request begins."""

    id: int
    head: LiveHead


class ReplyChunk(Struct, frozen=True, tag="reply_chunk"):
    """Worker: a piece of the answer's body."""

    id: int
    data: bytes


class Answered(Struct, frozen=True, tag="answered"):
    """Worker: the answer is complete; with `raised`, it failed."""

    id: int
    raised: Raised | None = None


class FunctionReply(Struct, frozen=True, gc=False):
    """The reply of a function to a FunctionRequest, in the request's form, or its error."""

    id: int
    body: bytes = b""  # in the owner, a large one is a memoryview
    head: bytes = b""  # the form's header beside the body
    raised: Raised | None = None
    pieces: list[bytes] = []  # of a large body that a worker has not joined
    place: tuple[int, int] | None = None  # begin and size of a large body in shared memory, on its way

    @property
    def size_bytes(self) -> int:
        return len(self.body) + sum(map(len, self.pieces)) + len(self.head)

    def joined(self) -> bytes:
        """The body in one piece, in memory of its own."""
        return b"".join(self.pieces) if self.pieces else bytes(self.body)


class Answers(Struct, frozen=True, tag="answers"):
    """Worker: answers that became ready together, and the statistics since the last of these messages."""

    answers: list[FunctionReply] = []
    stats: CallStats | None = None


ToWorker = (
    Start
    | Open
    | Grant
    | Ack
    | SetShare
    | Allow
    | FailRows
    | Revoke
    | Noted
    | Provide
    | Learn
    | AnswerLive
    | FunctionRequests
    | Abandon
    | FlowCredit
    | Renewed
    | Drain
)
ToOwner = (
    Ready
    | RequestRows
    | Record
    | Note
    | Spending
    | LeaseReleased
    | Released
    | Heartbeat
    | Failed
    | StorageBroken
    | EngineDied
    | Suspected
    | Charged
    | Head
    | ReplyChunk
    | Answered
    | Answers
)

_encoder = msgspec.msgpack.Encoder()
to_worker = msgspec.msgpack.Decoder(ToWorker)
to_owner = msgspec.msgpack.Decoder(ToOwner)


def encode(message: Struct) -> bytes:
    """Encode a message, without its length."""
    data = _encoder.encode(message)
    assert len(data) <= MESSAGE_BYTES_MAX, f"a message of {len(data)} bytes"
    return data


def pack(message: Struct) -> bytes:
    """Encode a message, with its length before it."""
    data = encode(message)
    return len(data).to_bytes(4, "little") + data


async def read(reader: asyncio.StreamReader) -> bytes | None:
    """Read the next message's bytes; None when the other side has closed."""
    try:
        length = int.from_bytes(await reader.readexactly(4), "little")
        if length > MESSAGE_BYTES_MAX:
            raise ConnectionError(f"a message of {length} bytes: the other side does not use this protocol")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError):
        return None  # BrokenPipeError is the error of a write, which the reader gets too


def pack_u32(numbers: list[int]) -> bytes:
    return array("I", numbers).tobytes()


def unpack_u32(data: bytes) -> array:
    numbers = array("I")
    numbers.frombytes(data)
    return numbers


def replace_rows(grant: Grant, pairs: list[tuple[int, int]]) -> Grant:
    """Return the grant with these (position, row) pairs."""
    return msgspec.structs.replace(
        grant,
        n=len(pairs),
        positions=pack_u32([position for position, _ in pairs]),
        rows=pack_u32([row for _, row in pairs]),
    )
