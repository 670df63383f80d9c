"""What replicas take of the machine together: dealt once, first come first served, and said in numbers."""

from __future__ import annotations

import pytest

from batchmill.jobs.pools.resources import AllocationRequest, Capacity, Leaver, ReplicaId, Resources, hide_names
from batchmill.types import FunctionSpec, ModelSpec, Needs, Scaling

GIB = 2**30


def asked(name: str, gib: float = 0, gpus: int = 0, replica: int = 0, *, is_extra: bool = False) -> AllocationRequest:
    return AllocationRequest(ReplicaId(name, replica), name, Needs(int(gib * GIB), gpus), is_extra)


def take(machine: Resources, each: AllocationRequest) -> Capacity | None:
    """Ask, and what is allotted to it at once."""
    machine.request(each)
    return dict(machine.allot()).get(each.replica)


def test_without_limits_all_fits():
    """A machine that was told nothing gives room to everybody, and deals no devices."""
    machine = Resources()
    assert [take(machine, asked(f"m{n}", 1000, 64)) for n in range(3)] == [Capacity()] * 3


def test_each_replica_has_devices_of_its_own():
    """No device is dealt twice, over all models; what is given back is dealt again; who needs none gets none."""
    machine = Resources(gpus=["0", "2", "3"])
    assert take(machine, asked("a", gpus=1)) == Capacity(["0"])
    assert take(machine, asked("b", gpus=2)) == Capacity(["2", "3"])
    assert take(machine, asked("none")) == Capacity(None)
    assert take(machine, asked("c", gpus=1)) is None
    machine.give_back(ReplicaId("a", 0))
    assert machine.allot() == [(ReplicaId("c", 0), Capacity(["0"]))]


def test_memory_is_counted():
    """Replicas take memory together up to the limit, and no byte beyond it."""
    machine = Resources(24 * GIB)
    assert take(machine, asked("a", 20)) and take(machine, asked("b", 4))
    assert take(machine, asked("c", 1 / GIB)) is None
    machine.give_back(ReplicaId("b", 0))
    assert len(machine.allot()) == 1


def test_who_waited_first_gets_room_first():
    """Room that comes free goes to the first in the queue that fits, not to whoever is quick."""
    machine = Resources(10 * GIB)
    take(machine, asked("holds", 10))
    assert [take(machine, asked(name, 6)) for name in ("first", "second")] == [None, None]
    machine.give_back(ReplicaId("holds", 0))
    assert [place.key for place, _ in machine.allot()] == ["first"]


def test_small_ones_pass_only_while_the_large_one_will_fit():
    """What came later may go ahead as long as the large one would fit once all that were there before it have gone."""
    machine = Resources(24 * GIB)
    take(machine, asked("job", 20))
    assert take(machine, asked("large", 22)) is None
    assert take(machine, asked("small-1", 2)) == Capacity()
    assert take(machine, asked("small-2", 2)) is None
    machine.give_back(ReplicaId("job", 0))
    assert [place.key for place, _ in machine.allot()] == ["large"]


def test_who_needs_nothing_of_it_does_not_wait():
    """A queue for GPUs holds up nobody who needs none."""
    machine = Resources(24 * GIB, ["0"])
    take(machine, asked("a", gpus=1))
    assert take(machine, asked("b", gpus=1)) is None
    assert take(machine, asked("c", 20)) == Capacity(None)


def test_further_replicas_come_last():
    """A replica beside others of its model gets room only where nobody waits for a first one."""
    machine = Resources(10 * GIB)
    take(machine, asked("holds", 8))
    assert take(machine, asked("busy", 1, replica=1, is_extra=True)) == Capacity()
    assert take(machine, asked("first", 2)) is None
    assert take(machine, asked("busy", 1, replica=2, is_extra=True)) is None
    machine.give_back(ReplicaId("holds", 0))
    assert [place for place, _ in machine.allot()] == [ReplicaId("first", 0), ReplicaId("busy", 2)]


def test_withdrawn_is_forgotten():
    """Who waits no more holds nobody up."""
    machine = Resources(10 * GIB)
    take(machine, asked("a", 8))
    assert take(machine, asked("large", 10)) is None and take(machine, asked("small", 2)) is None
    machine.withdraw(ReplicaId("large", 0))
    assert [place.key for place, _ in machine.allot()] == ["small"]


def leavers(*names: str, is_idle: bool = True) -> list[Leaver]:
    return [Leaver([ReplicaId(name, 0)], is_idle) for name in names]


@pytest.mark.parametrize(
    ("need", "leave"),
    [
        (3, []),  # it is there
        (8, ["old"]),  # the one unused longest is enough
        (9, ["old", "new"]),
        (7, ["old"]),
        (17, []),  # it would not do
    ],
)
def test_as_few_leave_as_will_do(need, leave):
    """Idle replicas leave in their order, only as many as are needed, and none where all of them are not enough."""
    machine = Resources(24 * GIB)
    for each in (asked("old", 5), asked("new", 4), asked("used", 12)):
        take(machine, each)
    machine.request(asked("wants", need))
    chosen = [] if machine.allot() else machine.clearances([], leavers("old", "new"))
    assert [each.replicas[0].key for each in chosen] == leave


def test_the_one_that_is_enough_alone_leaves_alone():
    """What was chosen first and turns out not to be needed stays."""
    machine = Resources(24 * GIB)
    for each in (asked("little", 1), asked("much", 20)):
        take(machine, each)
    machine.request(asked("wants", 22))
    assert [each.replicas[0].key for each in machine.clearances([], leavers("little", "much"))] == ["much"]


