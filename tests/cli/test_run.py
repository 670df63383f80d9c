"""`batchmill run` as a user sees it: what is ordered, shown, summed up, and which exit code comes."""

import asyncio
import contextlib
import errno
import gc
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from batchmill.cli.jobs.run import follow
from batchmill.cli.session import Session
from batchmill.jobs.ledger.files import JobFiles
from batchmill.types import Limits, Policy, Price, Problem, Sample, Usage

RUN = ("run", "in.jsonl", "--model", "function:app.py:f")


def test_flags_become_the_order(app, call, place, view):
    """Every flag reaches the order, with paths absolute and values as what they are."""
    (place / "batchmill.toml").write_text(
        '[models.t]\nengine = "openai"\nsource = "gpt"\nprice = { input = 1 }\n[limits]\ndepth_max = 9\n'
    )
    app.jobs.add(view(state="completed", rows_ok=10))
    result = call(
        *("run", "in.jsonl", "--model", "t", "--base-url", "http://h/v1", "-o", "out/r.csv", "--format", "jsonl"),
        *("--copy", "--on-invalid", "skip", "--dedupe", "--budget", "2.5", "--prompt", "Is {a}?", "--system", "S"),
        *("--url", "/v1/completions", "--param", "temperature=0", "--param", 'stop=["x"]', "--param", "user=me"),
        *("--rpm", "60", "--tpm", "100", "--in-flight", "7", "--timeout", "1.5", "--restart", "--overwrite"),
        *("--api-key-env", "KEY", "--adapter", "up=up", "--model-column", "which", "--adapter-column", "lora"),
    )
    assert result.exit_code == 0, result.output
    (order,) = app.jobs.orders
    assert order.dataset.paths == [str(place / "in.jsonl")]
    assert (order.dataset.format, order.dataset.copy, order.dataset.depth_max) == ("jsonl", True, 9)
    assert order.policy == Policy(on_invalid="skip", dedupe=True, budget=2.5)
    assert order.output == str(place / "out/r.csv") and order.restart and order.overwrite
    assert (order.prompt, order.system, order.url) == ("Is {a}?", "S", "/v1/completions")
    assert (order.model_column, order.adapter_column) == ("which", "lora")
    assert order.params == {"temperature": 0, "stop": ["x"], "user": "me"}
    (model,) = order.models
    assert (model.name, model.engine, model.base_url, model.api_key) == ("t", "http", "http://h/v1", "env:KEY")
    assert model.adapters == {"up": "up"}
    assert model.limits == Limits(requests_per_minute=60, tokens_per_minute=100, in_flight_max=7, attempt_timeout_s=1.5)
    assert app.configs[0].data_dir == place / "data"


