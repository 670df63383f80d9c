"""Jobs as people see them: a record of the ledger, and what the process that runs it knows besides."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa

from batchmill.jobs import routing
from batchmill.jobs.job_files import read_spec
from batchmill.jobs.job_run import JobRun
from batchmill.types import EngineStats, JobView, ModelSpec, Problem, Usage
from batchmill.wire.job_spec import JobSpec

NAMES_MAX = 100  # of the models and adapters that rows go to, as they are shown


def view_of(record: sa.RowMapping, errors: dict[str, tuple[int, str]]) -> JobView:
    """What the ledger knows of a job."""
    spec = read_spec(record["spec"])
    problems = record.get("problems")  # a list of jobs comes without them
    return JobView(
        id=record["id"],
        state=record["state"],
        project=record["project"],
        labels=spec.labels,
        origin=spec.origin,
        priority=record["priority"],
        deadline=record["deadline"],
        reason=record["reason"],
        message=record["message"],
        input=spec.dataset.paths,
        output=record["output"],
        errors_output=record["errors_output"],
        model=_names(spec.used if spec.origin is not None else [model.name for model in spec.models]),
        routing=routing.sentences(spec),
        created=record["created"],
        started=record["started"],
        finalizing=record["finalizing"],
        cancelling=record["cancelling"],
        finished=record["finished"],
        generation=record["generation"],
        rows=record["rows"],
        rows_ok=record["rows_ok"],
        rows_failed=record["rows_failed"],
        rows_folded=record["rows_folded"],
        rows_rejected=record["rows_rejected"],
        usage=Usage(record["input_tokens"], record["cached_tokens"], record["output_tokens"]),
        cost=record["cost"],
        prices={model.name: model.price for model in _in_use(spec) if model.price is not None},
        errors={code: rows for code, (rows, _) in errors.items()},
        error_samples={code: sample for code, (_, sample) in errors.items()},
        elapsed_s=record["elapsed_s"],
        problems=msgspec.json.decode(problems, type=list[Problem]) if problems else [],
        problems_total=record["problems_total"],
    )


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_MAX:,} more" if len(names) > NAMES_MAX else ""
    return ", ".join(names[:NAMES_MAX]) + more


def _in_use(spec: JobSpec) -> list[ModelSpec]:
    """The models that rows go to, or to adapters of; a door's job, which is given all there are, knows once planned."""
    if spec.origin is None:
        return spec.models
    used = frozenset(spec.used)
    return [model for model in spec.models if model.name in used or not used.isdisjoint(model.adapters)]


def add_run(view: JobView, run: JobRun, workers: Sequence[EngineStats]) -> JobView:
    """The same job with its rates, the time left and what its engines say."""
    rates = run.rates.now()
    rows_per_s, input_per_s, output_per_s = rates or (None, None, None)
    return msgspec.structs.replace(
        view,
        elapsed_s=view.elapsed_s + run.elapsed_s,
        rows_per_s=rows_per_s,
        input_tokens_per_s=input_per_s,
        output_tokens_per_s=output_per_s,
        remaining_s=run.rows_left / rows_per_s if rows_per_s else None,
        in_flight=sum(stats.in_flight for stats in workers),
        notes=[*dict.fromkeys(stats.note for stats in workers if stats.note), *(run.purse.notes if run.purse else [])],
    )
