"""What a client looks after at a server: a job, a deployed function."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchmill.client import calls
from batchmill.client.frame_shapes import (
    FrameShape,
    failures_of,
    is_parquet,
    read_results,
    table_of,
    to_pandas,
    to_polars,
    with_types,
)
from batchmill.client.inputs import alias_of, is_past, part_of, refuse_elsewhere, refuse_unreadable
from batchmill.client.job_ends import is_sampled
from batchmill.client.pairs import run_in_thread
from batchmill.client.progress import Progress, as_html
from batchmill.client.result_copies import ResultCopy, ends_of, lines_at_once, refuse_far
from batchmill.client.streams import NOT_LINES, FileContent, JsonLines, Lines, Views
from batchmill.errors import InvalidInput
from batchmill.types import JobView, LedgerReport, RemoteJob, RetryChange, Wait
from batchmill.wire.native import (
    AliasInfo,
    BackendInfo,
    Change,
    FunctionDetail,
    Merge,
    Restart,
    Rollback,
    VersionInfo,
)
from batchmill.wire.native_models import LIMIT_DEFAULT, LogPage, LogQuery
from batchmill.wire.rows.result_rows import RowPicker, RowShape, added_by, number_in

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow

    from batchmill.client.asynchronous import AsyncClient


BOM = b"\xef\xbb\xbf"


class AsyncJob:
    """A job at a server. `view` is its last known state.

    Raises, everywhere: UnknownName once the job is gone, InvalidTransition for what does not fit its state.
    """

    def __init__(self, client: AsyncClient, view: JobView) -> None:
        self._client = client
        self.view = view
        self.shape = FrameShape()  # of the frame that its rows came from

    @property
    def id(self) -> str:
        return self.view.id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}: {self.view.state}>"

    async def refresh(self) -> JobView:
        """Ask how the job is."""
        self.view = await self._client.call(calls.show(self.id))
        return self.view

    async def watch(self, interval_s: float = 1.0) -> AsyncGenerator[JobView]:
        """Views of the job, one an interval, until it is paused or has ended; broken connections are taken up."""
        async with aclosing(self._client.read(Views(self.id, interval_s))) as views:
            async for view in views:
                self.view = view
                yield view

    async def wait(self, timeout_s: float | None = None, interval_s: float = 1.0) -> JobView:
        """Wait until the job is paused or has ended; returns the last view of it.

        Raises: TimeoutError; the job continues.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        async with aclosing(self.watch(interval_s)) as views:
            async for view in views:
                if is_past(until, time.monotonic(), view):
                    raise TimeoutError(f"the job {self.id} is {view.state} after {timeout_s:g} s")
        return self.view

    async def show_progress(self, progress: Progress) -> JobView:
        """As `wait`, and show each view."""
        try:
            async with aclosing(self.watch()) as views:
                async for view in views:
                    progress.show(view)
        finally:
            progress.close()
        return self.view

    @property
    def is_sampled(self) -> bool:
        """Whether the job has paused after its sample, at the last look: frames have the rows of the sample."""
        return is_sampled(self.view)

    async def to_arrow(self) -> pyarrow.Table:
        """All rows of a job that has ended, in the order of the input; of OpenAI rows as `rows`."""
        table, _ = await self._stored_table()
        return with_types(table, self.shape)

    async def _stored_table(self) -> tuple[pyarrow.Table, list[int] | None]:
        """The results with the types that they are stored with, and the numbers of their rows; None: all rows."""
        if is_sampled(await self.refresh()):
            return await self._sampled_table()
        with tempfile.TemporaryDirectory(prefix="batchmill-results-") as folder:
            path = Path(folder, "results")
            if self.view.output is not None:
                await self.download(path)
            if is_parquet(path):
                return await run_in_thread(read_results, path), None
        return table_of([row async for row in self.rows()]), None

    async def _sampled_table(self) -> tuple[pyarrow.Table, list[int]]:
        """As `_stored_table`, of a job that has paused after its sample."""
        content = FileContent(calls.partial(self.id, sampled=True, numbered=True), is_resumable=False)
        picker = RowPicker(RowShape(added=added_by(self.view)), only_failed=False)
        numbers: list[int] = []
        rows: list[dict[str, Any]] = []
        async with aclosing(self._client.read(Lines(content, is_any=True))) as lines:
            async for line in lines:
                number, _, text = line.partition(b"\t")
                if (row := picker.pick(text)) is not None:
                    numbers.append(int(number))
                    rows.append(row)
        return table_of(rows), numbers

    async def to_pandas(self) -> pandas.DataFrame:
        """As `to_arrow`; with the index, labels and types of the frame that was given to `run`."""
        table, numbers = await self._stored_table()
        return to_pandas(with_types(table, self.shape), self.shape, numbers)

    async def to_polars(self) -> polars.DataFrame:
        """As `to_arrow`."""
        return to_polars(await self.to_arrow(), self.shape)

    async def failures(self) -> Any:
        """The rows that failed: a frame of the library of the data, or of Arrow."""
        table, numbers = await self._stored_table()
        return failures_of(table, self.shape, numbers)

    def _repr_html_(self) -> str:
        return as_html(self.view)

    def results(self) -> AsyncIterator[dict[str, Any]]:
        """The lines of the result file of a job that has ended, as objects."""
        return self._client.read(JsonLines(FileContent(calls.results(self.id))))

    def errors(self) -> AsyncIterator[dict[str, Any]]:
        """The lines of the error file. Raises: UnknownName (`no_file`) where no row failed."""
        return self._client.read(JsonLines(FileContent(calls.errors(self.id))))

    def partial(self, *, sampled: bool = False) -> AsyncIterator[dict[str, Any]]:
        """The rows that have their outcome so far, in row order, also while the job runs.

        Args: sampled: only those of its sample.
        """
        return self._client.read(JsonLines(FileContent(calls.partial(self.id, sampled=sampled), is_resumable=False)))

    async def rows(
        self, *, columns: Sequence[str] | None = None, failed: bool = False, join: bool = False, partial: bool = False
    ) -> AsyncGenerator[dict[str, Any]]:
        """The rows of a job that has ended, as those of a table, in the order of the input, also those that failed.

        A table's rows are its results. An OpenAI row has `custom_id`, `output` (the text or the vector of the reply)
        and `error` ("code: message").

        Args:
            columns: only these, in this order; of OpenAI rows also `id` and `response`.
            failed: only the rows that failed.
            join: with the columns of the input; of OpenAI rows, `method`, `url` and `body` of the request.
            partial: the rows that have their outcome so far, also while the job runs.

        Raises: InvalidInput (`unknown_column`) for a column that no row has: of a table, after the last one.
        """
        view = await self.refresh()
        shape = RowShape(None if columns is None else list(columns), join, added_by(view))
        picker = RowPicker(shape, only_failed=failed)
        next_number, request = 0, None
        async with aclosing(self._lines(view, failed, partial)) as lines, aclosing(self._requests(view)) as requests:
            async for line in lines:
                if (number := picker.number(line)) is not None:
                    while next_number <= number:
                        request = await anext(requests, None)
                        next_number += 1
                if (row := picker.pick(line, request)) is not None:
                    yield row
        picker.finish()

    async def _lines(self, view: JobView, failed: bool, partial: bool) -> AsyncGenerator[bytes]:
        """The lines of the result files that may hold wanted rows, in the order of the input."""
        try:
            async with aclosing(self._streamed_lines(view, failed, partial)) as lines:
                async for line in lines:
                    yield line
            return
        except InvalidInput as error:
            if error.code != NOT_LINES or partial:
                raise
        with tempfile.TemporaryDirectory(prefix="batchmill-results-") as folder:
            read = (await self.copy_results(Path(folder))).lines()
            while some := await run_in_thread(lines_at_once, read):
                for line in some:
                    yield line

    async def _streamed_lines(self, view: JobView, failed: bool, partial: bool) -> AsyncGenerator[bytes]:
        """As `_lines`, while they arrive. Raises: InvalidInput (NOT_LINES), before the first one."""
        read, job_id = self._client.read, view.id
        request = calls.partial(job_id) if partial else calls.results(job_id)
        results = Lines(FileContent(request, is_resumable=not partial))
        if partial or view.errors_output is None:
            async with aclosing(read(results)) as lines:
                async for line in lines:
                    yield line
            return
        async with aclosing(read(Lines(FileContent(calls.errors(job_id))))) as errors:
            error = await anext(errors, None)
            if view.output is not None and not failed:
                async with aclosing(read(results)) as lines:
                    async for line in lines:
                        while error is not None and number_in(error) < number_in(line):
                            yield error
                            error = await anext(errors, None)
                        yield line
            while error is not None:
                yield error
                error = await anext(errors, None)

    async def _requests(self, view: JobView) -> AsyncGenerator[bytes]:
        """The lines of the input files."""
        for file_id in view.input:
            refuse_unreadable(file_id)
            refuse_unreadable((await self._client.file(file_id)).filename)
            async with aclosing(self._client.read(Lines(FileContent(calls.content(file_id)), is_any=True))) as lines:
                async for line in lines:
                    if line := line.removeprefix(BOM).strip():
                        yield line

    async def download(self, path: str | os.PathLike[str], *, errors: bool = False) -> None:
        """Write the result (or error) file to `path`, which gets its name once it is whole."""
        stream = FileContent(calls.errors(self.id) if errors else calls.results(self.id))
        with part_of(path) as file:
            async with aclosing(self._client.read(stream)) as pieces:
                async for piece in pieces:
                    await run_in_thread(file.write, piece)

    async def copy_results(self, folder: Path) -> ResultCopy:
        """Copy the result files of a job that has ended to a folder. Raises: InvalidInput for results elsewhere."""
        view = await self.refresh()
        name = ""
        if view.output is not None or view.errors_output is None:  # of neither, the server says why
            if view.output is not None:
                refuse_far(view.output)
                name = (await self._client.file(view.output)).filename
            await self.download(folder / "results")
        if view.errors_output is not None:
            await self.download(folder / "errors", errors=True)
        return ResultCopy(
            view,
            None if view.output is None else folder / "results",
            name,
            None if view.errors_output is None else folder / "errors",
        )

    async def copy_inputs(self, folder: Path) -> list[Path]:
        """Copy the input files of the job to an empty folder. Raises: InvalidInput for one that the server read."""
        paths: list[Path] = []
        for file_id in self.view.input:
            refuse_elsewhere(file_id)
            name = (await self._client.file(file_id)).filename
            path = folder / f"input-{len(paths):06d}{ends_of(name)}"
            with path.open("wb") as file:
                async with aclosing(self._client.read(FileContent(calls.content(file_id)))) as pieces:
                    async for piece in pieces:
                        await run_in_thread(file.write, piece)
            paths.append(path)
        return paths

    async def pause(self) -> JobView:
        """Rows in flight may finish; `resume` continues from there."""
        return await self._steer("pause")

    async def resume(self) -> JobView:
        return await self._steer("resume")

    async def cancel(self) -> JobView:
        """Finished rows are kept and written; the rest become errors."""
        return await self._steer("cancel")

    async def retry(
        self, *, params: dict[str, Any] | None = None, model: str | None = None, adapter: str | None = None
    ) -> JobView:
        """Run the failed rows again.

        Args:
            params: fields of their requests that change, such as max_tokens.
            model: another language model, which answers them; its price and its limits count.
            adapter: the same for an adapter, of `model` or of the job's model.
        """
        change = RetryChange(params or {}, model, adapter)
        self.view = await self._client.call(calls.retry(self.id, change))
        return self.view

    async def fail_rows(self) -> JobView:
        """Rows that failed and wait for their service become errors now; a paused job is resumed."""
        return await self._steer("fail_rows")

    async def amend(
        self, *, priority: int | None = None, deadline: float | None = None, budget: float | None = None
    ) -> JobView:
        """Change what is given: priority (-100..100), deadline (seconds since the epoch), budget (USD)."""
        change = Change(priority, deadline, budget)
        self.view = await self._client.call(calls.amend(self.id, change))
        return self.view

    async def explain(self) -> Wait:
        """Why the job waits, or goes no faster."""
        return await self._client.call(calls.explain(self.id))

    async def remote(self) -> list[RemoteJob]:
        """The jobs at providers that hold rows of this one, in the order of their making."""
        return (await self._client.call(calls.remote(self.id))).jobs

    async def settle_remote(self, tag: str, remote_id: str | None) -> RemoteJob:
        """Settle a submission whose result is unknown: the provider's id, or None if it was never created.

        Raises: InvalidTransition for one that is not unknown, or while the job runs.
        """
        return await self._client.call(calls.settle_remote(self.id, tag, remote_id))

    async def remove(self) -> JobView:
        """Remove the job, which has ended, and its results."""
        return await self._client.call(calls.remove(self.id))

    async def verify(self) -> LedgerReport:
        """Audit the record of which rows are done; needs an admin's key."""
        return await self._client.call(calls.verify(self.id))

    async def _steer(self, verb: calls.Steering) -> JobView:
        self.view = await self._client.call(calls.steer(self.id, verb))
        return self.view


