"""A worker as its pool sees it: what it holds, and who hears its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from batchmill.errors import BatchmillError
from batchmill.jobs.claims import Weight
from batchmill.ports import WorkerHandle
from batchmill.types import Ask, EngineStats, LiveHead, Provision
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.messages import LIVE_ASKS_BYTES, Abandon, Answer, Answered, Asks, Chunk, Drain, Head, Provide

JOBS_OPEN_MAX = 64  # at one worker: each has a file open there, and a place among those whose turn it may be
JOBS_OPEN_PROJECT_MAX = 48  # of one project: a worker has room for the jobs of others

# None: the answer is complete. An Ask has one Answer, or an error.
Hear = Callable[[Answer | LiveHead | bytes | Exception | None], None]


class PoolWorker:
    """A worker and what it holds."""

    def __init__(
        self, name: str, home: Path, handle: WorkerHandle, provision: Provision = Provision(), replica: int = 0
    ) -> None:
        self.name, self.home, self.handle, self.provision, self.replica = name, home, handle, provision, replica
        self.is_leaving = False  # it finishes what it has, and ends
        self.is_ready = False
        self.is_ended = False  # we have killed it: its end is nobody's fault
        self.storage_error = ""  # why it cannot write what it finishes: its end is no row's fault
        self.wants: set[str] = set()  # jobs of which it has room for one more grant
        self.weights: dict[str, Weight] = {}  # job -> what it was told of it
        self.calls: dict[int, Hear] = {}  # live request -> who hears its answer
        self.opened: dict[str, str] = {}  # jobs it was told of and may get grants of, and their projects
        self.revoked: set[str] = set()  # jobs of which it may still run what it had begun
        self.stats = EngineStats()
        self.heard = 0.0
        self._asks: list[Ask] = []  # of this turn of the loop: they go in one message

    def drain(self) -> None:
        """Let it finish its rows and live requests, and end. It is given nothing more."""
        self.is_leaving, self.is_ready = True, False
        self._send_asks()
        self.handle.send(Drain())

    def end(self) -> None:
        """Kill it because we want it gone."""
        self.is_ended = True
        self.handle.kill()

    def provide(self, provision: Provision) -> None:
        """Give it the secrets of now, if it has others."""
        if provision != self.provision:
            self.provision = provision
            self.handle.send(Provide(provision))

    def has_room(self, job: JobSpec) -> bool:
        """It asked for more of this job, or has none of it and not too many others."""
        if job.id in self.wants:
            return True
        if job.id in self.opened or len(self.opened) >= JOBS_OPEN_MAX:
            return False
        is_crowded = len(self.opened) >= JOBS_OPEN_PROJECT_MAX
        return not is_crowded or list(self.opened.values()).count(job.project) < JOBS_OPEN_PROJECT_MAX

    def close(self, job_id: str) -> None:
        """It gets no more of this job."""
        self.opened.pop(job_id, None)
        self.wants.discard(job_id)
        self.weights.pop(job_id, None)

    def hear(self, message: Head | Chunk | Answered) -> None:
        """Pass on a piece of an answer; nobody hears one that was abandoned."""
        match message:
            case Head(id_, piece) | Chunk(id_, piece):
                hear = self.calls.get(id_)
            case Answered(id_, raised):
                hear, piece = self.calls.pop(id_, None), None if raised is None else raised.error()
        if hear is not None:
            hear(piece)

    def ask(self, ask: Ask, hear: Hear) -> None:
        """Have it answer a call, with all the others of this turn of the loop."""
        self.calls[ask.id] = hear
        if not self._asks:
            asyncio.get_running_loop().call_soon(self._send_asks)
        self._asks.append(ask)

    def _send_asks(self) -> None:
        asks, self._asks = self._asks, []
        begin = size = 0
        for at, ask in enumerate(asks):
            size += len(ask.body) + len(ask.head)
            if size > LIVE_ASKS_BYTES and at > begin:
                self.handle.send(Asks(asks[begin:at]))
                begin, size = at, len(ask.body) + len(ask.head)
        if asks:
            self.handle.send(Asks(asks[begin:]))

    def abandon(self, ask_id: int) -> None:
        """Nobody waits for this answer any more."""
        if self.calls.pop(ask_id, None) is not None:
            self._send_asks()
            self.handle.send(Abandon(ask_id))

    def answer(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            hear = self.calls.pop(answer.id, None)
            if hear is not None:
                hear(answer)

    def end_calls(self, error: BatchmillError) -> None:
        """It answers nothing any more."""
        calls, self.calls = self.calls, {}
        for hear in calls.values():
            hear(error)
