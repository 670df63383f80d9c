"""By which names a server may be called."""

import pytest

from batchmill.errors import Forbidden, InvalidInput
from batchmill.server.auth import Hosts, is_loopback, is_wildcard


def host(value):
    return [(b"host", value.encode())]


@pytest.mark.parametrize("name", ["127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000", "my.test", "my.test.:80"])
def test_its_own_names(name):
    """The loopback names, and those that were allowed, with any port."""
    Hosts("127.0.0.1", ["my.test"]).check("GET", host(name))


@pytest.mark.parametrize(
    "name",
    ["evil.test", "127.0.0.1.evil.test", "evil/admin?", "user@localhost", "localhost/x", "", "192.0.2.1", "localhost:x",
     "localhost\t", "[::1"],
)  # fmt: skip
def test_other_names(name):
    """A rebound or crooked name is refused."""
    with pytest.raises(InvalidInput, match="not a name of this server"):
        Hosts("127.0.0.1", ["my.test"]).check("GET", host(name))


def test_one_host_exactly():
    """No Host header, or two, are refused."""
    for headers in ([], [*host("localhost"), *host("localhost")]):
        with pytest.raises(InvalidInput):
            Hosts("127.0.0.1").check("GET", headers)


def test_everywhere_takes_addresses_but_no_names():
    """A server that listens everywhere takes any address, which no page can have as its name, and no foreign name."""
    hosts = Hosts("0.0.0.0")
    hosts.check("GET", host("192.0.2.7:8000"))
    with pytest.raises(InvalidInput):
        hosts.check("GET", host("evil.test"))
    Hosts("0.0.0.0", ["*"]).check("GET", host("any.test"))


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize(
    "header",
    [(b"origin", b"http://evil.test"), (b"origin", b"null"), (b"sec-fetch-site", b"cross-site"),
     (b"sec-fetch-site", b"same-site")],
)  # fmt: skip
def test_pages_of_other_sites(method, header):
    """No method that changes something is taken from a page of another site."""
    with pytest.raises(Forbidden):
        Hosts("127.0.0.1").check(method, [*host("localhost"), header])


def test_its_own_pages():
    """A page of the server itself may call it."""
    headers = [*host("localhost:8000"), (b"origin", b"http://localhost:8000"), (b"sec-fetch-site", b"same-origin")]
    Hosts("127.0.0.1").check("POST", headers)


@pytest.mark.parametrize(
    ("name", "expected"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("a.b", False)]
)
def test_loopback(name, expected):
    """What only this machine can reach."""
    assert is_loopback(name) is expected


def test_an_address_to_listen_at_is_judged_by_its_bits():
    """What reaches only this machine, and what is every address of it, is the same under every Python."""
    for bound in ("127.0.0.1", "127.255.0.9", "::1", "::ffff:127.0.0.1", "localhost"):
        assert is_loopback(bound) and not is_wildcard(bound)
    for bound in ("0.0.0.0", "::", "::ffff:0.0.0.0"):
        assert is_wildcard(bound) and not is_loopback(bound)
    for bound in ("0.0.0.1", "128.0.0.1", "::2", "::127.0.0.1", "2002:7f00:1::", "::ffff:8.8.8.8", "host"):
        assert not is_wildcard(bound) and not is_loopback(bound)
