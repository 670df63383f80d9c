"""`batchmill.run`: the work of `batchmill run`, in the process of a program."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import gc
import inspect
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from decimal import Decimal
from pathlib import Path

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from msgspec.structs import fields, replace

import batchmill
from batchmill.config import load
from batchmill.datasets import spooled_inputs
from batchmill.errors import InvalidInput, InvalidTransition, JobPaused
from batchmill.inprocess import orders
from batchmill.inprocess.results import stored_table
from batchmill.jobs.pools.job_run import JobRun
from batchmill.services.data_dirs.data_dirs import try_lock
from batchmill.wire.native import NewJob

SIZE = f"function:{Path(__file__).with_name('functions.py')}:size"
COUNTED = f"function:{Path(__file__).with_name('functions.py')}:counted"
FRAME = pd.DataFrame({"text": ["a", "bb", "ccc"], "n": [1, 2, 3]}, index=pd.Index([5, 5, 1], name="key"))


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("inprocess") / "data")


@pytest.fixture(scope="module")
def job(data_dir: str) -> batchmill.Job:
    """A job over FRAME that has ended."""
    return batchmill.run(FRAME, model=SIZE, data_dir=data_dir)


def test_a_frame_in_and_a_frame_out(job: batchmill.Job):
    """Every row has its answer or its error, under the frame's index."""
    found = job.to_pandas()
    expected = FRAME.assign(
        output=pd.array([2, 4, None], dtype="Int64"), error=pd.Series([None, None, "ValueError: three"], FRAME.index)
    )
    pd.testing.assert_frame_equal(found, expected.astype({"error": found["error"].dtype}))
    assert job.to_polars()["output"].to_list() == [2, 4, None] and job.to_arrow().column("text")[0].as_py() == "a"
    failed = job.failures()
    assert failed.index.tolist() == [1] and failed["error"].tolist() == ["ValueError: three"]
    assert (job.view.state, job.view.rows_ok, job.view.rows_failed, job.how) == ("completed", 2, 1, "started")


def test_the_same_frame_is_the_same_job(job: batchmill.Job, data_dir: str):
    """Whichever library holds it: nothing is called again. Other rows are another job."""
    for same in (FRAME.copy(), pa.Table.from_pandas(FRAME, preserve_index=False), FRAME.reset_index(drop=True)):
        again = batchmill.run(same, model=SIZE, data_dir=data_dir)
        assert (again.id, again.how) == (job.id, "finished")
    assert again.to_pandas().index.tolist() == [0, 1, 2]
    failed = batchmill.run(pl.from_pandas(FRAME), model=SIZE, data_dir=data_dir).failures()
    assert isinstance(failed, pl.DataFrame) and failed["text"].to_list() == ["ccc"]
    other = batchmill.run(FRAME.assign(n=[7, 8, 9]), model=SIZE, data_dir=data_dir)
    assert other.id != job.id and other.to_pandas()["output"].tolist() == [8, 10, 12]
    assert other.failures().empty


def test_rows_and_files_and_retries(data_dir: str, tmp_path: Path):
    """An iterable of dicts, a path and a list of paths are data too; failed rows run again."""
    rows = [{"text": "x" * n, "n": n} for n in range(5)]
    job = batchmill.run(iter(rows), model=SIZE, data_dir=data_dir)
    assert sorted(job, key=lambda row: row["n"]) == list(job)
    assert [(row["output"], row["error"]) for row in job][3:] == [(None, "ValueError: three"), (8, None)]
    assert job.to_pandas()["output"].tolist() == [0, 2, 4, pd.NA, 8]
    assert job.retry().view.generation == 1 and len(job.failures()) == 1
    with pytest.raises(InvalidInput, match="retry"):
        job.retry(adapter="of-no-language-model")
    assert len(list(job)) == 5 == len(job.wait().to_arrow())  # a retry that is refused leaves the job as it was
    pl.DataFrame(rows).write_csv(tmp_path / "rows.csv")
    output = tmp_path / "out.jsonl"
    filed = batchmill.run([tmp_path / "rows.csv"], model=SIZE, data_dir=data_dir, output=output, on_invalid="skip")
    assert len(output.read_text().splitlines()) == 5 == len(filed.to_arrow())