def test_what_leaves_already_is_reckoned_with():
    """Room that is about to come free is not asked for twice, and goes to those that wait in their order."""
    machine = Resources(24 * GIB)
    for each in (asked("going", 12), asked("idle", 12)):
        take(machine, each)
    machine.request(asked("first", 10))
    going = [ReplicaId("going", 0)]
    assert machine.clearances(going, leavers("idle")) == []
    machine.request(asked("second", 10))
    assert machine.clearances(going, leavers("idle")) == leavers("idle")


def test_replicas_in_use_leave_for_a_first_one_only():
    """A replica beside others of its model gives way to a model that has none; not to another of its kind."""
    machine = Resources(24 * GIB)
    for each in (asked("busy", 12), asked("busy", 12, replica=1, is_extra=True)):
        take(machine, each)
    spare = [Leaver([ReplicaId("busy", 1)], is_idle=False)]
    machine.request(asked("other", 12, replica=1, is_extra=True))
    assert machine.clearances([], spare) == []
    machine.request(asked("first", 12))
    assert machine.clearances([], spare) == spare


MODEL = ModelSpec("big", "llm", "/models/big")
FLAGS = {"--tensor-parallel-size": "2", "pipeline-parallel-size": 2}
DEPLOYED = ModelSpec("m", "function_process", "f", function=FunctionSpec("main/1", "/", "d", gpus=2))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (ModelSpec("big", "llm", "/m", needs=Needs(32 * GIB)), "'big' needs 32 GiB and the machine has 24 GiB"),
        (ModelSpec("big", "llm", "/m", needs=Needs(gpus=3)), "'big' needs 3 GPUs and the machine has 2 GPUs"),
        (ModelSpec("big", "llm", "/m", engine_args={"tensor_parallel_size": 4}), "'big' needs 4 GPUs"),
        (ModelSpec("big", "llm", "/m", workers=3), "3 replicas of 'big' need 3 GPUs and the machine has 2 GPUs"),
        (ModelSpec("f", "function", "f.py:f", needs=Needs(25 * GIB)), "'f' needs 25 GiB"),
        (ModelSpec("big", "llm", "/m", scaling=Scaling(replicas_min=3, replicas_max=9)), "3 replicas of 'big'"),
        (ModelSpec("big", "llm", "/m", scaling=Scaling(replicas_max=9)), ""),
        (ModelSpec("big", "llm", "/m", needs=Needs(24 * GIB, 2)), ""),
    ],
)
def test_what_never_fits_is_said_at_once(model, expected):
    """A model that the machine could not hold empty is told with both numbers."""
    flaw = Resources(24 * GIB, ["0", "1"]).find_excess(model)
    assert flaw.startswith(expected) and bool(flaw) is bool(expected)


@pytest.mark.parametrize(
    ("model", "gpus", "needs"),
    [
        (MODEL, ["0"], Needs(0, 1)),
        (MODEL, [], Needs()),
        (MODEL, None, Needs()),
        (ModelSpec("m", "llm", "/m", engine_args=FLAGS), ["0"], Needs(0, 4)),
        (ModelSpec("m", "llm", "/m", engine_args={"tensor-parallel-size": 2}, needs=Needs(5, 1)), ["0"], Needs(5, 1)),
        (ModelSpec("m", "function", "f.py:f"), ["0"], Needs()),
        (DEPLOYED, ["0"], Needs(0, 2)),
    ],
)
def test_what_a_replica_needs(model, gpus, needs):
    """A language model on a machine with GPUs takes as many as its flags say, one at least; a function what it says."""
    assert Resources(gpus=gpus).needs_of(model) == needs


def test_why_a_replica_waits():
    """The sentence names both numbers and who holds the rest; behind others it names them."""
    machine = Resources(24 * GIB, ["0", "1"])
    take(machine, asked("other", 20, 1))
    take(machine, asked("third", 0, 1))
    uses = {"other": "a job runs on it", "third": "it is unused"}.__getitem__
    machine.request(asked("big", 12))
    why = "'big' needs 12 GiB and 4 of 24 GiB are free: 'other' (a job runs on it) holds 20 GiB"
    assert machine.why(ReplicaId("big", 0), uses) == why
    machine.request(asked("wide", 0.5, 2))
    text = machine.why(ReplicaId("wide", 0), uses)
    assert text.startswith("'wide' needs 2 GPUs and 0 of 2 GPUs are free: 'other' (a job runs on it) holds 1 GPU; ")
    assert text.endswith("'third' (it is unused) holds 1 GPU")
    machine.request(asked("late", 4))
    machine.allot()
    machine.request(asked("later", 0.25))
    assert machine.why(ReplicaId("other", 0), uses) == ""


def test_who_waits_behind_another_is_told():
    """A replica for which there would be room, were it not for one that waited first, says so."""
    machine = Resources(24 * GIB)
    take(machine, asked("job", 20))
    machine.request(asked("large", 22))
    machine.request(asked("small", 3))
    assert machine.allot() == []
    assert machine.why(ReplicaId("small", 0), str) == "'small' comes after 'large', which waited first"


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        (
            "'big' needs 1 GPU and 0 of 2 GPUs are free: 'other' (2 jobs run on it) holds 1 GPU; 'ours' (it is ending) "
            "holds 1 GPU",
            "'big' needs 1 GPU and 0 of 2 GPUs are free: another model (2 jobs run on it) holds 1 GPU; 'ours' (it is "
            "ending) holds 1 GPU",
        ),
        (
            "'big' comes after 'other', 'ours', which waited first",
            "'big' comes after another model, 'ours', which waited first",
        ),
        ("ImportError: No module named 'other' (a job runs on it)",) * 2,
        ("",) * 2,
    ],
)
def test_others_may_be_unknown(sentence, expected):
    """Who may not know of a model is not told its name; what an engine says stays as it is."""
    assert hide_names(sentence, lambda name: name == "ours") == expected
