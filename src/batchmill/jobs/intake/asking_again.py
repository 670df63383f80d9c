"""What it may take that answers which do not fit their schema are asked for again: for plans and estimates."""

from __future__ import annotations

from collections.abc import Sequence

from batchmill.datasets.checking.inspection import BYTES_A_TOKEN
from batchmill.types import ModelSpec, Usage
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.native import EstimateRange
from batchmill.wire.schemas.output_schema import WORDS_BYTES_MAX

IN_BATCHES = "each time in a further batch of the provider, which may take as long as the first"
WORDS_TOKENS_MAX = WORDS_BYTES_MAX // BYTES_A_TOKEN  # in the message to a model about its answer, about


def attempts_of(spec: JobSpec, model: ModelSpec) -> int:
    """How often an answer of a model is asked for again, at most."""
    schema = spec.form.schema
    return 0 if schema is None or model.takes_columns else schema.attempts


def most(input_tokens: float, output_tokens: float, rows: int, attempts: int) -> Usage:
    """The tokens of rows whose answers are all asked for again as often as allowed.

    Args: input_tokens, output_tokens: of all rows, if each is asked for once. A request repeats the answers before it.
    """
    repeated = attempts * (attempts + 1) / 2 * (output_tokens + rows * WORDS_TOKENS_MAX)
    return Usage(round((attempts + 1) * input_tokens + repeated), output_tokens=round((attempts + 1) * output_tokens))


def with_share(
    given: EstimateRange, answers: EstimateRange, rows: int, attempts: int, share: float
) -> EstimateRange:  # fmt: skip
    """Input tokens where this share of the rows is asked for again: once at least, and as often as allowed at most.

    Args: given: if each is asked for once. answers: with those that were asked for again.
    """

    def extra(input_tokens: float, output_tokens: float, times: int) -> int:
        again = most(input_tokens, output_tokens / (1 + share), rows, times)
        return round(share * (again.input_tokens - input_tokens))

    return EstimateRange(
        given.low + round(share * (given.low + answers.low / (1 + share))),
        given.mid + extra(given.mid, answers.mid, 1),
        given.high + extra(given.high, answers.high, attempts),
    )


def plan_notes(spec: JobSpec) -> list[str]:
    """What a plan says about it."""
    found = [(attempts, model) for model in spec.models if (attempts := attempts_of(spec, model))]
    if not found:
        return []
    attempts = max(attempts for attempts, _ in found)
    far = [model.name for _, model in found if model.is_handed_over]
    notes = [f"{in_words(attempts)}: up to {attempts + 1} requests a row"]
    return [*notes, f"{', '.join(far)}: {IN_BATCHES}"] if far else notes


def estimate_note(model: ModelSpec, attempts: int, rows: int, share: float | None, jobs: Sequence[str]) -> str:
    """Args: share: of the rows of `jobs`, that were asked for again; None: not known. rows: those of `jobs`."""
    text = f"{model.name}: {in_words(attempts)}, each time with the answers before it"
    text = f"{text}; {IN_BATCHES}" if model.is_handed_over else text
    if share is None:
        return f"{text}; no earlier job tells how often, so each row counts once"
    return f"{text}; {share:.1%} of {rows:,} rows were asked for again before (the newest job: {jobs[0]})"


def in_words(attempts: int) -> str:
    times = "once" if attempts == 1 else f"{attempts} times"
    return f"an answer that does not fit the schema is asked for again, at most {times}"
