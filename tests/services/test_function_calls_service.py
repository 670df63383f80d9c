"""Calls of deployed functions: whose they are, which version is meant, who gets a copy, and what is told of them."""

from __future__ import annotations

import asyncio
import random

import pytest
from fakes.databases import open_ledger
from fakes.held_clock import HeldClock
from fakes.scripted_workers import ScriptedExecutor, ScriptedWorker

from batchmill.config import Config
from batchmill.errors import InvalidRow, ModelFailed, Unavailable, UnknownName
from batchmill.jobs.ledger.commits import CommitLog
from batchmill.jobs.pools.dispatcher import Dispatcher
from batchmill.services.directory.configured import ConfiguredModels
from batchmill.services.directory.directory import ModelDirectory
from batchmill.services.directory.rows import ModelKind, ModelRow
from batchmill.services.functions import calls as function_calls
from batchmill.services.functions.calls import FunctionCalls
from batchmill.services.functions.function import Function
from batchmill.types import Caller, CallStats, FunctionSpec, LiveHead, ModelSpec, Scope
from batchmill.wire.bundles import Backend, ModelVersion, Route
from batchmill.wire.error_statuses import Raised
from batchmill.wire.messages import (
    Abandon,
    Answered,
    AnswerLive,
    Answers,
    FunctionReply,
    FunctionRequests,
    Head,
    ReplyChunk,
)

CALLER = Caller("default", Scope.SUBMIT)


def version(number: int, name: str = "f", branch: str = "main") -> ModelVersion:
    function = FunctionSpec(f"{branch}/{number}", f"/{name}/{branch}/{number}", "d")
    spec = ModelSpec(name, "function_process", "app.py:f", function=function)
    return ModelVersion(name, branch, number, "ready", 0.0, spec=spec)


class Stage:
    def __init__(self, folder) -> None:
        self.executor, clock = ScriptedExecutor(), HeldClock()
        clock.sleep = lambda _: asyncio.Event().wait()  # pools stay
        self.commit_log = CommitLog(open_ledger(folder / "batchmill.db"))
        self.dispatcher = Dispatcher(folder, self.commit_log, self.executor, clock, idle_timeout_s=3600.0)
        self.versions = [version(1), version(2), version(1, branch="feat/x"), version(7, name="other")]
        routes = [
            Route("f", "main", [Backend("main", 2)]),
            Route("f", "feat/x", [Backend("feat/x", 1)]),
            Route("f", "@half", [Backend("main", 1, 1.0), Backend("main", 2, 3.0)]),
            Route("f", "@shadowed", [Backend("main", 1)], [Backend("main", 2)]),
            Route("other", "main", [Backend("main", 7)]),
        ]
        directory = ModelDirectory(ConfiguredModels(Config(data_dir=folder, base=folder)), random.Random(1))
        for name in ("f", "other"):
            found = Function(name, {}, {}).changed(
                [each for each in self.versions if each.name == name], [each for each in routes if each.name == name]
            )
            row = ModelRow(name, ModelKind.FUNCTION, "default", function=found, listed=(name,))
            directory.publish({(ModelKind.FUNCTION, name): [row]})
        self.calls = FunctionCalls(self.dispatcher.live, directory, clock)
        self.received = []
        self.calls.listen(self.received.append)

    async def loaded(self, target) -> ScriptedWorker:
        loading = asyncio.create_task(self.calls.load(target))
        worker = await self.executor.next()
        await loading
        return worker

    async def close(self) -> None:
        await self.calls.close()
        await self.dispatcher.close(at_once=True)
        self.commit_log.close()


@pytest.fixture
async def stage(tmp_path):
    made = Stage(tmp_path)
    yield made
    await made.close()


async def heard(worker: ScriptedWorker):
    return (await worker.expect(FunctionRequests)).asks


@pytest.mark.parametrize(
    ("branch", "text", "found"),
    [
        (None, "latest", ("main", 2)),
        (None, "1", ("main", 1)),
        ("main", "latest", ("main", 2)),
        ("feat/x", "latest", ("feat/x", 1)),
        ("feat/x", "1", ("feat/x", 1)),
        (None, "shadowed", ("main", 1)),
    ],
)
def test_a_name_means_a_version(stage, branch, text, found):
    """`latest` of a branch, a number and an alias each mean the version that they should."""
    target = stage.calls.find(CALLER, "f", branch, text)
    assert (target.branch, target.number, target.version) == (*found, str(found[1]))


