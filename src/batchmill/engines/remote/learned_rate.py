"""LearnedRate: the calls per second that a service allows, learned from its refusals. Pure.

Between two refusals a service accepts what its limit allows: its replies over that time are its rate, or less if
fewer calls were sent. Calls are sent a little below the rate that is known to be good. Now and then a higher rate is
tried, in growing steps until a refusal; then the rate returns to the good rate.
"""

from __future__ import annotations

import math
from enum import Enum

ANSWERS_MIN = 12  # replies between two refusals that are enough to compute a rate
ANSWERS_FIRST = 4  # for the first guess
KEEP = 0.985  # the share of the good rate that is used
LESS = 0.97  # the share of the good rate after it was refused
STEP_S, STEP_CALLS = 0.25, 4  # the minimum time and calls of a step before the next one
STEP_FIRST, STEP_MAX = 0.02, 1.0  # the increase that a step tries; doubled with each step
HOLD_FIRST_S, HOLD_MAX_S = 4.0, 32.0  # between the end of one trial and the next; doubled while trials gain nothing
HOLD_CALLS = 100  # the minimum number of calls between trials
RESTS_A_HOLD = 20.0  # between trials, this many times the wait that a failed trial costs
SAME = 1.05  # a measured rate that is higher by less than this counts as the known rate
CREEP = 1.03  # the minimum increase of the good rate by a trial
BLAMED_MIN = 4  # calls in flight that may be the cause of a refusal
SAVED_CALLS = 12  # calls that a service may accept beyond its rate, after a wait
SAVED_S = 0.05  # how much unused time is saved up for later calls
REST_CALLS = 3  # the default wait after a refusal, in calls


class RefusalCause(Enum):
    """The presumed cause of a refusal."""

    STALE = "stale"  # the cause of an earlier refusal
    UNKNOWN = "unknown"  # there are too few replies to tell
    FOUND = "found"  # the rate, of which there is a first estimate now
    RATE = "rate"  # the rate, which is lower now
    IN_FLIGHT = "in flight"  # the number of calls in flight, until another refusal shows that it was the rate


class Count:
    """Counts replies since a moment."""

    def __init__(self) -> None:
        self.since: float | None = None
        self.answers = 0

    def begin(self, now: float, saved: int = 0) -> None:
        """Start counting, minus an allowance that the service may have saved up."""
        self.since, self.answers = now, -saved

    def rate(self, now: float, answers_min: int = ANSWERS_MIN) -> float | None:
        """Replies per second; None if there were too few."""
        if self.since is None or self.answers < answers_min or now <= self.since:
            return None
        return self.answers / (now - self.since)