class AsyncModel:
    """Raises, everywhere: UnknownName (`model_not_found`) for a function or version that is not there."""

    def __init__(self, client: AsyncClient, name: str) -> None:
        self._client, self.name = client, name

    async def show(self) -> FunctionDetail:
        """Its versions, the versions of its names, and its interface."""
        return await self._client.call(calls.model(self.name))

    async def openapi(self) -> dict[str, Any]:
        """Its OpenAPI document."""
        return await self._client.call(calls.model_document(self.name))

    async def log(self, *, branch: str | None = None, version: int | str | None = None) -> str:
        """What was printed while a version was made: the newest that was tried, where none is named."""
        wanted = None if version is None else str(version)
        pieces = self._client.read(FileContent(calls.model_log(self.name, branch=branch, version=wanted)))
        return b"".join([piece async for piece in pieces]).decode(errors="replace")

    async def logs(
        self, *, request: str | None = None, branch: str | None = None, version: int | str | None = None,
        after: str | None = None, limit: int = LIMIT_DEFAULT,
    ) -> LogPage:  # fmt: skip
        """What its calls printed and raised: the last lines, or those behind `after`, which is `next` of a page.

        Args:
            request: the id of a request (x-request-id of its reply) or of a job: only its lines are printed.
        """
        query = LogQuery(branch, None if version is None else str(version), request, after, limit)
        return await self._client.call(calls.model_calls(self.name, query))

    async def rollback(self, number: int | None = None, *, branch: str = "main") -> VersionInfo:
        """Let an earlier version be the latest: this one, or the one before."""
        return await self._client.call(calls.rollback(self.name, Rollback(branch, number)))

    async def merge(self, source: str, *, into: str = "main") -> VersionInfo:
        """Make the latest of one branch a new version of another."""
        return await self._client.call(calls.merge(self.name, Merge(source, into)))

    async def restart(self, *, branch: str = "main") -> VersionInfo:
        """Make the latest again, under a new number, with workers of its own."""
        return await self._client.call(calls.restart(self.name, Restart(branch)))

    async def set_alias(
        self, alias: str, backends: dict[int, float] | list[BackendInfo], mirrors: Sequence[int | BackendInfo] = ()
    ) -> AliasInfo:
        """Point an alias to versions.

        Args:
            backends: number -> weight on the branch main, or BackendInfo for other branches too.
            mirrors: versions that get copies of the calls; their answers go nowhere.
        """
        return await self._client.call(calls.set_alias(self.name, alias, alias_of(backends, mirrors)))

    async def remove_alias(self, alias: str) -> None:
        await self._client.call(calls.remove_alias(self.name, alias))

    async def remove(self, *, branch: str | None = None, version: int | None = None) -> list[VersionInfo]:
        """Remove a version, a branch, or all. Raises: Conflict (`version_in_use`)."""
        wanted = None if version is None else str(version)
        return (await self._client.call(calls.remove_model(self.name, branch=branch, version=wanted))).versions
