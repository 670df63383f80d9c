"""Validators that are killed before they send any result."""

from __future__ import annotations

import os
import signal

import pytest

from batchmill.datasets.checking import fan_out, inspection


def kill_pools(patch: pytest.MonkeyPatch, pools_max: int) -> list[fan_out.ValidatorPool]:
    """Kill the first `pools_max` pools of validators once they have ranges. Returns the list of all pools."""
    pools: list[fan_out.ValidatorPool] = []
    begin, readable = fan_out.ValidatorPool.__init__, fan_out.ValidatorPool._readable

    def begin_stopped(self, *args):
        begin(self, *args)
        pools.append(self)
        if len(pools) <= pools_max:
            _signal(self, signal.SIGSTOP)

    def kill_first(self, turn, *, only_turn):
        if pools.index(self) < pools_max:
            _signal(self, signal.SIGKILL)
        return readable(self, turn, only_turn=only_turn)

    patch.setattr(fan_out.ValidatorPool, "__init__", begin_stopped)
    patch.setattr(fan_out.ValidatorPool, "_readable", kill_first)
    patch.setattr(inspection, "RANGE_BYTES", 50_000)
    return pools


def _signal(pool: fan_out.ValidatorPool, number: int) -> None:
    for link in pool._links:
        os.kill(link._process.pid, number)
