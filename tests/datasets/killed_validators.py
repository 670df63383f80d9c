"""Validators that are killed before they have said anything of the ranges they were given."""

from __future__ import annotations

import os
import signal

import pytest

from batchmill.datasets import fan_out, inspection


def kill_crews(patch: pytest.MonkeyPatch, crews_max: int) -> list[fan_out.Crew]:
    """From now on the first crews die once they have ranges, so many of them; every crew that there was."""
    crews: list[fan_out.Crew] = []
    begin, ready = fan_out.Crew.__init__, fan_out.Crew._ready

    def begin_stopped(self, *args):
        begin(self, *args)
        crews.append(self)
        if len(crews) <= crews_max:
            _signal(self, signal.SIGSTOP)

    def kill_first(self, turn, *, crowded):
        if crews.index(self) < crews_max:
            _signal(self, signal.SIGKILL)
        return ready(self, turn, crowded=crowded)

    patch.setattr(fan_out.Crew, "__init__", begin_stopped)
    patch.setattr(fan_out.Crew, "_ready", kill_first)
    patch.setattr(inspection, "RANGE_BYTES", 50_000)
    return crews


def _signal(crew: fan_out.Crew, number: int) -> None:
    for link in crew._links:
        os.kill(link._process.pid, number)
