"""Which rows go together in one call of user code: live asks first, filled up with rows of jobs. Pure."""

from __future__ import annotations

import collections

PARTS_MAX = 4000  # asks in one batch: what `progress` can hold


class Batches:
    """Rows that wait, by group: only rows of one group go together. Within it live asks are first come, first served.

    Args:
        size: rows in one batch, at most.
        window_ns: how long the oldest may wait for a batch to fill while nothing else is to be done.
    """

    def __init__(self, size, window_ns=0):
        self.size, self.window_ns = size, window_ns
        self._live = {}  # key -> deque of (ask, first, end)
        self._trains = {}
        self._rows = collections.Counter()  # key -> rows that wait

    def __bool__(self):
        return bool(self._live or self._trains)

    @property
    def has_live(self):
        return bool(self._live)

    def add(self, ask, first, end, key=None):
        """These rows wait from now on."""
        groups = self._trains if ask.is_train else self._live
        groups.setdefault(key, collections.deque()).append((ask, first, end))
        self._count(key, end - first)

    def drop(self, ask):
        """What waits of this ask never runs."""
        for groups in (self._live, self._trains):
            for key, runs in list(groups.items()):
                kept = collections.deque(run for run in runs if run[0] is not ask)
                self._count(key, _rows_of(kept) - _rows_of(runs))
                groups[key] = kept
                if not kept:
                    del groups[key]

    def due_ns(self, now_ns, size=None):
        """How long to wait until `take` has something to give; None: for ever."""
        key, wait_ns = self._choose(now_ns, size or self.size)
        return None if key is _NOTHING else wait_ns

    def take(self, now_ns, size=None):
        """The next batch, as (ask, first, end); empty where none is due."""
        size = size or self.size
        key, wait_ns = self._choose(now_ns, size)
        if key is _NOTHING or wait_ns > 0:
            return []
        parts = []
        for groups in (self._live, self._trains):
            if key in groups:
                size -= self._take_of(groups[key], size, parts)
                if not groups[key]:
                    del groups[key]
        self._count(key, -_rows_of(parts))
        return parts

    @staticmethod
    def _take_of(runs, size, parts):
        """Move up to `size` rows from what waits to `parts`; returns how many."""
        left = size
        while runs and left and len(parts) < PARTS_MAX:
            ask, first, end = runs[0]
            stop = min(end, first + left)
            parts.append((ask, first, stop))
            left -= stop - first
            if stop == end:
                runs.popleft()
            else:
                runs[0] = (ask, stop, end)
        return size - left

    def _choose(self, now_ns, size):
        """The key of the next batch, and how long it is to wait yet: a full one first, else the oldest."""
        best, best_age = _NOTHING, 0
        for groups in (self._live, self._trains):
            for key, runs in groups.items():
                age = now_ns - runs[0][0].arrived_ns
                if self.window_ns and self._rows[key] >= size:
                    age += self.window_ns + _AHEAD_NS
                if best is _NOTHING or age > best_age:
                    best, best_age = key, age
            if best is not _NOTHING:
                break
        return best, max(self.window_ns - best_age, 0)

    def _count(self, key, rows):
        self._rows[key] += rows
        if not self._rows[key]:
            del self._rows[key]


class Bisection:
    """How a batch that raised is cut, learned from what happened to the rows before it.

    `share` is the estimated share of rows that raise.
    """

    SINGLES_ROWS = 4  # up to here, one by one is no dearer than halves
    MEMORY_ROWS = 256  # rows after which an estimate has mostly gone
    RAISING_MAX = 2.0  # expected rows that raise in a batch, from which on halves would all raise too
    FULL_SHARE = 0.7  # expected rows that raise in a batch that is made

    def __init__(self):
        self.share = 0.0

    def learn(self, rows, raised):
        """Of so many rows so many raised."""
        self.share += (raised / rows - self.share) * rows / (rows + self.MEMORY_ROWS)

    def size(self, size):
        """The rows of a batch that is likely to succeed."""
        if self.share * size <= self.FULL_SHARE:
            return size
        return max(1, int(self.FULL_SHARE / self.share))

    def goes_by_singles(self, rows):
        """Whether the rows of a batch that raised are called one by one, not in halves."""
        return rows <= self.SINGLES_ROWS or self.share * rows >= self.RAISING_MAX


_NOTHING = object()
_AHEAD_NS = 1 << 60


def _rows_of(parts):
    return sum(end - first for _, first, end in parts)


def halves(parts):
    """The parts of a batch in two, as even as can be."""
    left, right, half = [], [], _rows_of(parts) // 2
    for ask, first, end in parts:
        count = min(end - first, half)
        if count:
            left.append((ask, first, first + count))
            half -= count
        if first + count < end:
            right.append((ask, first + count, end))
    return left, right


def singles(parts):
    """Every row of a batch as a batch of its own."""
    return [[(ask, row, row + 1)] for ask, first, end in parts for row in range(first, end)]
