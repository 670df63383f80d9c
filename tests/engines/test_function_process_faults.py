"""Whatever a deployed function does to its process: callers hear of it, rows are accounted for, the next call works.

Each test has a real process.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import pytest
from contract.engine_suite import PATIENCE_S, ListSink, OpenFeed, run_all
from function_process_support import Answers, deployed, openai_rows, running, table_rows

from batchmill.engines.function.engine import FunctionEngine, Watch
from batchmill.errors import ModelFailed
from batchmill.types import Limits
from batchmill.wire.messages import FunctionReply

DOES = """
import ctypes, os, sys, threading, time
kept = []
def f(does=""):
    if does == "exit": os._exit(3)
    if does == "segfault": ctypes.string_at(0)
    if does == "hang": threading.Event().wait()
    if does == "close": os.closerange(0, 4096)
    if does == "print": print("hello from the function"); sys.stdout.buffer.write(b"\\xff\\n" * 10)
    if does == "write": os.write(1, b"raw\\n"); os.write(2, b"raw\\n")
    if does == "fork":
        child = os.fork()
        if not child: return "a child speaks"
        os.waitpid(child, 0)
    if does == "junk": return object
    if does == "sysexit": sys.exit(4)
    if does == "leak":
        while True:
            kept.append(bytearray(1024 * 1024)); time.sleep(0.0005)
    if does == "huge": kept.append(bytearray(1 << 40))
    return [does, os.getpid()]
"""
BATCHED = """
import batchmill, ctypes, threading
@batchmill.batched(64)
def f(n):
    if 41 in n: ctypes.string_at(0)
    if 99 in n: threading.Event().wait()
    return [each * 2 for each in n]
"""


def message_of(reply: FunctionReply) -> str:
    assert reply.raised is not None, reply
    return reply.raised.message


async def test_exit_in_a_call_is_one_clear_error(tmp_path: Path) -> None:
    """Who called what ended the process hears `worker_crashed`; the next call is answered by a new process."""
    async with running(deployed(tmp_path, DOES), tmp_path / "home") as engine:
        answers = Answers(engine)
        _, first = await answers.value({})
        with pytest.raises(ModelFailed, match="^the function's process died: exit code 3$") as failed:
            await answers.value({"does": "exit"})
        assert failed.value.code == "worker_crashed"
        said, second = await answers.value({})
        assert (said, first != second) == ("", True)


async def test_those_who_wait_behind_a_crash_are_answered(tmp_path: Path) -> None:
    """Calls that had not begun when the process died are answered by the next one."""
    async with running(deployed(tmp_path, DOES), tmp_path / "home") as engine:
        answers = Answers(engine)
        crashing = answers.ask("arguments", {"does": "exit"})
        waiting = [answers.ask("arguments", {"does": f"{n}"}) for n in range(50)]
        async with asyncio.timeout(PATIENCE_S):
            done = await asyncio.gather(crashing, *waiting)
        assert done[0].raised is not None
        assert [json.loads(answer.body)[0] for answer in done[1:]] == [f"{n}" for n in range(50)]


async def test_idempotent_calls_are_made_again(tmp_path: Path) -> None:
    """A call of a function that is declared idempotent survives one death of its process, and no second one."""
    mark = tmp_path / "mark"
    text = f"""
import os
def f(times):
    with open({str(mark)!r}, "a") as file: file.write("x")
    if len(open({str(mark)!r}).read()) <= times: os._exit(3)
    return "done"
"""
    async with running(deployed(tmp_path, text, is_idempotent=True), tmp_path / "home") as engine:
        answers = Answers(engine)
        assert await answers.value({"times": 1}) == "done"
        with pytest.raises(ModelFailed) as failed:
            await answers.value({"times": 100})
        assert failed.value.code == "worker_crashed"
        assert len(mark.read_text()) == 4


async def test_killed_in_the_midst_of_a_call(tmp_path: Path) -> None:
    """SIGKILL from outside is one clear error for who was being answered, and the next call works."""
    mark = tmp_path / "mark"
    text = f"""
import os, threading
def f(wait=False):
    if wait:
        os.mkfifo({str(mark)!r}) if not os.path.exists({str(mark)!r}) else None
        open({str(mark)!r}, "w").write("in")
        threading.Event().wait()
    return os.getpid()
