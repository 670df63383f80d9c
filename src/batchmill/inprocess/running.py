"""`batchmill.run` and `batchmill.arun`."""

from __future__ import annotations

import asyncio
import glob
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Unpack

from batchmill import config as configuration
from batchmill.client.frame_shapes import FrameShape
from batchmill.client.frames import is_data, write_data
from batchmill.config import Config
from batchmill.datasets import spooled_inputs
from batchmill.errors import InvalidInput
from batchmill.inprocess.job import Job
from batchmill.inprocess.orders import Keywords, Model, RunOptions, checked, path_of
from batchmill.services.data_dirs import data_dirs
from batchmill.types.cluster import EXECUTORS

Data = Any  # a path or several; a frame or table; a dict of columns; an iterable of rows


def run(
    data: Data,
    *,
    model: Model | None = None,
    wait: bool = True,
    progress: bool | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    config: str | os.PathLike[str] | None = None,
    **options: Unpack[RunOptions],
) -> Job:
    """Run every row of some data through a model, in this process and its children.

    The same call again resumes the job, or finds it finished: data counts by its contents, a function by its code and
    what it holds.

    Args:
        data: a path, a list of paths (folders, globs and URLs too); a frame of pandas or polars, a table of Arrow, a
            relation of DuckDB, a dataset of Hugging Face; a dict of columns; an iterable of dicts.
        model: a name of the configuration, "ENGINE:SOURCE", a function or a class.
        wait: until the job has ended; otherwise it runs in the background.
        progress: show a bar; None: in a notebook and on a terminal.
        data_dir: where the state of jobs is; None: as for the command line.
        config: the configuration file; None: as for the command line.
        options: see `RunOptions`.

    Raises: InvalidInput for what cannot run as it is; JobPaused, InvalidDataset as `Job.wait`.
    """
    job = Job(*_prepared(data, model, data_dir, config, options))
    job.accepted()
    return job.wait(progress=progress) if wait else job


async def arun(
    data: Data,
    *,
    model: Model | None = None,
    wait: bool = True,
    progress: bool | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    config: str | os.PathLike[str] | None = None,
    **options: Unpack[RunOptions],
) -> Job:
    """As `run`, in an event loop. A cancellation pauses the job."""
    # The thread outlives a cancellation, so it must not be what starts the job.
    job = Job(*await asyncio.to_thread(_prepared, data, model, data_dir, config, options))
    await job.accepted_async()
    return await job.waited(progress) if wait else job


def _prepared(
    data: Data,
    model: Model | None,
    data_dir: str | os.PathLike[str] | None,
    config: str | os.PathLike[str] | None,
    options: Mapping[str, Any],
) -> tuple[Config, Path, list[str], Keywords, FrameShape | None]:
    """What a job is made of."""
    given = dict(options)
    executor = given.pop("executor", None)
    if executor is not None and executor not in EXECUTORS:
        raise InvalidInput(
            f"executor is {' or '.join(map(repr, EXECUTORS))}, not {executor!r}; leave it out for workers here"
        )
    keywords = checked(given | ({} if model is None else {"model": model}))
    cwd = Path.cwd()
    loaded = configuration.load(
        environ=os.environ, cwd=cwd, data_dir=path_of("data_dir", data_dir), config_file=path_of("config", config),
        executor=executor,
    )  # fmt: skip
    if is_data(data):
        path, shape = _spooled(data, loaded)
        return loaded, cwd, [path], keywords, shape
    return loaded, cwd, _paths(data), keywords, None


def _paths(data: Any) -> list[str]:
    sources: Iterable[Any] = data if isinstance(data, list | tuple) else [data]
    paths = []
    for source in sources:
        if not isinstance(source, str | os.PathLike) or not os.fspath(source):
            what = "an empty text" if isinstance(source, str) else f"a {type(source).__name__}"
            raise InvalidInput(f"{what} is no path: give the path of a file, or the data itself", code="invalid_source")
        paths.append(os.fspath(source))
    if isinstance(data, list | tuple) and paths and not any(_names_files(path) for path in paths):
        raise InvalidInput(
            f"there is no file {paths[0]!r}: a list of strings is a list of paths. To run texts, give dicts: "
            "[{'text': each} for each in texts]",
            code="no_input",
        )
    return paths


def _names_files(path: str) -> bool:
    """Whether a string may be meant as a path."""
    return "://" in path or glob.has_magic(path) or os.path.lexists(path)


def _spooled(data: Any, config: Config) -> tuple[str, FrameShape]:
    """Data in memory as a file of the data directory, by its contents."""
    data_dirs.prepare_data_dir(config.data_dir)
    with spooled_inputs.part_in(config.data_dir / spooled_inputs.FOLDER) as part:
        written = write_data(data, part)
        return str(spooled_inputs.adopt(part, written.suffix)), written.shape or FrameShape()
