"""The progress page as the worker reads it, and the runtime writes it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from batchmill.function_runtime.printing import Progress
from batchmill.models.function_progress import NO_SLOT, SLOTS_MAX, ProgressPage


@pytest.fixture
def pages() -> Iterator[tuple[ProgressPage, Progress]]:
    fd = os.memfd_create("progress")
    page = ProgressPage(fd)
    yield page, Progress(fd)
    page.close()


def test_a_request_has_begun_between_its_calls_and_after_them(pages: tuple[ProgressPage, Progress]) -> None:
    """A request with a slot has begun from its first call on, whatever runs at the moment."""
    page, progress = pages
    slot = page.take_slot()
    assert not page.has_begun(2**40 + 7, slot)
    progress.begin(2**40 + 7, slot)
    progress.one(2**40 + 7, 3)
    assert (page.running(), page.has_begun(2**40 + 7, slot)) == ([(2**40 + 7, 3, 1)], True)
    progress.none()
    assert (page.running(), page.has_begun(2**40 + 7, slot), page.last_called()) == ([], True, 2**40 + 7)
    progress.one(8, 0)
    assert page.has_begun(2**40 + 7, slot)


def test_a_slot_says_nothing_of_the_next_request_that_has_it(pages: tuple[ProgressPage, Progress]) -> None:
    """What an earlier request left in a slot, or leaves late, does not count for the next."""
    page, progress = pages
    slot = page.take_slot()
    progress.begin(1, slot)
    page.return_slot(slot)
    assert (page.take_slot(), page.has_begun(2, slot)) == (slot, False)
    progress.begin(2, slot)
    assert page.has_begun(2, slot)


def test_requests_beyond_the_slots_have_begun_while_they_run(pages: tuple[ProgressPage, Progress]) -> None:
    """There are SLOTS_MAX slots, all different; a request beyond them is looked for among the running ones."""
    page, progress = pages
    slots = [page.take_slot() for _ in range(SLOTS_MAX + 1)]
    assert (sorted(slots[:-1]), slots[-1]) == (list(range(SLOTS_MAX)), NO_SLOT)
    progress.begin(5, slots[-2])
    progress.begin(6, NO_SLOT)
    progress.one(6, 0)
    assert (page.has_begun(5, slots[-2]), page.has_begun(6, NO_SLOT)) == (True, True)
    progress.none()
    assert not page.has_begun(6, NO_SLOT)
    page.return_slot(NO_SLOT)
    assert page.take_slot() == NO_SLOT
