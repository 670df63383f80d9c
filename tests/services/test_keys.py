"""Keys: made, shown once, looked up, revoked."""

import asyncio

import msgspec
import pytest
from fakes.databases import open_database
from fakes.held_clock import HeldClock

from batchmill.errors import Forbidden, InvalidInput, OverQuota, Unauthenticated, UnknownName
from batchmill.services.keys import ANYBODY, KeyService
from batchmill.types import Caller, ProjectQuotas, Quotas, Scope


@pytest.fixture
def database(tmp_path):
    opened = open_database(tmp_path / "batchmill.db")
    yield opened
    opened.close()


@pytest.fixture
def clock():
    return HeldClock()


@pytest.fixture
def keys(database, clock):
    return KeyService(database, clock)


async def make(keys, **expected):
    return await keys.create(**{"name": "n", "project": "one", "scope": Scope.SUBMIT} | expected)


async def test_a_key_stands_for_its_caller(keys):
    """A key lets in as its project, with its scope, models and rate."""
    made = await make(keys, models=frozenset({"m"}), requests_per_minute=7)
    caller = await keys.authenticate(made.key)
    assert caller == Caller("one", Scope.SUBMIT, made.record.id, frozenset({"m"}), 7)
    assert await keys.authenticate(made.key) == caller


async def test_the_key_itself_is_nowhere(keys, database, tmp_path):
    """Only a digest of a key lies in the database."""
    made = await make(keys)
    secret = made.key.split("_", 2)[2]
    await database.read(lambda db: None)
    for path in tmp_path.iterdir():
        assert secret.encode() not in path.read_bytes()


@pytest.mark.parametrize("change", [lambda key: key[:-1] + "!", lambda key: key[:-1] + ("A" if key[-1] != "A" else "B"),
                                    lambda key: "bm_" + "0" * 16 + key[19:], lambda key: "", lambda key: key + "\n",
                                    lambda key: key + "'--"])  # fmt: skip
async def test_wrong_keys_are_refused_alike(keys, change):
    """An unknown id, a wrong secret and nonsense are refused in the same words."""
    made = await make(keys)
    await keys.authenticate(made.key)
    with pytest.raises(Unauthenticated) as caught:
        await keys.authenticate(change(made.key))
    assert caught.value.message == "the API key is not valid: it is unknown, revoked or expired"


async def test_revoking_takes_effect_at_once(keys):
    """A revoked key is refused by the next request, also one that was let in before, and stays so."""
    made = await make(keys)
    await keys.authenticate(made.key)
    revoked = (await keys.revoke(made.record.id, "one")).record
    assert revoked.revoked is not None
    with pytest.raises(Unauthenticated):
        await keys.authenticate(made.key)
    assert (await keys.revoke(made.record.id, None)).record == revoked


async def test_keys_end(keys, clock):
    """A key is refused from the second it ends on, and cannot be made to end in the past."""
    made = await make(keys, expires=clock.now() + 10)
    await keys.authenticate(made.key)
    clock.at += 10
    with pytest.raises(Unauthenticated):
        await keys.authenticate(made.key)
    with pytest.raises(InvalidInput):
        await make(keys, expires=clock.now())


async def test_a_project_sees_its_own_keys(keys):
    """Keys of another project are neither listed nor revoked."""
    mine, other = await make(keys), await make(keys, project="two")
    assert [each.id for each in await keys.list("one")] == [mine.record.id]
    assert {each.id for each in await keys.list(None)} == {mine.record.id, other.record.id}
    with pytest.raises(UnknownName):
        await keys.revoke(other.record.id, "one")


async def test_ended_keys_make_room(keys, clock, monkeypatch):
    """There is a limit to the keys that are valid; beyond it the record of the one that ended first is forgotten."""
    monkeypatch.setattr("batchmill.services.keys.KEYS_MAX", 3)
    kept, ended, revoked = await make(keys), await make(keys, expires=clock.now() + 10), await make(keys)
    with pytest.raises(InvalidInput, match="revoke one"):
        await make(keys)
    await keys.revoke(revoked.record.id, None)
    clock.at += 20
    fresh = [await make(keys), await make(keys)]
    with pytest.raises(InvalidInput):
        await make(keys)
    assert {each.id for each in await keys.list(None)} == {each.record.id for each in (kept, *fresh)}
    for each in (kept, *fresh):
        await keys.authenticate(each.key)
    for each in (ended, revoked):
        with pytest.raises(Unauthenticated):
            await keys.authenticate(each.key)


async def test_guessing_keeps_the_database_from_nobody(keys, database, monkeypatch):
    """Keys whose id was never given out are refused without a look at the database."""
    await make(keys)
    monkeypatch.setattr(database, "read", None)
    for n in range(3):
        with pytest.raises(Unauthenticated):
            await keys.authenticate(f"bm_{n:016x}_{'x' * 43}")


async def test_revoking_the_last_key_opens_nothing(keys, database, clock):
    """From the first key on every request needs one, also after a restart and when none is left."""
    assert not await keys.any_exist()
    made = await make(keys)
    await keys.revoke(made.record.id, None)
    assert await keys.any_exist() and await KeyService(database, clock).any_exist()


