"""The summary of a job that has ended or paused, and its exit code."""

from __future__ import annotations

import os
from collections.abc import Callable

from batchmill.cli.session import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PAUSED,
    EXIT_ROWS_FAILED,
    EXIT_USAGE,
    Session,
)
from batchmill.cli.text import clean, count, duration, money, percent, short
from batchmill.states import JobState, PauseReason
from batchmill.types import EstimateRange, JobView, Outlook, Problem, Sample
from batchmill.wire.replies import WARNINGS

CAUSES_MAX = 20
PROBLEMS_MAX = 1000
SAMPLE_CHARS_MAX = 160
NAME_CHARS_MAX = 80
WIDTH = 10
SPOOLED = "spooled-inputs"  # the folder of `datasets.spooled_inputs`, which takes long to import

RESUME = "batchmill resume {id} (or the same command again)"
# The reason of a pause, and what to do to resume the job.
PAUSES = {
    PauseReason.REQUESTED: ("paused", RESUME),
    PauseReason.INTERRUPTED: ("interrupted", RESUME),
    PauseReason.INTERNAL_ERROR: ("a bug of batchmill stopped it", f"report the traceback in the log; then {RESUME}"),
    PauseReason.SAMPLED: (
        "its sample has run",
        "batchmill resume {id}, or the same command without --limit or --sample; to end the job: batchmill cancel {id}",
    ),
    PauseReason.BUDGET: (
        "the budget is spent",
        "run the same command with a larger --budget, or `batchmill amend` and `batchmill resume`",
    ),
    PauseReason.QUOTA: ("the account has nothing left to spend", f"add to its quota; then {RESUME}"),
    PauseReason.AUTH: ("the service refused the credentials", f"correct the key; then {RESUME}"),
    PauseReason.STORAGE_FULL: ("there is no room left on the disk", f"make room; then {RESUME}"),
    PauseReason.STORAGE_FAILED: (
        "the disk, the object store or the limit of open files stopped it",
        f"remove the cause; then {RESUME}",
    ),
    PauseReason.DATABASE_UNAVAILABLE: ("the database could not be reached", f"see to its server; then {RESUME}"),
    PauseReason.DISK_QUOTA: (
        "its project has no room left on the server's disk",
        "delete files, uploads or adapters; the job then resumes by itself",
    ),
    PauseReason.INPUT_CHANGED: ("an input file changed since it was sealed", f"restore it; then {RESUME}"),
    PauseReason.ENGINE_FAILED: (
        "the engine failed",
        "fix it; then batchmill resume {id}. If a flag was wrong, run the same command with the right flag: resume "
        "keeps the old ones",
    ),
    PauseReason.DATASET_DAMAGED: (
        "the index of the input is damaged; the input itself is not the cause",
        "batchmill ledger rebuild {id} rebuilds the index from the input; then batchmill resume {id}",
    ),
    PauseReason.SUBMIT_UNKNOWN: (
        "it is unknown whether a provider accepted rows",
        "look for them at the provider (batchmill remote {id} lists them), then batchmill remote adopt or forget, then "
        "batchmill resume {id}",
    ),
    PauseReason.ROUTE_FAILED: (
        "the route to the model failed",
        "check the provider, then batchmill resume {id}; the same command with another --model uses another route",
    ),
}


def exit_code(view: JobView, *, was_interrupted: bool = False) -> int:
    """0 all rows ok, or all of a sample; 3 some failed, 2 bad input, 1 could not run, 4 paused, 130 interrupted."""
    match view.state:
        case JobState.COMPLETED:
            return EXIT_ROWS_FAILED if view.rows_failed else EXIT_OK
        case JobState.CANCELLED | JobState.EXPIRED:
            return EXIT_ROWS_FAILED
        case JobState.FAILED:
            return EXIT_USAGE  # a job fails only because of its input
    if was_interrupted or view.reason == PauseReason.INTERRUPTED:
        return EXIT_INTERRUPTED
    if view.reason == PauseReason.SAMPLED:  # as it was asked to do
        return EXIT_ROWS_FAILED if view.rows_failed > view.rows_rejected else EXIT_OK
    if view.reason == PauseReason.INTERNAL_ERROR:
        return EXIT_FAILED
    if view.reason == PauseReason.ENGINE_FAILED and not view.rows_ok + view.rows_failed - view.rows_rejected:
        return EXIT_FAILED  # it never ran a row
    return EXIT_PAUSED


