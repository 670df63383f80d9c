"""How many rows may be in flight while somebody waits for an answer. Pure: told what happens and when, it decides."""

from __future__ import annotations

import math

ALERT_S = 5.0  # after the last live request rows go at full speed again
SLOWER, FASTER = 1.5, 1.25  # times the best lately: beyond the one fewer rows, below the other more
SHRINK, GROWTH = 0.8, 1.1
FIRST_SHARE = 0.75  # of the rows that run, when the first live request comes
ROWS_MIN = 4
RATE_KEPT = 0.55  # of the rows' rate without live requests: below it they are not slowed further
BEST_FADES = 1.005  # with each answer, so that what was once possible is not asked for for ever
CREDIT_MAX_S = 4.0  # how long no row is sent while live requests are answered; it comes back as time goes by
LEARN = 0.2  # weight of the newest sample


class Yielding:
    """Follows how long live requests take, against the best of late, and how fast rows go.

    While a live request is answered no new row is sent, for at most half of the time; and as long as live requests
    come now and then, fewer rows are in flight: as many as leave the answers as quick as they were.
    """

    def __init__(self) -> None:
        self.live = 0
        self._live_at = -math.inf  # when one was last there
        self._allowed = math.inf
        self._best_s = math.inf  # for one piece of an answer
        self._running = 0
        self._rows_at: tuple[float, int] | None = None
        self._rate = 0.0  # rows a second, of late
        self._full_rate = 0.0  # without live requests
        self._credit_s = CREDIT_MAX_S
        self._credit_at: float | None = None

    def began(self, now: float) -> None:
        """A live request has come."""
        self._spend(now)
        if not self._is_alert(now):
            self._allowed = max(ROWS_MIN, FIRST_SHARE * self._running) if self._running else math.inf
        self.live += 1
        self._live_at = now

    def ended(self, now: float) -> None:
        """It is answered, or nobody waits any more."""
        self._spend(now)
        self.live -= 1
        self._live_at = now

    def answered(self, piece_s: float, in_flight: int) -> None:
        """A whole answer took `piece_s` for each of its pieces, beside so many rows."""
        self._best_s = min(self._best_s * BEST_FADES, piece_s)
        if in_flight == 0:
            return
        is_slow_enough = self._rate < RATE_KEPT * self._full_rate
        if is_slow_enough or piece_s < FASTER * self._best_s:
            self._allowed = self._allowed * GROWTH + 1
        elif piece_s > SLOWER * self._best_s:
            self._allowed = max(ROWS_MIN, SHRINK * min(self._allowed, in_flight))

    def observe(self, running: int, rows_done: int, now: float) -> None:
        """Rows in the engine, and how many have been finished ever; now and then."""
        self._running = running
        if self._rows_at is not None and now > self._rows_at[0] and rows_done >= self._rows_at[1]:
            rate = (rows_done - self._rows_at[1]) / (now - self._rows_at[0])
            self._rate += LEARN * (rate - self._rate)
            if not self._is_alert(now):
                self._full_rate += LEARN * (rate - self._full_rate)
        self._rows_at = now, rows_done

    def limit(self, limit: int, in_flight: int, now: float) -> int:
        """Rows that may be in flight: `limit`, or fewer."""
        if not self._is_alert(now):
            return limit
        self._spend(now)
        allowed = int(min(limit, self._allowed))
        return min(allowed, in_flight) if self.live and self._credit_s > 0 else allowed

    def _is_alert(self, now: float) -> bool:
        return self.live > 0 or now - self._live_at < ALERT_S

    def _spend(self, now: float) -> None:
        """Keep the account of time in which rows were held back."""
        passed = 0.0 if self._credit_at is None else now - self._credit_at
        self._credit_at = now
        self._credit_s = max(0.0, min(CREDIT_MAX_S, self._credit_s + (-passed if self.live else passed)))
