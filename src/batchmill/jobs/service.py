"""JobService: the one door to jobs, in the process that owns the data directory. See `ports.Jobs` for its promises."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import msgspec
import sqlalchemy as sa

from batchmill.children.offload import Children
from batchmill.errors import BatchmillError, InvalidInput, InvalidTransition, StorageFull, UnknownName
from batchmill.jobs import (
    endings,
    job_records,
    orders,
    policies,
    publishing,
    shard_notes,
    submissions,
    views,
    waits,
)
from batchmill.jobs.adapters import NoAdapters
from batchmill.jobs.at_work import models_at_work, standstill_of, view_at_work
from batchmill.jobs.audit import AuditOrder
from batchmill.jobs.caretaker import Caretaker
from batchmill.jobs.commits import Books
from batchmill.jobs.deadlines import Deadlines
from batchmill.jobs.dispatcher import Dispatcher
from batchmill.jobs.drive import Drive, Tools
from batchmill.jobs.endings import EarlyEnd
from batchmill.jobs.entrance import Entrance
from batchmill.jobs.job_files import JobFiles, clear_unsealed, read_spec, sweep_orphans
from batchmill.jobs.ledger import Ledger
from batchmill.jobs.ledger_snapshot import Rebuilt
from batchmill.jobs.quarantine import Quarantine
from batchmill.jobs.retention import Retention, refuse_compacted
from batchmill.jobs.roster import Roster
from batchmill.jobs.waiting_jobs import WaitingJobs
from batchmill.models.provisions import NothingProvided
from batchmill.ports import Adapters, Clock, Executor, Live, Provisions
from batchmill.states import ENDED, JobState, PauseReason
from batchmill.store.ballast import Ballast
from batchmill.store.disk_room import DiskRoom
from batchmill.types import (
    Amendment,
    JobOrder,
    JobQuery,
    JobView,
    LedgerReport,
    Once,
    ProjectQuotas,
    RemoteJob,
    Submitted,
    Wait,
)
from batchmill.wire.job_spec import JobSpec

REMOTE_ID_CHARS_MAX = 512
ENDING_S = 60.0  # a command waits so long for the ends of jobs before it; what providers still have may take longer
HERE = "a command on this machine"
INTERRUPTED = "the process that ran this job ended; resume it and it goes on where it was"


class JobService:
    def __init__(
        self,
        data_dir: Path,
        ledger: Ledger,
        executor: Executor,
        clock: Clock,
        *,
        weights: Mapping[str, float] = {},
        linger_s: float = 0.0,
        provisions: Provisions = NothingProvided(),
        room: DiskRoom | None = None,
    ) -> None:
        """Take over a data directory; `recover` comes next.

        Args:
            weights: project -> its share of the workers beside others; 1 for those that are not named.
            linger_s: how long workers that no job needs stay, for the next one.
            provisions: what workers are given beside their model.
            room: where the bytes of projects are counted; None: nothing bounds them.
        """
        self._data_dir, self._clock = data_dir, clock
        self._books = Books(ledger)
        self._dispatcher = Dispatcher(
            data_dir, self._books, executor, clock, weights=weights, linger_s=linger_s, provisions=provisions,
            quarantine=Quarantine(clock, ledger.database),
        )  # fmt: skip
        self._ballast = Ballast(data_dir / "ballast")
        self._children = Children()
        self.adapters: Adapters = NoAdapters()  # who fetches those that rows name; set before `recover`
        self.room = room or DiskRoom(ledger.database, data_dir, ProjectQuotas())
        tools = Tools(
            data_dir, self._books, self._dispatcher, clock, self._ballast, self._children.offload,
            lambda: self.adapters, lambda: self.room,
        )  # fmt: skip
        self._roster = Roster(tools)
        self.retention = Retention(data_dir, ledger.database, self._roster, clock)
        self._entrance = Entrance(tools, self._roster)
        self._deadlines = Deadlines(clock, self._upcoming, self._expire)
        self._waiting = WaitingJobs(data_dir, ledger.database, self._roster, lambda: self.room)
        self._caretaker = Caretaker(clock, self._ballast, self._waiting.look, self._resume_or_note, self._tidy)
        self._resuming: asyncio.Task[None] | None = None

    @property
    def dispatcher(self) -> Dispatcher:
        """For those who look on: it counts, and knows what every model does now."""
        return self._dispatcher

    @property
    def counts(self) -> bool:
        """Outcomes are still counted."""
        return not self._books.is_broken

    @property
    def live(self) -> Live:
        return self._dispatcher.live

    async def recover(self, *, resume_doors: bool = False) -> None:
        """What an owner that died left running becomes paused: its rows are safe, and it goes on when asked.

        What was being ended early is brought to its end. On a full disk nothing can be written down, but all can be
        looked at. With `resume_doors`, in a server: the jobs that came by its doors go on by themselves, also those
        that wait for room on the disk.
        """
        await self._dispatcher.quarantine.load()
        await self.retention.finish()
        ending: list[Drive] = []
        doors: list[str] = []
        unfinished = await self._read(job_records.unfinished)
        await asyncio.to_thread(clear_unsealed, self._data_dir, [record["id"] for record in unfinished])
        for record in unfinished:
            state, spec = JobState(record["state"]), read_spec(record["spec"])
            if state is JobState.CANCELLING:
                ending.append(self._roster.start(spec))
            elif state is JobState.PAUSED:
                doors += [spec.id] if spec.origin and record["reason"] == PauseReason.INTERRUPTED else []
            elif await self._set_down(spec.id) or resume_doors:
                doors += [spec.id] if spec.origin else []
        known = await self._read(job_records.ids)
        await asyncio.to_thread(sweep_orphans, self._data_dir, known)
        self._ballast.reserve()
        self._deadlines.start()
        if resume_doors:
            self._caretaker.start()
            self._resuming = asyncio.create_task(self._resume_all(doors))
        elif ending:
            await asyncio.wait({drive.task for drive in ending if drive.task is not None}, timeout=ENDING_S)

    async def _set_down(self, job_id: str) -> bool:
        """Write down that a job was interrupted; False on a full disk: then it goes on looking as if it ran."""
        try:
            if (await self._record(job_id))["state"] != JobState.PAUSED:
                await self._move(job_id, JobState.PAUSED, reason=PauseReason.INTERRUPTED, message=INTERRUPTED)
        except StorageFull:
            self._waiting.stranded.add(job_id)
            return False
        return True

    async def _resume_all(self, job_ids: Sequence[str]) -> None:
        for job_id in job_ids:
            await self._resume_or_note(job_id)

    async def _resume_or_note(self, job_id: str) -> None:
        """Let a paused job go on; one that cannot says why."""
        is_stranded = job_id in self._waiting.stranded
        self._waiting.stranded.discard(job_id)
        try:
            if not is_stranded or await self._set_down(job_id):
                await self.resume(job_id)
        except InvalidTransition:
            return  # somebody else was faster
        except StorageFull:
            self._waiting.stranded.add(job_id)  # the caretaker tries again
        except BatchmillError as error:
            await self._call(self._ledger.note, job_id, message=error.message)

    @property
    def _ledger(self) -> Ledger:
        return self._books.ledger

    @property
    def _call(self):
        return self._books.call

    @property
    def _read(self):
        return self._ledger.database.read

    async def _move(self, job_id: str, state: JobState, **fields: object) -> None:
        await self._call(self._ledger.move, job_id, state, **fields)

    # -- submitting ---------------------------------------------------------------------------------------------------

    async def submit(self, order: JobOrder) -> Submitted:
        submitted = await self._entrance.submit(order)
        if order.policy.deadline is not None:
            self._deadlines.changed()
        return submitted

    async def ordered(self, once: Once) -> str | None:
        return await submissions.known(self._ledger.database, once, self._clock.now())

    async def answered(self, key: str) -> None:
        await self._ledger.database.write(submissions.answered, key, self._clock.now())

    # -- looking ------------------------------------------------------------------------------------------------------

    async def list(self, query: JobQuery = JobQuery()) -> list[JobView]:
        return [self._view(record, errors) for record, errors in await self._read(job_records.page, query)]

    async def show(self, job_id: str) -> JobView:
        return self._view(*await self._read(job_records.find_with_errors, job_id))

    async def _record(self, job_id: str) -> sa.RowMapping:
        return await self._read(job_records.find, job_id)

    def _view(self, record: sa.RowMapping, errors: job_records.Errors) -> JobView:
        view = views.view_of(record, errors)
        drive = self._roster.get(record["id"])
        return view if drive is None else view_at_work(view, drive, self._dispatcher)

    async def watch(self, job_id: str, interval_s: float = 0.5) -> AsyncIterator[JobView]:
        while True:
            view = await self.show(job_id)
            drive = self._roster.active(view.id)
            if drive is None:
                async with self._roster.alone(view.id):  # somebody may be about to let it go on
                    drive = self._roster.active(view.id)
                view = await self.show(view.id)  # as whoever had it meanwhile left it
            if drive is None or drive.task is None:
                yield await self.show(view.id)
                return
            yield view
            await asyncio.wait({drive.task}, timeout=interval_s)

    async def explain(self, job_id: str) -> Wait:
        view = await self.show(job_id)
        drive = self._roster.active(view.id)
        if drive is None:
            return Wait(
                view.id, view.state, [*waits.unattended(view, view.id in self._waiting.stranded), *view.routing], 0
            )
        now = self._clock.monotonic()
        ahead = self._dispatcher.ahead_of(view.id)
        first = [drive.waits_for] if drive.waits_for else []
        found = waits.reasons(
            view, list(models_at_work(drive, self._dispatcher, now)), ahead, standstill_of(drive, now)
        )  # fmt: skip
        return Wait(view.id, view.state, [*first, *found, *view.routing], ahead)

    async def partial(self, job_id: str) -> str:
        record = await self._record(job_id)
        refuse_compacted(record, "--partial")
        files, spec = JobFiles(self._data_dir, record["id"]), read_spec(record["spec"])
        committed = await self._call(self._ledger.committed, spec.id)
        path = files.home / f"partial-{uuid.uuid4().hex}.jsonl"
        if not publishing.has_plan(files):  # no row has run
            await asyncio.to_thread(path.touch, 0o600)
            return str(path)
        order = publishing.gather_order(spec, files, committed, path)
        try:
            await self._children.offload(
                "batchmill.jobs.gathering:partial_offloaded",
                msgspec.json.encode(order),
                lambda _: None,
                project=spec.project,
            )
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return str(path)

    # -- steering -----------------------------------------------------------------------------------------------------

    async def pause(self, job_id: str) -> JobView:
        record = await self._record(job_id)
        drive = self._roster.get(record["id"])
        if drive is None or record["state"] == JobState.CANCELLING:
            raise InvalidTransition(f"the job {record['id']} is {record['state']}: only a running job can be paused")
        await drive.pause(PauseReason.ASKED, f"paused; `batchmill resume {record['id']}` goes on")
        return await self.show(record["id"])

    async def fail_rows(self, job_id: str) -> JobView:
        record = await self._record(job_id)
        policies.check_rows_may_wait(read_spec(record["spec"]), record["state"])
        await self.resume(record["id"])
        if (drive := self._roster.active(record["id"])) is not None:
            drive.fail_rows()
        return await self.show(record["id"])

    async def resume(self, job_id: str) -> JobView:
        record = await self._record(job_id)
        async with self._roster.steering(record):
            if await self._roster.let_rest(record["id"]) is None:
                record = await self._record(record["id"])
                if record["state"] != JobState.PAUSED:
                    raise InvalidTransition(
                        f"the job {record['id']} is {record['state']}: only a paused job is resumed"
                    )
                await self._roster.reopen(await self._checked(record))
        self._deadlines.changed()
        return await self.show(record["id"])

    async def _checked(self, record: sa.RowMapping) -> JobSpec:
        """The description of a job that is to go on: the code it began with, an output that is still its own."""
        spec = read_spec(record["spec"])
        if record["cancelling"] is not None:
            return spec  # none of its rows will run
        code = await self._code_now(spec)
        if orders.has_run(record):
            orders.check_code(spec, code, "restore it and resume, or start over with --restart")
        await self._refuse_if_taken(spec, record)
        return msgspec.structs.replace(spec, code=code)

    @staticmethod
    async def _code_now(spec: JobSpec) -> dict[str, str]:
        return await asyncio.to_thread(orders.code_of, spec.models, by_door=spec.origin is not None)

    async def _refuse_if_taken(self, spec: JobSpec, record: sa.RowMapping) -> None:
        if spec.output is not None:
            others = await self._read(job_records.at_home)
            await asyncio.to_thread(orders.refuse_if_taken, spec, others, record["finished"])

    async def cancel(self, job_id: str) -> JobView:
        record = await self._record(job_id)
        drive = await self._end_early(record["id"], endings.CANCELLED)
        if record["door"] is None:  # somebody sits before it and waits for the results
            await drive.rest()
        return await self.show(record["id"])

    async def _end_early(self, job_id: str, early: EarlyEnd) -> Drive:
        """End a job without the rows that have not run. Returns once that is written down, or too late.

        Raises: InvalidTransition.
        """
        while True:
            drive = self._roster.active(job_id)
            if drive is not None:
                await drive.end_early(early)
                if (await self._record(job_id))["state"] != JobState.PAUSED:
                    return drive
            async with self._roster.alone(job_id):
                if await self._roster.let_rest(job_id) is not None:
                    continue  # somebody has let it go on meanwhile
                record = await self._record(job_id)
                if record["state"] != JobState.PAUSED:
                    raise InvalidTransition(f"the job {job_id} is {record['state']}: there is nothing left to cancel")
                cancelling = endings.begins_at(early, record["deadline"], self._clock.now())
                await self._move(job_id, JobState.CANCELLING, reason=early.reason, message="", cancelling=cancelling)
                drive = self._roster.start(read_spec(record["spec"]))
                drive.leaves_remote = record["cancelling"] is not None  # it could not collect, and is asked once more
                return drive

    async def retry(self, job_id: str) -> JobView:
        record = await self._record(job_id)
        async with self._roster.steering(record):
            drive = await self._roster.let_rest(record["id"])
            record = await self._record(record["id"])
            if drive is not None or record["state"] not in ENDED - {JobState.FAILED}:
                raise InvalidTransition(
                    f"the job {record['id']} is {record['state']}: only rows of an ended job are retried"
                )
            refuse_compacted(record, "a retry")
            spec = policies.without_past_deadline(read_spec(record["spec"]), self._clock.now())
            await self._refuse_if_taken(spec, record)
            # Code that was mended is what a retry is for.
            spec = msgspec.structs.replace(spec, code=await self._code_now(spec))
            await self._roster.open_retry(spec)
        self._deadlines.changed()
        return await self.show(record["id"])

    async def amend(self, job_id: str, change: Amendment) -> JobView:
        record = await self._record(job_id)
        async with self._roster.alone(record["id"]):
            record = await self._record(record["id"])
            if record["state"] in ENDED or record["cancelling"] is not None:
                raise InvalidTransition(f"the job {record['id']} is {record['state']}: nothing of it can be changed")
            spec = read_spec(record["spec"])
            await self._roster.amend(spec, policies.amended(spec, change, self._clock.now()))
        self._deadlines.changed()
        return await self.show(record["id"])

    # -- what goes on by itself ---------------------------------------------------------------------------------------

    async def _upcoming(self, count: int) -> Sequence[tuple[str, float]]:
        return await self._read(job_records.next_deadlines, count)

    async def _expire(self, job_id: str) -> None:
        try:
            await self._end_early(job_id, endings.PAST_DEADLINE)
        except StorageFull:
            self._ballast.release()  # so that at least this can be written down
            await self._end_early(job_id, endings.PAST_DEADLINE)

    async def _tidy(self) -> None:
        await self._ledger.database.write(submissions.forget_old, self._clock.now())

    # -- jobs at providers --------------------------------------------------------------------------------------------

    async def remote(self, job_id: str) -> list[RemoteJob]:
        record = await self._record(job_id)
        return await self._read(shard_notes.remote_jobs, record["id"])

    async def settle_remote(self, job_id: str, tag: str, remote_id: str | None) -> RemoteJob:
        record = await self._record(job_id)
        if remote_id is not None and not 0 < len(remote_id) <= REMOTE_ID_CHARS_MAX:
            raise InvalidInput("a job at a provider has an id", code="invalid_remote_id")
        async with self._roster.alone(record["id"]):
            drive, record = await self._roster.let_rest(record["id"]), await self._record(record["id"])
            if drive is not None or record["state"] != JobState.PAUSED:
                raise InvalidTransition(
                    f"the job {record['id']} is {record['state']}: say what became of a submission while it is paused"
                )
            return await self._ledger.database.write(
                shard_notes.settle, record["id"], record["generation"], tag=tag, remote_id=remote_id,
                now=self._clock.now(),
            )  # fmt: skip

    # -- the ledger itself --------------------------------------------------------------------------------------------

    async def remove(self, job_id: str, by: str = HERE) -> JobView:
        await self.retention.remove((view := await self.show(job_id)).id, by)
        return view

    async def verify(self, job_id: str) -> LedgerReport:
        record = await self._record(job_id)
        refuse_compacted(record, "an audit")
        order = await self._audit_order(read_spec(record["spec"]))
        work = self._children.offload(
            "batchmill.jobs.audit:verify_offloaded", msgspec.json.encode(order), lambda _: None
        )
        report = msgspec.json.decode(await work, type=LedgerReport)
        refuse_compacted(await self._record(record["id"]), "an audit")  # meanwhile: what it missed was to go
        return report

    async def _audit_order(self, spec: JobSpec) -> AuditOrder:
        return AuditOrder(spec, str(self._data_dir), await self._call(self._ledger.snapshot, spec.id))

    async def rebuild(self, job_id: str) -> LedgerReport:
        spec = await self._spec_or_file(job_id)
        self._refuse_running(spec.id)
        if JobFiles(self._data_dir, spec.id).ending.exists():
            refuse_compacted(await self._record(spec.id), "a rebuild")
        order = await self._audit_order(spec)
        work = self._children.offload(
            "batchmill.jobs.repair:rebuild_offloaded", msgspec.json.encode(order), lambda _: None
        )
        rebuilt = msgspec.json.decode(await work, type=Rebuilt)
        async with self._roster.alone(spec.id):
            self._refuse_running(spec.id)
            await self._call(self._ledger.replace, spec, order.before, rebuilt)
        report = await self.verify(spec.id)
        return msgspec.structs.replace(
            report, adopted=rebuilt.adopted, reopened=rebuilt.reopened, damaged=rebuilt.damaged
        )

    def _refuse_running(self, job_id: str) -> None:
        if self._roster.active(job_id) is not None:
            raise InvalidTransition(f"the job {job_id} is running: pause it before its ledger is rebuilt")

    async def _spec_or_file(self, job_id: str) -> JobSpec:
        """The description of a job; from its file where the database has lost it."""
        try:
            return read_spec((await self._record(job_id))["spec"])
        except UnknownName:
            files = JobFiles(self._data_dir, job_id)
            if "/" in job_id or not files.spec.is_file():
                raise
        return await asyncio.to_thread(files.read_spec)

    async def close(self, *, at_once: bool = False) -> None:
        """Pause what runs and end every worker; `at_once`: without waiting for rows in flight."""
        if self._resuming is not None:
            self._resuming.cancel()
            await asyncio.wait({self._resuming})
        await self._entrance.close()
        await self._caretaker.close()
        await self._deadlines.close()
        await self._roster.close(at_once=at_once)
        if not at_once:
            await self._dispatcher.close()
        await self._children.close()
        self._books.close()
