"""How an order that arrives again is known."""

import pytest

from batchmill.errors import InvalidInput
from batchmill.services.repeats import AGAIN_S, KEY_CHARS_MAX, once_for, retry_count_of
from batchmill.types import Caller, Scope

ANN = Caller("ann", Scope.SUBMIT, "k1")
ROUTE = "POST /v1/batches"


def test_a_blind_repeat_has_the_name_of_the_first():
    """The same body, of the same key, on the same route, is the same order."""
    assert once_for(ANN, ROUTE, b"{}", None, 0) == once_for(ANN, ROUTE, b"{}", None, 0)


@pytest.mark.parametrize(
    "other",
    [
        once_for(Caller("ann", Scope.SUBMIT, "k2"), ROUTE, b"{}", None, 0),
        once_for(Caller("bob", Scope.SUBMIT, "k1"), ROUTE, b"{}", None, 0),
        once_for(ANN, "POST /batchmill/v1/jobs", b"{}", None, 0),
        once_for(ANN, ROUTE, b'{"a":1}', None, 0),
        once_for(ANN, ROUTE, b"{}", "a-key", 0),
    ],
    ids=["another key", "another project", "another route", "another body", "a key of its own"],
)
def test_what_differs_is_another_order(other):
    """Nobody is given a job for an order that is not theirs to the byte."""
    assert once_for(ANN, ROUTE, b"{}", None, 0).key != other.key


def test_a_key_stands_for_its_body():
    """One key has one name whatever the body is, and the fingerprint tells two bodies apart."""
    first, second = once_for(ANN, ROUTE, b"1", "k", 0), once_for(ANN, ROUTE, b"2", "k", 0)
    assert first.key == second.key and first.fingerprint != second.fingerprint
    assert not first.blind and first.again_s is None


def test_a_client_that_says_it_asked_before_is_believed_for_a_while():
    """`x-stainless-retry-count` above zero asks for the earlier order too, of the last 15 minutes."""
    assert once_for(ANN, ROUTE, b"{}", None, 0).again_s is None
    assert once_for(ANN, ROUTE, b"{}", None, 1).again_s == AGAIN_S == 900.0


@pytest.mark.parametrize(("header", "count"), [(None, 0), ("0", 0), ("2", 2), ("-1", 0), ("x", 0), ("99999", 0)])
def test_a_retry_count_that_is_none_counts_nothing(header, count):
    """A header nobody can read never makes an order another's."""
    assert retry_count_of(header) == count


@pytest.mark.parametrize("key", ["", " ", " a", "a ", "a\nb", "é", "x" * (KEY_CHARS_MAX + 1)])
def test_a_key_that_cannot_be_one_is_refused(key):
    """An empty, overlong or unprintable key is an error of its own, not a blind order."""
    with pytest.raises(InvalidInput) as refused:
        once_for(ANN, ROUTE, b"{}", key, 0)
    assert refused.value.code == "invalid_idempotency_key"


@pytest.mark.parametrize("key", ["x", "a b", "x" * KEY_CHARS_MAX])
def test_a_key_of_any_allowed_length_is_taken(key):
    """1 to 255 printable characters make a key."""
    assert once_for(ANN, ROUTE, b"{}", key, 0).key.startswith("key:")
