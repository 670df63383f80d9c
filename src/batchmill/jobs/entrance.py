"""What becomes of an order: a job that it is already, by its name or by what it asks for, or a new one.

A job's folder is there before the ledger knows of it; what a crash leaves of one that never got so far is swept.
"""

from __future__ import annotations

import asyncio
import os

import sqlalchemy as sa

from batchmill import faults
from batchmill.errors import InvalidInput
from batchmill.jobs import adapters, job_records, orders, routing, submissions
from batchmill.jobs.drive import Tools
from batchmill.jobs.job_files import JobFiles, read_spec
from batchmill.jobs.part_file import full_disk_named
from batchmill.jobs.roster import Roster
from batchmill.jobs.ways import with_code
from batchmill.states import JobState, PauseReason
from batchmill.types import JobOrder, Once, Submitted
from batchmill.wire.job_spec import JobSpec


class Entrance:
    def __init__(self, tools: Tools, roster: Roster) -> None:
        self._data_dir, self._books, self._clock = tools.data_dir, tools.books, tools.clock
        self._roster, self._tools = roster, tools
        self._entering: set[asyncio.Task[Submitted]] = set()

    async def submit(self, order: JobOrder) -> Submitted:
        """As `ports.Jobs.submit`. What has begun is brought to its end, though whoever asked may have gone."""
        assert order.origin is None or order.output is None, "a door keeps results with their job"
        task = asyncio.create_task(self._submit(order))
        self._entering.add(task)
        task.add_done_callback(self._entered)
        return await asyncio.shield(task)

    def _entered(self, task: asyncio.Task[Submitted]) -> None:
        self._entering.discard(task)
        if not task.cancelled():
            task.exception()  # whoever asked has it, if they are still there

    async def close(self) -> None:
        """Wait for the orders that are being taken."""
        if self._entering:
            await asyncio.wait(self._entering)

    async def _submit(self, order: JobOrder) -> Submitted:
        once = order.once
        if once is None:
            return await self._take(order)
        async with self._roster.alone(once.key):
            known = await submissions.known(self._books.ledger.database, once, self._clock.now())
            return await self._take(order) if known is None else Submitted(known, "repeated")

    async def _take(self, order: JobOrder) -> Submitted:
        if order.origin is not None:  # by a server's door: always another job
            return await self._enter(await self._described(order), order.once)
        async with self._roster.outputs:
            return await self._match(order)

    async def _described(self, order: JobOrder) -> JobSpec:
        return await asyncio.to_thread(orders.describe, order, self._clock.now())

    async def _enter(self, spec: JobSpec, once: Once | None) -> Submitted:
        """A new job: described, stored, begun. Of one that cannot be stored nothing stays."""
        if (room := self._tools.room_of(spec)) is not None:
            await room.check(spec.project)
        files = JobFiles(self._data_dir, spec.id)
        try:
            with full_disk_named(files.home):
                await asyncio.to_thread(files.write_spec, spec)
            faults.point("after_describe")
            await self._books.ledger.database.write(submissions.enter, spec, once, self._tools.quota_of(spec))
        except BaseException:
            await asyncio.to_thread(files.remove)
            raise
        faults.point("after_create")
        self._roster.start(spec)
        return Submitted(spec.id, "started")

    # -- jobs of this machine's commands ------------------------------------------------------------------------------

    async def _match(self, order: JobOrder) -> Submitted:
        """The same command again is the same job, unless it is to be run anew."""
        spec = await self._described(order)
        known, is_same = await self._known(spec)
        if known is not None and is_same and not self._is_anew(known, order):
            return await self._take_up(known, spec)
        unfinished = known is not None and known["state"] != JobState.COMPLETED
        if unfinished and not is_same and not order.restart:
            raise InvalidInput(
                f"{', '.join(spec.dataset.paths)} changed since the unfinished job {known['id']} began: "
                "restore it, or start over with --restart",
                code="input_changed",
            )
        if spec.output is not None:
            if known is None and not order.overwrite:
                await asyncio.to_thread(orders.refuse_if_there, spec)
            records = await self._books.ledger.database.read(job_records.at_home)
            others = [record for record in records if known is None or record["id"] != known["id"]]
            await asyncio.to_thread(orders.refuse_if_taken, spec, others)
        if unfinished:
            await self._set_aside(known)
        return await self._enter(spec, order.once)

    async def _known(self, spec: JobSpec) -> tuple[sa.RowMapping | None, bool]:
        """The job that a description is already, and whether its input is the same.

        A job over other input is another job, unless the two would write to one output from the same files.
        """
        changed = None
        for record in await self._books.look(self._books.ledger.by_identity, spec.identity):
            if await asyncio.to_thread(orders.same_input, spec, JobFiles(self._data_dir, record["id"])):
                return record, True
            if spec.output is not None and spec.dataset.paths == read_spec(record["spec"]).dataset.paths:
                changed = changed or record
        return changed, False

    @staticmethod
    def _is_anew(record: sa.RowMapping, order: JobOrder) -> bool:
        """The caller wants the known job to be run from its beginning again."""
        if record["compacted"] is not None and not os.path.exists(record["output"]):
            return True  # its results are gone, and what they could be written from
        return order.restart or (order.overwrite and record["state"] == JobState.COMPLETED)

    async def _take_up(self, record: sa.RowMapping, spec: JobSpec) -> Submitted:
        """Go on with a job where it is: finished, running, or to be resumed."""
        job_id, earlier = record["id"], read_spec(record["spec"])
        spec = await asyncio.to_thread(with_code, _kept(orders.new_id_form(spec, job_id), earlier))
        if record["state"] == JobState.COMPLETED:
            orders.check_code(earlier, spec.code, "run it again with --overwrite")
            if os.path.exists(record["output"]):
                return Submitted(job_id, "finished")
        elif orders.has_run(record):
            orders.check_code(earlier, spec.code, "finish it with the code it began with, or start over with --restart")
        async with self._roster.alone(job_id):
            if await self._roster.let_rest(job_id) is not None:
                return Submitted(job_id, "joined")
            await self._roster.reopen(spec)
        return Submitted(job_id, "resumed")

    async def _set_aside(self, record: sa.RowMapping) -> None:
        """End an unfinished job that is started over: it writes no results."""
        job_id, ledger = record["id"], self._books.ledger
        async with self._roster.alone(job_id):
            drive = self._roster.get(job_id)
            if drive is not None:
                await drive.pause(PauseReason.ASKED, "about to be started over")
            text = "started over by another job with --restart; its results were not written"
            now = self._clock.now()
            await self._books.call(ledger.move, job_id, JobState.CANCELLING, reason=None, message=text, cancelling=now)
            await self._books.call(ledger.move, job_id, JobState.CANCELLED, finished=now)


def _kept(spec: JobSpec, earlier: JobSpec) -> JobSpec:
    """An order that is a known job again, with what was found out when that was prepared."""
    return adapters.kept(routing.kept(spec, earlier), earlier)
