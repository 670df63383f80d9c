"""The commands about jobs that exist."""

import asyncio
import json
import os

import pytest

from batchmill.cli.jobs import jobs as jobs_commands
from batchmill.errors import BatchmillError
from batchmill.types import JobQuery, Problem, RetryChange, Sample


def test_jobs_are_listed_one_a_line(app, call, view):
    """Each job is one line of 80 columns at most, with its id whole, its state, rows, time and model."""
    long = "job_" + "f" * 20
    app.jobs.add(
        view(id=long, state="validating", rows=5_000_000, rows_ok=1_250_000, rows_failed=40_200, model="m" * 90)
    )
    app.jobs.add(view(id="job_2", state="paused", reason="budget", rows_ok=4, rows_failed=1))
    head, first, second = call("jobs").stdout.splitlines()
    assert head.split() == ["ID", "STATE", "DONE", "FAILED", "CREATED", "MODEL"]
    assert first.split()[:4] == [long, "validating", "1.3M/5.0M", "40.2k"] and len(first) == 80 and "mmm" in first
    assert second.split()[:4] == ["job_2", "paused", "(budget)", "5/10"]
    lines = [json.loads(line) for line in call("jobs", "--json").stdout.splitlines()]
    assert [line["job"]["id"] for line in lines] == [long, "job_2"]


def test_jobs_are_chosen(app, call, view):
    """What is to be listed goes to whoever has the jobs; a list that is cut short says so."""
    app.jobs.add(view()).add(view(id="job_2"))
    flags = ("--state", "running", "--model", "m", "--project", "p", "--since", "2026-01-02T03:04:05+00:00")
    result = call("jobs", *flags, "--limit", "1")
    assert app.projects == ["p"]
    assert app.jobs.queries == [JobQuery(state="running", model="m", since=1767323045.0, limit=2)]
    assert len(result.stdout.splitlines()) == 2 and "there are more than 1" in result.stderr
    for wrong in (("--state", "odd"), ("--since", "soon"), ("--limit", "0")):
        assert call("jobs", *wrong).exit_code == 2


def test_no_jobs_are_said_to_be_none(call):
    """An empty list is a sentence, and nothing in JSON."""
    assert call("jobs").stdout == "there are no jobs\n"
    assert call("jobs", "--json").stdout == ""


def test_show_prints_a_job(app, call, view):
    """A job is shown with its figures, model, inputs and problems; a unique beginning of its id will do."""
    problems = [Problem("invalid_json", "no", 3, "/in")]
    app.jobs.add(view(state="paused", reason="quota", input=["/in"], problems=problems, problems_total=1, generation=1))
    result = call("show", "job")
    assert result.exit_code == 0
    for line in ("job job_1: paused", "  model     m", "  input     /in", "  retries   1"):
        assert line in result.stdout.splitlines()
    assert "nothing left to spend" in result.stdout and "/in:3: invalid_json: no" in result.stderr
    assert json.loads(call("show", "job_1", "--json").stdout)["job"]["reason"] == "quota"


def test_an_unknown_job_is_a_usage_error(call):
    """An id nobody knows is exit code 2."""
    result = call("show", "job_9")
    assert (result.exit_code, result.stderr) == (2, "batchmill: no job is called 'job_9'\n")


def test_results_are_printed_to_the_byte(app, call, view, place):
    """The result or error file comes out as it is, to standard output or to a file."""
    (place / "r.jsonl").write_bytes(b'{"a":"\xc2\x9b"}\r\n')
    (place / "e.jsonl").write_bytes(b"e\n")
    app.jobs.add(view(state="completed", output=str(place / "r.jsonl"), errors_output=str(place / "e.jsonl")))
    assert call("results", "job_1").stdout_bytes == b'{"a":"\xc2\x9b"}\r\n'
    assert call("results", "job_1", "--errors").stdout_bytes == b"e\n"
    assert call("results", "job_1", "-o", "copy").stdout_bytes == b""
    assert (place / "copy").read_bytes() == b'{"a":"\xc2\x9b"}\r\n'
    expected = json.loads(call("results", "job_1", "--json").stdout)
    assert (expected["output"], expected["state"]) == (str(place / "r.jsonl"), "completed")