"""
    os.mkfifo(mark)
    async with running(deployed(tmp_path, text), tmp_path / "home") as engine:
        answers = Answers(engine)
        pid = await answers.value({})
        waiting = answers.ask("arguments", {"wait": True})
        assert await asyncio.to_thread(mark.read_text) == "in"
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            answer = await waiting
        assert answer.raised is not None
        assert (answer.raised.code, "SIGKILL" in answer.raised.message) == ("worker_crashed", True)
        assert await answers.value({}) != pid


async def test_killed_while_idle(tmp_path: Path) -> None:
    """A process that dies while nothing is called is replaced, and nobody hears of it."""
    async with running(deployed(tmp_path, DOES), tmp_path / "home") as engine:
        answers = Answers(engine)
        _, pid = await answers.value({})
        os.kill(pid, signal.SIGKILL)
        assert (await answers.value({"does": "on"}))[0] == "on"


async def test_a_call_that_hangs_is_timed_out(tmp_path: Path) -> None:
    """The caller's own limit ends a call with `timeout`; those behind it are answered by a new process."""
    async with running(deployed(tmp_path, DOES), tmp_path / "home") as engine:
        answers = Answers(engine)
        hanging = answers.ask("arguments", {"does": "hang"}, timeout_s=0.5)
        behind = answers.ask("arguments", {"does": "on"})
        async with asyncio.timeout(PATIENCE_S):
            late, answer = await asyncio.gather(hanging, behind)
        assert late.raised is not None
        assert (late.raised.code, late.raised.message) == ("timeout", "the function took longer than 0.5 s")
        assert json.loads(answer.body)[0] == "on"


async def test_the_models_own_limit(tmp_path: Path) -> None:
    """Without a limit of the caller's the model's `attempt_timeout_s` holds, for live calls and for rows."""
    limits = Limits(attempt_timeout_s=0.5)
    async with running(deployed(tmp_path, DOES, limits=limits), tmp_path / "home") as engine:
        answers = Answers(engine)
        with pytest.raises(ModelFailed) as failed:
            await answers.value({"does": "hang"})
        assert failed.value.code == "timeout"
        sink = await run_all(engine, table_rows({"does": "a"}, {"does": "hang"}, {"does": "b"}))
    assert sink.numbers() == [0, 1, 2]
    assert {o.row.number: o.error.code for o in sink.outcomes if o.error} == {1: "timeout"}


async def test_a_caller_who_waits_in_line_kills_nobody(tmp_path: Path) -> None:
    """Time that is up before a call has begun ends that call alone: what runs goes on."""
    text = f"""
import os, threading
def f(wait=False):
    if wait: open({str(tmp_path / "go")!r}).read()
    return os.getpid()
"""
    os.mkfifo(tmp_path / "go")
    async with running(deployed(tmp_path, text), tmp_path / "home") as engine:
        answers = Answers(engine)
        pid = await answers.value({})
        long = answers.ask("arguments", {"wait": True})
        with pytest.raises(ModelFailed) as failed:
            await answers.value({}, timeout_s=0.1)
        assert failed.value.code == "timeout"
        await asyncio.to_thread((tmp_path / "go").write_text, "go")
        async with asyncio.timeout(PATIENCE_S):
            assert json.loads((await long).body) == pid


async def test_memory_is_limited(tmp_path: Path) -> None:
    """A function that holds more memory than its model may have gets `memory_limit`, and a new process."""
    limits = Limits(memory_bytes=256 * 2**20)
    async with running(deployed(tmp_path, DOES, limits=limits), tmp_path / "home") as engine:
        answers = Answers(engine)
        _, pid = await answers.value({})
        with pytest.raises(ModelFailed) as failed:
            await answers.value({"does": "leak"})
        assert failed.value.code == "memory_limit"
        said, another = await answers.value({"does": "on"})
        assert (said, another != pid) == ("on", True)


