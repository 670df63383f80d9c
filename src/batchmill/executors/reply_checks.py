"""Between an engine of language models and the recorder: a reply is checked before it counts as a row's result.

An answer that does not fit its job's schema is asked for again, with what was wrong with it: its row goes back to the
feed, ahead of others, under the same lease.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchmill.executors.feed import GrantFeed
from batchmill.executors.recorder import Recorder
from batchmill.models import redaction
from batchmill.optional import require
from batchmill.types import EarlierAnswer, Outcome, OutputSchema, Row, RowError, Usage
from batchmill.wire.output_schema import VALIDATION, read_json
from batchmill.wire.replies import (
    ASKED_AGAIN,
    FILTERED,
    FLAWS,
    MISMATCH,
    REFUSED,
    TRUNCATED,
    error_of,
    flaws_of,
    text_and_flaws_of,
    with_text,
)

if TYPE_CHECKING:
    from batchmill.wire.schema_validation import SchemaValidator

FINAL = (TRUNCATED, FILTERED, REFUSED)  # flaws of an answer that is not asked for again: the next one would have them
REPEATED_CHARS_MAX = 64 * 1024  # a longer answer is not sent back to its model
MESSAGE_CHARS_MAX = 1_000
UNFIT = "it did not fit when it was read before"


class ReplyChecks:
    """The sink of an engine whose results are the replies of a model or a service."""

    def __init__(self, feed: GrantFeed, recorder: Recorder, *, asks_again: bool) -> None:
        """Args: asks_again: rows may go back to the feed; False: the engine takes all rows of a lease together."""
        self._feed, self._recorder, self._asks_again = feed, recorder, asks_again
        self.put_block = recorder.put_block

    def put(self, outcomes: Iterable[Outcome]) -> None:
        """See `ports.Sink`."""
        final: list[Outcome] = []
        for outcome in outcomes:
            checked = self._check(outcome)
            if not isinstance(checked, _Misfit):
                final.append(checked)
            elif self._asks_again and checked.may_be_asked:
                self._ask_again(checked)
            else:
                final.append(self._settled(checked.outcome))
        if final:
            self._recorder.put(final)

    def put_or_return(self, outcomes: Iterable[Outcome]) -> list[Outcome]:
        """See `ports.CheckingSink`."""
        final: list[Outcome] = []
        returned: list[Outcome] = []
        for outcome in outcomes:
            checked = self._check(outcome)
            if not isinstance(checked, _Misfit):
                final.append(checked)
            elif checked.may_be_asked:
                returned.append(checked.returned())
            else:
                final.append(self._settled(checked.outcome))
        if final:
            self._recorder.put(final)
        return returned

    def as_returned(self, outcome: Outcome) -> Outcome:
        """See `ports.CheckingSink`."""
        schema: OutputSchema = outcome.row.form.schema
        text, _ = ("", ()) if outcome.body is None else text_and_flaws_of(outcome.body)
        problems = _problems_of(schema, text) or [UNFIT]
        return _Misfit(replace(outcome, error=_mismatch(outcome.row, problems)), text, problems, True).returned()

    def _check(self, outcome: Outcome) -> Outcome | _Misfit:
        """The outcome that counts, or an answer that does not fit its schema."""
        schema: OutputSchema | None = outcome.row.form.schema
        body = None if outcome.error is not None else outcome.body
        if schema is None:
            flaws = () if body is None else flaws_of(body)
        else:
            text, flaws = ("", ()) if body is None else text_and_flaws_of(body)
            checked = self._fit(outcome, schema, text, flaws)
            if isinstance(checked, _Misfit):
                return checked
            outcome = self._settled(checked)
            if outcome.error is None and outcome.row.earlier:
                flaws = (*flaws, ASKED_AGAIN)
        return _judged(outcome, flaws) if flaws and outcome.error is None else outcome

    def _settled(self, outcome: Outcome) -> Outcome:
        self._feed.settle_checked(outcome.row)
        return outcome

    def _fit(self, outcome: Outcome, schema: OutputSchema, text: str, flaws: Sequence[str]) -> Outcome | _Misfit:
        """The outcome with its answer; an answer that does not fit."""
        row = outcome.row
        if outcome.error is not None or outcome.body is None:
            return outcome
        try:
            answer = read_json(text)
            problems = _validator_of(schema).problems(answer.value)
        except ValueError as error:
            problems = [str(error)]
        else:
            if not problems:
                body = outcome.body if answer.is_whole else with_text(outcome.body, answer.text)
                line = msgspec.json.encode(answer.value) if redaction.known() else answer.text.encode()
                if b"\n" in line or b"\r" in line:
                    line = msgspec.json.format(line, indent=-1)
                return replace(outcome, body=body, answer=line)
        final = [FLAWS[flaw] for flaw in flaws if flaw in FINAL]
        refused = next((flaw for flaw in flaws if flaw in row.lease.job.replies.fail_on), None)
        error = _mismatch(row, [*final, *problems]) if refused is None else error_of(refused)
        may_be_asked = not final and _may_ask_again(row, schema, text)
        return _Misfit(replace(outcome, error=error), text, problems, may_be_asked)

    def _ask_again(self, misfit: _Misfit) -> None:
        """Count an answer, and give its row back to the feed."""
        outcome = misfit.outcome
        again = EarlierAnswer(misfit.text, misfit.problems, outcome.usage or Usage())
        self._recorder.put_usage(outcome.row.lease, again.usage)
        self._feed.ask_again(replace(outcome.row, earlier=(*outcome.row.earlier, again)))


class _Misfit(Struct, frozen=True):
    """An answer that does not fit the schema of its job. `outcome` is what it counts as if nobody asks again."""

    outcome: Outcome
    text: str
    problems: list[str]
    may_be_asked: bool

    def returned(self) -> Outcome:
        """For `ports.CheckingSink`, whose engine counts the usage itself."""
        row = self.outcome.row
        answer = EarlierAnswer(self.text, self.problems, Usage())
        return replace(self.outcome, row=replace(row, earlier=(*row.earlier, answer)))


def _problems_of(schema: OutputSchema, text: str) -> list[str]:
    try:
        return _validator_of(schema).problems(read_json(text).value)
    except ValueError as error:
        return [str(error)]


def _mismatch(row: Row, problems: Sequence[str]) -> RowError:
    asked = f" (asked {len(row.earlier) + 1} times)" if row.earlier else ""
    return RowError(MISMATCH, "; ".join(problems)[:MESSAGE_CHARS_MAX] + asked)


def _may_ask_again(row: Row, schema: OutputSchema, text: str) -> bool:
    return len(row.earlier) < schema.attempts and len(text) <= REPEATED_CHARS_MAX


@lru_cache(maxsize=64)
def _validator_of(schema: OutputSchema) -> SchemaValidator:
    return require(f"{VALIDATION}:validator_of", "a schema")(schema)


def _judged(outcome: Outcome, flaws: Sequence[str]) -> Outcome:
    """The outcome with the flaws of its reply, or an error where the job does not accept one of them."""
    fail_on = outcome.row.lease.job.replies.fail_on
    refused = next((flaw for flaw in flaws if flaw in fail_on), None)
    return replace(outcome, warnings=tuple(flaws)) if refused is None else replace(outcome, error=error_of(refused))