@pytest.mark.parametrize(
    ("fields", "flags", "expected"),
    [
        ({"rows_ok": 4}, (), "the job job_1 is running, 4 of 10 rows are done: --partial prints those"),
        ({"state": "completed"}, ("--errors",), "has no error file"),
        ({"state": "completed"}, ("--errors", "--partial"), "exclude each other"),
        ({"state": "completed", "output": "/gone.jsonl"}, (), "in /gone.jsonl cannot be read: No such file"),
        ({}, ("--json", "--errors"), "--json prints the paths of all results"),
        ({}, ("--json", "--partial"), "--json prints the paths of all results"),
        ({}, ("--json", "-o", "x"), "--json prints the paths of all results"),
        ({}, ("--partial", "-o", "gone/x"), "gone/x cannot be written: No such file"),
        ({}, ("--partial", "-o", ""), "the name of the results' file is empty"),
    ],
)
def test_results_that_are_not_there_are_refused(app, call, view, fields, flags, expected):
    """What cannot be printed is refused with what can."""
    app.jobs.add(view(**fields))
    result = call("results", "job_1", *flags)
    assert result.exit_code == 2 and expected in result.stderr


def test_partial_results_come_while_it_runs(app, call, view, place):
    """--partial prints the rows that are finished, and says how many those are."""
    app.partial = b"1\n2\n"
    app.jobs.add(view())
    result = call("results", "job_1", "--partial")
    assert (result.stdout, result.stderr) == ("1\n2\n", "2 of 10 rows are finished\n")
    assert call("results", "job_1", "--partial", "-o", "part").exit_code == 0
    assert (place / "part").read_bytes() == b"1\n2\n"


OWN = ("in.jsonl", "r.jsonl", "./r.jsonl", "link", "hard", "r.jsonl.part", "r.errors.jsonl", "r.errors.jsonl.part")


@pytest.mark.parametrize("flags", [(), ("--partial",), ("--errors",)])
@pytest.mark.parametrize("own", OWN)
def test_results_are_not_written_over_the_jobs_files(app, call, view, place, flags, own):
    """-o refuses every name of the job's output, error file, their parts and its input, and leaves them alone."""
    for name in ("r.jsonl", "r.errors.jsonl", "r.jsonl.part", "r.errors.jsonl.part"):
        (place / name).write_text(name)
    (place / "link").symlink_to("r.jsonl")
    (place / "hard").hardlink_to(place / "r.jsonl")
    files = {"output": str(place / "r.jsonl"), "errors_output": str(place / "r.errors.jsonl")}
    app.jobs.add(view(state="completed", input=[str(place / "in.jsonl")], **files))
    before = {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()}
    result = call("results", "job_1", "-o", own, *flags)
    assert result.exit_code == 2 and "belongs to the job itself" in result.stderr
    assert {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()} == before


def test_a_copy_appears_whole_or_not_at_all(app, call, view, place):
    """A copy that fails in the middle leaves what was there before, and nothing else."""
    (place / "copy").write_text("before")
    app.jobs.add(view())

    async def fail(config, job_id, out):
        out.write(b"half")
        raise BatchmillError("the segments are gone")

    app.partial_results = fail
    names = sorted(path.name for path in place.iterdir())
    assert call("results", "job_1", "--partial", "-o", "copy", "--overwrite").exit_code == 1
    assert (place / "copy").read_text() == "before"
    assert sorted(path.name for path in place.iterdir()) == names