def test_engine_flags_keep_their_kind(app, call, place, view):
    """--engine-arg values are numbers, booleans or text as they would be in the file; a bare key is a bare flag."""
    (place / "tiny").mkdir()
    app.jobs.add(view(state="completed"))
    args = ("max-model-len=2048", "--enforce-eager", "x=0.5", "id=007", "off=false", "name=a=b")
    flags = [each for arg in args for each in ("--engine-arg", arg)]
    result = call("run", "in.jsonl", "--model", "vllm:tiny", "--replicas", "2", *flags)
    assert result.exit_code == 0, result.output
    (model,) = app.jobs.orders[0].models
    assert model.workers == 2
    assert model.engine_args == {
        "max-model-len": 2048, "enforce-eager": True, "x": 0.5, "id": "007", "off": False, "name": "a=b",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("run",), "Missing argument"),
        (("run", "in.jsonl"), "Missing option '--model'"),
        (("run", "gone.jsonl", "--model", "function:app.py:f"), "there is no file gone.jsonl"),
        (("run", "in.jsonl", "--model", "function:gone.py:f"), "gone.py"),
        ((*RUN, "--budget", "1"), "--budget needs a price"),
        ((*RUN, "--budget", "0"), "Invalid value for '--budget'"),
        ((*RUN, "--workers", "0"), "Invalid value for '--workers'"),
        ((*RUN, "--param", "x"), "--param is given as KEY=VALUE"),
        ((*RUN, "--model", "vllm:x/y", "--workers", "2"), "with several --model"),
        ((*RUN, "--model", "openai:f"), "two models are called 'f'"),
        ((*RUN, "--nope"), "No such option"),
        ((*RUN, "--param", "x=NaN"), "--param x holds NaN"),
        ((*RUN, "--param", 'x={"a":[1,-Infinity]}'), "--param x holds -Infinity"),
        ((*RUN, "--param", "x=[1e999]"), "--param x holds 1e999"),
        ((*RUN, "--param", "x=" + "[" * 100_000), "--param x is nested deeper than 128 levels"),
        ((*RUN, "--param", "messages=[]"), "--param cannot set messages"),
        ((*RUN, "--param", "instructions=x"), "--param cannot set instructions"),
        ((*RUN, "--prompt", "\udcff{a}"), r"'\udcff{a}' is not UTF-8"),
        ((*RUN, "-o", "\udcff.jsonl"), "is not UTF-8"),
        (("--data-dir", "\udcff", *RUN), "is not UTF-8"),
        (("show", "\udcff"), "is not UTF-8"),
        ((*RUN, "-o", "out.txt"), "does not say what to write"),
        (("rum",), "No such command 'rum'"),
        (("--config", "gone.toml", *RUN), "gone.toml cannot be read"),
    ],
)
def test_usage_errors_exit_with_2(call, args, expected):
    """What cannot be run as it is asked for is one line and exit code 2; no job is made."""
    result = call(*args)
    assert result.exit_code == 2
    assert expected in result.stderr and "Traceback" not in result.output


def test_templates_from_files(app, call, place, view):
    """@FILE is a template's file without the end of its last line, and @@ a literal @."""
    (place / "p.txt").write_bytes("\ufeffIs {a}\n positive?\r\n".encode())
    app.jobs.add(view(state="completed"))
    result = call(*RUN, "--model", "openai:m", "--prompt", "@p.txt", "--system", "@@all", "--allow-constant-prompt")
    assert result.exit_code == 0, result.output
    (order,) = app.jobs.orders
    assert (order.prompt, order.system, order.constant_prompt) == ("Is {a}\n positive?", "@all", True)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "--prompt @p.txt: No such file or directory; --prompt @FILE reads a template from a file; write @@"),
        (b"\n", "the file is empty"),
        (b"caf\xe9 {a}", "not UTF-8 text (byte 3)"),
        (b"x" * (2**20 + 1), "more than 1,048,576 bytes"),
    ],
)
def test_files_that_are_no_templates(call, place, content, expected):
    """A file that cannot be a template is refused by name."""
    if content is not None:
        (place / "p.txt").write_bytes(content)
    result = call(*RUN, "--prompt", "@p.txt")
    assert result.exit_code == 2 and expected in result.stderr


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"state": "completed", "rows_ok": 10}, 0),
        ({"state": "completed", "rows_ok": 9, "rows_failed": 1}, 3),
        ({"state": "cancelled", "rows_ok": 4}, 3),
        ({"state": "failed", "reason": "invalid_dataset"}, 2),
        ({"state": "failed", "reason": "not_jsonl", "problems_total": 1}, 2),
        ({"state": "failed", "reason": "empty_file"}, 2),
        ({"state": "paused", "reason": "budget", "rows_ok": 3}, 4),
        ({"state": "paused", "reason": "quota"}, 4),
        ({"state": "paused", "reason": "storage_full"}, 4),
        ({"state": "paused", "reason": "input_changed"}, 4),
        ({"state": "paused", "reason": "asked"}, 4),
        ({"state": "paused", "reason": "engine_failed", "rows_ok": 3}, 4),
        ({"state": "paused", "reason": "engine_failed", "rows_failed": 1, "rows_rejected": 1}, 1),
        ({"state": "paused", "reason": "interrupted"}, 130),
        ({"state": "paused", "reason": "internal_error", "rows_ok": 1}, 1),
    ],
)
def test_exit_codes(app, call, view, fields, code):
    """The exit code says how the job stands, on a terminal and in JSON alike."""
    app.jobs.add(view(), view(**fields))
    assert call(*RUN).exit_code == code
    result = call(*RUN, "--json")
    assert result.exit_code == code
    assert json.loads(result.stdout.splitlines()[-1])["exit_code"] == code