def test_rows_are_the_same_while_a_job_runs_and_afterwards(data_dir: str):
    """Also where a column of the stored results holds values of several types, dates or numbers with all digits."""
    mixed = f"function:{Path(__file__).with_name('functions.py')}:mixed"
    day = pd.Timestamp("2026-01-02T03:04", tz="Europe/Berlin")
    frame = pd.DataFrame({"n": [1, 2, 3], "day": [day] * 3, "price": [Decimal("1.10")] * 3})
    for data in (frame, [{"n": 1, "x": [1]}, {"n": 2, "x": "a"}, {"n": 3, "x": 10**20}]):
        job = batchmill.run(data, model=mixed, data_dir=data_dir, wait=False)
        running = sorted(job, key=lambda row: row["n"])
        assert [row["output"] for row in running] == [1, {"n": 2}, "three"]
        assert list(job) == running
        assert job.to_pandas()["output"].tolist() == ["1", '{"n":2}', '"three"']  # one type: JSON as text


def test_a_job_holds_none_of_its_results(data_dir: str, tmp_path: Path):
    """Whatever the form of its files: each call reads them, and what it returned is freed with the last reference."""
    rows = [{"text": "x" * n, "n": n % 5} for n in range(200)]
    for data, output in (
        (pd.DataFrame(rows), None), (rows, None), (pd.DataFrame(rows), tmp_path / "parts/"), (rows, tmp_path / "o.csv"),
        (rows, tmp_path / "rows.jsonl.gz"),
    ):  # fmt: skip
        keywords = {} if output is None else {"output": f"{output}/" if output.suffix == "" else str(output)}
        job = batchmill.run(data, model=SIZE, data_dir=data_dir, **keywords)
        before = pa.total_allocated_bytes()
        frames = [job.to_arrow(), job.to_pandas(), job.to_polars(), job.failures(), list(job)]
        assert [len(each) for each in frames] == [200, 200, 200, 40, 200], output
        failed = [row["n"] for row in job if row["error"]]
        assert list(map(int, failed)) == [3] * 40 and len(job.to_arrow()) == 200
        if isinstance(data, pd.DataFrame):
            assert job.failures().index.tolist() == list(range(3, 200, 5)), output
        del frames
        gc.collect()
        assert pa.total_allocated_bytes() == before, output
    assert not list(Path(data_dir, spooled_inputs.FOLDER).glob(f"{spooled_inputs.PART}*"))


def test_results_that_are_gone_are_named(data_dir: str, tmp_path: Path):
    """Results are read where they lie: a file that was removed since is an error that says which."""
    for name in ("gone.jsonl", "gone.parquet"):
        job = batchmill.run([{"text": name, "n": 1}], model=SIZE, data_dir=data_dir, output=str(tmp_path / name))
        (tmp_path / name).unlink()
        for read in (job.to_arrow, job.failures, lambda job=job: list(job)):
            with pytest.raises(InvalidInput, match=name):
                read()
    started_over = replace(job.view, state="cancelled", output=None, message="started over by another job")
    with pytest.raises(InvalidInput, match="is cancelled and has no results: started over"):
        asyncio.run(stored_table(load(environ={}, cwd=tmp_path, data_dir=data_dir), started_over))


