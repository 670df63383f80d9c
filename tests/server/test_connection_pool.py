"""Which connection goes for a new one."""

from batchmill.server.admission_control import EVICTION_RETRY_S, ConnectionPool, Stage


class Held:
    """A connection that is what a test says."""

    def __init__(self, address="a", stage=Stage.IDLE, since=0.0, is_authenticated=False, project=""):
        self.address, self.now, self.since, self.is_authenticated = address, stage, since, is_authenticated
        self.project = project
        self.is_over = False

    def stage(self):
        return self.now

    def end(self):
        self.is_over = True


class Time:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_the_order_in_which_connections_go():
    """Refused ones go first, then idle ones, then strangers' heads, then those of a key; a request under way stays."""
    order = [
        Held("a", Stage.REFUSED), Held("b", Stage.IDLE, 1.0), Held("c", Stage.IDLE, 2.0),
        Held("d", Stage.ARRIVING, 0.5), Held("e", Stage.AUTHENTICATED_IDLE, is_authenticated=True),
        Held("f", Stage.AUTHENTICATED_ARRIVING, is_authenticated=True),
    ]  # fmt: skip
    busy = Held("g", Stage.BUSY)
    pool = ConnectionPool(len(order) + 1, Time())
    for each in (busy, *reversed(order)):
        assert pool.add(each)
    for count in range(1, len(order) + 1):
        assert pool.add(Held(f"new{count}", Stage.BUSY))
        assert [each.is_over for each in order] == [True] * count + [False] * (len(order) - count)
    assert not busy.is_over and len(pool) == len(order) + 1


def test_no_connection_can_go():
    """Where every connection has a request under way a new one finds no room, until one of them is idle again."""
    time, first = Time(), Held("a", Stage.BUSY)
    pool = ConnectionPool(1, time)
    assert pool.add(first) and not pool.add(Held("b"))
    first.now = Stage.IDLE
    time.now += EVICTION_RETRY_S
    assert pool.add(Held("b")) and first.is_over


def test_one_address_ends_its_own():
    """Connections of the address that has the most go before those of others; half of all is what it may have."""
    pool = ConnectionPool(10, Time())
    other = Held("other", Stage.ARRIVING, since=0.0)
    assert pool.add(other)
    flood = [Held("flood", Stage.ARRIVING, since=float(n + 1)) for n in range(30)]
    assert all(pool.add(each) for each in flood)
    assert not other.is_over and [each.is_over for each in flood] == [True] * 25 + [False] * 5


def test_one_project_ends_its_own():
    """Of idle connections with a key those of the project that has the most go, however new they are."""
    pool = ConnectionPool(10, Time())
    others = [Held("a", Stage.AUTHENTICATED_IDLE, float(n), is_authenticated=True, project=f"p{n}") for n in range(3)]
    flood = [Held("b", Stage.AUTHENTICATED_IDLE, 5.0 + n, is_authenticated=True, project="flood") for n in range(30)]
    assert all(pool.add(each) for each in (*others, *flood))
    assert not any(each.is_over for each in others) and sum(each.is_over for each in flood) == 23


def test_who_shows_a_key_goes_no_more():
    """A connection that was chosen to go, and did something before there was need, stays."""
    pool = ConnectionPool(3, Time())
    first, second, third = (Held(name, Stage.IDLE, float(n)) for n, name in enumerate("abc"))
    assert all(pool.add(each) for each in (first, second, third)) and pool.add(Held("d", Stage.BUSY))
    assert first.is_over
    second.project = "p"
    pool.mark_authenticated(second)
    second.is_authenticated, second.now = True, Stage.AUTHENTICATED_IDLE
    assert pool.add(Held("e", Stage.BUSY))
    assert third.is_over and not second.is_over


def test_a_proxy_is_many_clients():
    """The share of one address is not that of a trusted proxy, and a connection with a key counts for no address."""
    pool = ConnectionPool(10, Time(), lambda address: address == "proxy")
    assert all(pool.add(Held("proxy", since=float(n))) for n in range(10))
    assert len(pool) == 10
    pool = ConnectionPool(10, Time())
    members = [Held("a") for _ in range(10)]
    for each in members:
        pool.add(each)
        pool.mark_authenticated(each)
        each.is_authenticated = True
    assert not any(each.is_over for each in members)
    for each in members:
        pool.remove(each)
        pool.remove(each)
    assert len(pool) == 0 and not pool._anonymous
