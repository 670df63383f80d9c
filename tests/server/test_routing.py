"""What a path means."""

import pytest
from small_api import SmallDialect

from batchmill.server.routing import Routes


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
    ],
)
def test_the_most_exact_path_wins(routes, method, path, name, parameters):
    """A path means the operation with the most exact template, with its parameters."""
    found = routes.find(method, path)
    assert (found.route.operation.name, found.parameters) == (name, parameters)


@pytest.mark.parametrize(
    ("path", "owner"),
    [("/small/x/y/z", "small"), ("/small", "small"), ("/elsewhere", "other"), ("/", "other"), ("", "other"),
     ("/small/things/", "small"), ("//small/things", "other"), ("/small/../etc", "small")],
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
    """A name of 10 kB in a path is no name."""
    assert routes.find("GET", "/small/things/" + "a" * 10_000).route is None
    assert routes.find("GET", "/small/things/" + "a" * 1024).route is not None


def test_two_operations_cannot_share_a_place():
    """A method of a path that is claimed twice is a mistake found at the start."""
    small = SmallDialect()
    with pytest.raises(ValueError, match="two operations"):
        Routes([(small, small.operations()), (small, small.operations()[:1])], small)