def test_a_sample_first(data_dir: str):
    """Its rows come back under their labels; the same call without a limit runs the others, and those not again."""
    frame = pd.DataFrame({"text": list("abcde"), "n": [5, 3, 4, 3, 6]}, index=list("vwxyz"))
    first = batchmill.run(frame, model=SIZE, data_dir=data_dir, limit=2)
    assert first.is_sampled and first.to_pandas()["output"].dropna().to_dict() == {"v": 6}
    assert first.failures().index.tolist() == ["w"] and [row["n"] for row in first] == [5, 3]
    drawn = batchmill.run(frame, model=SIZE, data_dir=data_dir, sample=2, seed=1)
    assert (drawn.id, drawn.how, len(drawn.to_arrow())) == (first.id, "resumed", 2)
    assert drawn.to_pandas()["n"].tolist() == [frame["n"][label] for label in drawn.to_pandas().index]
    whole = batchmill.run(frame, model=SIZE, data_dir=data_dir)
    assert (whole.id, whole.how, whole.is_sampled) == (first.id, "resumed", False)
    assert whole.to_pandas().index.tolist() == list("vwxyz") and whole.failures().index.tolist() == ["w", "y"]
    everything = batchmill.run(frame, model=SIZE, data_dir=data_dir, limit=99)
    assert everything.how == "finished" and len(everything.to_pandas()) == 5
    for part, labels in ({"limit": 2}, list("vw")), ({"sample": 2, "seed": 1}, drawn.to_pandas().index.tolist()):
        some = batchmill.run(frame, model=SIZE, data_dir=data_dir, **part)  # of a job that has run all rows
        assert some.how == "finished" and some.to_pandas().index.tolist() == labels
        assert [row["n"] for row in some] == some.to_polars()["n"].to_list() == [frame["n"][label] for label in labels]
        assert some.failures().index.tolist() == [label for label in labels if frame["n"][label] == 3]


