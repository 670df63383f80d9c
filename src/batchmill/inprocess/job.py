"""A job in process: it runs in the background thread; the program waits for it, iterates over it, and gets frames."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from batchmill.cli.clients import OwnerJobs
from batchmill.cli.jobs.own_rows import Followed, again, follow_own_rows, order_once, resumed
from batchmill.client.frame_shapes import (
    FrameShape,
    failed_frame,
    to_pandas,
    to_polars,
    with_types,
)
from batchmill.client.job_ends import check_ended, is_sampled
from batchmill.client.progress import Progress, as_html, figures, progress_of
from batchmill.config import Config
from batchmill.errors import InvalidTransition, JobPaused
from batchmill.inprocess.background import Background, background
from batchmill.inprocess.orders import Keywords, make_order
from batchmill.inprocess.results import (
    StoredTable,
    numbered_table,
    refuse_unfinished,
    result_lines,
    row_of,
    scratch_folder,
    stored_table,
)
from batchmill.states import JobState
from batchmill.types import JobView, RetryChange, Sample, Submitted
from batchmill.wire.sampling import rows_of

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow

T = TypeVar("T")

VIEW_S = 0.2  # between two looks at a job while something waits for it
GATHER_SHARE = 4  # finished rows are gathered in at most a fifth of the time
ROWS_AT_ONCE = 1000


class Job:
    """A job of this process. Get one from `batchmill.run`.

    Concurrency: any thread may use it; `await job` and `async for row in job` run in any event loop.
    """

    def __init__(
        self, config: Config, cwd: Path, paths: Sequence[str], keywords: Keywords, shape: FrameShape | None
    ) -> None:
        self._config, self._cwd, self._paths, self._keywords = config, cwd, list(paths), keywords
        self._shape = shape
        self._process = os.getpid()
        self._submitted: Future[Submitted] = Future()
        self._view = JobView(id="", state=JobState.VALIDATING)
        self._sample: Sample | None = None  # the rows that this program asked for
        self._stored: StoredTable | None = None
        self._changed = threading.Event()
        self._is_pausing = False
        self._running: Future[None] = self._background.start(self._run())

    # -- running ------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Submit the job and follow it until it is paused or has ended."""
        try:
            async with self._background.use(self._config) as (app, jobs):
                if self._config.cluster.executor is not None:
                    await jobs.require_cluster()
                order = await make_order(
                    app, self._config, self._cwd, self._paths, self._keywords, is_spooled=self._shape is not None
                )
                order = order_once(order)
                self._sample = order.sample
                submitted = await jobs.submit(order)
                self._view = await jobs.show(submitted.id)
                self._submitted.set_result(submitted)
                await self._follow_rows(jobs, submitted, lambda: jobs.submit(again(order)))
        except BaseException as error:
            if not self._submitted.done():
                self._submitted.set_exception(error)
            raise
        finally:
            self._changed.set()

    async def _follow_rows(
        self, jobs: OwnerJobs, submitted: Submitted, go_on: Callable[[], Awaitable[Submitted]]
    ) -> None:
        """Follow the job until the rows that this program asked for have run."""

        async def follow(submitted: Submitted) -> Followed:
            async for view in jobs.watch(submitted.id, VIEW_S):
                self._view = view
                self._changed.set()
            return Followed(self._view, self._is_pausing)

        await follow_own_rows(submitted, self._sample, follow=follow, go_on=go_on)

    @property
    def _background(self) -> Background:
        return background()

    def _refuse_fork(self) -> None:
        """Raises: InvalidTransition in a fork of the process that runs the job: what happens there is unknown here."""
        if os.getpid() != self._process and not self._running.done():
            raise InvalidTransition(
                f"the job {self.id} runs in process {self._process}, of which this one is a fork: call batchmill.run "
                "again here, which joins the job"
            )

    def accepted(self) -> None:
        """Wait until the job is one. Raises: InvalidInput for an order that cannot run."""
        try:
            self._submitted.result()
        except BaseException:
            self._running.cancel()
            raise

    async def accepted_async(self) -> None:
        """As `accepted`, in an event loop."""
        try:
            await asyncio.wrap_future(self._submitted)
        except BaseException:
            self._running.cancel()
            raise

    @property
    def id(self) -> str:
        return self._view.id

    @property
    def view(self) -> JobView:
        """The last known state of the job."""
        return self._view

    @property
    def how(self) -> str:
        """started, resumed, joined (another process runs it) or finished (it had ended before this call)."""
        return self._submitted.result().how

    @property
    def is_sampled(self) -> bool:
        """Whether the job has paused after its sample: results are those of the sample."""
        return is_sampled(self._view)

    @property
    def is_running(self) -> bool:
        return not self._running.done()

    def wait(self, *, progress: bool | None = None) -> Self:
        """Wait until the job has ended, and return it.

        The first KeyboardInterrupt pauses the job: finished rows are stored, and the same call resumes it. The second
        stops it at once.

        Args: progress: show a bar; None: in a notebook and on a terminal.
        Raises: JobPaused, InvalidDataset, and what else keeps a job from its end.
        """
        self._refuse_fork()
        shown = progress_of(progress)
        try:
            try:
                self._announce(shown)
                self._watch(shown)
            except KeyboardInterrupt:
                scope = " the job for all who run it" if self.how == "joined" else ""
                shown.say(f"pausing{scope}: finished rows are stored; interrupt again to stop at once")
                self._stop()
                shown.show(self._view)
                raise
        finally:
            shown.close()
        return self._ended()

    def _announce(self, shown: Progress) -> None:
        done = self.view.rows_ok + self.view.rows_failed
        if self.how in ("resumed", "joined"):
            shown.say(f"{self.how} job {self.id}: {done:,} of {self.view.rows:,} rows are done")
        if self.how == "finished":
            shown.say(f"job {self.id} had finished already; overwrite=True runs it again")

    def _watch(self, shown: Progress) -> None:
        while not self._running.done():
            if self._changed.wait(VIEW_S):
                self._changed.clear()
                shown.show(self._view)
        shown.show(self._view)

    def _stop(self) -> None:
        """Pause the job and wait; stop it at once if that is interrupted."""
        pausing = self._background.start(self._pause())
        try:
            pausing.result()
            self._settle()
        except BaseException:
            self._running.cancel()
            self._settle()
            raise

    def _settle(self) -> None:
        """Wait until nothing of the job runs here, whatever became of it."""
        while not self._running.done():
            time.sleep(VIEW_S / 10)

    async def _pause(self) -> None:
        self._is_pausing = True  # it does not go on after the sample of another process either
        async with self._background.use(self._config) as (_, jobs):
            try:
                await jobs.steer(self.id, "pause")
            except InvalidTransition:
                return  # it has ended meanwhile

    def _ended(self) -> Self:
        """Raises: why the job did not end with results."""
        try:
            self._running.result()
        except CancelledError:
            raise JobPaused(f"the job {self.id} was stopped; the same call resumes it") from None
        check_ended(self._view, "the same call resumes it")
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self.waited(None).__await__()

    async def waited(self, progress: bool | None) -> Self:
        """As `wait`, in an event loop of the program: a cancellation is its interrupt."""
        self._refuse_fork()
        shown = progress_of(progress)
        try:
            self._announce(shown)
            while not self._running.done():
                shown.show(self._view)
                await asyncio.sleep(VIEW_S)
            shown.show(self._view)
        except asyncio.CancelledError:
            shown.say("pausing: finished rows are stored")
            await self._stop_async()
            shown.show(self._view)
            raise
        finally:
            shown.close()
        return self._ended()

    async def _stop_async(self) -> None:
        try:
            await asyncio.wrap_future(self._background.start(self._pause()))
            while not self._running.done():
                await asyncio.sleep(VIEW_S / 10)
        except asyncio.CancelledError:
            self._running.cancel()
            raise

    # -- steering -----------------------------------------------------------------------------------------------------

    def pause(self) -> JobView:
        """Store the finished rows and stop. The same call of `batchmill.run` resumes the job."""
        self._is_pausing = True
        return self._ask(lambda jobs: jobs.steer(self.id, "pause"))

    def cancel(self) -> JobView:
        """End the job: finished rows are kept, the others become errors."""
        return self._ask(lambda jobs: jobs.steer(self.id, "cancel"))

    def retry(
        self, *, params: dict[str, Any] | None = None, adapter: str | None = None, wait: bool = True,
        progress: bool | None = None,
    ) -> Self:  # fmt: skip
        """Run the failed rows again.

        Args:
            params: fields of their requests that change, such as max_tokens.
            adapter: of the job's model, which answers them.
        """
        refuse_unfinished(self._view)
        self._refuse_fork()
        change = RetryChange(params or {}, None, adapter)
        self._settle()
        self._is_pausing = False
        retried: Future[None] = Future()
        running = self._background.start(self._run_again(change, retried))
        try:
            retried.result()
        except BaseException:  # the job is as it was
            running.cancel()
            raise
        self._running, self._stored = running, None
        return self.wait(progress=progress) if wait else self

    async def _run_again(self, change: RetryChange, retried: Future[None]) -> None:
        try:
            async with self._background.use(self._config) as (_, jobs):
                self._view = await jobs.retry(self.id, change, None)
                self._sample = self._view.sample  # a retry is of all rows
                retried.set_result(None)
                submitted = Submitted(self.id, "retried")
                await self._follow_rows(jobs, submitted, lambda: resumed(jobs, submitted))
        except BaseException as error:
            if not retried.done():
                retried.set_exception(error)
            raise
        finally:
            self._changed.set()

    def _ask(self, request: Callable[[OwnerJobs], Awaitable[JobView]]) -> JobView:
        async def ask() -> JobView:
            async with self._background.use(self._config) as (_, jobs):
                return await request(jobs)

        self._view = self._background.start(ask()).result()
        return self._view

    # -- results ------------------------------------------------------------------------------------------------------

    def to_arrow(self) -> pyarrow.Table:
        """All rows in the order of the input: its columns, then the answers.

        Raises: InvalidTransition before the job has ended.
        """
        return with_types(self._results().read(), self._shape or FrameShape())

    def to_pandas(self) -> pandas.DataFrame:
        """As `to_arrow`. A frame of pandas that was given lends its index, column labels and types."""
        return to_pandas(self.to_arrow(), self._shape or FrameShape(), self._results().numbers)

    def to_polars(self) -> polars.DataFrame:
        """As `to_arrow`."""
        return to_polars(self.to_arrow(), self._shape or FrameShape())

    def failures(self) -> Any:
        """The rows that failed, with the cause in `error`: a frame of the library of the data, or of Arrow."""
        failed, numbers = self._results().read_failed()
        return failed_frame(failed, self._shape or FrameShape(), numbers)

    def _results(self) -> StoredTable:
        """The results on disk, with the types that they are stored with."""
        if (stored := self._stored) is None:
            if self.is_sampled:
                path = Path(self._here(self._gather()))
                stored = numbered_table(self._config, path, self._view, self._own_rows)
            else:
                refuse_unfinished(self._view)
                is_all = self._own_rows is None
                stored = self._here(stored_table(self._config, self._view)) if is_all else self._own_results()
            self._stored = stored
        return stored

    def _own_results(self) -> StoredTable:
        """The results of a sample, of a job that others had run all rows."""
        with scratch_folder(self._config) as folder:
            path = folder / "numbered"
            with path.open("wb") as file:
                file.writelines(b"%d\t%s\n" % each for each in self._own_lines(folder))
            return numbered_table(self._config, path, self._view, None)

    def _own_lines(self, folder: Path) -> Iterator[tuple[int, bytes]]:
        """The numbers and the results of the rows that this program asked for, of a job that has ended."""
        only = self._own_rows
        lines = self._here(result_lines(self._config, self._view, folder))
        return (each for each in enumerate(lines) if only is None or each[0] in only)

    def _here(self, work: Coroutine[Any, Any, T]) -> T:
        return self._background.start(work).result()

    # -- rows ---------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Every row once, as a dict: while the job runs, those that are finished; the rest in the order of the input.

        Raises: as `wait`, after the finished rows.
        """
        return chain.from_iterable(self._batches())

    def _batches(self) -> Iterator[list[dict[str, Any]]]:
        """The rows, some at once; an empty batch where none has finished for a moment."""
        self._refuse_fork()
        seen = bytearray()
        while self.is_running:
            self._changed.wait(VIEW_S)
            self._changed.clear()
            started = time.monotonic()
            yield from self._finished(seen)
            if self.is_running:
                time.sleep(GATHER_SHARE * (time.monotonic() - started))
            yield []
        try:
            is_sampled = self._ended().is_sampled
        except JobPaused:
            yield from self._finished(seen)
            raise
        if is_sampled:
            yield from self._finished(seen)
            return
        with scratch_folder(self._config) as folder:
            yield from _in_batches(row_of(line) for number, line in self._own_lines(folder) if _is_new(seen, number))

    def _finished(self, seen: bytearray) -> Iterator[list[dict[str, Any]]]:
        """The finished rows that were not seen yet."""
        path = Path(self._here(self._gather()))
        try:
            with path.open("rb") as file:
                only = self._own_rows
                lines = ((int(number), row) for number, _, row in (line.partition(b"\t") for line in file))
                own = (each for each in lines if only is None or each[0] in only)
                yield from _in_batches(row_of(row) for number, row in own if _is_new(seen, number))
        finally:
            path.unlink()

    async def _gather(self) -> str:
        """Write the finished rows to a file. Others may have the job run more than this program asked for."""
        async with self._background.use(self._config) as (_, jobs):
            return await jobs.partial(self.id, is_numbered=True)

    @property
    def _own_rows(self) -> Container[int] | None:
        """The numbers of the rows of this program's sample, also where others have more run; None: all rows."""
        if self._sample is None or 0 < self._view.rows <= self._sample.rows:
            return None
        rows = rows_of(self._sample, self._view.rows)
        return rows if isinstance(rows, range) else frozenset(rows)

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        """As `__iter__`."""
        batches = self._batches()
        while (batch := await asyncio.to_thread(next, batches, None)) is not None:
            for row in batch:
                yield row

    # -- display ------------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"<Job {self.id}: {self._view.state}, {figures(self._view)}>"

    def _repr_html_(self) -> str:
        return as_html(self._view)


def _in_batches(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    while batch := list(islice(rows, ROWS_AT_ONCE)):
        yield batch


def _is_new(seen: bytearray, number: int) -> bool:
    """Whether a row was not seen before; it is from now on. `seen` has a bit for each row."""
    at, bit = divmod(number, 8)
    if at >= len(seen):
        seen.extend(bytes(max(at + 1, 2 * len(seen)) - len(seen)))
    is_new = not seen[at] & 1 << bit
    seen[at] |= 1 << bit
    return is_new
