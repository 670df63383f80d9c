"""Estimates how long an engine's steps take with and without rows. Pure; runs in vLLM's environment."""

from __future__ import annotations

HELD_SHARE = 0.5  # rows are held for at most this share of the time
CREDIT_MAX_S = 4.0  # the most holding time to save up while no rows are held
LEARN = 0.2  # weight of the newest step


class StepTimes:
    """How long a step takes with live requests alone, and how much time each token of a row adds."""

    def __init__(self) -> None:
        self._alone_s = 0.0
        self._token_s = 0.0
        self._credit_s = CREDIT_MAX_S

    def observe(self, lasted_s: float, row_tokens: int, is_live: bool, is_held: bool) -> None:
        """Record a step: its duration, its tokens of rows, and whether it served live requests or held rows."""
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

    def row_tokens(self, share: float) -> int | None:
        """The tokens of rows that take `share` of a live step's time; None: unknown yet."""
        return int(share * self._alone_s / self._token_s) if self._alone_s and self._token_s else None


def _blend(old: float, new: float) -> float:
    return new if old == 0 else old + LEARN * (new - old)
