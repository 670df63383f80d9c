"""How long live requests wait for others to share their call, and how many of them share it.

Clients mostly ask again when they have their reply. While they are on their way, an idle function gains by waiting if
what waiting costs (the requests that wait, times the gap until the next one comes) is less than what it saves, the part
of a call's time that does not depend on its rows. And where the way of all replies and requests takes longer than that
part, it is quicker to call a share of the waiting requests at once: replies travel while the next share is called.
Both follow from the times of earlier calls and requests. Times are in nanoseconds, of any one clock.
"""

from __future__ import annotations

import math

TIME_SHARE, GAP_SHARE = 7 / 8, 3 / 4  # of an average that stays when a value is added
OUTLIER = 4  # a call counts for at most this times the average of calls with about as many rows
SAVING = 2  # times its cost must be saved before anybody waits: gaps vary
PATIENCE = 4  # gaps between requests after which no more are waited for
DOUBT = 31 / 32  # of the gap, each time that all were back before anybody looked: it may be shorter than was seen
SHARES_MAX = 4  # of the clients: with more, calls become small and nothing more is gained


class CallCosts:
    """The time of a call: `fixed_ns`, and `row_ns` for each row, fitted to earlier calls."""

    def __init__(self):
        self._sizes = {}  # bits of the number of rows -> [average rows, average time]
        self._fitted = (0.0, 0.0)
        self._is_fitted = True

    def learn(self, rows, took_ns):
        """Learn from a call."""
        seen = self._sizes.get(rows.bit_length())
        if seen is None:
            self._sizes[rows.bit_length()] = [rows, took_ns]
        else:
            seen[0] += (rows - seen[0]) * (1 - TIME_SHARE)
            seen[1] += (min(took_ns, OUTLIER * seen[1]) - seen[1]) * (1 - TIME_SHARE)
        self._is_fitted = False

    def fit(self):
        """(fixed_ns, row_ns). As long as all calls had about as many rows, all their time counts as fixed."""
        if not self._is_fitted:
            self._fitted, self._is_fitted = _line(list(self._sizes.values())), True
        return self._fitted


def _line(points):
    """(height at 0, slope) of the line through points that fits best; neither is below 0."""
    count = len(points)
    middle_x, middle_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    spread = sum((x - middle_x) ** 2 for x, _ in points)
    slope = sum((x - middle_x) * (y - middle_y) for x, y in points) / spread if spread else 0.0
    height = middle_y - slope * middle_x
    if slope <= 0:
        return middle_y, 0.0
    return (height, slope) if height > 0 else (0.0, middle_y / middle_x)


class BatchWindow:
    """Decides for the live requests of one function. Each event is reported with the time at which it happened.

    Args:
        bound_ns: how long after its last replies a function waits at most; 0: it never does, and all that waits goes
            together.
        shares_max: the most parts in which waiting requests are called; 1: all go together.
    """

    def __init__(self, bound_ns, shares_max=SHARES_MAX):
        self.bound_ns, self._shares_max = bound_ns, shares_max
        self.costs = CallCosts()
        self._away = 0  # clients that have had a reply and may be on their way
        self._returned = 0  # requests since the last replies
        self._replied_ns = self._arrived_ns = 0  # of the last replies and the last request
        self._gap_ns = None  # between a client that comes back and the next; None: unknown
        self._has_learned = True  # from what came after the last replies

    def arrived(self, now_ns):
        """Count a request."""
        if now_ns - self._replied_ns > self.bound_ns:
            self._away = 0  # nobody waits so long
        self._away -= self._away > 0
        self._returned += 1
        self._arrived_ns = now_ns

    def begun(self):
        """Learn from what came before this call: if nobody is away, when the last client came was seen."""
        if not self._has_learned and not self._away and self._returned:
            self._learn_gap((self._arrived_ns - self._replied_ns) / self._returned)

    def called(self, asks, rows, began_ns, ended_ns, *, is_whole):
        """Learn from a call with rows of these requests, after everything that came before their replies were sent.

        Args:
            is_whole: no row of it was called again.
        """
        if is_whole and not asks[-1].from_job:
            self.costs.learn(rows, ended_ns - began_ns)
        self.replied(sum(ask.left == 0 for ask in asks if not ask.from_job), ended_ns)

    def replied(self, requests, now_ns):
        """Count the replies of a call that ended at `now_ns`."""
        if not self._has_learned:
            gap_ns = (now_ns - self._replied_ns) / max(self._returned, 1)
            if self._away:
                self._learn_gap(gap_ns)
            elif self._gap_ns is not None:  # all were back at some time during the call
                self._gap_ns = min(self._gap_ns, gap_ns) * DOUBT
        self._away += requests
        self._returned, self._replied_ns, self._has_learned = 0, now_ns, False

    def _learn_gap(self, gap_ns):
        gap_ns = min(gap_ns, self.bound_ns)
        self._gap_ns = gap_ns if self._gap_ns is None else self._gap_ns * GAP_SHARE + gap_ns * (1 - GAP_SHARE)
        self._has_learned = True

    def wait_ns(self, now_ns, requests, rows):
        """How long so many waiting requests, which have so many rows, wait for the next one."""
        left_ns = self._replied_ns + self.bound_ns - now_ns
        if not self._away or left_ns <= 0 or requests >= self.requests_max(requests, rows):
            return 0
        fixed_ns, _ = self.costs.fit()
        gap_ns = self._gap_ns or 0
        if SAVING * requests * gap_ns >= fixed_ns:
            return 0
        silence_ns = now_ns - max(self._replied_ns, self._arrived_ns)
        patience_ns = fixed_ns / requests if self._gap_ns is None else min(fixed_ns / requests, PATIENCE * gap_ns)
        if silence_ns >= patience_ns:  # who has not come back by now does not come back
            self._away, self._gap_ns = 0, max(gap_ns, min(silence_ns, self.bound_ns))
            return 0
        return math.ceil(min(patience_ns - silence_ns, left_ns))

    def requests_max(self, requests, rows):
        """How many of the waiting requests, which have so many rows, share the next call."""
        clients = requests + self._away
        if self.bound_ns == 0 or self._gap_ns is None or clients < 2:
            return clients
        fixed_ns, row_ns = self.costs.fit()
        run_ns = row_ns * rows / requests  # of one request
        best, best_ns = 1, fixed_ns + clients * (run_ns + self._gap_ns)  # for a call and a reply to each client
        for shares in range(2, min(self._shares_max, clients) + 1):
            share_ns = fixed_ns + clients / shares * (run_ns + self._gap_ns)
            round_ns = max(shares * fixed_ns + clients * run_ns, share_ns)
            if round_ns < best_ns:
                best, best_ns = shares, round_ns
        return -(-clients // best)