def test_a_pipe_is_written_as_it_is(app, call, view, place):
    """-o may name what is not a file: its reader gets the rows, and it is still there afterwards."""
    os.mkfifo(place / "pipe")
    reader = os.open(place / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    app.partial = b"1\n"
    app.jobs.add(view())
    assert call("results", "job_1", "--partial", "-o", "pipe").exit_code == 0
    assert os.read(reader, 10) == b"1\n" and (place / "pipe").is_fifo()
    os.close(reader)


@pytest.mark.parametrize(("verb", "state"), [("cancel", "cancelled"), ("pause", "paused")])
def test_steering_waits_until_the_job_rests(app, call, view, verb, state):
    """cancel and pause ask for it, wait until it is so and exit with 0."""
    app.jobs.add(view(), view(state=state, rows_ok=3))
    result = call(verb, "job_1")
    assert result.exit_code == 0 and app.jobs.asked == [(verb, "job_1")]
    assert f"job job_1: {state}" in result.stdout
    assert json.loads(call(verb, "job_1", "--json").stdout.splitlines()[-1])["job"]["state"] == state


def test_a_cancel_that_could_not_end_says_so(app, call, view):
    """A provider that did not answer is exit code 4, with what to do; what a job left behind is in its figures."""
    expected = "its providers did not answer: the job batch_7 of openai may still be there"
    app.jobs.add(view(), view(state="paused", reason="route_failed", message=expected, cancelling=5.0))
    result = call("cancel", "job_1")
    assert result.exit_code == 4 and expected in result.stderr and "to go on:" in result.stderr
    assert json.loads(call("cancel", "job_1", "--json").stdout.splitlines()[-1])["exit_code"] == 4
    app.jobs.add(view(state="cancelled", message="the job batch_7 of openai may still be there"))
    assert "note      the job batch_7 of openai may still be there" in call("show", "job_1").stdout


def test_steering_that_takes_long_is_watched(app, call, view, monkeypatch):
    """Somebody who waits is told for what, and sees how the job is meanwhile."""
    monkeypatch.setattr(jobs_commands, "QUIET_S", 0.0)
    app.jobs.add(view(), view(state="cancelling"), view(state="cancelled"))
    seen, steer = asyncio.Event(), app.jobs.steer
    app.jobs.before_view = lambda number: seen.set() if number else None

    async def cancel(job_id, verb):
        await seen.wait()
        return await steer(job_id, verb)

    app.jobs.steer = cancel
    result = call("cancel", "job_1")
    assert result.exit_code == 0 and "rows in flight may still finish" in result.stderr
    assert "cancelling" in result.stderr and "job job_1: cancelled" in result.stdout


@pytest.mark.parametrize(
    ("verb", "expected"),
    [
        ("resume", "resuming job job_1: 2 of 10 rows are done"),
        ("fail_rows", "resuming job job_1"),
        ("retry", "retrying 8 rows of job job_1"),
    ],
)
def test_going_on_follows_the_job_to_its_end(app, call, view, verb, expected):
    """resume and retry show the job like run does, with the same exit codes."""
    app.jobs.add(view(rows_ok=2), view(state="completed", rows_ok=9, rows_failed=1))
    result = call(verb.removesuffix("_rows"), "job_1")
    assert result.exit_code == 3 and app.jobs.asked == [(verb, "job_1")]
    assert expected in result.stderr and "job job_1: completed" in result.stdout
    assert app.jobs.retries == ([(RetryChange(), None)] if verb == "retry" else [])


@pytest.mark.parametrize("verb", ["resume", "retry"])
def test_going_on_is_not_over_after_the_sample_of_another_command(app, call, view, monkeypatch, verb):
    """When the owner ends, the next one may be a command that wants a sample of the job: the others run after it."""
    app.jobs.add(view())
    steer, changes = app.jobs.steer, []

    async def change(job_id):
        changes.append(job_id)
        is_first = len(changes) == 1
        sampled = view(state="paused", reason="sampled", rows_ok=4, sample=Sample(4))
        app.jobs.add(view(), sampled if is_first else view(state="completed", rows_ok=10))
        return view()

    async def change_by_verb(job_id, verb):
        await steer(job_id, verb)
        return await change(job_id)

    async def retry(job_id, changed, model):
        return await change(job_id)

    monkeypatch.setattr(app.jobs, "steer", change_by_verb)
    monkeypatch.setattr(app.jobs, "retry", retry)
    result = call(verb, "job_1")
    assert result.exit_code == 0 and "job job_1: completed" in result.stdout and len(changes) == 2
    assert app.jobs.asked[-1] == ("resume", "job_1")


def test_resume_is_not_over_after_a_sample_that_runs_already(app, call, view, monkeypatch):
    """It is another command's. The rest of a sample that was interrupted is what its command wanted."""
    steer = app.jobs.steer
    sampled = view(state="paused", reason="sampled", rows_ok=4, sample=Sample(4))

    async def go_on(job_id, verb):
        before = await steer(job_id, verb)
        app.jobs.add(before if len(app.jobs.asked) == 1 else view(state="completed", rows_ok=10))
        return before

    monkeypatch.setattr(app.jobs, "steer", go_on)
    app.jobs.add(view(sample=Sample(4)), sampled)
    assert "job job_1: completed" in call("resume", "job_1").stdout and len(app.jobs.asked) == 2
    app.jobs.asked.clear()
    app.jobs.add(view(state="paused", reason="asked", sample=Sample(4)), sampled)
    assert call("resume", "job_1").exit_code == 0 and len(app.jobs.asked) == 1


def test_what_does_not_fit_the_state_is_refused(app, call, view):
    """Pausing a job that has ended is exit code 2."""
    app.jobs.add(view(state="completed"))
    result = call("pause", "job_1")
    assert result.exit_code == 2 and "has ended" in result.stderr
