"""A scheduler for vLLM that lets rows step aside while somebody waits. It runs inside vLLM, which is all it imports.

In a step that serves live requests, rows get as many tokens as make it little longer; the others keep their place and
their cache. vLLM itself knows such steps: a running request that finds the step's token budget spent waits for the
next.
"""

from __future__ import annotations

import os
import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

LIVE_PRIORITY = -(2**31)  # as batchmill sends live requests
SLACK = float(os.environ.get("BMY_SLACK", 0.15))  # by so much rows may lengthen a step that serves live requests
HELD_SHARE = 0.5  # rows step aside for at most this share of the time
CREDIT_MAX_S = 4.0  # saved up while nobody waits
PROBE_EVERY = 16  # of the live steps one runs without rows, to see how long such a step takes
LEARN = 0.2  # weight of the newest step
KV_USAGE_MAX = 0.95  # of the cache; beyond it vLLM preempts, and must see the rows
STEP_MAX_S = 10.0  # a longer one was no step: the engine had nothing to do


def create(*args: Any, **kwargs: Any) -> Scheduler:
    """What vLLM calls in a scheduler's place. With asynchronous scheduling, a GPU's, steps are vLLM's own."""
    config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    kind = AsyncScheduler if config.scheduler_config.async_scheduling else YieldingScheduler
    return kind(*args, **kwargs)


class StepTimes:
    """How long a step takes with live requests alone, and what each token of a row adds."""

    def __init__(self) -> None:
        self._alone_s = 0.0
        self._token_s = 0.0
        self._credit_s = CREDIT_MAX_S

    def observe(self, lasted_s: float, row_tokens: int, is_live: bool, is_held: bool) -> None:
        """A step has ended."""
        self._credit_s += -lasted_s if is_held else lasted_s * HELD_SHARE / (1 - HELD_SHARE)
        self._credit_s = min(self._credit_s, CREDIT_MAX_S)
        if row_tokens == 0:
            if is_live:
                self._alone_s = _blend(self._alone_s, lasted_s)
        elif lasted_s > self._alone_s:
            self._token_s = _blend(self._token_s, (lasted_s - self._alone_s) / row_tokens)

    @property
    def may_hold(self) -> bool:
        return self._credit_s > 0

    def row_tokens(self) -> int:
        """Tokens of rows that a live step has room for."""
        return int(SLACK * self._alone_s / self._token_s) if self._token_s > 0 else 0


def _blend(old: float, new: float) -> float:
    return new if old == 0 else old + LEARN * (new - old)


class YieldingScheduler(Scheduler):
    """vLLM's scheduler, with live requests first in every step and few rows beside them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._times = StepTimes()
        self._live_steps = 0
        self._is_stuck = False  # the last step held rows and served nobody: a live request waits for something else
        self._last: tuple[float, int, bool, bool] | None = None  # of the step before: when, and as `observe` has it

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        now = time.monotonic()
        if self._last is not None and now - self._last[0] < STEP_MAX_S:
            self._times.observe(now - self._last[0], *self._last[1:])
        live = [request for request in self.running if request.priority <= LIVE_PRIORITY]
        arriving = self.waiting.peek_request() if self.waiting else None
        if arriving is not None and arriving.priority > LIVE_PRIORITY:
            arriving = None
        is_live = bool(live) or arriving is not None
        is_held = is_live and self._can_hold(len(live), arriving is not None)
        output = self._schedule_held(live, arriving, args, kwargs) if is_held else super().schedule(*args, **kwargs)
        tokens = output.num_scheduled_tokens
        of_rows = sum(n for name, n in tokens.items() if self.requests[name].priority > LIVE_PRIORITY)
        self._last = (now, of_rows, is_live, is_held) if tokens else None
        self._is_stuck = is_held and not tokens
        return output

    def _can_hold(self, live: int, is_arriving: bool) -> bool:
        """Whether there are rows to hold and that helps: who needs the place of one, or its cache, waits for them."""
        rows = len(self.running) + len(self.waiting) - live - is_arriving
        has_place = not is_arriving or len(self.running) < self.max_num_active_reqs
        has_cache = self.get_kv_cache_usage() < KV_USAGE_MAX
        return rows > 0 and has_place and has_cache and self._times.may_hold and not self._is_stuck

    def _schedule_held(self, live: list[Any], arriving: Any, args: Any, kwargs: Any) -> Any:
        """A step in which rows have few tokens. While a request arrives they have none, or it would not get in."""
        rows = [request for request in self.running if request.priority > LIVE_PRIORITY]
        self._live_steps += 1
        allowed = self._times.row_tokens() if self._live_steps % PROBE_EVERY else 0
        needed = sum(max(1, request.num_tokens_with_spec - request.num_computed_tokens) for request in live)
        hidden: list[Any] = []
        if arriving is not None or not allowed:
            hidden, rows, allowed = rows, [], 0
            needed += 0 if arriving is None else max(1, arriving.num_tokens - arriving.num_computed_tokens)
        budget, active = self.max_num_scheduled_tokens, self.max_num_active_reqs
        self.running = live + rows
        self.max_num_scheduled_tokens = min(budget, max(1, needed + allowed))
        # Whoever is hidden keeps its place; and no row comes in where only live requests are to run.
        self.max_num_active_reqs = active - len(hidden) if arriving is not None or allowed else len(self.running)
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.running += hidden
            self.max_num_scheduled_tokens, self.max_num_active_reqs = budget, active