@pytest.mark.parametrize(
    "expected",
    [
        {"project": "two"},
        {"scope": Scope.ADMIN},
        {"models": frozenset({"m", "x"})},
        {"requests_per_minute": 11},
    ],
)
async def test_a_key_makes_none_that_may_more(keys, expected):
    """Scope, project, models and rate of a key lie within those of the key that makes it."""
    by = Caller("one", Scope.SUBMIT, "k", frozenset({"m"}), 10)
    with pytest.raises(Forbidden):
        await make(keys, by=by, **expected)


async def test_only_who_runs_the_machine_makes_a_key_that_deploys(keys):
    """A key with the scope deploy is made without a caller, and by no caller: not with such a key, nor where there are
    no keys."""
    made = await make(keys, scope=Scope.DEPLOY)
    caller = await keys.authenticate(made.key)
    assert all(caller.may(scope) for scope in Scope) and ANYBODY.may(Scope.DEPLOY)
    for by in (caller, msgspec.structs.replace(ANYBODY, project="one"), Caller("one", Scope.ADMIN, "k")):
        with pytest.raises(Forbidden, match="batchmill keys create --scope deploy"):
            await make(keys, scope=Scope.DEPLOY, by=by)
    assert (await make(keys, scope=Scope.ADMIN, by=caller)).record.scope == Scope.ADMIN


async def test_a_key_hands_on_its_own_bounds(keys):
    """What is not said of a key made by another is as that one's, not unbounded."""
    by = Caller("one", Scope.ADMIN, "k", frozenset({"m"}), 10)
    record = (await make(keys, by=by)).record
    assert (record.models, record.requests_per_minute) == (["m"], 10)


@pytest.mark.parametrize(
    "expected",
    [{"name": ""}, {"name": "a\nb"}, {"name": "x" * 201}, {"project": "a b"}, {"models": frozenset()},
     {"requests_per_minute": 0}, {"requests_per_minute": 10**9 + 1}],
)  # fmt: skip
async def test_values_out_of_range(keys, expected):
    """A key's name, project, models and rate are checked."""
    with pytest.raises(InvalidInput):
        await make(keys, **expected)


async def test_uses_are_written_down(keys, clock):
    """The last use of a key is known, to the minute."""
    made = await make(keys)
    await keys.authenticate(made.key)
    await keys.write_uses()
    assert (await keys.list("one"))[0].last_used == clock.now()


async def test_a_key_that_is_revoked_while_it_is_looked_up(keys, database):
    """A look-up that read a key just before it was revoked lets in nobody after it."""
    made = await make(keys)
    looking = asyncio.create_task(keys.authenticate(made.key))
    await asyncio.sleep(0)  # it reads
    await keys.revoke(made.record.id, None)
    await asyncio.gather(looking, return_exceptions=True)
    with pytest.raises(Unauthenticated):
        await keys.authenticate(made.key)


async def mint(keys, maker, **expected):
    return await make(keys, by=await keys.authenticate(maker.key), scope=Scope.ADMIN, **expected)


async def test_what_a_key_mints_knows_who_pays(keys, clock):
    """A minted key names every key above it with its rate, ends no later than its maker, and has a bounded descent."""
    first = await make(keys, scope=Scope.ADMIN, requests_per_minute=9, expires=clock.now() + 100)
    second = await mint(keys, first, requests_per_minute=5)
    assert (await keys.authenticate(second.key)).minted_by == ((first.record.id, 9),)
    third = await mint(keys, second)
    assert (await keys.authenticate(third.key)).minted_by == ((first.record.id, 9), (second.record.id, 5))
    assert third.record.expires == first.record.expires
    with pytest.raises(Forbidden, match="expires later"):
        await mint(keys, third, expires=clock.now() + 101)
    for _ in range(6):
        third = await mint(keys, third)
    with pytest.raises(Forbidden, match="chain of 8 keys"):
        await mint(keys, third)


async def test_a_key_ends_with_those_it_minted_where_that_is_asked_for(keys):
    """Revoking a key names the valid keys below it, and ends them only with `with_minted`; others stay."""
    first, other = await make(keys, scope=Scope.ADMIN), await make(keys, scope=Scope.ADMIN)
    second = await mint(keys, first)
    third = await mint(keys, second)
    await mint(keys, other)
    below = [second.record.id, third.record.id]
    assert sorted((await keys.revoke(first.record.id, "one")).minted) == sorted(below)
    await keys.authenticate(third.key)
    assert sorted((await keys.revoke(first.record.id, "one", with_minted=True)).minted) == sorted(below)
    for gone in (second, third):
        with pytest.raises(Unauthenticated):
            await keys.authenticate(gone.key)
    assert sum(each.revoked is None for each in await keys.list("one")) == 2


async def test_a_project_has_as_many_valid_keys_as_its_quota_says(database, clock):
    """Of many keys made at once only as many come to be as the quota says; revoked ones do not count, nor another
    project's."""
    keys = KeyService(database, clock, ProjectQuotas(Quotas(keys=5), {"two": Quotas(keys=1)}))
    tries = await asyncio.gather(*(make(keys) for _ in range(20)), return_exceptions=True)
    assert sum(isinstance(each, OverQuota) for each in tries) == 15
    assert "projects.one.quotas.keys" in next(str(each) for each in tries if isinstance(each, OverQuota))
    made = next(each for each in tries if not isinstance(each, OverQuota))
    await make(keys, project="two")
    await keys.revoke(made.record.id, "one")
    await make(keys)
    with pytest.raises(OverQuota):
        await make(keys, project="two")
