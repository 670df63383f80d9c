"""What the owner and its workers say to each other, and how a message travels: length-prefixed msgpack."""

from __future__ import annotations

import asyncio
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
    ModelSpec,
    Provision,
)
from batchmill.types.models import Charge, Poison, Suspect
from batchmill.wire.error_statuses import Raised
from batchmill.wire.forms import OpenAIForm, TableForm

MESSAGE_BYTES_MAX = 64 * 1024 * 1024
LIVE_ASKS_BYTES = 32 * 1024 * 1024  # of the bodies in one Asks; a longer one goes alone
LIVE_AHEAD_BYTES = 1024 * 1024  # of an answer that a worker sends before its owner says that they were handed on


class Start(Struct, frozen=True, tag="start"):
    """Owner: host the engine of this model. The first message."""

    worker: str  # unique for all time: names this worker's segments
    model: ModelSpec
    home: str  # folder for logs and whatever the engine leaves
    replica: int = 0  # which of the model's workers this is: engines that share devices tell them apart by it
    provision: Provision = Provision()
    gpus: list[str] | None = None  # the devices that are this worker's own; None: nobody deals them
    poison: Poison = Poison()


class Open(Struct, frozen=True, tag="open"):
    """Owner: grants of this job will come; this is how its rows are read and written."""

    job: str
    identity: str
    form: OpenAIForm | TableForm
    dataset: str  # folder of the sealed dataset
    segments: str  # folder to write outcomes to
    adapters: AdapterSet = AdapterSet()
    project: str = ""


class Grant(Struct, frozen=True, tag="grant"):
    """Owner: run these rows under this lease.

    `positions` and `rows` are packed u32; empty where both run on from `position` and `row` without a gap.
    """

    lease: Lease
    seq: int
    base: int  # plan position that commits count from
    n: int
    position: int = 0
    row: int = 0
    positions: bytes = b""
    rows: bytes = b""
    isolated: bool = False  # one row at a time, its position noted first: an earlier worker died on this shard
    quarantined: list[int] = []  # positions that killed too many workers: they become errors unrun
    priority: int = 0  # of the job: rows of a higher one go first
    share: float = 1.0  # of this worker that the job has a claim to, beside others of its priority
    row_cost: float = 1.0  # what one of its rows is reckoned at, in tokens where it has any
    notes: dict[str, bytes] = {}  # of the shard: see ports.LeaseHandle
    is_over: bool = False  # the job ends: collect what a provider has of these rows, begin nothing


class Ack(Struct, frozen=True, tag="ack"):
    """Owner: what became of a commit."""

    lease: Lease
    seq: int
    counted: bool


class SetShare(Struct, frozen=True, tag="set_share"):
    """Owner: what a Grant said of its job has changed, also for rows that were granted before."""

    job: str
    priority: int
    share: float
    row_cost: float


class Allow(Struct, frozen=True, tag="allow"):
    """Owner: rows of this job may cost so much more; until a worker hears of a budget, there is none."""

    job: str
    usd: float
    is_lean: bool = False  # give back at once what rows leave of what they have reserved


class FailRows(Struct, frozen=True, tag="fail_rows"):
    """Owner: give up the rows of this job that have failed and wait, and those that fail from now on."""

    job: str


class Revoke(Struct, frozen=True, tag="revoke"):
    """Owner: begin no more rows of this job. Rows in flight may end; then comes Released."""

    job: str
    is_over: bool = False  # it ends without the rows that have not run; otherwise it goes on some day


class Noted(Struct, frozen=True, tag="noted"):
    """Owner: what became of a Note. `is_kept` False: the lease is another's, or it could not be written."""

    id: int
    is_kept: bool
    reason: str = ""  # a states.PauseReason, where it could not be written
    message: str = ""


class Provide(Struct, frozen=True, tag="provide"):
    """Owner: secrets have changed; use these from now on."""

    provision: Provision


class Learn(Struct, frozen=True, tag="learn"):
    """Owner: what is known of requests that engines of this model died of has changed."""

    poison: Poison


class AnswerLive(Struct, frozen=True, tag="answer_live"):
    """Owner: answer this live request, ahead of every row."""

    id: int
    request: LiveRequest


class Asks(Struct, frozen=True, tag="function_requests"):
    """Owner: answer these calls of a deployed function, in any order; as many as came in one turn of its loop."""

    asks: list[FunctionRequest]


class Abandon(Struct, frozen=True, tag="abandon"):
    """Owner: nobody waits for the answer to this live request any more."""

    id: int


class FlowCredit(Struct, frozen=True, tag="flow_credit"):
    """Owner: so many bytes more of this answer have been handed on. A worker sends only so far ahead of it."""

    id: int
    bytes: int


class Drain(Struct, frozen=True, tag="drain"):
    """Owner: no more grants will come; record what is in flight, then exit."""


