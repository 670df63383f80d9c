"""A dataset's own files made anew from its input, where they are damaged and the input is what it was.

Sealing is a pure function of the input: each file is replaced by one with the bytes that it had, so that a kill between
two of them leaves a dataset that is sound, or is begun again.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

import msgspec

from batchmill.datasets import layout, soundness
from batchmill.datasets.orders import SealOrder
from batchmill.datasets.sealed import SealedRows, load_seal
from batchmill.datasets.sealing import seal_patiently
from batchmill.errors import InputChanged, InvalidDataset
from batchmill.jobs.job_files import JobFiles
from batchmill.jobs.plan import Progress
from batchmill.store.segments import sync_folder

ANEW = "dataset.new"
ROWS = 4096  # read at once
LAST = (layout.SUMS, layout.SEAL)


def flaws(home: Path) -> list[str]:
    """What is wrong with a sealed dataset, rows that were copied or converted included; the input is not looked at."""
    found = soundness.faults(home)
    if found:
        return found
    seal = load_seal(home)
    if not any(Path(file.path).parent == home for file in seal.files):
        return []
    rows = SealedRows(home, seal)
    try:
        for first in range(0, rows.rows, ROWS):
            rows.read(first, min(first + ROWS, rows.rows))
    except InputChanged as error:
        return [error.message]
    finally:
        rows.close()
    return []


def remake(order: SealOrder, files: JobFiles, progress: Progress) -> list[str]:
    """Make a damaged dataset anew; what was wrong with it, nothing where it is sound.

    Raises: InputChanged where the input is not what was sealed, or nobody can say so any more.
    """
    wrong = flaws(files.dataset)
    if not wrong:
        return []
    anew = files.home / ANEW
    shutil.rmtree(anew, ignore_errors=True)
    anew.mkdir()
    try:
        seal_patiently(order, anew, progress)
        if not _is_same(files.dataset, anew):
            raise InputChanged(
                f"the index of the dataset in {files.dataset} is damaged ({'; '.join(wrong)}), and its input "
                f"{', '.join(order.dataset.paths)} is not what was sealed, or cannot be known to be: restore it, or "
                "start over with --restart"
            )
        _move_in(files.dataset, anew)
    finally:
        shutil.rmtree(anew, ignore_errors=True)
    return wrong


def _is_same(home: Path, anew: Path) -> bool:
    """The input has the digest that was sealed; where that is lost, every block of it the checksum it had."""
    new = load_seal(anew)
    with suppress(InputChanged, InvalidDataset):  # it cannot be read
        old = load_seal(home)
        if (old.sha256, old.rows) == (new.sha256, new.rows):
            return True
    crcs = home / layout.CRCS
    return crcs.exists() and crcs.read_bytes() == (anew / layout.CRCS).read_bytes()


def _move_in(home: Path, anew: Path) -> None:
    """The seal last. What it names lies where it is going to lie."""
    seal = (anew / layout.SEAL).read_bytes()
    moved = seal.replace(msgspec.json.encode(str(anew))[1:-1] + b"/", msgspec.json.encode(str(home))[1:-1] + b"/")
    if moved != seal:
        (anew / layout.SEAL).write_bytes(moved)
        soundness.write_sums(anew, moved)
    home.mkdir(exist_ok=True)
    names = sorted(path.name for path in anew.iterdir())
    for name in (*(name for name in names if name not in LAST), *LAST):
        os.replace(anew / name, home / name)
    sync_folder(home)
