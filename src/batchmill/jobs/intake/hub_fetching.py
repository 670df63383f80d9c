"""Fetches a file of a hub within bounds: in a child process, which is ended at a bound.

The hub's library cannot be interrupted, has no bound for a download as a whole, and writes what it gets until its end.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from batchmill.children.offload import Child
from batchmill.children.process_end import boot_id
from batchmill.errors import InvalidInput, StorageFailed
from batchmill.jobs.intake.fetching import HUB_PURPOSE, HUB_VARIABLES
from batchmill.models.worker_environment import chosen, of_helpers
from batchmill.optional import require
from batchmill.wire.input_urls import HUB_DATASETS, HubFile

STALL_S = 600.0  # without a byte on disk: the library writes 10 MiB at once
WATCH_S = 1.0  # between two looks at what was written

CheckSize = Callable[[int], None]


class _Order(Struct, frozen=True):
    file: HubFile
    target: str


def fetch(file: HubFile, target: Path, time_s: float, check_size: CheckSize) -> int:
    """Download a file at a commit. It has its name once it is complete and durable. Returns: its size.

    Args:
        time_s: for all of it.
        check_size: raises an error for a file of so many bytes, which ends the download; called before the file gets
            its name.

    Raises: InvalidInput without the library; InvalidDataset, AuthRefused; StorageFailed.
    """
    return target.stat().st_size if target.exists() else asyncio.run(_fetch(file, target, time_s, check_size))


async def _fetch(file: HubFile, target: Path, time_s: float, check_size: CheckSize) -> int:
    order = msgspec.json.encode(_Order(file, str(target)))
    try:
        async with asyncio.timeout(time_s):
            child = await Child.start(of_helpers(os.environ) | chosen(os.environ, HUB_VARIABLES))
            try:
                check_size(int(await child.run(f"{__name__}:read_size_offloaded", order, lambda _: None)))
                done = await _run_watched(child, order, file, target, check_size)
            finally:
                await child.end()
    except TimeoutError:
        raise _failed(file, f"was not downloaded in time ({time_s:,.0f} s were left for it)") from None
    size_bytes = done.stat().st_size
    check_size(size_bytes)
    done.replace(target)
    shutil.rmtree(_work_folder(target))
    return size_bytes


async def _run_watched(child: Child, order: bytes, file: HubFile, target: Path, check_size: CheckSize) -> Path:
    """Download, as long as there is progress and the size is allowed. Returns where the file is."""
    loop = asyncio.get_running_loop()
    work = asyncio.create_task(child.run(f"{__name__}:fetch_offloaded", order, lambda _: None))
    written, at = _written(target), loop.time()
    try:
        while not (await asyncio.wait([work], timeout=WATCH_S))[0]:
            now = _written(target)
            check_size(now[0])
            if now != written:
                written, at = now, loop.time()
            elif loop.time() - at >= STALL_S:
                raise _failed(file, f"was not downloaded: nothing came for {STALL_S:,.0f} s")
        return Path(os.fsdecode(await work))
    finally:
        work.cancel()
        await asyncio.wait([work])


def _written(target: Path) -> tuple[int, int]:
    """The bytes that an unfinished download has written, and when it did last (ns)."""
    size_bytes = last = 0
    for folder, _, names in os.walk(_work_folder(target)):
        for name in names:
            try:
                found = os.stat(os.path.join(folder, name), follow_symlinks=False)
            except FileNotFoundError:
                continue  # it has another name now
            size_bytes, last = size_bytes + found.st_size, max(last, found.st_mtime_ns)
    return size_bytes, last


def _work_folder(target: Path) -> Path:
    """Where the library writes; it goes on with what an earlier attempt left there, unless the machine lost its power
    meanwhile: bytes that were not synced may be missing in the middle.
    """
    return target.with_name(f"{target.name}.hub-{boot_id().partition('/')[0]}")


def _failed(file: HubFile, what: str) -> StorageFailed:
    name = f"{HUB_DATASETS}{file.repository}"
    return StorageFailed(f"{file.path!r} of {name} {what}; resume the job to go on with it", code="hub_unavailable")


def read_size_offloaded(order: bytes, progress: Callable[[float], None]) -> bytes:
    """Offloaded: the size of the file, as its hub says."""
    wanted = msgspec.json.decode(order, type=_Order)
    read_size = require("batchmill.models.hub_datasets:read_size", HUB_PURPOSE, InvalidInput)
    return str(read_size(wanted.file)).encode()


def fetch_offloaded(order: bytes, progress: Callable[[float], None]) -> bytes:
    """Offloaded: download the file."""
    wanted = msgspec.json.decode(order, type=_Order)
    fetch_file = require("batchmill.models.hub_datasets:fetch", HUB_PURPOSE, InvalidInput)
    return os.fsencode(fetch_file(wanted.file, _work_folder(Path(wanted.target))))