class Ready(Struct, frozen=True, tag="ready"):
    """Worker: the engine has started."""

    pid: int


class RequestRows(Struct, frozen=True, tag="request_rows"):
    """Worker: there is room for one more grant of this job. For the first of a job there is always room."""

    job: str


class Record(Struct, frozen=True, tag="commit"):
    """Worker: these outcomes are durable; count them."""

    commit: Commit


class Note(Struct, frozen=True, tag="note"):
    """Worker: make this durable with the lease, and say so with Noted. Empty `data`: take the note back."""

    id: int  # of this worker's notes
    lease: Lease
    key: str
    data: bytes


class Spending(Struct, frozen=True, tag="spending"):
    """Worker: how a job with a budget stands here."""

    job: str
    returned: float  # USD of what it was allowed, which it does not keep
    needs: float  # USD that the next row may cost, while it waits for them; 0: none waits
    reserved: int  # rows in flight
    done: int = 0  # rows that ended here, counted or not
    beyond: float = 0.0  # USD that those without a bound may cost more than they have reserved, told from those before
    allowances_seen: int = 0  # Allow messages before it
    takes_all: bool = False  # what it is allowed is handed over together


class LeaseReleased(Struct, frozen=True, tag="lease_released"):
    """Worker: no more outcomes of this lease will come, and all there were have been sent; its rows stay undone."""

    lease: Lease


class Released(Struct, frozen=True, tag="released"):
    """Worker: after a Revoke, nothing of this job is in flight here and all of it has been sent."""

    job: str


class Heartbeat(Struct, frozen=True, tag="heartbeat"):
    """Worker: alive; what the engine is doing."""

    stats: EngineStats


class Failed(Struct, frozen=True, tag="failed"):
    """Worker: this cannot go on. `job` names the one job concerned; None: all that use the engine."""

    code: str
    message: str
    reason: str  # a states.PauseReason
    job: str | None = None


class StorageBroken(Struct, frozen=True, tag="storage_broken"):
    """Worker: what it writes to has failed. It ends, and another may write to another place of the disk."""

    why: str


class EngineDied(Struct, frozen=True, tag="engine_died"):
    """Worker: the server of its engine died, and is started again."""

    at: float  # seconds since the epoch
    how: str
    in_flight: dict[str, int]  # project -> its requests that were in flight


class Suspected(Struct, frozen=True, tag="suspected"):
    """Worker: it died with this request alone in flight."""

    suspect: Suspect


class Charged(Struct, frozen=True, tag="charged"):
    """Worker: a death is this project's; or it turned out not to be."""

    charge: Charge
    is_taken_back: bool = False


class Head(Struct, frozen=True, tag="head"):
    """Worker: the answer to a live request begins."""

    id: int
    head: LiveHead


class ReplyChunk(Struct, frozen=True, tag="reply_chunk"):
    """Worker: a piece of its body."""

    id: int
    data: bytes


class Answered(Struct, frozen=True, tag="answered"):
    """Worker: the answer is complete, or there is none and this is why."""

    id: int
    raised: Raised | None = None


class FunctionReply(Struct, frozen=True, gc=False):
    """What a function answered to an Ask, in the FunctionRequest's own form, or why it did not."""

    id: int
    body: bytes = b""
    head: bytes = b""  # what the form says beside the body
    raised: Raised | None = None


class Answers(Struct, frozen=True, tag="answers"):
    """Worker: answers that became ready together, and what has been counted since the last of these messages."""

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
    | Asks
    | Abandon
    | FlowCredit
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


def pack(message: Struct) -> bytes:
    """A message with its length before it."""
    data = _encoder.encode(message)
    assert len(data) <= MESSAGE_BYTES_MAX, f"a message of {len(data)} bytes"
    return len(data).to_bytes(4, "little") + data


async def read(reader: asyncio.StreamReader) -> bytes | None:
    """The next message's bytes; None when the other side has gone."""
    try:
        length = int.from_bytes(await reader.readexactly(4), "little")
        if length > MESSAGE_BYTES_MAX:
            raise ConnectionError(f"a message of {length} bytes: the other side does not speak this protocol")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError):
        return None  # the last of them is a write's, which the reader is told of too


def pack_u32(numbers: list[int]) -> bytes:
    return array("I", numbers).tobytes()


def unpack_u32(data: bytes) -> array:
    numbers = array("I")
    numbers.frombytes(data)
    return numbers


def replace_rows(grant: Grant, pairs: list[tuple[int, int]]) -> Grant:
    """The same grant over these (position, row) pairs."""
    return msgspec.structs.replace(
        grant,
        n=len(pairs),
        positions=pack_u32([position for position, _ in pairs]),
        rows=pack_u32([row for _, row in pairs]),
    )
