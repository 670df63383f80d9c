"""The gate: keys in each form that clients send them, scopes and rates."""

import base64
import math

import pytest
from fakes.held_clock import HeldClock
from fakes.terms import SetTerm
from small_api import HeldKeys

from batchmill.errors import Forbidden, RateLimited, Unauthenticated, Unavailable
from batchmill.server.auth import ANYBODY, FAILURE_RATE, Gate, token_of
from batchmill.types import Caller, Scope

ONE = Caller("one", Scope.SUBMIT, "k1")


def headers(value):
    return [(b"authorization", value if isinstance(value, bytes) else value.encode())]


@pytest.mark.parametrize(
    ("value", "token"),
    [
        ("Bearer k", "k"),
        ("bearer   k ", "k"),
        ("k", "k"),
        ("Basic " + base64.b64encode(b"user:k:with").decode(), "k:with"),
        ("Basic ????", None),
        ("Digest x", None),
        (b"Bearer \xff\xfe", "\xff\xfe"),
        ("Bearer " + "k" * 5000, None),
    ],
)
def test_forms_of_a_key(value, token):
    """A key comes as Bearer, bare, or as the password of Basic."""
    assert token_of(headers(value)) == token


def test_no_key():
    """A request without the header has none."""
    assert token_of([(b"x", b"y")]) is None


async def test_without_keys_anybody_may():
    """Where no key was ever made, anybody on this machine may do anything, whatever they send."""
    gate = Gate(HeldKeys(), HeldClock())
    assert await gate.admit(headers("Bearer anything"), "a", Scope.ADMIN) == ANYBODY


async def test_scopes():
    """A key does what its scope holds, and no more."""
    gate = Gate(HeldKeys(good=ONE), HeldClock())
    assert await gate.admit(headers("good"), "a", Scope.READ) == ONE
    with pytest.raises(Forbidden, match="scope submit"):
        await gate.admit(headers("good"), "a", Scope.ADMIN)


async def test_only_a_sure_owner_answers():
    """Where another process may own the database, no key is taken: not with its scope, not from the cache."""
    left = [math.inf]
    gate = Gate(HeldKeys(good=ONE), HeldClock(), term=SetTerm(lambda: left[-1]))
    for left_s in (math.inf, 0.1):
        left.append(left_s)
        assert await gate.admit(headers("good"), "a", Scope.READ) == ONE == await gate.identify(headers("good"), "a")
        assert gate.cached_caller(b"good") == ONE
    left.append(0.0)
    with pytest.raises(Unavailable, match="another server may own"):
        await gate.admit(headers("good"), "a", Scope.READ)
    assert gate.cached_caller(b"good") is None and await gate.identify(headers("good"), "a") is None


async def test_rates_of_a_key():
    """A key's own rate goes before the server's, and a refused request costs nothing of another key."""
    clock = HeldClock()
    two = Caller("one", Scope.SUBMIT, "k2", None, 1)
    gate = Gate(HeldKeys(good=ONE, slow=two), clock, 2)
    gate.spend(two)
    with pytest.raises(RateLimited) as caught:
        gate.spend(two)
    assert caught.value.retry_after_s == 60.0
    for _ in range(2):
        gate.spend(ONE)
    with pytest.raises(RateLimited):
        gate.spend(ONE)


async def test_wrong_keys_are_counted_by_address():
    """Who sends wrong keys is told to come again later; a right key gets in, though wrong ones come from there too."""
    gate = Gate(HeldKeys(good=ONE), HeldClock())
    for _ in range(FAILURE_RATE[0]):
        with pytest.raises(Unauthenticated):
            await gate.admit(headers("wrong"), "a", Scope.READ)
    with pytest.raises(RateLimited):
        await gate.admit(headers("wrong"), "a", Scope.READ)
    assert await gate.admit(headers("good"), "a", Scope.READ) == ONE
    with pytest.raises(Unauthenticated):
        await gate.admit(headers("wrong"), "b", Scope.READ)


async def test_minted_keys_pay_with_the_rate_of_their_minter():
    """All keys that a key minted, whoever of them asks, have its rate together with it; one that has none of its own
    has the server's default. A refused request costs nobody anything, and the fast path counts the same."""
    for rate, default in ((10, None), (None, 10)):
        gate = Gate(HeldKeys(), HeldClock(), default)
        minter = Caller("one", Scope.ADMIN, "m", None, rate)
        below = [Caller("one", Scope.SUBMIT, f"k{at}", None, rate, (("m", rate),)) for at in range(3)]
        below.append(Caller("one", Scope.SUBMIT, "deep", None, rate, (("m", rate), ("k0", rate))))
        for at in range(10):
            assert gate.has_room((minter, *below)[at % 5])
            gate.spend((minter, *below)[at % 5])
        for each in (minter, *below):
            assert not gate.has_room(each)
            with pytest.raises(RateLimited):
                gate.spend(each)
        other = Caller("one", Scope.SUBMIT, "other", None, rate)
        gate.spend(other)