async def test_memory_that_is_refused(tmp_path: Path) -> None:
    """A call that asks for far more memory than there may be fails with `memory_limit` at once."""
    limits = Limits(memory_bytes=256 * 2**20)
    async with running(deployed(tmp_path, DOES, limits=limits), tmp_path / "home") as engine:
        answers = Answers(engine)
        with pytest.raises(ModelFailed) as failed:
            await answers.value({"does": "huge"})
        assert failed.value.code == "memory_limit"
        assert (await answers.value({"does": "on"}))[0] == "on"


async def test_closing_every_descriptor(tmp_path: Path) -> None:
    """A function that closes all file descriptors is replaced; who called it hears `worker_crashed`."""
    async with running(deployed(tmp_path, DOES), tmp_path / "home") as engine:
        answers = Answers(engine)
        with pytest.raises(ModelFailed) as failed:
            await answers.value({"does": "close"})
        assert failed.value.code == "worker_crashed"
        assert (await answers.value({"does": "on"}))[0] == "on"


@pytest.mark.parametrize("how", ["print", "write", "fork"])
async def test_what_does_no_harm(tmp_path: Path, how: str) -> None:
    """Printing, writing to the standard descriptors and forking leave the call, and the next, answered."""
    async with running(deployed(tmp_path, DOES), tmp_path / "home") as engine:
        answers = Answers(engine)
        said, pid = await answers.value({"does": how})
        assert (said, (await answers.value({"does": "on"}))) == (how, ["on", pid])


async def test_what_is_printed_goes_to_the_log(tmp_path: Path) -> None:
    """What a function prints before any call lies in function.log, for whoever reads why it did not start."""
    async with running(deployed(tmp_path, "print('loading')\n" + DOES), tmp_path / "home"):
        assert b"loading\n" in (tmp_path / "home" / "function.log").read_bytes()


@pytest.mark.parametrize(("how", "code"), [("junk", "bad_return"), ("sysexit", "function_error")])
async def test_a_failed_call_keeps_the_process(tmp_path: Path, how: str, code: str) -> None:
    """What cannot be encoded, and SystemExit, are errors of that call; the process goes on."""
    async with running(deployed(tmp_path, DOES), tmp_path / "home") as engine:
        answers = Answers(engine)
        _, pid = await answers.value({})
        with pytest.raises(ModelFailed) as failed:
            await answers.value({"does": how})
        assert failed.value.code == code
        assert await answers.value({"does": "on"}) == ["on", pid]


async def test_a_row_that_segfaults(tmp_path: Path) -> None:
    """Of 100 rows the one that kills its process ends in `worker_crashed`; the others have their results."""
    async with running(deployed(tmp_path, DOES), tmp_path / "home") as engine:
        rows = table_rows(*({"does": "segfault" if n == 41 else f"{n}"} for n in range(100)))
        sink = await run_all(engine, rows)
    assert sink.numbers() == list(range(100))
    assert {o.row.number: o.error.code for o in sink.outcomes if o.error} == {41: "worker_crashed"}


async def test_a_row_that_segfaults_in_a_batch(tmp_path: Path) -> None:
    """Where rows are called together the one that kills is found by halves; its neighbours have their results."""
    async with running(deployed(tmp_path, BATCHED), tmp_path / "home") as engine:
        sink = await run_all(engine, table_rows(*({"n": n} for n in range(98))))
    assert sink.numbers() == list(range(98))
    assert {o.row.number: o.error.code for o in sink.outcomes if o.error} == {41: "worker_crashed"}
    assert {o.row.number: json.loads(o.body) for o in sink.outcomes if o.body} == {
        n: 2 * n for n in range(98) if n != 41
    }


async def test_a_row_that_hangs_in_a_batch(tmp_path: Path) -> None:
    """Where rows are called together the one that hangs is found by halves, and ends in `timeout`."""
    limits = Limits(attempt_timeout_s=0.3)
    async with running(deployed(tmp_path, BATCHED, limits=limits), tmp_path / "home") as engine:
        sink = await run_all(engine, table_rows(*({"n": n} for n in range(95, 103))))
    assert sink.numbers() == list(range(8))
    assert {o.row.number: o.error.code for o in sink.outcomes if o.error} == {4: "timeout"}


