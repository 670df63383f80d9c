"""How long requests wait for others, with simulated clients, calls and times."""

import heapq
import random

import pytest

from batchmill.function_runtime.batch_window import BatchWindow, CallCosts

US, MS, S = 1_000, 1_000_000, 1_000_000_000
BOUND_NS, BATCH = 10 * MS, 64


class Simulation:
    """One function whose calls take `fixed_ns` and `row_ns` for each row, give or take a tenth, and its clients.

    Replies and requests pass one after the other: `path_ns` each, then `latency_ns` for all at once.
    """

    def __init__(self, window, *, fixed_ns, row_ns=0, path_ns=90 * US, latency_ns=150 * US, seed=1):
        self.window, self._fixed_ns, self._row_ns = window, fixed_ns, row_ns
        self._path_ns, self._latency_ns, self._random = path_ns, latency_ns, random.Random(seed)
        self.now_ns, self._path_free_ns, self._number = 0, 0, 0
        self._coming, self._queue = [], []  # (time, number, whether its client comes back); what has come
        self.clients_max = 1 << 30  # more of them leave with their reply
        self.sizes, self.latencies, self.waited_ns = [], [], []

    def send(self, at_ns, *, comes_back=True):
        """Let a request be sent."""
        self._path_free_ns = max(self._path_free_ns, at_ns) + self._vary(self._path_ns)
        self._number += 1
        heapq.heappush(self._coming, (self._path_free_ns + self._latency_ns, self._number, comes_back))

    def _vary(self, time_ns):
        return int(time_ns * self._random.uniform(0.9, 1.1))

    def run(self, until_ns):
        """Run until then, and start the figures anew."""
        self.sizes, self.latencies, self.waited_ns = [], [], []
        while self.now_ns < until_ns and (self._queue or self._coming):
            self._receive()
            if not self._queue:
                self.now_ns = self._coming[0][0]
                continue
            count = len(self._queue)
            wait_ns = self.window.wait_ns(self.now_ns, count, count) if count < BATCH else 0
            if wait_ns > 0:
                until = min([self.now_ns + wait_ns, *(each[0] for each in self._coming[:1])])
                self.waited_ns.append(until - self.now_ns)
                self.now_ns = until
            else:
                self._call(min(count, BATCH, self.window.requests_max(count, count)))
        return self

    def _receive(self):
        while self._coming and self._coming[0][0] <= self.now_ns:
            self._queue.append(heapq.heappop(self._coming))
            self.window.arrived(self.now_ns)

    def _call(self, count):
        self.window.begun()
        called, self._queue = self._queue[:count], self._queue[count:]
        took_ns = self._vary(self._fixed_ns + self._row_ns * count)
        self.now_ns += took_ns
        self.window.costs.learn(count, took_ns)
        self._receive()
        self.window.replied(count, self.now_ns)
        self.sizes.append(count)
        for came_ns, _, comes_back in called:
            self.latencies.append(self.now_ns - came_ns)
            if comes_back and len(self._queue) + len(self._coming) < self.clients_max:
                self.send(self.now_ns)

    @property
    def mean_size(self):
        return sum(self.sizes) / len(self.sizes)

    @property
    def mean_latency_ns(self):
        return sum(self.latencies) / len(self.latencies)