@pytest.mark.parametrize("flags", [(), ("--together",)])
def test_results_together_are_asked_for(app, call, view, flags):
    """--together asks for one file of results; otherwise failed rows have one of their own."""
    app.jobs.add(view(state="completed", rows_ok=10))
    assert call(*RUN, *flags).exit_code == 0
    assert [order.together for order in app.jobs.orders] == [bool(flags)]


def test_a_summary_groups_errors_by_cause(app, call, view, place):
    """The summary has rows, causes with a sample, tokens, cost and the files; nothing steers the terminal."""
    app.jobs.add(
        view(
            state="completed", rows=1234, rows_ok=1200, rows_failed=34, rows_folded=5, elapsed_s=75.0,
            usage=Usage(1000, 250, 20), cost=0.0123, prices={"m": Price(0.4, 0.1, 1.6)},
            output=f"{place}/out.jsonl", errors_output=f"{place}/e.jsonl",
            errors={"timeout": 4, "rate_limited": 30},
            error_samples={"rate_limited": "slow \x1b[31mdown\x07\n\u202enow"},
        )
    )  # fmt: skip
    result = call(*RUN)
    assert result.exit_code == 3
    assert result.stdout.splitlines() == [
        "job job_1: completed, 1:15 min of running",
        "  rows      1,234",
        "  ok        1,200",
        "  failed    34",
        "          30  rate_limited: slow down now",
        "           4  timeout",
        "  folded    5 share the answer of an identical row",
        "  tokens    1,000 in (25 % cached), 20 out",
        "  cost      $0.0123",
        "  price     USD 0.4 in, 0.1 cached, 1.6 out per million tokens",
        f"  results   {place}/out.jsonl",
        f"  errors    {place}/e.jsonl",
    ]


def test_a_pause_says_why_and_how_to_go_on(app, call, view):
    """A paused job prints its reason and the command that goes on."""
    app.jobs.add(view(state="paused", reason="budget", message="$1.00 of $1.00 is spent", rows_ok=4))
    result = call(*RUN)
    assert "the budget is spent: $1.00 of $1.00 is spent" in result.stderr
    assert (
        "to go on: run the same command with a larger --budget, or `batchmill amend` and `batchmill resume`"
        in result.stderr
    )  # resume keeps the old one
    assert "  left      6" in result.stdout


@pytest.mark.parametrize(
    ("reason", "message", "expected"),
    [
        (
            "auth",
            "the service refused the credentials: no key",
            "batchmill: the service refused the credentials: no key",
        ),
        ("auth", "no key", "batchmill: the service refused the credentials: no key"),
        ("quota", "the account has nothing left to spend: x", "batchmill: the account has nothing left to spend: x"),
        ("storage_full", "", "batchmill: there is no room left on the disk"),
        ("storage_failed", "", "batchmill: the disk, the object store or the limit of open files stopped it"),
        ("disk_quota", "", "to go on: delete files, uploads or adapters; the job then resumes by itself"),
        ("internal_error", "boom", "batchmill: a bug of batchmill stopped it: boom"),
        ("engine_failed", "boom", "batchmill: the engine failed: boom"),
        ("engine_failed", "boom", "run the same command with the right flag"),
        ("submit_unknown", "", "batchmill remote job_1 lists them"),
        ("route_failed", "refused", "batchmill: the route to the model failed: refused"),
        ("new_reason", "x", "batchmill: new_reason: x"),
        ("quota", "", "to go on: add to its quota; then batchmill resume job_1 (or the same command again)"),
    ],
)
def test_a_pause_says_its_reason_once(app, call, view, reason, message, expected):
    """The reason of a pause is not repeated where its message begins with it, and what helps is said."""
    app.jobs.add(view(state="paused", reason=reason, message=message))
    lines = call(*RUN).stderr.splitlines()[-2:]
    assert any(line == expected or (line.startswith("to go on") and expected in line) for line in lines)