async def test_a_row_may_ask_for_less_time(tmp_path: Path) -> None:
    """`timeout_seconds` in the body of a row bounds its calls, and no other row's."""
    bodies = [{"data": "hang", "timeout_seconds": 1}, {"data": "a"}]
    async with running(deployed(tmp_path, DOES), tmp_path / "home") as engine:
        sink = await run_all(engine, openai_rows(*bodies))
    expected = {o.row.number: o.error for o in sink.outcomes if o.error}
    assert {number: (error.code, error.message) for number, error in expected.items()} == {
        0: ("timeout", "the function took longer than 1 s")
    }


async def test_live_calls_beside_a_row_that_kills(tmp_path: Path) -> None:
    """While a killing row is being found live calls are answered, each once."""
    async with running(deployed(tmp_path, BATCHED), tmp_path / "home") as engine:
        answers = Answers(engine)
        sink = ListSink()
        feed = OpenFeed(sink, table_rows(*({"n": n} for n in range(64))))
        rows = asyncio.create_task(engine.run(feed, sink))
        live = [answers.ask("arguments", {"n": 1000 + n}) for n in range(20)]
        async with asyncio.timeout(PATIENCE_S):
            done = await asyncio.gather(*live)
            await sink.wait_for(64)
            feed.end()
            await rows
        bad = {answer.raised.code for answer in done if answer.raised is not None}
        assert bad <= {"worker_crashed"}
        assert [json.loads(a.body) for a in done if a.raised is None] == [
            2 * (1000 + n) for n, a in enumerate(done) if a.raised is None
        ]
        assert [o.row.number for o in sink.outcomes if o.error] == [41]


async def test_a_setup_that_fails_tells_why(tmp_path: Path) -> None:
    """start() raises with the traceback of what failed."""
    engine = FunctionEngine(deployed(tmp_path, "raise ValueError('no such weights')"), tmp_path / "home")
    with pytest.raises(ModelFailed, match="no such weights") as failed:
        await engine.start()
    assert "app.py" in failed.value.message
    await engine.stop()


async def test_a_setup_that_ends_the_process_tells_what_it_wrote(tmp_path: Path) -> None:
    """start() raises with the exit code and the end of what was printed."""
    text = "import os\nprint('about to go')\nos._exit(9)"
    engine = FunctionEngine(deployed(tmp_path, text), tmp_path / "home")
    with pytest.raises(ModelFailed, match="(?s)exit code 9.*about to go"):
        await engine.start()
    await engine.stop()


async def test_a_setup_that_is_killed_is_tried_again(tmp_path: Path) -> None:
    """A signal during the setup is no reason to give a function up, but one in each of three setups is."""
    text = f"""
import os, pathlib
with open({str(tmp_path / "starts")!r}, "a") as file: file.write("x")
if os.stat({str(tmp_path / "starts")!r}).st_size <= KILLS: os.kill(os.getpid(), 9)
def f(): return 1
"""
    async with running(deployed(tmp_path, text.replace("KILLS", "2")), tmp_path / "home") as engine:
        assert await Answers(engine).value({}) == 1
    engine = FunctionEngine(deployed(tmp_path, text.replace("KILLS", "100")), tmp_path / "home")
    with pytest.raises(ModelFailed, match="signal SIGKILL"):
        await engine.start()
    await engine.stop()
    assert (tmp_path / "starts").stat().st_size == 6


async def test_a_process_that_cannot_start_again(tmp_path: Path) -> None:
    """A function that worked and cannot be started again fails its run and everybody who waits, with the reason."""
    mark = tmp_path / "mark"
    text = f"""
import os
if os.path.exists({str(mark)!r}): raise RuntimeError("the licence has ended")
def f(): open({str(mark)!r}, "w"); os._exit(1)
"""
    async with running(deployed(tmp_path, text), tmp_path / "home") as engine:
        answers = Answers(engine)
        sink = ListSink()
        rows = asyncio.create_task(engine.run(OpenFeed(sink), sink))
        first, second = answers.ask("arguments", {}), answers.ask("arguments", {})
        async with asyncio.timeout(PATIENCE_S):
            done = await asyncio.gather(first, second)
            with pytest.raises(ModelFailed, match="the licence has ended"):
                await rows
        assert [answer.raised.code for answer in done if answer.raised] == ["worker_crashed", "model_failed"]
        with pytest.raises(ModelFailed, match="the licence has ended"):
            await answers.value({})


