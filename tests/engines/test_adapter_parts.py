"""The parts of adapters that need no engine: names, the order of rows that wait, and what is counted."""

from __future__ import annotations

import pytest
from llm_support import chat_row

from batchmill.engines.llm.adapters import NAMES_MAX, OTHERS, Adapter, AdapterCounts, AdapterNames, Restorer
from batchmill.engines.llm.calls import LlmRow
from batchmill.engines.llm.row_queue import AdapterQueue
from batchmill.types import AdapterStats, Usage

A, B = Adapter("a", "/a"), Adapter("b", "/b")


def call(number, adapter=None):
    return LlmRow(chat_row(number, "x"), "/v1/chat/completions", b"{}", adapter)


def filled(*adapters):
    queue = AdapterQueue()
    for number, adapter in enumerate(adapters):
        queue.push(call(number, adapter))
    return queue


def drained(queue, *loaded):
    numbers = []
    while (found := queue.pop(lambda adapter: adapter in loaded)) is not None:
        numbers.append(found.row.number)
    return numbers


def test_rows_go_in_order_past_those_whose_adapter_is_not_there():
    """Rows of the base and of loaded adapters keep their order; the others wait, in theirs."""
    queue = filled(A, B, None, A, B, None)
    assert queue.adapters() == [A, B]
    assert drained(queue, B) == [1, 2, 4, 5]
    assert (len(queue), queue.adapters(), queue.waiting(A), queue.waiting(B)) == (2, [A], 2, 0)
    assert drained(queue, A) == [0, 3]


def test_a_row_that_comes_back_has_its_old_turn():
    """What is tried again goes before what came after it."""
    queue = filled(None, None, None)
    first = queue.pop(lambda _: False)
    queue.push(first)
    assert drained(queue) == [0, 1, 2]


def test_rows_of_an_adapter_that_cannot_be_loaded_leave_together():
    """They leave in order, and nothing of others does."""
    queue = filled(A, None, A)
    assert [each.row.number for each in queue.take_adapter(A)] == [0, 2]
    assert queue.take_adapter(A) == []
    assert drained(queue) == [1]


def test_a_row_that_had_to_wait_for_its_adapter_did_not_find_it():
    """Rows there was room for, but no adapter, count as misses; later rows of it do not."""
    queue = filled(A, A, B, B)
    assert queue.mark_late([A, B], 3) == 3
    queue.push(call(4, A))
    assert [queue.pop(lambda _: True).adapter_was_loaded for _ in range(5)] == [False, False, False, True, True]
    assert queue.mark_late([], 3) == 0


def test_one_name_in_the_engine_means_one_place():
    """Adapters of two projects with one name are told apart, and each keeps the name it got."""
    names = AdapterNames()
    other = Adapter("a", "/elsewhere")
    assert [names.of(each) for each in (A, other, Adapter("a#2", "/x"), A, other)] == ["a", "a#2", "a#2#2", "a", "a#2"]
    assert names.restorer(A) is None


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_replies_carry_the_own_name(size):
    """The engine's name is replaced wherever `model` has it as its value, across pieces too, and nowhere else."""
    text = b'{"model":"a#2","x":"a#2"}\n{"model": "a#2"} "a#22" {"model":"a#22"} {"mo'
    restorer = Restorer("a#2", "a")
    pieces = [restorer.feed(text[start : start + size]) for start in range(0, len(text), size)]
    assert b"".join([*pieces, restorer.flush()]) == (
        b'{"model":"a","x":"a#2"}\n{"model": "a"} "a#22" {"model":"a#22"} {"mo'
    )


def test_what_is_counted_of_each_adapter():
    """Rows, tokens, hits, loads, and the time in which at least one row was in flight."""
    counts = AdapterCounts()
    counts.record_load("a")
    counts.record_start("a", 10.0)
    counts.record_start("a", 11.0)
    counts.record_reply("a", Usage(5, 1, 7), was_loaded=True)
    counts.record_end("a", 12.0)
    counts.record_reply("a", None, was_loaded=False)
    counts.record_end("a", 14.0)
    counts.record_start("a", 20.0)
    assert counts.stats(21.0) == [AdapterStats("a", 2, 5, 7, 1, 1, 5.0)]


def test_beyond_a_hundred_names_the_others_are_summed():
    """A thousand adapters make no thousand entries."""
    counts = AdapterCounts()
    for number in range(NAMES_MAX + 50):
        counts.record_reply(f"a{number}", None, was_loaded=True)
    stats = counts.stats(0.0)
    assert len(stats) == NAMES_MAX + 1
    assert (stats[-1].name, stats[-1].rows) == (OTHERS, 50)