def test_all_rows_beside_a_sample_of_them(data_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A call for all rows that joins a sample goes on after it, and hands out every row."""
    monkeypatch.setenv("INPROCESS_PLACE", str(tmp_path))
    data = {"n": list(range(90))}
    sample = batchmill.run(data, model=COUNTED, data_dir=data_dir, limit=61, wait=False)
    while not (tmp_path / "blocked").exists():
        assert sample.is_running
        time.sleep(0.001)
    whole = batchmill.run(data, model=COUNTED, data_dir=data_dir, wait=False)
    assert (whole.id, whole.how) == (sample.id, "joined")
    (tmp_path / "go").touch()
    whole.wait()
    assert not whole.is_sampled and sorted(row["n"] for row in whole) == data["n"]
    if sample.wait().is_sampled:  # it saw its end before the other rows ran
        assert sample.to_arrow()["n"].to_pylist() == [row["n"] for row in sample] == list(range(61))


def test_a_fork_of_the_program(data_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is not the owner, also once its parent is not any more, and does not wait for what it cannot see."""
    monkeypatch.setenv("INPROCESS_PLACE", str(tmp_path))
    job = batchmill.run({"n": list(range(61))}, model=COUNTED, data_dir=data_dir, wait=False)
    while not (tmp_path / "blocked").exists():
        assert job.is_running
        time.sleep(0.001)
    ends, (said, says) = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: this process has threads
        if not (child := os.fork()):
            try:
                signal.alarm(30)  # it may wait for ever, if this fails
                os.close(ends[1])
                with contextlib.suppress(InvalidTransition):
                    job.wait()
                    os._exit(1)
                os.write(says, b"refused")
                os.read(ends[0], 1)
            finally:
                os._exit(0)
    os.close(says)
    assert os.read(said, 10) == b"refused"
    (tmp_path / "go").touch()
    job.wait()
    lock = try_lock(Path(data_dir))
    assert lock is not None
    for fd in (lock, said, *ends):
        os.close(fd)
    assert os.waitpid(child, 0)[1] == 0


async def test_in_a_running_loop(data_dir: str):
    """A notebook has an event loop already: `run` works beside it, `arun` in it, two jobs at once."""
    frames = [pl.DataFrame({"text": ["q" * n], "n": [n]}) for n in (11, 12)]
    jobs = await asyncio.gather(*(batchmill.arun(frame, model=SIZE, data_dir=data_dir) for frame in frames))
    assert [job.to_polars()["output"].to_list() for job in jobs] == [[22], [24]]
    assert batchmill.run(frames[0], model=SIZE, data_dir=data_dir).how == "finished"
    later = await batchmill.arun({"text": ["z"], "n": [5]}, model=SIZE, data_dir=data_dir, wait=False)
    assert [row["output"] async for row in later] == [6] and (await later).view.state == "completed"


async def test_a_cancelled_call_starts_nothing(data_dir: str):
    """Cancelled while its rows are still read, in a thread that goes on: no job begins that nobody holds."""
    reading, go, read = threading.Event(), threading.Event(), threading.Event()

    def rows():
        reading.set()
        go.wait()
        yield {"text": "cancelled", "n": 1}
        read.set()

    known = len(list(Path(data_dir, spooled_inputs.FOLDER).glob("*.job_*")))
    call = asyncio.create_task(batchmill.arun(rows(), model=SIZE, data_dir=data_dir))
    await asyncio.to_thread(reading.wait)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    go.set()
    await asyncio.to_thread(read.wait)
    await batchmill.arun({"text": ["next"], "n": [1]}, model=SIZE, data_dir=data_dir)
    assert len(list(Path(data_dir, spooled_inputs.FOLDER).glob("*.job_*"))) == known + 1


def test_the_collector_is_the_programs(data_dir: str):
    """What the program has frozen stays so, and nothing else is."""
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        batchmill.run({"text": ["frozen"], "n": [1]}, model=SIZE, data_dir=data_dir)
        assert 0 < gc.get_freeze_count() <= frozen
    finally:
        gc.unfreeze()


def test_what_cannot_run_is_refused(data_dir: str):
    """Before anything runs, with the value; nothing stays of it."""
    for keywords, message in (
        ({"model": SIZE, "promt": "x"}, "did you mean 'prompt'"),
        ({"model": SIZE, "in_flight": 3}, "did you mean 'in_flight_max'"),
        ({"model": SIZE, "timeout": 3}, "attempt_timeout_s"),
        ({"model": SIZE, "prompt": "{text}"}, "needless|language models"),
        ({}, "name a model"),
        ({"model": 7}, "a name or a function, not a int"),
        ({"model": SIZE, "workers": "many"}, "Expected `int"),
        ({"model": SIZE, "models": [SIZE]}, "leave one out"),
        ({"model": "function:nowhere.py:f"}, "nowhere.py"),
        ({"model": "unknown"}, "no model is called 'unknown'"),
        ({"model": SIZE, "deadline": 5.0, "completion_s": 5.0}, "leave one of them out"),
        ({"model": SIZE, "limit": 1, "sample": 1}, "sample"),
        ({"model": ""}, "name a model"),
        ({"models": 3}, "models is a list of models, not 3"),
        ({"models": [SIZE, COUNTED], "workers": 2}, "workers describes one model"),
        ({"model": SIZE, "gpus": -1}, "gpus must be 0 to 1024, not -1"),
        ({"model": SIZE, "executor": "dask"}, "executor is 'ray', not 'dask'"),
        ({"model": SIZE, "restart": "yes"}, r"got `str` - at `\$.restart`"),
        ({"model": SIZE, "output": 3}, "output is a path, not a int"),
        ({"model": SIZE, "config": ""}, "config is empty"),
    ):
        with pytest.raises(InvalidInput, match=message):
            batchmill.run({"text": ["never"], "n": [0]}, data_dir=data_dir, **keywords)
    with pytest.raises(InvalidInput, match="there is no file"):
        batchmill.run("nowhere.jsonl", model=SIZE, data_dir=data_dir)
    with pytest.raises(InvalidInput, match="an empty text is no path"):
        batchmill.run("", model=SIZE, data_dir=data_dir)
    with pytest.raises(InvalidInput, match="data_dir is a path, not a int"):
        batchmill.run("nowhere.jsonl", model=SIZE, data_dir=3)
    with pytest.raises(InvalidInput, match="To run texts, give dicts"):
        batchmill.run(["a text", "another"], model=SIZE, data_dir=data_dir)
    assert not list(Path(data_dir, spooled_inputs.FOLDER).glob(f"{spooled_inputs.PART}*"))


def test_a_job_shows_itself(job: batchmill.Job):
    """As text and as HTML, in which nothing of a row is markup."""
    assert repr(job) == f"<Job {job.id}: completed, 3 of 3 rows | 1 failed>"
    assert "ValueError" in job._repr_html_() and job.id in job._repr_html_()


def test_results_of_an_unfinished_job_are_refused(data_dir: str):
    """The message says how to get the finished rows."""
    later = batchmill.run({"text": ["late"], "n": [1]}, model=SIZE, data_dir=data_dir, wait=False)
    if later.view.state not in ("completed", "finalizing"):
        with pytest.raises(InvalidTransition, match=r"wait\(\)"):
            later.to_pandas()
    assert later.wait().to_pandas()["output"].tolist() == [5]


def test_a_paused_job_hands_out_its_finished_rows(data_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Those of an iteration that a pause ends too: each once, then the error; the message names the way on."""
    monkeypatch.setenv("INPROCESS_PLACE", str(tmp_path))
    job = batchmill.run({"n": list(range(100))}, model=COUNTED, data_dir=data_dir, wait=False)
    while not (tmp_path / "blocked").exists():
        assert job.is_running
        time.sleep(0.001)
    pause = JobRun.pause

    def paused(run: JobRun, error: Exception) -> None:
        pause(run, error)
        (tmp_path / "go").touch()

    monkeypatch.setattr(JobRun, "pause", paused)
    assert job.pause().state == "paused"
    for _ in range(2):
        rows = iter(job)
        found = list(itertools.islice(rows, job.view.rows_ok))
        with pytest.raises(JobPaused):
            next(rows)
        assert len({row["n"] for row in found}) == len(found) == job.view.rows_ok
        assert all(row["output"] == 2 * row["n"] for row in found)

    async def collect() -> None:
        rows = aiter(job)
        assert [await anext(rows) for _ in found] == found
        with pytest.raises(JobPaused):
            await anext(rows)

    asyncio.run(collect())
    with pytest.raises(InvalidTransition, match=r"batchmill\.run again"):
        job.to_pandas()


def test_every_keyword_of_a_job_has_an_effect():
    """The order of a job in process reads each field that an order over HTTP has: none is accepted and ignored."""
    source = inspect.getsource(orders)
    unread = [each.name for each in fields(NewJob) if f"job.{each.name}" not in source]
    assert unread == ["files", "models"]  # the data, and the models themselves


DATA = [{"text": "a", "n": 2**60}, {"text": "b", "n": 0.5}]
WITHOUT_ARROW = f"""
DATA = {DATA}
import importlib.util, sys, threading
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "pyarrow" else found(name, *rest)
sys.modules["pyarrow"] = None
import batchmill
from batchmill.errors import InvalidInput

def work():
    job = batchmill.run(DATA, model=sys.argv[1], data_dir=sys.argv[2], wait=False)
    begun.set()
    job.wait()
    print(list(job))
    try:
        job.to_pandas()
    except InvalidInput as error:
        print(error.code, error.message)

begun = threading.Event()
threading.Thread(target=work).start()
begun.wait()
"""


def test_rows_need_no_arrow(tmp_path: Path):
    """Without pyarrow rows run and are read, and frames name the extra; once it is there, no row is called again.

    The program is a thread that outlives the main one.
    """
    command = [sys.executable, "-c", WITHOUT_ARROW, SIZE, str(tmp_path / "data")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    rows, message = done.stdout.splitlines()
    expected = [{**DATA[0], "output": 2**60 + 1, "error": None}, {**DATA[1], "output": 1.5, "error": None}]
    assert ast.literal_eval(rows) == expected
    assert message == "missing_dependency results as a frame needs pyarrow: pip install 'batchmill[parquet]'"
    again = batchmill.run(DATA, model=SIZE, data_dir=str(tmp_path / "data"))
    assert again.how == "finished" and list(again) == expected
