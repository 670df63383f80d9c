"""Standard input as the dataset of a command, and standard output as the place for the results of a job: `-`.

What they need is imported only where it is used: `batchmill run` starts with this module.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from batchmill.cli.session import Session
from batchmill.client.job_ends import is_sampled
from batchmill.config import Config
from batchmill.errors import InvalidInput, InvalidTransition
from batchmill.services.data_dirs import data_dirs
from batchmill.states import JobState
from batchmill.types import JobView, Sample

if TYPE_CHECKING:
    from batchmill.cli.clients import JobsClient

STDIN = STDOUT = "-"
SPOOL, RESULTS = "batchmill.datasets.spooled_inputs", "batchmill.cli.jobs.results"
STREAM, FILES = "batchmill.cli.jobs.result_stream", "batchmill.jobs.ledger.files"
RESULT_NAME = "results.jsonl"  # of JSON lines that stay with their job
SAMPLES = "batchmill.cli.jobs.samples"


def load(name: str) -> ModuleType:
    """Import what pipes need, which few commands do."""
    return import_module(name)


@contextlib.contextmanager
def spooled_input(session: Session, config: Config, options: dict[str, Any], *, stays: bool = False) -> Iterator[None]:
    """Read standard input to its end, if it is the input of a command, and name the file instead.

    Args: stays: the file belongs to the job of the command; otherwise it is gone at the end.
    Raises: InvalidInput where it cannot be a dataset.
    """
    inputs = list(options["inputs"])
    if STDIN not in inputs:
        yield
        return
    if inputs != [STDIN]:
        raise InvalidInput("standard input (-) is a dataset by itself: name no other input beside it")
    if sys.stdin is None or sys.stdin.isatty():
        raise InvalidInput("standard input is a terminal: send a dataset into it, or name its files")
    spooling = load(SPOOL)
    with contextlib.ExitStack() as stack:
        if stays and session.server_url is None:
            data_dirs.prepare_data_dir(config.data_dir)
            folder = config.data_dir / spooling.FOLDER
        else:
            temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="batchmill-input-"))
            folder = Path(temporary, spooling.FOLDER)
        options["inputs"] = (str(spooling.spool(sys.stdin.buffer, folder, options["format_"])),)
        yield


def is_piped(session: Session, options: dict[str, Any]) -> bool:
    """Whether the results go to standard output (`-o -`). The order then names no output, and has all rows together.

    Whatever else the command prints goes to standard error. Raises: InvalidInput.
    """
    if options["output"] != STDOUT:
        return False
    if session.as_json:
        raise InvalidInput("--json and -o - both write to standard output: leave one of them out")
    if options["output_format"] == "parquet" and sys.stdout.isatty():
        raise InvalidInput("Parquet is not for a terminal: name a file with -o, or send it into a pipe")
    session.prints_to_stderr = True
    options["output"], options["together"] = None, True
    return True


@contextlib.asynccontextmanager
async def piped_results(
    session: Session, config: Config, jobs: JobsClient, job_id: str, output_format: str, sample: Sample | None
) -> AsyncIterator[None]:
    """Write the results of a job to standard output: rows as they come while the context lasts, the others at its end.

    Rows come early as JSON lines of a job on this machine, in the order of the input, and not into a terminal, which
    shows the progress meanwhile. Those of a sample come at the end, also of a job that has run all rows for others.

    Args: sample: which the command asks for.
    Raises: BrokenPipeError where nobody reads them; the job is paused then. InvalidTransition for a job of this machine
    that goes on with other rows before these are written.
    """
    written = 0
    is_streamed = output_format == "jsonl" and sample is None and session.server_url is None
    if is_streamed and not sys.stdout.isatty():
        streams = load(STREAM)
        write = streams.writer_to_stdout()
    else:
        write = None
    if write is None:
        yield
    else:
        path = load(FILES).JobFiles(config.data_dir, job_id).output(RESULT_NAME)
        tail = streams.ResultTail(path, write)
        async with streams.followed(tail, lambda: _pause(jobs, job_id)):
            yield
        written = tail.written
    results = load(RESULTS)
    view = await jobs.show(job_id)
    has_results = view.state in results.WITH_RESULTS and bool(view.output or view.errors_output)
    is_part = has_results and sample is not None and sample.rows < view.rows
    if sample is not None and (is_part or (is_sampled(view) and view.sample == sample)):
        await load(SAMPLES).write_sample(session, view, sample, results.Wanted(kind=output_format))
    elif has_results:
        await results.write_results(session, config, view, results.Wanted(kind=output_format, skipped_bytes=written))
    elif session.server_url is None and _is_running(view) and not session.interrupts.count:
        raise InvalidTransition(
            f"another command has gone on with the job {job_id} before its rows were written: "
            f"batchmill results {job_id} --partial"
        )


def _is_running(view: JobView) -> bool:
    return view.state != JobState.PAUSED and not JobState(view.state).is_at_rest


async def _pause(jobs: JobsClient, job_id: str) -> None:
    with contextlib.suppress(InvalidTransition):  # it has ended
        await jobs.steer(job_id, "pause")