async def test_a_process_that_dies_by_itself_again_and_again(tmp_path: Path) -> None:
    """A process that keeps dying while nothing is called is given up after a few, with how it ended."""

    async def kill_each(engine: FunctionEngine) -> None:
        while True:
            if engine._process.is_up and engine._process.child is not None:
                engine._process.child.kill()
            await asyncio.sleep(0.01)

    async with running(deployed(tmp_path, "def f(): return 1"), tmp_path / "home") as engine:
        killing, sink = asyncio.create_task(kill_each(engine)), ListSink()
        with pytest.raises(ModelFailed, match="died in a row.*SIGKILL"):
            async with asyncio.timeout(PATIENCE_S):
                await engine.run(OpenFeed(sink), sink)
        killing.cancel()


NESTED = """
def f(depth):
    value = 1
    for _ in range(depth): value = [value]
    return value
"""


async def test_results_that_nest_deep(tmp_path: Path) -> None:
    """A nested result is kept; one nested too deep is an error of that row or call, and nothing else."""
    async with running(deployed(tmp_path, NESTED), tmp_path / "home") as engine:
        sink = await run_all(engine, table_rows({"depth": 100}, {"depth": 600}, {"depth": 100_000}, {"depth": 1}))
        assert {o.row.number: o.error.code for o in sink.outcomes if o.error} == {1: "bad_return", 2: "bad_return"}
        answers = Answers(engine)
        with pytest.raises(ModelFailed):
            await answers.value({"depth": 100_000})
        assert await answers.value({"depth": 1}) == [1]


async def test_an_async_call_that_hangs(tmp_path: Path) -> None:
    """An awaited call whose time is up ends alone; one that blocks the loop is ended with its process."""
    text = """
import asyncio, os, time
async def f(does=""):
    if does == "await": await asyncio.Event().wait()
    if does == "block": time.sleep(600)
    return os.getpid()
"""
    async with running(deployed(tmp_path, text), tmp_path / "home") as engine:
        answers = Answers(engine)
        pid = await answers.value({})
        beside = answers.ask("arguments", {"does": "await"}, timeout_s=30)
        with pytest.raises(ModelFailed) as failed:
            await answers.value({"does": "await"}, timeout_s=0.2)
        assert (failed.value.code, await answers.value({}), beside.done()) == ("timeout", pid, False)
        with pytest.raises(ModelFailed) as failed:
            await answers.value({"does": "block"}, timeout_s=0.2)
        assert (failed.value.code, await answers.value({}) != pid) == ("timeout", True)


async def test_a_body_of_many_quick_rows_that_is_late(tmp_path: Path) -> None:
    """A body whose rows take too long together ends by itself: none of its calls hangs, so the process stays."""
    text = f"""
import os
def f(n):
    if n == 3: open({str(tmp_path / "called")!r}, "w").close()
    if n > 3: open({str(tmp_path / "go")!r}).close()
    return os.getpid()
"""
    spec = deployed(tmp_path, text)
    os.mkfifo(tmp_path / "called")
    os.mkfifo(tmp_path / "go")
    async with running(spec, tmp_path / "home") as engine:
        answers = Answers(engine)
        pid = await answers.value({"n": 0})
        late = answers.ask("rows", {"data": [[n, n] for n in range(5)]}, timeout_s=3600)
        await asyncio.to_thread((tmp_path / "called").read_bytes)
        Watch(spec, engine._process, is_async=False).check(time.monotonic() + 3601)
        assert message_of(await late) == "the function took longer than 3600 s"
        go = os.open(tmp_path / "go", os.O_RDWR)
        assert await answers.value({"n": 0}) == pid
        os.close(go)


