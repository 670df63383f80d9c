"""Jobs that pause after a sample of their rows: the order that goes on with one, and what happens to its output.

A sample at rest holds no output: another prompt is tried with the same command line. So an order that goes on looks
again whether the output is still free.
"""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from batchmill.errors import InvalidInput, JobPaused
from batchmill.jobs.intake import orders
from batchmill.jobs.ledger import records
from batchmill.jobs.ledger.files import read_spec
from batchmill.jobs.ledger.storage import bring_description
from batchmill.jobs.runner_tools import RunnerTools
from batchmill.states import PauseReason
from batchmill.store.sql.transactions import Record
from batchmill.types import Sample
from batchmill.wire.job_spec import NO_SAMPLE, JobSpec
from batchmill.wire.sampling import in_words


def sample_has_run(spec: JobSpec) -> JobPaused:
    """The pause after a sample."""
    assert spec.sample is not None
    text = f"its sample has run: {in_words(spec.sample)}"
    return JobPaused(text, reason=PauseReason.SAMPLED)


def checked(spec: JobSpec) -> Sample:
    """The sample of a job. Raises: InvalidInput if it has none, or has gone on."""
    if spec.sample is None:
        raise InvalidInput(f"the job {spec.id} has no sample: all of its rows run", code=NO_SAMPLE)
    return spec.sample


def whole(spec: JobSpec) -> JobSpec:
    """The same job, all of whose rows run."""
    return replace(spec, sample=None)


def moved_columns(record: Record, spec: JobSpec) -> dict[str, object]:
    """The columns of a job whose results go elsewhere now than its sample said."""
    return {} if record["identity"] == spec.identity else {"identity": spec.identity, "output": spec.output}


def has_other_code(record: Record, spec: JobSpec) -> bool:
    """Whether rows of a sample ran with other code of a function: its results are those of another job."""
    if not orders.has_run(record):
        return False
    try:
        orders.check_code(read_spec(record["spec"]), spec.code, "start over")
    except InvalidInput:
        return True
    return False


class Samples:
    def __init__(self, tools: RunnerTools) -> None:
        self._read, self._tools = tools.commit_log.ledger.database.read, tools

    async def find_existing(self, spec: JobSpec) -> tuple[Record | None, bool]:
        """The existing job for a spec, and whether its input is the same.

        A job over other input is another job, unless the two would write to one output from the same files. A sample
        at rest is the job of every order that computes the same, wherever the results go.
        """
        tools, changed = self._tools, None
        for record in await tools.commit_log.call_reader(tools.commit_log.ledger.by_identity, spec.identity):
            if await self._is_same_input(record, spec):
                return record, True
            is_same_files = spec.dataset.paths == read_spec(record["spec"]).dataset.paths
            if spec.output is not None and is_same_files and not orders.is_sample(record):
                changed = changed or record
        for record in await self._read(records.samples_at_rest):
            if read_spec(record["spec"]).work == spec.work and await self._is_same_input(record, spec):
                return record, True
        return changed, False

    async def _is_same_input(self, record: Record, spec: JobSpec) -> bool:
        files = await bring_description(self._tools.stored, self._tools.data_dir, record)
        return await asyncio.to_thread(orders.same_input, spec, files)

    async def claim_output(self, record: Record, spec: JobSpec) -> JobSpec:
        """The spec with which a sample goes on. Raises: InvalidInput if another job, or a file, is at its output."""
        if spec.output is None:
            return spec
        others = await self._read(records.naming_outputs)
        await asyncio.to_thread(orders.refuse_shared_output, spec, others, record["started"] or record["created"])
        return await asyncio.to_thread(orders.checked_output, spec, may_replace=spec.may_overwrite)

    async def go_on(self, record: Record, spec: JobSpec) -> JobSpec:
        """The spec of a paused sample that is resumed: a sample that has run becomes the whole job."""
        spec = await self.claim_output(record, spec)
        return whole(spec) if record["reason"] == PauseReason.SAMPLED else spec

    async def yield_output(self, record: Record) -> tuple[JobSpec, dict[str, object]]:
        """The spec of a paused job that is to end, and the columns that change with it.

        A sample whose output is another's meanwhile keeps its results with the job.
        """
        spec = read_spec(record["spec"])
        if not orders.is_sample(record):
            return spec, {}
        try:
            claimed = whole(await self.claim_output(record, spec))
        except InvalidInput:
            claimed = replace(whole(spec), output=None, identity=f"only {spec.id}")
        return claimed, records.columns_of(claimed) | moved_columns(record, claimed)
