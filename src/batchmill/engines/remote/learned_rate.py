"""LearnedRate: the calls per second that a service allows, learned from its refusals. Pure.

Between two refusals a service takes what its limit allows, and no more: what it answered then, over that time, is its
rate, or less where it was not asked for so much. Calls go a little below the rate that is known to be good. Now and
then more is tried, faster and faster while it is borne, and the good rate is what it goes back to.
"""

from __future__ import annotations

import math
from enum import Enum

ANSWERS_MIN = 12  # between two refusals, for what was answered there to be a rate
ANSWERS_FIRST = 4  # for the first guess
KEEP = 0.985  # of the good rate, used
LESS = 0.97  # of the good rate, once it was refused
STEP_S, STEP_CALLS = 0.25, 4  # tried so long before the next step, and with so many calls
STEP_FIRST, STEP_MAX = 0.02, 1.0  # how much more a step tries; each tries twice as much more as the one before
HOLD_FIRST_S, HOLD_MAX_S = 4.0, 32.0  # between the end of one trial and the next; doubled while they bring nothing
HOLD_CALLS = 100  # and so many calls at least, where there are few
RESTS_A_HOLD = 20.0  # a trial that costs a rest is made so seldom that it costs no more than a part of the time
SAME = 1.05  # a rate found that is higher by less is the one that was known
CREEP = 1.03  # a trial makes the good rate higher by so much at least
BLAMED_MIN = 4  # calls in flight, for these to be what a refusal may be laid to
SAVED_CALLS = 12  # that a service may take beyond its rate, after a rest
SAVED_S = 0.05  # calls saved up while nothing was sent
REST_CALLS = 3  # a refusal is followed by the time of so many calls


class RefusalCause(Enum):
    """The presumed cause of a refusal."""

    STALE = "stale"  # to what an earlier refusal was laid to
    UNKNOWN = "unknown"  # too little is known
    FOUND = "found"  # to the rate, of which there is a first guess now
    RATE = "rate"  # to the rate, which is lower now
    IN_FLIGHT = "in flight"  # to the calls in flight, until another refusal shows that it was the rate


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
    """No rate is known before the first refusals; then `wait_s` spreads calls evenly."""

    def __init__(self) -> None:
        self.pace: float | None = None  # calls per second, now
        self.good = 0.0  # calls per second that the service is known to take
        self._refusal = Count()  # since the last refusal that ended a count
        self._trial = Count()  # since more was tried
        self._blamed: Count | None = None  # since the last refusal of this trial was laid to the calls in flight
        self._was_held = False  # and these were what calls waited for, since then
        self._reacted_at = -math.inf
        self._step = STEP_MAX
        self._step_at = 0.0  # when the next step may be tried
        self._hold_s = HOLD_FIRST_S
        self._keep = LESS  # of the good rate, if it is refused
        self._was_bound = False  # calls have waited for the rate since the last step, and for nothing else
        self._level, self._at = 0.0, 0.0

    def wait_s(self, now: float) -> float:
        """Seconds until the rate allows another call."""
        if self.pace is None:
            return 0.0
        if self._was_bound and now >= self._step_at:
            self._try_more(now)
        self._level = min(max(1.0, self.pace * SAVED_S), self._level + (now - self._at) * self.pace)
        self._at = now
        if self._level > 1 - 1e-6:  # rounding must not leave a wait too short for the clock to see
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

    def refused(self, sent_at: float, now: float, rest_s: float | None, in_flight: int) -> RefusalCause:
        """Note a call that the service refused for its rate.

        Args: `rest_s`, how long it wants to be left alone, if it says; `in_flight`, how many calls are out beside it.
        """
        if sent_at < self._reacted_at:  # it went before the last refusal was known
            return RefusalCause.STALE
        self._reacted_at = now
        if self.pace is None:
            return self._begin(now)
        return self._fall_back(now, rest_s or 0.0, in_flight)

    def rest_s(self) -> float:
        """The pause after a refusal that does not name one."""
        return REST_CALLS / self.pace if self.pace else 0.0

    def _begin(self, now: float) -> RefusalCause:
        """Start with a guess from the replies so far; trying more later corrects it."""
        found = self._refusal.rate(now, ANSWERS_FIRST)
        if found is None:
            if self._refusal.since is None:
                self._refusal.begin(now)
            return RefusalCause.UNKNOWN
        self._refusal.begin(now)
        self.good = self.pace = found
        self._step, self._step_at = STEP_MAX, now + STEP_S
        self._level, self._at = 0.0, now
        return RefusalCause.FOUND

    def _fall_back(self, now: float, rest_s: float, in_flight: int) -> RefusalCause:
        """Return to the known good rate, or below it if that was refused."""
        assert self.pace is not None
        was, pace = self.good, self.pace
        self._learn(now, rest_s)
        self._was_bound = False
        self._level = min(self._level, 0.0)
        is_settled = pace > was and self.good <= was * SAME and self._step < STEP_MAX
        if self._was_window(now) or (is_settled and self._blamed is None and not rest_s and in_flight >= BLAMED_MIN):
            self._blamed, self._was_held = Count(), False
            self._blamed.begin(now)
            self._step_at = now + STEP_S
            return RefusalCause.IN_FLIGHT
        self._blamed = None
        if is_settled:
            longest = max(HOLD_MAX_S, rest_s * RESTS_A_HOLD)
            self._hold_s = min(max(self._hold_s * 2, rest_s * RESTS_A_HOLD), longest)
        self.pace = self.good * KEEP
        self._step = STEP_FIRST
        hold_s = max(self._hold_s, HOLD_CALLS / self.pace) if is_settled else STEP_S
        self._step_at = now + rest_s + hold_s
        return RefusalCause.RATE

    def _learn(self, now: float, rest_s: float) -> None:
        """Update the good rate from the replies before this refusal."""
        assert self.pace is not None
        was, pace, found = self.good, self.pace, self._refusal.rate(now)
        if found is not None or rest_s:
            self._refusal.begin(now + rest_s, SAVED_CALLS if rest_s else 0)
        if pace <= was:
            # One refusal is little to go by; each that follows it at once says more.
            self.good = was * self._keep if found is None else min(was * LESS, found)
            self._keep = self._keep**2 if found is None else LESS
            self._hold_s = HOLD_FIRST_S
            return
        self._keep = LESS
        tried = self._trial.rate(now) or 0.0
        if self._step >= STEP_MAX:
            tried = max(tried, pace / (1 + STEP_MAX))
        elif not rest_s:
            tried = max(tried, was * CREEP)  # the service took some of it; if it was too much, it soon refuses
        self.good = min(max(was, found or 0.0, tried), pace)

    def _was_window(self, now: float) -> bool:
        """Whether the concurrency window, not the rate, has limited calls since it was blamed."""
        return self._was_held and self._blamed is not None and self._blamed.rate(now - STEP_S) is not None

    def _try_more(self, now: float) -> None:
        assert self.pace is not None
        if self.pace <= self.good:
            self._trial.begin(now, SAVED_CALLS)
        # Half of what was borne without a refusal is good, whatever the service had saved up.
        self.good = max(self.good, self.pace / 2)
        self.pace *= 1 + self._step
        self._step = min(self._step * 2, STEP_MAX)
        self._step_at = now + max(STEP_S, STEP_CALLS / self.pace)
        self._was_bound = False
