"""Orders that arrive again: the same job, another, or a contradiction."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import pytest
from fakes.databases import open_database

from batchmill.errors import Conflict
from batchmill.jobs.ledger import records
from batchmill.jobs.ledger.records import BLIND_S, KEPT_S
from batchmill.types import DatasetSpec, ModelSpec, Once, Policy
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.rows.forms import OpenAIForm

TAKEN = 1000.0
KEYED = Once("key:1", "f" * 64)
BLIND = Once("blind:1", "f" * 64, blind=True)


def spec(job_id: str = "job_1") -> JobSpec:
    return JobSpec(
        id=job_id, dataset=DatasetSpec(["/in.jsonl"]), models=[ModelSpec("m", "function", "app.py:f")],
        form=OpenAIForm(), policy=Policy(), output=None, identity=job_id, code={}, created=TAKEN,
    )  # fmt: skip


@pytest.fixture
def database(tmp_path):
    opened = open_database(tmp_path / "batchmill.db")
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("once", "age_s", "answered", "stands"),
    [
        (KEYED, 1, True, True),
        (KEYED, KEPT_S, True, True),
        (KEYED, KEPT_S + 1, False, False),
        (BLIND, 1, False, True),
        (BLIND, BLIND_S, False, True),
        (BLIND, BLIND_S + 1, False, False),
        (BLIND, 1, True, False),
        (Once("blind:1", "f" * 64, blind=True, again_s=900.0), 900, True, True),
        (Once("blind:1", "f" * 64, blind=True, again_s=900.0), 901, True, False),
        (Once("blind:1", "0" * 64, blind=True), 1, False, False),
        (Once("key:2", "f" * 64), 1, False, False),
    ],
)
async def test_what_an_order_stands_for(database, once, age_s, answered, stands):
    """A key stands for its job for a day; an order without one until it was answered, or was asked again soon."""
    first = BLIND if once.blind else KEYED
    await database.write(records.enter, spec(), first, None)
    if answered:
        await database.write(records.answered, first.key, TAKEN + 1)
    found = await database.read(records.standing, once, TAKEN + age_s)
    assert found == ("job_1" if stands else None)


async def test_a_key_with_another_order(database):
    """A key that stands for something else is refused, and the message names the job."""
    await database.write(records.enter, spec(), KEYED, None)
    with pytest.raises(Conflict, match="job_1") as refused:
        await database.read(records.standing, Once(KEYED.key, "0" * 64), TAKEN)
    assert refused.value.code == "idempotency_key_reused"


async def test_a_name_is_taken_anew(database):
    """An order that stands for nothing any more makes room for the next of its name."""
    await database.write(records.enter, spec(), BLIND, None)
    await database.write(records.answered, BLIND.key, TAKEN)
    await database.write(records.enter, spec("job_2"), BLIND, None)
    assert await database.read(records.standing, BLIND, TAKEN) == "job_2"


async def test_old_names_are_forgotten(database):
    """What stands for nothing any more does not stay for ever."""
    await database.write(records.enter, spec(), KEYED, None)
    await database.write(records.forget_old, TAKEN + KEPT_S)
    assert await database.read(records.standing, KEYED, TAKEN) == "job_1"
    await database.write(records.forget_old, TAKEN + KEPT_S + 1)
    assert await database.read(records.standing, KEYED, TAKEN) is None


async def test_a_note_on_its_way_counts(database):
    """Who orders again after a reply was delivered is not held up by a slow disk that still writes so down."""
    begin, slow = threading.Event(), threading.Event()

    def hold_up(db):
        begin.set()
        slow.wait()

    await database.write(records.enter, spec(), BLIND, None)
    held = asyncio.create_task(database.write(hold_up))
    await asyncio.to_thread(begin.wait)
    noting = asyncio.create_task(database.write(records.answered, BLIND.key, TAKEN + 1))
    await asyncio.sleep(0)
    again = msgspec.structs.replace(BLIND, arrived=TAKEN + 2)
    asking = asyncio.create_task(records.known(database, again, TAKEN + 2))
    await asyncio.sleep(0)
    await database.read(lambda db: None)  # behind its look at the last commit
    slow.set()
    await asyncio.gather(held, noting)
    assert await asking is None
    assert await records.known(database, msgspec.structs.replace(BLIND, arrived=TAKEN), TAKEN + 2) == "job_1"