def closed(clients, bound_ns=BOUND_NS, **costs):
    """Clients that each ask again when they have their reply; the figures are those after half a second."""
    simulation = Simulation(BatchWindow(bound_ns), **costs)
    for _ in range(clients):
        simulation.send(0)
    return simulation.run(S // 2).run(S)


def open_loop(rate, bound_ns=BOUND_NS, **costs):
    """Requests at random times, whose clients do not come back."""
    simulation, at_ns = Simulation(BatchWindow(bound_ns), **costs), 0
    draw = random.Random(2)
    while at_ns < 2 * S:
        at_ns += int(draw.expovariate(rate) * S)
        simulation.send(at_ns, comes_back=False)
    return simulation.run(S // 2).run(2 * S)


COSTS = {
    "a model that is cheaper in batches": {"fixed_ns": 580 * US, "row_ns": 77 * US},
    "one that takes as long for many rows": {"fixed_ns": 20 * MS, "row_ns": 50 * US},
    "one that does nothing": {"fixed_ns": 20 * US, "row_ns": US},
    "one that is not cheaper in batches": {"fixed_ns": 5 * US, "row_ns": 500 * US},
    "clients that are far away": {"fixed_ns": 2 * MS, "row_ns": 20 * US, "path_ns": 10 * US, "latency_ns": 5 * MS},
}


@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
def test_one_client_never_waits(costs):
    """A client alone has nobody to wait for."""
    simulation = closed(1, **costs)
    assert (simulation.waited_ns, simulation.mean_size) == ([], 1)


@pytest.mark.parametrize("clients", [2, 8, 64, 128])
@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
def test_clients_that_come_back_are_answered_no_slower(costs, clients):
    """Whatever calls cost and however far clients are, as many are answered as without a window, or more."""
    with_window, without = closed(clients, **costs), closed(clients, 0, **costs)
    assert without.waited_ns == []
    assert len(with_window.latencies) >= 0.95 * len(without.latencies)


@pytest.mark.parametrize("clients", [2, 8, 32])
def test_calls_that_take_as_long_for_many_rows_are_shared_by_all(clients):
    """Where waiting saves whole calls all clients share one, and nearly twice as many are answered."""
    costs = COSTS["one that takes as long for many rows"]
    with_window, without = closed(clients, **costs), closed(clients, 0, **costs)
    assert with_window.mean_size > 0.95 * clients
    assert without.mean_size < 0.6 * clients
    assert len(with_window.latencies) > 1.6 * len(without.latencies)


def test_a_share_is_called_while_others_are_on_their_way():
    """Where replies and requests take longer than the fixed part of a call, half of the clients share one."""
    simulation = closed(64, **COSTS["a model that is cheaper in batches"])
    assert 24 < simulation.mean_size < 36
    assert sum(simulation.waited_ns) < 0.01 * S


@pytest.mark.parametrize("rate", [20, 200, 1_000, 5_000])
@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
def test_requests_at_random_times_are_answered_no_slower(costs, rate):
    """Requests whose clients do not come back have the latency that they have without a window, or less."""
    with_window, without = open_loop(rate, **costs), open_loop(rate, 0, **costs)
    assert with_window.mean_latency_ns <= 1.1 * without.mean_latency_ns


def test_rare_requests_do_not_wait():
    """Where requests come far apart hardly one waits, also after a burst."""
    simulation = open_loop(20, fixed_ns=MS)
    assert sum(simulation.waited_ns) < 0.001 * S


def test_clients_that_have_left_are_not_waited_for_again():
    """When all clients but one have left, that one waits for them once at most."""
    simulation = closed(64, **COSTS["one that takes as long for many rows"])
    simulation.clients_max = 1
    simulation.run(2 * S)
    simulation.run(3 * S)
    assert (simulation.waited_ns, simulation.mean_size) == ([], 1)


def test_clients_that_join_are_found():
    """When there are many clients where one was, they share calls as if they had been there before."""
    simulation = closed(1, **COSTS["one that takes as long for many rows"])
    for _ in range(31):
        simulation.send(simulation.now_ns)
    simulation.run(2 * S).run(3 * S)
    assert simulation.mean_size > 30


def test_nobody_waits_longer_than_the_bound():
    """A function that would wait long for one more request waits for the bound, from its last replies on."""
    window = BatchWindow(BOUND_NS)
    window.costs.learn(1, S)
    window.replied(2, 0)
    window.arrived(MS)
    assert window.wait_ns(MS, 1, 1) == 9 * MS
    assert window.wait_ns(9 * MS, 1, 1) == MS
    assert window.wait_ns(10 * MS, 1, 1) == 0


def test_a_bound_of_zero_never_waits():
    """Nobody waits, and all that wait go together."""
    window = BatchWindow(0)
    window.costs.learn(1, S)
    window.replied(2, 0)
    window.arrived(0)
    assert (window.wait_ns(0, 1, 1), window.requests_max(1, 1) >= 1) == (0, True)


def test_costs_are_fitted_to_calls():
    """The fixed part and the part of a row are found from calls of different sizes; outliers hardly count."""
    costs = CallCosts()
    costs.learn(1, 677)
    assert costs.fit() == (677, 0)
    for rows in (1, 3, 9, 30, 64) * 20:
        costs.learn(rows, 600 + 77 * rows)
    costs.learn(3, 10**9)
    for rows in (1, 3, 9, 30, 64) * 20:
        costs.learn(rows, 600 + 77 * rows)
    fixed_ns, row_ns = costs.fit()
    assert (fixed_ns, row_ns) == (pytest.approx(600, rel=0.05), pytest.approx(77, rel=0.05))


@pytest.mark.parametrize(("times", "fixed_ns", "row_ns"), [({1: 500, 64: 400}, 450, 0), ({1: 10, 64: 6400}, 0, 98.6)])
def test_costs_are_never_negative(times, fixed_ns, row_ns):
    """Calls that became quicker, and calls without a fixed part, are fitted without a part below 0."""
    costs = CallCosts()
    for rows, took_ns in times.items():
        costs.learn(rows, took_ns)
    assert costs.fit() == (pytest.approx(fixed_ns), pytest.approx(row_ns, rel=0.01))