def show_end(session: Session, view: JobView, *, was_interrupted: bool = False) -> int:
    """Print the summary of a job that ended or paused; returns the exit code."""
    code = exit_code(view, was_interrupted=was_interrupted)
    if session.as_json:
        session.emit("summary", exit_code=code, job=view)
        return code
    if view.state == JobState.FAILED:
        show_problems(session, view.problems, view.problems_total)
    for line in lines(view):
        session.print(line)
    if not JobState(view.state).is_at_rest:
        for line in pause_lines(view) if view.state == JobState.PAUSED else leave_lines(view):
            session.say(line)
    return code


def lines(view: JobView) -> list[str]:
    """A job's figures for people."""
    head = f"job {view.id}: {clean(view.state)}"
    if view.elapsed_s:
        head += f", {duration(view.elapsed_s)} of running"
    if view.state == JobState.FAILED:
        return [f"{head}: {clean(view.message, 2000, lines=True)}" if view.message else head]
    texts = [head]
    if view.rows:
        texts.append(_line("rows", count(view.rows)))
        texts.append(_line("ok", count(view.rows_ok)))
        texts += flaws(view)
        texts.append(_line("failed", count(view.rows_failed)))
        texts += causes(view)
        left = view.rows - view.rows_ok - view.rows_failed
        texts += [_line("left", count(left))] if left else []
    if view.rows_folded:
        texts.append(
            _line(
                "folded",
                f"{count(view.rows_folded)} share{'s' if view.rows_folded == 1 else ''} the answer of an identical row",
            )
        )
    if view.rows_reused or view.reuse_note:
        note = f"; {clean(view.reuse_note, 2000)}" if view.reuse_note else ""
        texts.append(_line("reused", f"{count(view.rows_reused)} took over the result of an earlier job{note}"))
    usage = view.usage
    if usage.input_tokens or usage.output_tokens:
        cached = f" ({percent(usage.cached_tokens, usage.input_tokens)} cached)" if usage.cached_tokens else ""
        texts.append(_line("tokens", f"{count(usage.input_tokens)} in{cached}, {count(usage.output_tokens)} out"))
    if view.cost is not None:
        texts.append(_line("cost", money(view.cost)))
    texts += [_line("price", price_line) for price_line in prices(view)]
    texts += [] if view.outlook is None else outlook_lines(view.outlook, view.sample)
    if view.state in (JobState.COMPLETED, JobState.CANCELLED, JobState.EXPIRED):
        texts += [_line("results", clean(_place(view.output), 4096))] if view.output else []
        texts += [_line("errors", clean(view.errors_output, 4096))] if view.errors_output else []
        texts += [_line("note", clean(view.message, 2000))] if view.message else []
    return texts


def has_sample(view: JobView) -> bool:
    """Whether the rows of a sample have run; they may be all rows of the job."""
    return view.sample is not None and (view.state == JobState.COMPLETED or view.reason == PauseReason.SAMPLED)


def outlook_lines(outlook: Outlook, sample: Sample | None) -> list[str]:
    """What the whole job will have used, as far as a sample tells."""
    figures = [] if outlook.cost is None else [ranged(outlook.cost, money)]
    if outlook.input_tokens is not None:
        figures.append(f"{ranged(outlook.input_tokens, short)} tokens in")
    if outlook.output_tokens is not None:
        figures.append(f"{ranged(outlook.output_tokens, short)} out")
    if outlook.time_s_max is not None:
        figures.append(f"at most {duration(outlook.time_s_max)}, less if more rows run at once")
    if not figures:
        return []
    kind = "" if sample is None or sample.seed is not None else "; the first rows may differ from the others"
    return [
        _line("the whole", f"{count(outlook.rows, 'row')}: {', '.join(figures)}"),
        _line("", f"by {count(outlook.ran, 'row')} that ran; ranges hold in 8 of 10 cases{kind}"),
    ]