def test_an_alias_with_weights_is_drawn_each_time(stage):
    """Of two versions with the weights 1 and 3, the second gets about three calls of four."""
    numbers = [stage.calls.find(CALLER, "f", None, "half").number for _ in range(1000)]
    assert 0.70 < numbers.count(2) / 1000 < 0.80 and set(numbers) == {1, 2}


def test_what_is_not_the_callers_is_unknown(stage):
    """A name that the key may not use and one that nobody knows are refused in the same words."""
    bound = Caller("default", Scope.SUBMIT, "k", models=frozenset({"f"}))
    results = []
    for name in ("other", "another"):
        with pytest.raises(UnknownName) as caught:
            stage.calls.find(bound, name)
        results.append((caught.value.code, caught.value.message.replace(name, "NAME")))
    assert (
        results[0]
        == results[1]
        == ("model_not_found", "the model 'NAME' does not exist or you do not have access to it")
    )
    assert {target.name for target in stage.calls.targets(bound)} == {"f"}
    with pytest.raises(UnknownName, match="did you mean 'other'"):
        stage.calls.find(CALLER, "othr")
    with pytest.raises(UnknownName, match="ready versions of"):
        stage.calls.find(CALLER, "f", None, "99")


async def test_an_answer_is_told_of(stage):
    """A call that is answered, one that is refused and one that is given up are each told once, and how they ended."""
    target = stage.calls.find(CALLER, "f")
    worker = await stage.loaded(target)
    tasks = [asyncio.create_task(stage.calls.call(CALLER, target, "rows", body)) for body in (b"a", b"b", b"c")]
    asks = await heard(worker)
    refused = FunctionReply(asks[1].id, raised=Raised.of(InvalidRow("no", code="invalid_field")))
    worker.say(Answers([FunctionReply(asks[0].id, b"done"), refused]))
    assert (await tasks[0]).body == b"done"
    with pytest.raises(InvalidRow):
        await tasks[1]
    tasks[2].cancel()
    assert (await worker.expect(Abandon)).id == asks[2].id
    assert [(call.model, call.status, call.error) for call in stage.received] == [
        ("f", 200, None), ("f", 0, "invalid_field"), ("f", 0, "abandoned"),
    ]  # fmt: skip


async def test_calls_without_waiting_are_told_of_too(stage):
    """`call_nowait` is None before a worker is ready; then answers and ends are heard and told once."""
    target, answers = stage.calls.find(CALLER, "f"), []
    assert stage.calls.call_nowait(CALLER, target, "rows", b"a", b"", answers.append) is None
    assert not stage.received
    worker = await stage.loaded(target)
    assert stage.calls.call_nowait(CALLER, target, "rows", b"a", b"", answers.append) is not None
    cancel = stage.calls.call_nowait(CALLER, target, "rows", b"b", b"", answers.append)
    cancel()
    asks = await heard(worker)
    worker.say(Answers([FunctionReply(ask.id, ask.body) for ask in asks]))
    while not answers:
        await asyncio.sleep(0)
    assert [answer.body for answer in answers] == [b"a"]
    assert [(call.status, call.error) for call in stage.received] == [(0, "abandoned"), (200, None)]


async def test_who_fails_to_hear_does_not_end_the_worker(stage, caplog):
    """A frontend that breaks over an answer is told of our fault instead; other calls of its worker go on."""
    target, answers = stage.calls.find(CALLER, "f"), []

    def hear(answer: FunctionReply) -> None:
        answers.append(answer)
        if answer.raised is None:
            raise RuntimeError("a bug")

    worker = await stage.loaded(target)
    assert stage.calls.call_nowait(CALLER, target, "rows", b"a", b"", hear) is not None
    other = asyncio.create_task(stage.calls.call(CALLER, target, "rows", b"b"))
    asks = await heard(worker)
    asks += await heard(worker) if len(asks) < 2 else []
    worker.say(Answers([FunctionReply(ask.id, ask.body) for ask in asks]))
    assert (await other).body == b"b"
    assert answers[1].raised is not None and answers[1].raised.code == "internal_error" and "a bug" in caplog.text


