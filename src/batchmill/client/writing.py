"""What both shells need when a job is waited for, its files are written and an alias is made."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from batchmill.states import JobState
from batchmill.types import JobView
from batchmill.wire.native import BackendInfo, NewAlias


def is_past(until: float | None, now: float, view: JobView) -> bool:
    """Whether somebody who waits until then has waited long enough, and there is still something to wait for."""
    state = JobState(view.state)
    return until is not None and now >= until and not state.is_at_rest and state is not JobState.PAUSED


@contextlib.contextmanager
def part_of(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file that gets its name once it is whole."""
    target = Path(path)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            yield file
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def asked_of(backends: dict[int, float] | list[BackendInfo], mirrors: Sequence[int | BackendInfo]) -> NewAlias:
    """What an alias is to stand for, versions of the branch main given by their numbers alone."""
    if isinstance(backends, dict):
        backends = [BackendInfo(number, weight=weight) for number, weight in backends.items()]
    return NewAlias(backends, [BackendInfo(each) if isinstance(each, int) else each for each in mirrors])
