"""Places, memory, pace and addresses: who gets how much."""

import pytest

from batchmill.config import ServerEntry
from batchmill.errors import InvalidConfig, Unavailable
from batchmill.server.admission_control import (
    PROXIES_MAX,
    Admission,
    BodyMemory,
    BodyPacer,
    Hold,
    Pace,
    Proxies,
    RequestLimiter,
    connections_for,
    memory_for,
)


def taken(places: RequestLimiter, name: str, most: int = 10_000) -> int:
    """How many places a name gets when it asks for all it can have."""
    count = 0
    while count < most and places.try_take(name):
        count += 1
    return count


def test_who_is_alone_may_have_every_place():
    """A project that is alone has all places, and one more is refused; once it left, everything is as before."""
    places = RequestLimiter(100, reserve=20, floor=5)
    assert taken(places, "one") == 100
    with pytest.raises(Unavailable, match="100 of yours"):
        places.take("one")
    for _ in range(100):
        places.leave("one")
    assert (places.total, places.held("one")) == (0, 0)


def test_everybody_else_has_places_too():
    """However many one project holds, each other one has some; what comes free goes to who holds least."""
    places = RequestLimiter(100, reserve=20, floor=5)
    taken(places, "greedy")
    assert [taken(places, name) for name in ("a", "b", "c", "d", "e")] == [5, 5, 5, 5, 0]
    for _ in range(60):
        places.leave("greedy")
    assert taken(places, "greedy") == 15  # as far as three quarters
    assert taken(places, "a") == 20 - 5 + 0  # its even share of 100 among five
    assert not places.try_take("greedy") and places.total < 100


def test_places_leave_connections_for_others():
    """However few connections there are, those of requests under way are not all of them."""
    for connections in (100, 768, 10_000, 50_000):
        held = Admission(ServerEntry(connections_max=connections), files=1_000_000, clock=float)
        busy = taken(held.project_requests, "greedy", 100_000) + sum(
            taken(held.project_requests, f"p{each}") for each in range(100)
        )
        busy += sum(taken(held.anonymous_requests, f"10.0.0.{each}") for each in range(250))
        assert 0.5 * min(connections, 10_000) < busy < 0.8 * connections


def test_memory_is_bounded_for_the_server_and_each_project():
    """A project has half of the memory, all projects together the whole; what is given back can be had again."""
    memory = BodyMemory(100)
    memory.take("one", 50)
    with pytest.raises(Unavailable, match="body_memory_bytes_max"):
        memory.take("one", 1)
    memory.take("two", 50)
    with pytest.raises(Unavailable):
        memory.take("three", 1)
    memory.give("one", 50)
    memory.take("three", 50)
    assert (memory.total, memory.held("one"), memory.held("three")) == (100, 0, 50)


def test_what_a_request_holds_is_given_back():
    """A request's bytes grow, are moved to another project, shrink and go; one alone fits, however much it is."""
    memory = BodyMemory(100)
    hold = Hold(memory, "")
    hold.grow_to(10)
    hold.grow_to(5)
    hold.move("one")
    assert (memory.held(""), memory.held("one")) == (0, 10)
    hold.grow_to(1000)
    assert memory.held("one") == 50
    hold.shrink_to(20)
    assert memory.total == 20
    hold.release()
    hold.release()
    assert memory.total == 0


def test_the_memory_has_room_for_large_bodies():
    """Unless it is told, the memory holds four bodies of the largest size there may be."""
    assert memory_for(1024, None) == 256 * 1024 * 1024
    assert memory_for(10**9, None) == 4 * 10**9
    assert memory_for(1024, 5000) == 5000


def test_a_rate_is_measured_over_a_window():
    """Whoever sends less than the rate over a window is late; a burst before counts for its own window alone."""
    pacer = BodyPacer(Pace(rate_min=10, window_s=5.0), None, lambda: 0.0)
    pacer.waited(4.0, 1000)
    assert not pacer.late() and pacer.patience_s == pytest.approx(1.0)
    pacer.waited(1.0, 0)
    assert not pacer.late() and pacer.patience_s == 5.0
    pacer.waited(5.0, 49)
    assert "10 bytes a second" in pacer.late()


def test_windows_that_began_at_once_do_not_end_at_once():
    """Thousands of slow bodies that began together are refused one after another."""
    pace, tenths = Pace(rate_min=10, window_s=30.0), [each / 10 for each in range(11)]
    assert [round(BodyPacer(pace, None, lambda at=at: at).patience_s) for at in tenths] == list(range(30, 41))


def test_a_body_has_a_total_time():
    """However fast it comes, a body that has a total time must end in it; an upload has none."""
    pace = Pace(total_s=8.0, rate_min=10, window_s=5.0)
    pacer, upload = BodyPacer(pace, 8.0, lambda: 0.0), BodyPacer(pace, None, lambda: 0.0)
    for each in (pacer, upload):
        each.waited(5.0, 1000)
        assert not each.late()
        each.waited(3.0, 1000)
    assert "body_timeout_s" in pacer.late() and not upload.late()


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("192.0.2.1", ["203.0.113.9"], "192.0.2.1"),  # no proxy of ours: anybody may write that
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["203.0.113.9"], "203.0.113.9"),
        ("10.0.0.1", ["198.51.100.1, 203.0.113.9"], "203.0.113.9"),
        ("10.0.0.1", ["198.51.100.1", "203.0.113.9, 10.2.3.4"], "203.0.113.9"),
        ("::ffff:10.0.0.1", ["203.0.113.9"], "203.0.113.9"),
        ("10.0.0.1", ["203.0.113.9, nonsense"], "10.0.0.1"),
        ("10.0.0.1", ["2001:db8:1:2:3::4"], "2001:db8:1:2::/64"),
        ("2001:db8:1:2:3::4", [], "2001:db8:1:2::/64"),
        ("testclient", [], "testclient"),
    ],
)
def test_which_client_it_is(peer, forwarded, client):
    """Behind a trusted proxy the rightmost address that is none of those is the client; elsewhere it is the peer."""
    headers = [(b"x-forwarded-for", each.encode()) for each in forwarded]
    assert Proxies(["10.0.0.0/8"]).client(peer, headers) == client


@pytest.mark.parametrize("entries", [["proxy.example"], ["10.0.0.1/8"], ["10.0.0.0/8"] * (PROXIES_MAX + 1)])
def test_proxies_that_are_none(entries):
    """What is not an address and no network is refused by the setting's name."""
    with pytest.raises(InvalidConfig, match="trusted_proxies"):
        Proxies(entries)


@pytest.mark.parametrize(
    ("files", "expected", "most"), [(20_000, None, 10_000), (1024, None, 768), (20_000, 500, 500), (1000, 5000, 750)]
)
def test_how_many_connections_there_are(files, expected, most):
    """As many as the setting says, where the limit of open files leaves some for everything else."""
    assert connections_for(files, expected) == most


def test_a_link_moves_its_place():
    """What came by a link is counted for the project that the link names, and by address no more."""
    admission = Admission(ServerEntry(), files=1000, clock=lambda: 0.0)
    place = admission.anonymous_slot("192.0.2.1", [])
    assert admission.anonymous_requests.held("192.0.2.1") == 1
    place.move("one")
    assert (admission.anonymous_requests.total, admission.project_requests.held("one")) == (0, 1)
    place.leave()
    place.leave()
    assert admission.project_requests.total == 0