def test_problems_are_listed_by_line(app, call, view, place):
    """A refused dataset lists FILE:LINE: code: message and the total."""
    problems = [Problem("invalid_json", "not JSON\x1b[2J", 7, f"{place}/in.jsonl"), Problem("empty", "e", 1, "/x/y")]
    app.jobs.add(
        view(state="failed", reason="invalid_dataset", message="no row ran", problems=problems, problems_total=5000)
    )
    result = call(*RUN)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-3:] == [
        "in.jsonl:7: invalid_json: not JSON",
        "/x/y:1: empty: e",
        "5,000 problems in all; the first 2 are listed",
    ]
    assert result.stdout == "job job_1: failed: no row ran\n"


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("started", "job job_1\n"),
        ("resumed", "resuming job job_1: 4 of 10 rows are done"),
        ("joined", "joining job job_1, which is running: 4 of 10 rows are done"),
        ("finished", "job job_1 is finished already; --overwrite runs it again"),
    ],
)
def test_what_became_of_the_order_is_said(app, call, view, how, expected):
    """A job that is started, resumed, joined or finished already is announced as that."""
    app.jobs.how = how
    app.jobs.add(view(rows_ok=4), view(state="completed", rows_ok=10))
    assert expected in call(*RUN).stderr


@pytest.mark.parametrize("named", ["fold", "fold/*", "fold/**"])
def test_results_in_the_input_folder_are_no_input(app, call, place, view, named):
    """The same command finds the same input, although its results lie in the folder or match the glob."""
    (place / "fold").mkdir()
    for name in ("a.jsonl", "b.jsonl", "out.jsonl", "out.errors.jsonl", "out.jsonl.part", "out.errors.jsonl.part"):
        (place / "fold" / name).write_text("{}\n")
    app.jobs.add(view(state="completed"))
    assert call("run", named, "--model", "function:app.py:f", "-o", "fold/out.jsonl").exit_code == 0
    assert call("run", "fold/out.jsonl", "--model", "function:app.py:f", "-o", "fold/out.jsonl").exit_code == 0
    first, named_itself = app.jobs.orders
    assert first.dataset.paths == [str(place / "fold/a.jsonl"), str(place / "fold/b.jsonl")]
    assert named_itself.dataset.paths == [first.output]


def test_a_file_name_that_is_not_utf8_is_refused(call, place):
    """A file in a folder whose name has no UTF-8 form is refused by name, not a crash."""
    (place / "fold").mkdir()
    (place / "fold" / os.fsdecode(b"a\xff.jsonl")).write_text("{}\n")
    result = call("run", "fold", "--model", "function:app.py:f")
    assert result.exit_code == 2 and r"a\udcff.jsonl' is not UTF-8" in result.stderr


def test_a_budget_needs_the_price_of_every_model(call, place):
    """A budget over two models of which one has no price would count half of what is spent."""
    model = '[models.%s]\nengine = "openai"\nsource = "m"\n'
    (place / "batchmill.toml").write_text(model % "a" + "price = { input = 1 }\n" + model % "b")
    result = call("run", "in.jsonl", "--model", "a", "--model", "b", "--budget", "1")
    assert result.exit_code == 2 and "give models.b.price" in result.stderr


