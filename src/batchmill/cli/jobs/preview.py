"""Commands that check a dataset and run nothing: validate, plan, estimate."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from batchmill.cli.jobs.displays import display_for
from batchmill.cli.jobs.order_options import build_order, deadline_option, order_options, sample_options
from batchmill.cli.jobs.pipes import spooled_input
from batchmill.cli.jobs.summary import ranged, show_problems
from batchmill.cli.session import EXIT_OK, EXIT_USAGE, Session
from batchmill.cli.text import clean, count, duration, money, percent, short, size, table
from batchmill.types import JobOrder, JobView, Sample
from batchmill.wire.sampling import in_words

if TYPE_CHECKING:
    from batchmill.wire.native import (
        Estimate,
        Explanation,
        ModelEstimate,
        PlanGroup,
        PlanSample,
        SealReport,
    )


WIDTH = 15
NOTE_CHARS_MAX = 300


def estimate_lines(estimated: Estimate) -> list[str]:
    """The lines of an estimate, with "unknown" for missing figures."""
    head = f"{count(estimated.rows, 'row')}: {count(estimated.run)} run"
    head += f", {count(estimated.folded)} folded into identical ones" if estimated.folded else ""
    head += f", {count(estimated.rejected)} refused" if estimated.rejected else ""
    lines = [head]
    if estimated.sampled:
        lines.append(_line("sample", f"{count(estimated.sampled, 'row')} read"))
    lines.append(_line("input tokens", ranged(estimated.input_tokens, short)))
    lines.append(_line("output tokens", ranged(estimated.output_tokens, short)))
    if estimated.shared_prefix is not None:
        lines.append(_line("shared prefix", f"{percent(estimated.shared_prefix, 1)} of the input"))
    cost = ranged(estimated.cost, money)
    if estimated.cost_input is not None:
        cost += f"; the input alone {ranged(estimated.cost_input, money)}"
    if estimated.cost_max is not None:
        cost += f"; at most {money(estimated.cost_max)} if all answers are asked for again"
    lines.append(_line("cost", cost))
    lines.append(_line("time", "unknown" if estimated.time_s is None else duration(estimated.time_s)))
    if estimated.time_s_min is not None:
        lines.append(_line("", f"at least {duration(estimated.time_s_min)}, by the limits per minute"))
    if len(estimated.models) > 1:
        columns = ["MODEL", "ROWS", "SAMPLED", "INPUT", "OUTPUT", "COST"]
        lines += table([columns, *(_model(model) for model in estimated.models)])
    counted = dict.fromkeys(model.counted_by for model in estimated.models if model.counted_by)
    if counted:
        lines.append(_line("counted with", ", ".join(clean(name, 200) for name in counted)))
    return lines + [f"note: {clean(note, NOTE_CHARS_MAX)}" for note in estimated.notes]


def _model(model: ModelEstimate) -> list[str]:
    return [
        clean(model.model, 60), count(model.rows), count(model.sampled), ranged(model.input_tokens, short),
        ranged(model.output_tokens, short), ranged(model.cost, money),
    ]  # fmt: skip


def _line(name: str, value: str) -> str:
    return f"  {name:<{WIDTH}}{value}"


@click.command()
@order_options
@click.pass_obj
def validate(session: Session, **options: Any) -> int:
    """Check every row and list problems as FILE:LINE: code: message. Run nothing."""
    with spooled_input(session, session.config(), options):
        return session.run(_validate(session, options))


async def _validate(session: Session, options: dict[str, Any]) -> int:
    config = session.config()
    order = await build_order(session, config, options)
    with progress_of(session, "validating") as progress:
        report = await session.app.preview_validate(order, config, progress)
    return _report(session, report, order)


@click.command()
@order_options
@sample_options
@deadline_option
@click.pass_obj
def plan(session: Session, **options: Any) -> int:
    """Explain the order in which rows would run: groups, duplicates, shared prefixes, shards."""
    with spooled_input(session, session.config(), options):
        return session.run(_plan(session, options))


async def _plan(session: Session, options: dict[str, Any]) -> int:
    config = session.config()
    order = await build_order(session, config, options)
    with progress_of(session, "planning") as progress:
        report, explanation = await session.app.preview_plan(order, config, progress)
    if explanation is None:
        return _report(session, report, order)
    if session.as_json:
        session.emit("plan", plan=explanation)
        return EXIT_OK
    for line in plan_lines(explanation):
        session.print(line)
    return EXIT_OK


@click.command()
@order_options
@sample_options
@deadline_option
@click.pass_obj
def estimate(session: Session, **options: Any) -> int:
    """Estimate tokens, cost and time from a sample of the rows, before anything is spent."""
    with spooled_input(session, session.config(), options):
        return session.run(_estimate(session, options))


async def _estimate(session: Session, options: dict[str, Any]) -> int:
    config = session.config()
    order = await build_order(session, config, options)
    with progress_of(session, "estimating") as progress:
        report, estimated = await session.app.preview_estimate(order, config, progress)
    if estimated is None:
        return _report(session, report, order)
    if session.as_json:
        session.emit("estimate", estimate=estimated)
        return EXIT_OK
    for line in estimate_lines(estimated):
        session.print(line)
    return EXIT_OK


def _report(session: Session, report: SealReport, order: JobOrder) -> int:
    """Print the report of validation. Invalid rows are an error unless they are skipped."""
    is_bad = report.problems_total > 0 and order.policy.on_invalid == "fail"
    code = EXIT_USAGE if is_bad else EXIT_OK
    if session.as_json:
        session.emit("report", exit_code=code, report=report)
        return code
    show_problems(session, report.problems, report.problems_total)
    seal = report.seal
    kind = "OpenAI batch rows" if seal.format == "openai" else f"{seal.format} rows"
    refused = f", {count(report.rejected)} refused" if report.rejected else ", all valid"
    session.print(f"{count(seal.rows)} {kind}, {size(seal.bytes)} in {count(len(seal.sources), 'file')}{refused}")
    if seal.columns:
        session.print(f"columns: {', '.join(clean(name, 80) for name in seal.columns)}")
    return code


def plan_lines(plan: Explanation) -> list[str]:
    """The lines of a plan."""
    lines = [f"{count(plan.rows, 'row')}: {count(plan.run)} run"]
    lines[0] += f", {count(plan.folded)} folded into identical ones" if plan.folded else ""
    lines[0] += f", {count(plan.rejected)} refused" if plan.rejected else ""
    if plan.reused:
        calls = count(plan.run - plan.reused)
        lines.append(f"{count(plan.reused)} of them take over results of earlier jobs: {calls} call a model")
    lines += [] if plan.sample is None else [_first(plan.sample)]
    lines.append("order: the file's own" if plan.in_file_order else "order: by model, adapter, shared prefix and cost")
    if plan.shared_prefix is not None:
        lines.append(
            f"shared prefix: {percent(plan.shared_prefix, 1)} of the input repeats the beginning of the row before"
        )
    tokens = "" if plan.tokens is None else f", about {short(plan.tokens)} tokens"
    lines.append(f"{count(plan.shards, 'shard')}{tokens}")
    head = ["MODEL", "ADAPTER", "ROWS", "FOLDED", "SHARDS", "PREFIX GROUPS", "SHARED", "TOKENS"]
    notes = [f"note: {clean(note, 2000)}" for note in plan.notes]
    return [*lines, *table([head, *(_group(group) for group in plan.groups)]), *notes]


def _first(sample: PlanSample) -> str:
    """What `run` does before it pauses."""
    text = f"sample: {in_words(Sample(sample.rows, sample.seed))}: {count(sample.run)} run"
    text += f", {count(sample.folded)} folded into identical ones" if sample.folded else ""
    text += f", {count(sample.rejected)} refused" if sample.rejected else ""
    return f"{text}, in {count(sample.shards, 'shard')}; then the job pauses"


def _group(group: PlanGroup) -> list[str]:
    shared = "-" if group.shared_prefix is None else percent(group.shared_prefix, 1)
    return [
        clean(group.model, 60), clean(group.adapter or "-", 60), count(group.rows), count(group.folded),
        count(group.shards), count(group.prefix_groups), shared, "-" if group.tokens is None else short(group.tokens),
    ]  # fmt: skip


@contextlib.contextmanager
def progress_of(session: Session, state: str) -> Iterator[Callable[[float], None]]:
    """Show the progress of a phase, as for a job in the state `state`."""
    display = display_for(session)
    try:
        yield lambda share: display.update(JobView(id="", state=state, progress=share))
    finally:
        display.close()