async def test_a_call_whose_result_is_being_written_is_late(tmp_path: Path) -> None:
    """A call that has ended, and whose result is not there yet, was called: nobody reads that the function was busy."""
    text = f"""
class Slow:
    def tolist(self):
        open({str(tmp_path / "called")!r}, "w").close()
        open({str(tmp_path / "go")!r}).close()
        return 1
def f(n):
    return Slow()
"""
    spec = deployed(tmp_path, text)
    os.mkfifo(tmp_path / "called")
    os.mkfifo(tmp_path / "go")
    async with running(spec, tmp_path / "home") as engine:
        answers = Answers(engine)
        late, behind = (answers.ask("arguments", {"n": n}, timeout_s=3600) for n in range(2))
        await asyncio.to_thread((tmp_path / "called").read_bytes)
        Watch(spec, engine._process, is_async=False).check(time.monotonic() + 3601)
        assert message_of(await late) == "the function took longer than 3600 s"
        assert message_of(await behind) == "there was no answer in 3600 s: the function was busy, or being started"
        await asyncio.to_thread((tmp_path / "go").write_bytes, b"")


async def test_a_call_that_begins_late_is_not_taken_for_one_that_hangs(tmp_path: Path) -> None:
    """Those who waited in line for too long are told so, and cost nobody the process."""
    text = "import os, time\ndef f(wait=0.0):\n    time.sleep(wait)\n    return os.getpid()\n"
    async with running(deployed(tmp_path, text, limits=Limits(attempt_timeout_s=0.5)), tmp_path / "home") as engine:
        answers = Answers(engine)
        pid = await answers.value({})
        async with asyncio.timeout(PATIENCE_S):
            expected = await asyncio.gather(*[answers.ask("arguments", {"wait": 0.3}) for _ in range(4)])
        codes = [answer.raised.code if answer.raised is not None else "" for answer in expected]
        assert (codes[0], codes[-1], expected[-1].raised.message[:26]) == ("", "timeout", "there was no answer in 0.5")
        assert await answers.value({}, timeout_s=30) == pid


async def test_an_async_call_that_is_late_is_cancelled(tmp_path: Path) -> None:
    """An awaited call whose time is up is cancelled, and those beside it go on: also when the time to end is over."""
    text = f"""
import asyncio, os
async def f(wait=0.0):
    try:
        await asyncio.sleep(wait)
    except asyncio.CancelledError:
        open({str(tmp_path / "told")!r}, "a").write("cancelled ")
        raise
    return os.getpid()
"""
    async with running(deployed(tmp_path, text), tmp_path / "home") as engine:
        answers = Answers(engine)
        pid = await answers.value({})
        beside = answers.ask("arguments", {"wait": 1.5})
        with pytest.raises(ModelFailed, match="took longer than 0.2 s"):
            await answers.value({"wait": 600}, timeout_s=0.2)
        async with asyncio.timeout(PATIENCE_S):
            assert json.loads((await beside).body) == pid
        assert (tmp_path / "told").read_text() == "cancelled "


LATE = """
import batchmill, os, threading
class Late:
    def tolist(self): threading.Event().wait()
def one(n): return Late() if n == 5 else n
@batchmill.batched(4)
def many(n): return [Late() if each == 5 else each for each in n]
async def awaited(n): return Late() if n == 5 else n
def pid(): return os.getpid()
"""


@pytest.mark.parametrize("name", ["one", "many", "awaited"])
async def test_a_result_that_hangs_while_it_is_written(tmp_path: Path, name: str) -> None:
    """The time limit of a call holds for the code of its result too, and only its row fails."""
    spec = deployed(tmp_path, LATE, source=f"app.py:{name}", limits=Limits(attempt_timeout_s=0.3))
    async with running(spec, tmp_path / "home") as engine:
        sink = await run_all(engine, table_rows(*({"n": n} for n in range(8))))
    assert {o.row.number: o.error.code for o in sink.outcomes if o.error} == {5: "timeout"}
    assert sorted(int(o.body) for o in sink.outcomes if o.body) == [0, 1, 2, 3, 4, 6, 7]


async def test_a_process_that_is_stopped_between_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has calls, runs none of them and sends nothing is replaced; its rows are called all the same."""
    monkeypatch.setattr("batchmill.engines.function.engine.SILENT_S", 0.2)
    async with running(deployed(tmp_path, LATE, source="app.py:pid"), tmp_path / "home") as engine:
        pid = await Answers(engine).value({})
        os.kill(pid, signal.SIGSTOP)
        sink = await run_all(engine, table_rows({}, {}, {}))
    assert [o.error for o in sink.outcomes] == [None] * 3
    assert str(pid).encode() not in {o.body for o in sink.outcomes}
