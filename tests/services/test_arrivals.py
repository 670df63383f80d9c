"""Files that arrive while a sweep removes what an earlier owner has left."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from batchmill.services.files import arrivals
from batchmill.services.files.arrivals import Arrivals


class Folder:
    """Names on a disk, and which of them have a record. `before` is called before each look at the records."""

    def __init__(self, names: Sequence[str], recorded: Sequence[str] = ()) -> None:
        self.names, self.recorded, self.looks = set(names), set(recorded), 0
        self.before = lambda look: None

    async def known(self, names: Sequence[str]) -> set[str]:
        self.looks += 1
        self.before(self.looks)
        return self.recorded & set(names)

    async def remove(self, names: Sequence[str]) -> None:
        await asyncio.sleep(0)
        self.names -= set(names)

    async def swept(self, its: Arrivals) -> list[str]:
        await its.sweep(sorted(self.names), self.known, self.remove)
        return sorted(self.names)


async def test_only_what_has_no_record_goes(monkeypatch: pytest.MonkeyPatch):
    """And does not arrive."""
    monkeypatch.setattr(arrivals, "SWEEP_MAX", 2)
    folder, its = Folder("abcdefg", recorded="acg"), Arrivals()
    assert its.begin(["e"])
    assert await folder.swept(its) == ["a", "c", "e", "g"]


@pytest.mark.parametrize("look", [1, 2])
async def test_a_result_that_arrives_between_two_looks_stays(look: int):
    """A result has the name of what a killed owner left of it: stored in time, it has a record; later, it waits."""
    folder, its, begun = Folder("ab"), Arrivals(), []

    def arrive(now: int) -> None:
        if now == look:
            begun.append(its.begin(["a"]))
            if begun[0]:
                folder.recorded.add("a")
                its.end(["a"])

    folder.before = arrive
    assert await folder.swept(its) == (["a"] if look == 1 else [])
    assert begun == [look == 1] and its.ids == set()


async def test_a_result_waits_until_its_name_is_free():
    """It is written after what had its name is gone."""
    folder, its, order = Folder("a"), Arrivals(), []
    waiting: list[asyncio.Task[None]] = []

    async def arrive() -> None:
        await its.begin_soon(["a"])
        order.append(sorted(folder.names))
        folder.names.add("a")

    folder.before = lambda look: waiting.append(asyncio.ensure_future(arrive())) if look == 2 else None
    await folder.swept(its)
    await waiting[0]
    assert order == [[]] and folder.names == {"a"} and its.ids == {"a"}


async def test_one_that_was_arriving_before_stays():
    """Although its record is stored only after the last look."""
    folder, its = Folder("a"), Arrivals()
    its.begin(["a"])
    folder.before = lambda look: its.end(["a"]) if look == 2 else None
    assert await folder.swept(its) == ["a"]
