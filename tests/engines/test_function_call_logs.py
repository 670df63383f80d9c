"""What calls of a deployed function print and raise, in the log of its version."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from contract.engine_suite import run_all
from function_process_support import Answers, deployed, running, table_rows
from msgspec.structs import replace

from batchmill.errors import ModelFailed
from batchmill.models import call_log
from batchmill.models.call_log import CallLog
from batchmill.services.functions import calls
from batchmill.wire.native_models import LogEntry, LogQuery

LINES = "print('loading')\ndef f(a):\n  print('got', a, end='')\n  print('!')\n  return 1 / a\n"
ASYNC = "import asyncio\nasync def f(a):\n  await asyncio.sleep(0)\n  print('got', a)\n  return 1 / a\n"
STREAM = "def f(a):\n  print('got', a)\n  yield 1 / a\n"
BATCH = "import batchmill\n@batchmill.batched(8)\ndef f(a):\n  print('got', len(a))\n  return a\n"


class Lease:
    project, job_id = "ours", "job_1"


def read(folder: Path, project: str | None = None, **query: object) -> list[LogEntry]:
    return calls.read(folder, LogQuery(**query), project).entries


async def test_lines_and_tracebacks_have_their_request(tmp_path: Path) -> None:
    """What a call prints, and the traceback of what it raises, is kept with its project and the id of its request."""
    for number, code in enumerate((LINES, ASYNC, STREAM)):
        folder = tmp_path / str(number)
        async with running(deployed(folder, code), folder / "home") as engine:
            answers = Answers(engine)
            await answers.value({"a": 4}, project="ours", request="req_1")
            with pytest.raises(ModelFailed):
                await answers.value({"a": 0}, project="theirs", request="req_2")
        [line] = read(folder, request="req_1")
        assert (line.text, line.stream, line.project) == ("got 4!" if number == 0 else "got 4", "stdout", "ours")
        printed, trace = read(folder, "theirs", request="req_2")
        assert printed.text.startswith("got 0")
        assert trace.stream == "traceback" and trace.text.endswith("ZeroDivisionError: division by zero")
        assert {entry.project for entry in read(folder, "ours")} <= {"ours", None}


async def test_what_no_call_prints_is_shown_at_the_start_alone(tmp_path: Path) -> None:
    """The function's own project sees what was printed before any call; not what a thread prints later."""
    code = (
        "import threading\nprint('loading')\n"
        "def f(a):\n  t = threading.Thread(target=print, args=('stray',)); t.start(); t.join()\n  return a\n"
    )
    async with running(deployed(tmp_path, code), tmp_path / "home") as engine:
        await Answers(engine).value({"a": 4}, project="theirs", request="req_1")
    assert [(each.text, each.stage) for each in read(tmp_path, "ours")] == [("loading", "start")]
    assert [each.text for each in read(tmp_path)] == ["loading", "stray"]


async def test_rows_of_a_job_are_told_by_their_numbers(tmp_path: Path) -> None:
    """What a row prints and raises is kept with its job and its number, and found by the job."""
    async with running(deployed(tmp_path, LINES), tmp_path / "home") as engine:
        await run_all(engine, [replace(row, lease=Lease()) for row in table_rows({"a": 5}, {"a": 0})])
    found = read(tmp_path, "ours", request="job_1")
    assert [(each.requests, each.stream) for each in found] == [
        (["job_1 row 0"], "stdout"), (["job_1 row 1"], "stdout"), (["job_1 row 1"], "traceback")
    ]  # fmt: skip


async def test_a_batch_of_several_projects_is_nobodys(tmp_path: Path) -> None:
    """A line printed for calls of two projects together names them to whoever runs the machine, and to neither."""
    spec = deployed(tmp_path, BATCH, batch_size=2)
    async with running(spec, tmp_path / "home") as engine:
        answers = Answers(engine)
        asked = [answers.ask("arguments", {"a": n}, project=f"p{n}", request=f"req_{n}") for n in range(2)]
        await asyncio.gather(*asked)
    [line] = read(tmp_path)
    assert (line.text, line.project, line.requests) == ("got 2", None, ["req_0", "req_1"])
    assert read(tmp_path, "p0") == read(tmp_path, "p1") == []