class LearnedRate:
    """The learned rate: unknown before the first refusals; then `wait_s` spreads calls evenly."""

    def __init__(self) -> None:
        self.pace: float | None = None  # calls per second, now
        self.good = 0.0  # calls per second that the service is known to accept
        self._refusal = Count()  # since the last refusal that ended a count
        self._trial = Count()  # since the start of the current trial
        self._blamed: Count | None = None  # since a refusal of this trial was blamed on the calls in flight
        self._was_held = False  # since then calls have waited for those in flight
        self._reacted_at = -math.inf
        self._step = STEP_MAX
        self._step_at = 0.0  # when the next step may be tried
        self._hold_s = HOLD_FIRST_S
        self._keep = LESS  # of the good rate, if it is refused
        self._was_bound = False  # since the last step, calls have waited only for the rate
        self._level, self._at = 0.0, 0.0

    def wait_s(self, now: float) -> float:
        """Seconds until the rate allows another call."""
        if self.pace is None:
            return 0.0
        if self._was_bound and now >= self._step_at:
            self._try_more(now)
        self._level = min(max(1.0, self.pace * SAVED_S), self._level + (now - self._at) * self.pace)
        self._at = now
        if self._level > 1 - 1e-6:  # rounding must not leave a wait below the clock's resolution
            return 0.0
        self._was_bound = True
        return (1 - self._level) / self.pace

    def held(self, now: float) -> None:
        """Note that calls wait for those in flight, so that the rate is not being tested."""
        if self.pace is None:
            return
        self._was_bound, self._was_held = False, True
        self._step_at = max(self._step_at, now + STEP_S)

    def sent(self) -> None:
        """Note a sent call."""
        if self.pace is not None:
            self._level -= 1

    def answered(self) -> None:
        """Note a call that the service accepted."""
        self._refusal.answers += 1
        self._trial.answers += 1
        if self._blamed is not None:
            self._blamed.answers += 1

    def refused(self, sent_at: float, now: float, retry_after_s: float | None, in_flight: int) -> RefusalCause:
        """Note a call that the service refused for its rate.

        Args: `retry_after_s`, the wait that it requests, if any; `in_flight`, the number of other calls in flight.
        """
        if sent_at < self._reacted_at:  # the call was sent before the last refusal
            return RefusalCause.STALE
        self._reacted_at = now
        if self.pace is None:
            return self._begin(now)
        return self._fall_back(now, retry_after_s or 0.0, in_flight)

    def default_wait_s(self) -> float:
        """The wait after a refusal that requests none."""
        return REST_CALLS / self.pace if self.pace else 0.0

    def _begin(self, now: float) -> RefusalCause:
        """Start with an estimate from the replies so far, which later trials correct."""
        rate = self._refusal.rate(now, ANSWERS_FIRST)
        if rate is None:
            if self._refusal.since is None:
                self._refusal.begin(now)
            return RefusalCause.UNKNOWN
        self._refusal.begin(now)
        self.good = self.pace = rate
        self._step, self._step_at = STEP_MAX, now + STEP_S
        self._level, self._at = 0.0, now
        return RefusalCause.FOUND

    def _fall_back(self, now: float, retry_after_s: float, in_flight: int) -> RefusalCause:
        """Return to the known good rate, or below it if that was refused."""
        assert self.pace is not None
        old_good, pace = self.good, self.pace
        self._learn(now, retry_after_s)
        self._was_bound = False
        self._level = min(self._level, 0.0)
        is_settled = pace > old_good and self.good <= old_good * SAME and self._step < STEP_MAX
        if self._was_window(now) or (
            is_settled and self._blamed is None and not retry_after_s and in_flight >= BLAMED_MIN
        ):
            self._blamed, self._was_held = Count(), False
            self._blamed.begin(now)
            self._step_at = now + STEP_S
            return RefusalCause.IN_FLIGHT
        self._blamed = None
        if is_settled:
            longest = max(HOLD_MAX_S, retry_after_s * RESTS_A_HOLD)
            self._hold_s = min(max(self._hold_s * 2, retry_after_s * RESTS_A_HOLD), longest)
        self.pace = self.good * KEEP
        self._step = STEP_FIRST
        hold_s = max(self._hold_s, HOLD_CALLS / self.pace) if is_settled else STEP_S
        self._step_at = now + retry_after_s + hold_s
        return RefusalCause.RATE

    def _learn(self, now: float, retry_after_s: float) -> None:
        """Update the good rate from the replies before this refusal."""
        assert self.pace is not None
        old_good, pace, measured = self.good, self.pace, self._refusal.rate(now)
        if measured is not None or retry_after_s:
            self._refusal.begin(now + retry_after_s, SAVED_CALLS if retry_after_s else 0)
        if pace <= old_good:
            # One refusal is weak evidence; each that follows at once is stronger.
            self.good = old_good * self._keep if measured is None else min(old_good * LESS, measured)
            self._keep = self._keep**2 if measured is None else LESS
            self._hold_s = HOLD_FIRST_S
            return
        self._keep = LESS
        tried = self._trial.rate(now) or 0.0
        if self._step >= STEP_MAX:
            tried = max(tried, pace / (1 + STEP_MAX))
        elif not retry_after_s:
            tried = max(tried, old_good * CREEP)  # the service accepted some of it; if it was too much, it soon refuses
        self.good = min(max(old_good, measured or 0.0, tried), pace)

    def _was_window(self, now: float) -> bool:
        """Whether the concurrency window, not the rate, has limited calls since it was blamed."""
        return self._was_held and self._blamed is not None and self._blamed.rate(now - STEP_S) is not None

    def _try_more(self, now: float) -> None:
        assert self.pace is not None
        if self.pace <= self.good:
            self._trial.begin(now, SAVED_CALLS)
        # Half of a rate without a refusal is good, even if the service had saved up an allowance.
        self.good = max(self.good, self.pace / 2)
        self.pace *= 1 + self._step
        self._step = min(self._step * 2, STEP_MAX)
        self._step_at = now + max(STEP_S, STEP_CALLS / self.pace)
        self._was_bound = False