def test_json_is_one_object_a_line(app, call, view):
    """With --json, standard output holds the submission, every view and the summary, in ASCII."""
    app.jobs.add(view(notes=["bl\x9bue"]), view(state="completed", rows_ok=10))
    result = call("--json", *RUN)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["type"] for line in lines] == ["submitted", "view", "view", "summary"]
    assert lines[0] == {"type": "submitted", "id": "job_1", "how": "started"}
    assert lines[1]["job"]["state"] == "running" and lines[3]["job"]["rows_ok"] == 10
    assert result.stdout.isascii()


def test_errors_are_json_too(call):
    """With --json an error is an object with its code, and a line for people."""
    result = call(*RUN, "--budget", "1", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["code"] == "unknown_price"
    assert result.stderr.startswith("batchmill: --budget needs a price")


@pytest.mark.parametrize(
    "args", [(*RUN, "--nope", "--json"), ("--json", "rum"), ("run", "--json"), (*RUN, "--json", "--budget", "x")]
)
def test_usage_errors_are_json_too(call, args):
    """A flag that is wrong is told as JSON wherever --json stands; without it nothing is on standard output."""
    expected = json.loads(call(*args).stdout)
    assert (expected["type"], expected["code"]) == ("error", "usage") and expected["message"]
    assert call(*[arg for arg in args if arg != "--json"]).stdout == ""


def test_a_crash_log_holds_any_text(app, call, place, view, monkeypatch):
    """A command line that has no UTF-8 form is written down with what went wrong."""
    monkeypatch.setattr(sys, "argv", ["batchmill", "\udcff"])
    app.jobs.add(view())

    async def submit(order):
        raise RuntimeError("boom \udcff")

    app.jobs.submit = submit
    result = call(*RUN)
    assert result.exit_code == 1 and "(details: " in result.stderr
    (log,) = (place / "data" / "crashes").iterdir()
    assert log.read_text().startswith("batchmill \\udcff\n") and "RuntimeError: boom" in log.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_interrupt_pauses_and_waits(app, call, view, number):
    """Ctrl-C, SIGTERM and a closed terminal ask for a pause, wait for it and exit with 130, resumable."""
    app.jobs.add(view(), view(), view(state="paused", reason="asked", rows_ok=4))
    app.jobs.waits_for_pause = True
    app.jobs.before_view = lambda at: os.kill(os.getpid(), number) if at == 1 else None
    result = call(*RUN)
    assert result.exit_code == 130
    assert app.jobs.asked == [("pause", "job_1")] and not app.was_cancelled
    assert "pausing:" in result.stderr and "batchmill resume job_1" in result.stderr


@pytest.mark.parametrize("interrupts", [0, 1, 2])
async def test_nobody_reads_the_messages_any_more(app, view, interrupts):
    """A reader that closed its pipe ends the command. One that was ended by the same Ctrl-C keeps it neither from
    pausing nor from stopping at once.
    """
    app.jobs.add(view(), view(rows_ok=1), view(rows_ok=2), view(state="paused", reason="asked"))
    app.jobs.waits_for_pause = True
    app.jobs.before_view = lambda at: os.kill(os.getpid(), signal.SIGINT) if 0 < at <= interrupts else None
    if interrupts == 2:
        app.jobs.pausing.set = lambda: None  # the pause never comes to its end
    session = Session()

    class Display:
        def update(self, view):
            if view.rows_ok:
                raise BrokenPipeError

        def say(self, text):
            raise BrokenPipeError

    error = {0: BrokenPipeError, 1: None, 2: asyncio.CancelledError}[interrupts]
    with session.interrupts.catch(), contextlib.nullcontext() if error is None else pytest.raises(error):
        followed = await follow(app.jobs, "job_1", Display(), session=session)
        assert followed.was_interrupted and followed.view.state == "paused"
    asyncio.current_task().uncancel()
    assert app.jobs.asked == ([("pause", "job_1")] if interrupts else [])


def test_the_second_interrupt_stops_at_once(app, call, view):
    """A second Ctrl-C does not wait for anything."""
    app.jobs.add(view(), view(), view(), view(state="paused", reason="asked"))
    app.jobs.waits_for_pause = True
    app.jobs.pausing.set = lambda: None  # the pause never comes to its end
    app.jobs.before_view = lambda at: os.kill(os.getpid(), signal.SIGINT) if at else None
    result = call(*RUN)
    assert result.exit_code == 130 and app.was_cancelled
    assert "stopping at once" in result.stderr


def test_after_the_second_interrupt_nothing_is_disturbed(app, call, view):
    """What a stopped command still has to close is closed, however often Ctrl-C comes, and no traceback is shown."""
    app.jobs.add(view(), view(), view(), view(state="paused", reason="asked"))

    async def pause(job_id, verb):
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError("the owner is gone")

    app.jobs.steer = pause
    app.jobs.before_view = lambda at: os.kill(os.getpid(), signal.SIGINT) if at else None
    app.jobs.waits_for_pause = True
    app.while_closing = lambda: os.kill(os.getpid(), signal.SIGINT)
    result = call(*RUN)
    gc.collect()
    assert result.exit_code == 130 and app.was_cancelled and app.was_closed
    assert "Traceback" not in result.output and "never retrieved" not in result.output
    assert result.stderr.splitlines()[-1].startswith("stopped; finished rows are kept")


def test_an_interrupt_after_the_end_asks_for_no_pause(app, call, view):
    """Ctrl-C while a command closes what it opened lets it close, and leaves the job that has ended alone."""
    app.jobs.add(view(), view(state="completed", rows_ok=10))
    app.while_closing = lambda: os.kill(os.getpid(), signal.SIGINT)
    result = call(*RUN)
    assert (result.exit_code, app.jobs.asked, app.was_closed) == (0, [], True)
    assert "job job_1: completed" in result.stdout and "Traceback" not in result.output


def test_an_ignored_signal_stays_ignored(app, call, view):
    """A command started with nohup goes on when its terminal closes."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    app.jobs.add(view(), view(state="completed", rows_ok=10))
    app.jobs.before_view = lambda at: os.kill(os.getpid(), signal.SIGHUP)
    assert call(*RUN).exit_code == 0 and app.jobs.asked == []


def test_who_joins_is_told_what_that_means(app, call, view):
    """A command that joins a running job says that its flags do not count and that Ctrl-C pauses it for everybody."""
    app.jobs.how = "joined"
    app.jobs.add(view(), view(), view(state="paused", reason="asked", rows_ok=4))
    app.jobs.waits_for_pause = True
    app.jobs.before_view = lambda at: os.kill(os.getpid(), signal.SIGINT) if at == 1 else None
    expected = call(*RUN).stderr
    assert (
        "flags for workers, limits, prices and budget have no effect on it, and Ctrl-C pauses it for everybody"
        in expected
    )
    assert "pausing the job for all who run or follow it" in expected


def test_another_owner_runs_the_sample_of_its_own_command(app, call, view, monkeypatch):
    """When the owner ends, the next one may be a command that wants a sample of the job: this one goes on after it."""
    sampled = view(state="paused", reason="sampled", rows_ok=4, sample=Sample(4))
    app.jobs.add(view(), sampled)
    submit = app.jobs.submit

    async def submit_again(order):
        if app.jobs.orders:
            app.jobs.add(view(state="completed", rows_ok=10))
        return await submit(order)

    monkeypatch.setattr(app.jobs, "submit", submit_again)
    result = call(*RUN, "--restart", "--overwrite")
    assert result.exit_code == 0 and "job job_1: completed" in result.stdout
    first, second = app.jobs.orders
    assert (first.sample, first.restart, second.restart) == (None, True, False)
    assert first.once is not None and first.once == second.once  # the owner knows that it is the same order


def test_a_sample_for_a_pipe_that_another_command_has_gone_on_with(app, call, view):
    """Its rows are not there to be written any more: that is no success."""
    app.jobs.add(view(), view(state="paused", reason="sampled", rows_ok=4, sample=Sample(4)))  # `show` finds it running
    result = call(*RUN, "--limit", "4", "-o", "-")
    assert result.exit_code == 2 and result.stdout == ""
    assert "another command has gone on with the job job_1" in result.stderr


def test_a_pipe_gets_the_rows_of_its_sample_and_no_others(app, call, view, place):
    """Each once: also of a job that has run all rows for others, before or after it was narrowed to the sample."""
    lines = [f'{{"n":{n}}}\n' for n in range(4)]
    path = JobFiles(place / "data", "job_1").output("results.jsonl")
    path.parent.mkdir(parents=True)
    path.write_text("".join(lines))  # as its tail would find it
    command = (*RUN, "--limit", "2", "-o", "-")
    app.jobs.add(view(rows=4, state="completed", rows_ok=4, output=str(path)))
    app.jobs.how = "finished"
    assert call(*command).stdout == "".join(lines[:2])
    assert call(*RUN, "--limit", "9", "-o", "-").stdout == "".join(lines)
    app.partial = "".join(lines[:2]).encode()
    app.jobs.add(view(rows=4, state="paused", reason="sampled", rows_ok=2, sample=Sample(2)))
    app.jobs.how = "joined"
    assert call(*command).stdout == "".join(lines[:2])


def test_an_interrupt_that_comes_too_late_changes_nothing(app, call, view):
    """A job that completes while it is to be paused is complete."""
    app.jobs.add(view(), view(state="completed", rows_ok=10))
    app.jobs.before_view = lambda at: os.kill(os.getpid(), signal.SIGINT)
    assert call(*RUN).exit_code == 0


def test_a_crash_is_one_line_and_a_file(app, call, view, place):
    """An error nobody foresaw is one line and a file with its traceback, or the traceback itself with --verbose."""
    app.jobs.add(view())

    def fail(at):
        raise RuntimeError("boom\x1b")

    app.jobs.add(view(), view())
    app.jobs.before_view = fail
    result = call(*RUN)
    assert result.exit_code == 1
    line = result.stderr.splitlines()[-1]
    assert line.startswith("batchmill: internal error: RuntimeError: boom (details: ")
    details = Path(line.partition("details: ")[2].removesuffix(")"))
    assert details.is_relative_to(place / "data") and "Traceback" in details.read_text()
    result = call("--verbose", *RUN)
    assert result.exit_code == 1 and "Traceback" in result.stderr


@pytest.mark.parametrize(
    ("number", "code", "expected"),
    [
        (errno.ENOSPC, 4, "the disk is full: /data/job.json: No space left on device; free some space"),
        (errno.EDQUOT, 4, "the disk is full"),
        (errno.EMFILE, 1, "too many files are open: /data/job.json: Too many open files; raise the limit"),
        (errno.EIO, 1, "the disk failed: /data/job.json: Input/output error"),
        (errno.EACCES, 1, "access to a file was denied: /data/job.json: Permission denied"),
    ],
)
def test_a_file_that_cannot_be_used_is_no_crash(app, call, view, number, code, expected):
    """What the file system says is a sentence with the file and a way out, and no error of batchmill's own."""
    app.jobs.add(view(), view())

    def fail(at):
        raise OSError(number, os.strerror(number), "/data/job.json")

    app.jobs.before_view = fail
    result = call(*RUN)
    assert result.exit_code == code
    assert result.stderr.splitlines()[-1].startswith(f"batchmill: {expected}")


def test_a_reader_that_left_is_no_crash():
    """When whoever reads the output has gone, the command ends quietly."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", "from batchmill.cli.main import main; main()", "run", "--help"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")