def ranged(figure: EstimateRange | None, show: Callable[[float], str]) -> str:
    """The middle value, and its range if the bounds look different."""
    if figure is None:
        return "unknown"
    low, mid, high = show(figure.low), show(figure.mid), show(figure.high)
    return mid if low == high else f"{mid} ({low} to {high})"


def _place(output: str) -> str:
    return f"{output} (manifest.json names its parts)" if output.endswith("/") else output


def prices(view: JobView) -> list[str]:
    """The price of a million tokens, with the name of the model if there are several."""
    is_one = len(view.prices) == 1 and view.model in view.prices
    fields = {name: f"USD {price.in_words} per million tokens" for name, price in view.prices.items()}
    return [text if is_one else f"{clean(name, NAME_CHARS_MAX)}: {text}" for name, text in fields.items()]


def causes(view: JobView) -> list[str]:
    """The failed rows by cause, the most frequent first."""
    by_rows = sorted(view.errors.items(), key=lambda item: (-item[1], item[0]))
    texts = [
        f"  {count(rows):>{WIDTH}}  {clean(code, 80)}: {clean(view.error_samples.get(code, ''), SAMPLE_CHARS_MAX)}"
        for code, rows in by_rows[:CAUSES_MAX]
    ]
    if len(by_rows) > CAUSES_MAX:
        rest = by_rows[CAUSES_MAX:]
        texts.append(f"  {count(sum(rows for _, rows in rest)):>{WIDTH}}  of {count(len(rest), 'further cause')}")
    return [line.removesuffix(": ") for line in texts]


def flaws(view: JobView) -> list[str]:
    """Results whose replies are not what they seem, by kind."""
    found = {name: view.warnings[name] for name in WARNINGS if view.warnings.get(name)}
    return [f"  {count(replies):>{WIDTH}}  {name}: {WARNINGS[name]}" for name, replies in found.items()]


def pause_lines(view: JobView) -> list[str]:
    """Why a job stopped and how to continue it."""
    pause = PAUSES.get(PauseReason(view.reason)) if view.reason in list(PauseReason) else None
    reason, remedy = pause or (clean(view.reason or view.state), RESUME)
    if view.reason == PauseReason.SAMPLED and view.origin is not None:  # a server runs the same command anew
        remedy = "batchmill resume {id}, then batchmill results {id}; to end the job: batchmill cancel {id}"
    message = "" if view.reason == PauseReason.REQUESTED else clean(view.message, 2000, lines=True)
    if not message.startswith(reason):  # many messages begin with the reason
        message = f"{reason}: {message}" if message else reason
    return [f"batchmill: {message}", f"to go on: {remedy.format(id=view.id)}"]


def leave_lines(view: JobView) -> list[str]:
    """How to follow or cancel a job that continues at a server."""
    return [
        f"to follow it: batchmill resume {view.id}",
        f"to end it: batchmill cancel {view.id}; its results: batchmill results {view.id}",
    ]


def show_problems(session: Session, problems: list[Problem], total: int) -> None:
    """Print `FILE:LINE: code: message` for the first problems, and their total number."""
    for problem in problems[:PROBLEMS_MAX]:
        session.say(f"{location(problem)}: {clean(problem.code)}: {clean(problem.message)}")
    shown = min(len(problems), PROBLEMS_MAX)
    if total:
        rest = f"; the first {count(shown)} are listed" if total > shown else ""
        session.say(f"{count(total, 'problem')} in all{rest}")


def location(problem: Problem) -> str:
    """FILE:LINE, or standard input; a file in the working directory is relative to it."""
    path = problem.path
    if os.path.basename(os.path.dirname(path)) == SPOOLED:
        return f"standard input:{problem.line}"
    base = os.path.join(os.getcwd(), "")
    return f"{clean(path.removeprefix(base), 4096) or '-'}:{problem.line}"


def _line(name: str, value: str) -> str:
    return f"  {name:<{WIDTH}}{value}"