async def test_a_death_is_told_to_the_call_that_died(tmp_path: Path) -> None:
    """The end of a process is in the log of the call that was running."""
    async with running(deployed(tmp_path, "import os\ndef f(a): os._exit(3)"), tmp_path / "home") as engine:
        with pytest.raises(ModelFailed):
            await Answers(engine).value({"a": 1}, project="ours", request="req_1")
    assert "exit code 3" in read(tmp_path, "ours", request="req_1")[0].text


def test_a_cursor_goes_on_across_a_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages from a cursor on have each line once, across a kept file too; what is kept no longer is said to be lost."""
    monkeypatch.setattr(call_log, "BYTES_MAX", 1)
    log = CallLog(tmp_path)
    write = lambda text: log.write(text, "p", "r")  # noqa: E731
    write("1")
    first = calls.read(tmp_path, LogQuery(), "p")
    write("2")
    log.rotate()
    write("3")
    page = calls.read(tmp_path, LogQuery(after=first.next, limit=1), "p")
    assert [each.text for each in page.entries] == ["2"] and not page.is_lost
    page = calls.read(tmp_path, LogQuery(after=page.next), "p")
    assert [each.text for each in page.entries] == ["3"]
    for text in ("4", "5"):
        log.rotate()
        write(text)
    page = calls.read(tmp_path, LogQuery(after=first.next), "p")
    assert [each.text for each in page.entries] == ["4", "5"] and page.is_lost
    assert [each.text for each in calls.read(tmp_path, LogQuery(limit=1), "p").entries] == ["5"]
    log.close()


def test_a_flood_of_tracebacks_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond so many in a second tracebacks are counted, and told of with the next."""
    log = CallLog(tmp_path)
    seconds = iter([1.0] * (call_log.TRACES_PER_S_MAX + 5) + [2.0])
    monkeypatch.setattr(call_log.time, "time", lambda: next(seconds))
    for _ in range(call_log.TRACES_PER_S_MAX + 6):
        log.write("e", "p", "r")
    log.close()
    found = read(tmp_path, "p")
    assert len(found) == call_log.TRACES_PER_S_MAX + 1 and found[-1].text == "(5 more were left out)\ne"


BATCHER = """
import asyncio
import os
queue = worker = None
async def work():
    while True:
        done, a = await queue.get()
        print('worked on', a)
        done.set_result(a)
async def f(a):
    global queue, worker
    if worker is None:
        queue = asyncio.Queue()
        worker = asyncio.create_task(work())
    done = asyncio.get_running_loop().create_future()
    await queue.put((done, a))
    return await done
"""


async def test_what_a_call_leaves_running_prints_for_nobody(tmp_path: Path) -> None:
    """A task that one project's call began prints what it does for another's: no project is shown that."""
    async with running(deployed(tmp_path, BATCHER), tmp_path / "home") as engine:
        answers = Answers(engine)
        assert await answers.value({"a": 1}, project="ours", request="req_1") == 1
        assert await answers.value({"a": 2}, project="theirs", request="req_2") == 2
    assert [(each.text, each.project) for each in read(tmp_path)] == [("worked on 1", "ours"), ("worked on 2", None)]
    assert [each.text for each in read(tmp_path, "ours")] == ["worked on 1"]
    assert "worked on 2" not in (tmp_path / "home" / "function.log").read_text()


def test_a_log_on_a_full_disk(tmp_path: Path) -> None:
    """Where nothing can be written nothing is raised, and what was left out is counted."""
    log = CallLog(tmp_path)
    with open("/dev/full", "wb") as full:
        kept = os.dup(log.fd)
        os.dup2(full.fileno(), log.fd)
    log.write("lost", "ours", "req_1")
    os.dup2(kept, log.fd)
    os.close(kept)
    log.write("kept", "ours", "req_2")
    log.close()
    assert [each.text for each in read(tmp_path)] == ["(1 more were left out)\nkept"]


def test_an_older_file_that_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older file without a first line, as after a power cut, stands in nobody's way."""
    monkeypatch.setattr(call_log, "BYTES_MAX", 1)
    (tmp_path / call_log.OLDER).write_bytes(b"")
    log = CallLog(tmp_path)
    log.write("kept", "ours", "req_1")
    log.rotate()
    log.write("new", "ours", "req_2")
    log.close()
    assert call_log.generation_of(tmp_path / call_log.OLDER) == 1
    assert [each.text for each in read(tmp_path)] == ["kept", "new"]
