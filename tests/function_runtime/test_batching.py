from hypothesis import given
from hypothesis import strategies as st

from batchmill.function_runtime.batch_window import BatchWindow
from batchmill.function_runtime.requests import BatchQueue, Bisection, halves, singles


class Waiting:
    """An ask as far as batches look at it."""

    def __init__(self, name, arrived_ns=0, *, from_job=False):
        self.name, self.arrived_ns, self.from_job = name, arrived_ns, from_job

    def __repr__(self):
        return self.name


def test_live_rows_go_before_rows_of_jobs():
    """A batch holds live asks in their order, and is filled up with rows of a job."""
    batches = BatchQueue(5, BatchWindow(0))
    row_batch, a, b = Waiting("job", 1, from_job=True), Waiting("a", 2), Waiting("b", 3)
    batches.add(row_batch, 0, 100)
    batches.add(a, 0, 1)
    batches.add(b, 0, 2)
    assert batches.has_live
    assert batches.take(10) == [(a, 0, 1), (b, 0, 2), (row_batch, 0, 2)]
    assert not batches.has_live
    assert batches.take(10) == [(row_batch, 2, 7)]


def test_only_rows_of_one_group_go_together():
    """Rows of different shapes never meet in a call; the group of the oldest goes first."""
    batches = BatchQueue(8, BatchWindow(0))
    a, b, c = Waiting("a", 1), Waiting("b", 2), Waiting("c", 3)
    batches.add(a, 0, 1, "wide")
    batches.add(b, 0, 1, "tall")
    batches.add(c, 0, 1, "wide")
    assert batches.take(10) == [(a, 0, 1), (c, 0, 1)]
    assert batches.take(10) == [(b, 0, 1)]
    assert not batches


def test_an_oversized_ask_is_cut():
    """No batch is larger than its size, whatever comes in one ask."""
    batches = BatchQueue(8, BatchWindow(0))
    ask = Waiting("a")
    batches.add(ask, 0, 20)
    assert [batches.take(1), batches.take(1), batches.take(1)] == [[(ask, 0, 8)], [(ask, 8, 16)], [(ask, 16, 20)]]
    assert batches.take(1) == []


def test_without_a_window_nothing_waits():
    """What is there goes at once."""
    batches = BatchQueue(8, BatchWindow(0))
    assert batches.due_ns(5) is None
    batches.add(Waiting("a", 5), 0, 1)
    assert batches.due_ns(5) == 0


def window_with(*, away):
    """A window that waits up to 100 ns for one of so many clients that have had their reply at 1000 ns."""
    window = BatchWindow(100)
    window.costs.learn(1, 10_000)
    window.replied(away, 1000)
    return window


def test_a_batch_waits_for_clients_that_come_back():
    """A batch that is not full waits for the window's time, and goes when all are back."""
    batches = BatchQueue(4, window_with(away=3))
    a, b, c = (Waiting(name, arrived_ns) for name, arrived_ns in (("a", 1010), ("b", 1050), ("c", 1060)))
    batches.add(a, 0, 1)
    assert (batches.due_ns(1010), batches.take(1099)) == (90, [])
    batches.add(b, 0, 1)
    assert (batches.due_ns(1050), batches.take(1099)) == (50, [])
    batches.add(c, 0, 1)
    assert batches.take(1060) == [(a, 0, 1), (b, 0, 1), (c, 0, 1)]


def test_a_full_batch_does_not_wait():
    """Nothing is gained by waiting when no more rows fit."""
    batches = BatchQueue(2, window_with(away=9))
    a, b = Waiting("a", 1010), Waiting("b", 1010)
    batches.add(a, 0, 1)
    batches.add(b, 0, 1)
    assert batches.take(1010) == [(a, 0, 1), (b, 0, 1)]


def test_nothing_waits_while_there_is_something_to_do():
    """Beside another group or a job no group waits; rows of a job do not either, and fill a batch of live rows."""
    batches = BatchQueue(4, window_with(away=9))
    a, b, row_batch = Waiting("a", 1010), Waiting("b", 1020), Waiting("job", 1000, from_job=True)
    batches.add(a, 0, 1, "x")
    batches.add(b, 0, 1, "y")
    assert batches.take(1020) == [(a, 0, 1)]
    assert batches.take(1020) == []
    batches.add(row_batch, 0, 9, "y")
    assert batches.take(1020) == [(b, 0, 1), (row_batch, 0, 3)]
    assert batches.take(1020) == [(row_batch, 3, 7)]
    assert batches.take(1020) == [(row_batch, 7, 9)]


def test_what_is_dropped_never_goes():
    """An abandoned ask leaves its group, and what waits of others stays."""
    batches = BatchQueue(4, BatchWindow(0))
    a, b = Waiting("a", 1), Waiting("b", 2)
    batches.add(a, 0, 3)
    batches.add(b, 0, 1)
    batches.drop(a)
    assert batches.take(5) == [(b, 0, 1)]
    batches.drop(b)
    assert not batches


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.sampled_from("xyz")), max_size=30), st.integers(1, 8))
def test_every_row_goes_once(asks, size):
    """Whatever waits, batches hold each row exactly once, in the order of its ask, and none is too large."""
    batches, rows = BatchQueue(size, BatchWindow(0)), {}
    for number, (count, from_job, key) in enumerate(asks):
        batches.add(Waiting(str(number), number, from_job=from_job), 0, count, key)
    while batches:
        parts = batches.take(10**9)
        assert 0 < sum(end - first for _, first, end in parts) <= size
        for ask, first, end in parts:
            rows.setdefault(int(ask.name), []).extend(range(first, end))
    assert rows == {number: list(range(count)) for number, (count, _, _) in enumerate(asks)}


@given(st.lists(st.integers(1, 5), min_size=1, max_size=9))
def test_halves_and_singles_hold_the_same_rows(counts):
    """A batch is cut without losing a row, into parts as even as can be."""
    parts = [(number, 3, 3 + count) for number, count in enumerate(counts)]
    rows = [(ask, row) for ask, first, end in parts for row in range(first, end)]
    left, right = halves(parts)
    cut = [[(ask, row) for ask, first, end in half for row in range(first, end)] for half in (left, right)]
    assert cut[0] + cut[1] == rows
    assert len(cut[0]) == len(rows) // 2
    assert [(ask, first) for [(ask, first, _)] in singles(parts)] == rows


def test_batches_shrink_where_rows_raise_and_grow_again():
    """With a tenth of the rows raising, batches become small enough to succeed; without, they are whole again."""
    bisection = Bisection()
    assert bisection.size(64) == 64
    for _ in range(40):
        bisection.learn(64, 6)
    assert 4 <= bisection.size(64) <= 10
    assert bisection.should_split_singly(64)
    for _ in range(400):
        bisection.learn(bisection.size(64), 0)
    assert bisection.size(64) == 64
    assert not bisection.should_split_singly(64)


def test_a_batch_of_one_is_the_least():
    """Even where every row raises, a batch has a row."""
    bisection = Bisection()
    for _ in range(100):
        bisection.learn(64, 64)
    assert bisection.size(64) == 1