async def test_mirrors_get_copies_that_touch_nothing(stage, monkeypatch):
    """A shadow gets the same body; that it fails, or that there are too many copies, is counted and no more."""
    monkeypatch.setattr(function_calls, "COPIES_MAX", 1)
    target = stage.calls.find(CALLER, "f", None, "shadowed")
    worker = await stage.loaded(target)
    shadow = await stage.loaded(stage.calls.find(CALLER, "f", None, "2"))
    first = asyncio.create_task(stage.calls.call(CALLER, target, "rows", b"a", head=b"h"))
    (ask,) = await heard(worker)
    (copy,) = await heard(shadow)
    assert (copy.body, copy.head, copy.form) == (b"a", b"h", "rows")
    worker.say(Answers([FunctionReply(ask.id, b"done")]))
    assert (await first).body == b"done"
    answers: list[FunctionReply] = []
    assert stage.calls.call_nowait(CALLER, target, "rows", b"b", b"", answers.append) is not None
    (ask,) = await heard(worker)
    worker.say(Answers([FunctionReply(ask.id, b"done")]))
    shadow.say(Answers([FunctionReply(copy.id, raised=Raised.of(ModelFailed("no")))]))
    while not answers or ("f", "failed") not in stage.calls.copied:
        await asyncio.sleep(0)
    assert stage.calls.copied == {("f", "dropped"): 1, ("f", "failed"): 1}


async def test_a_stream_comes_piece_by_piece(stage):
    """Events are handed on as they come, and a reader that leaves ends the call."""
    target = stage.calls.find(CALLER, "f")
    worker = await stage.loaded(target)
    beginning = asyncio.create_task(stage.calls.stream(CALLER, target, "arguments", b"{}", b"h"))
    request = await worker.expect(AnswerLive)
    assert (request.request.stream, request.request.form, request.request.head) == (True, "arguments", b"h")
    worker.say(Head(request.id, LiveHead(200, "text/event-stream")))
    worker.say(ReplyChunk(request.id, b"data: 1\n\n"))
    head, pieces = await beginning
    assert head.content_type == "text/event-stream" and await anext(pieces) == b"data: 1\n\n"
    await pieces.aclose()
    assert (await worker.expect(Abandon)).id == request.id
    assert [(call.status, call.error) for call in stage.received] == [(0, "abandoned")]


async def test_a_stream_that_cannot_begin(stage):
    """What the function raises before its first event is raised, and told of."""
    target = stage.calls.find(CALLER, "f")
    worker = await stage.loaded(target)
    beginning = asyncio.create_task(stage.calls.stream(CALLER, target, "arguments", b"{}"))
    request = await worker.expect(AnswerLive)
    worker.say(Answered(request.id, Raised.of(ModelFailed("ValueError: no", code="function_error"))))
    with pytest.raises(ModelFailed, match="ValueError: no"):
        await beginning
    assert [call.error for call in stage.received] == ["function_error"]


async def test_counts_of_each_version(stage):
    """What was counted of a version is found by its number, and of one that is not there there is nothing."""
    target = stage.calls.find(CALLER, "f")
    worker = await stage.loaded(target)
    worker.say(Answers([], CallStats(rows=3, executions=2)))
    while not stage.calls.stats("f", "2").rows:
        await asyncio.sleep(0)
    assert stage.calls.stats("f", "2").executions == 2
    assert stage.calls.stats("f", "1") == stage.calls.stats("f", "99") == CallStats()


async def test_a_new_version_is_up_before_the_old_one_goes(stage):
    """Where the old version has workers the new one gets some first; where it has none, nothing is started."""
    old, new = (each.spec for each in stage.versions[:2])
    await stage.dispatcher.live.replace(old, new)
    assert stage.executor.is_quiet
    await stage.loaded(stage.calls.find(CALLER, "f", None, "1"))
    replacing = asyncio.create_task(stage.dispatcher.live.replace(old, new))
    await stage.executor.next()
    await replacing
    assert stage.calls.call_nowait(CALLER, stage.calls.find(CALLER, "f"), "rows", b"", b"", lambda _: None) is not None


async def test_what_was_unloaded_is_not_called(stage):
    """A version that was unloaded refuses calls of every kind until it is loaded; others are not touched."""
    target = stage.calls.find(CALLER, "f")
    worker = await stage.loaded(target)
    await stage.calls.unload(target)
    assert not stage.calls.is_ready(target) and stage.calls.is_ready(stage.calls.find(CALLER, "other"))
    assert stage.calls.call_nowait(CALLER, target, "rows", b"", b"", lambda _: None) is None
    for call in (stage.calls.call(CALLER, target, "rows", b""), stage.calls.stream(CALLER, target, "rows", b"")):
        with pytest.raises(Unavailable) as raised:
            await call
        assert raised.value.code == "model_unloaded"
    await stage.calls.load(target)
    assert stage.calls.call_nowait(CALLER, target, "rows", b"", b"", lambda _: None) is not None
    assert len(await heard(worker)) == 1
