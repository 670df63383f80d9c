"""A vLLM scheduler that lets rows yield to live requests. It runs in vLLM and imports nothing else of batchmill.

In a step that serves live requests, rows get few tokens, so that the step takes little longer; other rows keep their
slot and their cache. While live requests arrive now and then, steps of rows are kept short, because a new request waits
for the current step. vLLM has such steps too: a running request waits for the next step if the token budget is used up.
"""

from __future__ import annotations

import time
from typing import Any

from batchmill_step_times import StepTimes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

LIVE_PRIORITY = -(2**31)  # the priority of live requests
SLACK = 0.15  # the share by which rows may lengthen a step that serves live requests
STEP_FACTOR = 4.0  # the maximum length of a step of rows, in live steps
ALERT_S = 10.0  # how long after the last live request steps stay short
PROBE_EVERY = 16  # one in this many live steps runs without rows, to measure the duration
SLOTS_FREE = 16  # slots of running requests kept for live ones; at most an eighth of all
ROW_TOKENS_MIN = 16  # of a short step
KV_USAGE_MAX = 0.95  # of the cache; above it vLLM preempts, and must see the rows


def create(*args: Any, **kwargs: Any) -> Scheduler:
    """Create the scheduler. With asynchronous scheduling, as on GPUs, vLLM's own scheduler is used."""
    config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    kind = AsyncScheduler if config.scheduler_config.async_scheduling else YieldingScheduler
    return kind(*args, **kwargs)


class YieldingScheduler(Scheduler):
    """vLLM's scheduler, with live requests first in every step and few rows beside them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._times = StepTimes()
        self._live_steps = 0
        self._live_at = -ALERT_S
        self._is_stuck = False  # the last step held rows and ran nothing, so a live request waits for something else
        self._last = (0.0, 0, False, False)  # the current step: its start, and the arguments of `observe`

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        now = time.monotonic()
        live = [request for request in self.running if request.priority <= LIVE_PRIORITY]
        arriving = self.waiting.peek_request() if self.waiting else None
        if arriving is not None and arriving.priority > LIVE_PRIORITY:
            arriving = None
        is_live = bool(live) or arriving is not None
        is_held = is_live and self._can_hold(len(live), arriving is not None)
        if is_live:
            self._live_at = now
        budget, active = self.max_num_scheduled_tokens, self.max_num_active_reqs
        hidden = self._hold(live, arriving) if is_held else []
        if not is_live:
            self._shorten(now)
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self.running += hidden
            self.max_num_scheduled_tokens, self.max_num_active_reqs = budget, active
        tokens = output.num_scheduled_tokens
        of_rows = sum(n for name, n in tokens.items() if self.requests[name].priority > LIVE_PRIORITY)
        self._last = (now, of_rows, is_live and arriving is None, is_held)
        self._is_stuck = is_held and not tokens
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        began, *arguments = self._last
        self._times.observe(time.monotonic() - began, *arguments)
        return super().update_from_output(*args, **kwargs)

    def _can_hold(self, live: int, is_arriving: bool) -> bool:
        """Whether there are rows to hold, and holding helps: new requests may need their slots or cache."""
        rows = len(self.running) + len(self.waiting) - live - is_arriving
        has_slot = not is_arriving or len(self.running) < self.max_num_active_reqs
        has_cache = self.get_kv_cache_usage() < KV_USAGE_MAX
        return rows > 0 and has_slot and has_cache and self._times.may_hold and not self._is_stuck

    def _shorten(self, now: float) -> None:
        """Limit a step of rows alone: leave some slots free, and keep it short while live requests may arrive."""
        self.max_num_active_reqs -= min(SLOTS_FREE, self.max_num_active_reqs // 8)
        allowed = self._times.row_tokens(STEP_FACTOR)
        if allowed is not None and now - self._live_at < ALERT_S:
            # The first rows continue and the others wait; prompts are processed in chunks.
            self.max_num_scheduled_tokens = min(self.max_num_scheduled_tokens, max(allowed, ROW_TOKENS_MIN))

    def _hold(self, live: list[Any], arriving: Any) -> list[Any]:
        """Limit the tokens of rows in this step; give them none while a live request arrives, which could not enter.

        Returns the rows to hide from vLLM in this step. They keep their slots.
        """
        rows = [request for request in self.running if request.priority > LIVE_PRIORITY]
        self._live_steps += 1
        allowed = (self._times.row_tokens(SLACK) or 0) if self._live_steps % PROBE_EVERY else 0
        needed = sum(max(1, request.num_tokens_with_spec - request.num_computed_tokens) for request in live)
        if arriving is not None:
            needed += max(1, arriving.num_tokens - arriving.num_computed_tokens)
        if arriving is None and allowed:
            self.running = live + rows
            hidden = []
        else:
            allowed, hidden = 0, rows
            self.running = live
            # Keep the number of slots, and let no row in where only live requests run.
            self.max_num_active_reqs = len(live) if arriving is None else self.max_num_active_reqs - len(rows)
        self.max_num_scheduled_tokens = min(self.max_num_scheduled_tokens, max(1, needed + allowed))
        return hidden
