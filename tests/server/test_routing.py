"""What a path means."""

import pytest
from msgspec.structs import replace
from small_api import SmallDialect

from batchmill.server.operations import Routes


@pytest.fixture
def routes():
    small, other = SmallDialect(), SmallDialect("other")
    return Routes([(small, small.operations()), (other, other.operations())], other)


@pytest.mark.parametrize(
    ("method", "path", "name", "parameters"),
    [
        ("GET", "/small/things", "list", {}),
        ("HEAD", "/small/things", "list", {}),
        ("GET", "/small/things/a", "get", {"thing_id": "a"}),
        ("POST", "/small/things/a/cancel", "cancel", {"thing_id": "a"}),
        ("GET", "/small/models/org/m", "model", {"model": "org/m"}),
        ("POST", "/small/what/ever", "any", {"rest": "what/ever"}),
        ("POST", "/small/upload", "upload", {}),
        ("GET", "/other/things", "list", {}),
        ("GET", "//small/things", "list", {}),  # of a client whose base URL ends with a slash
    ],
)
def test_the_most_exact_path_wins(routes, method, path, name, parameters):
    """A path means the operation with the most exact template, with its parameters."""
    found = routes.find(method, path)
    assert (found.route.operation.name, found.parameters) == (name, parameters)


@pytest.mark.parametrize(
    ("path", "owner"),
    [("/small/x/y/z", "small"), ("/small", "small"), ("/elsewhere", "other"), ("/", "other"), ("", "other"),
     ("/small/things/", "small"), ("//small/nothing", "small"), ("/small/../etc", "small")],
)  # fmt: skip
def test_a_path_of_none_belongs_to_somebody(routes, path, owner):
    """A path that means nothing is refused in the words of the dialect that owns its beginning."""
    found = routes.find("GET", path)
    assert (found.route, found.methods, found.dialect.name) == (None, (), owner)


def test_a_wider_template_swallows_no_method(routes):
    """POST of a path that is known for GET alone is not allowed, although a catch-all would take it."""
    found = routes.find("POST", "/small/things/a")
    assert (found.route, found.methods, found.dialect.name) == (None, ("GET",), "small")


def test_a_long_name_means_nothing(routes):
    """A name of 10 kB in a path is not a name."""
    assert routes.find("GET", "/small/things/" + "a" * 10_000).route is None
    assert routes.find("GET", "/small/things/" + "a" * 1024).route is not None


def test_two_operations_cannot_share_a_place():
    """A method of a path that is claimed twice is a mistake found at the start."""
    small = SmallDialect()
    with pytest.raises(ValueError, match="two operations"):
        Routes([(small, small.operations()), (small, small.operations()[:1])], small)


def test_an_operation_leaves_what_it_does_not_claim():
    """A path whose parameters an operation does not claim means what the next template says, and nothing is hidden."""
    picky, wide = SmallDialect("picky"), SmallDialect("wide")
    one, rest = picky.operations()[2], wide.operations()[5]
    mine = replace(one, path="/v1/{name}/{version}", claims=lambda path: path["name"] != "files")
    routes = Routes([(wide, [replace(rest, path="/v1/{rest:path}")]), (picky, [mine])], wide)
    assert routes.find("GET", "/v1/double/latest").route.dialect is picky
    assert routes.find("POST", "/v1/files/x").parameters == {"rest": "files/x"}
    assert routes.find("POST", "/v1/double/latest").methods == ("GET",)


def test_what_an_operation_passes_on(routes):
    """After an operation that does not want a path comes the next template that fits it, and in the end nothing."""
    first = routes.find("GET", "/small/things/a").route
    assert routes.find("GET", "/small/things/a", first).route is None
    second = routes.find("POST", "/small/things/a", first)
    assert (second.route.operation.name, second.parameters) == ("any", {"rest": "things/a"})


def test_a_last_slash_may_be_optional():
    """Where an operation says so, its path means the same with a slash at its end; of any other it means nothing."""
    small = SmallDialect()
    listing, one = small.operations()[0], replace(small.operations()[2], last_slash_is_optional=True)
    free = replace(listing, path="/small/free", last_slash_is_optional=True)
    routes = Routes([(small, [listing, one, free])], small)
    for path in ("/small/free", "/small/free/", "/small/things/a", "/small/things/a/"):
        assert routes.find("GET", path).route is not None, path
    assert routes.find("GET", "/small/things/a/").parameters == {"thing_id": "a"}
    assert [routes.find("GET", path).route for path in ("/small/things/", "/small/free//")] == [None, None]
    assert len(routes.all()) == 3


def test_the_root_owns_nothing_but_itself():
    """A dialect that answers `/` speaks for no path that belongs to nobody."""
    small, other = SmallDialect(), SmallDialect("other")
    routes = Routes([(small, [replace(small.operations()[0], path="/")])], other)
    assert routes.find("GET", "/").dialect is small
    assert routes.find("GET", "//x").dialect is other
