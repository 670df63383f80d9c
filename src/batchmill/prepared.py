"""The processes of a command's first job, started while the command opens its data directory.

Importing and opening what an owner needs takes longer than anything else in a small job; meanwhile its processes start.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path

from msgspec import Struct

from batchmill.children.offload import Children
from batchmill.executors.prepared_workers import PreparedWorkers
from batchmill.jobs.intake import PREPARE
from batchmill.types import ModelSpec

log = logging.getLogger("batchmill.owner")

# One core is for the owner: more processes would only delay it, and start again as fast when their model is known.
WORKERS_MAX = max(1, (os.cpu_count() or 2) - 1)


class PreparedProcesses(Struct, frozen=True):
    """Workers, and a child process for sealing."""

    workers: PreparedWorkers
    children: Children


@contextlib.asynccontextmanager
async def prepare(folder: Path, models: Sequence[ModelSpec]) -> AsyncIterator[PreparedProcesses | None]:
    """Start the processes of a job with these models; None: there is no job. Leaving ends those that nobody took.

    The caller holds the lock of the data directory. Args: folder: that of the workers.
    """
    if not models:
        yield None
        return
    prepared = PreparedProcesses(PreparedWorkers(folder), Children())
    try:
        try:
            await prepared.children.prepare(PREPARE)
            await prepared.workers.start(list(_engines(models))[:WORKERS_MAX])
        except OSError as error:  # the owner starts them again, and reports why it cannot
            log.info("processes could not be started ahead: %s", error)
        yield prepared
    finally:
        await prepared.workers.close()
        await prepared.children.close()


def _engines(models: Iterable[ModelSpec]) -> Iterable[str]:
    """The engine of each worker that the models begin with."""
    for model in models:
        if model.traits.class_path:
            yield from [model.engine] * max(1, model.workers if model.scaling is None else model.scaling.replicas_min)
