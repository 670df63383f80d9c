"""Between an engine of language models and the recorder: a reply is checked before it counts as a row's result.

An answer that does not fit its job's schema is asked for again, with what was wrong with it: its row goes back to the
feed, ahead of others, under the same lease.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec
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


class ReplyChecks:
    """The sink of an engine whose results are the replies of a model or a service."""

    def __init__(self, feed: GrantFeed, recorder: Recorder, *, asks_again: bool) -> None:
        """Args: asks_again: rows may go back to the feed; False: the engine takes all rows of a lease together."""
        self._feed, self._recorder, self._asks_again = feed, recorder, asks_again
        self.put_block = recorder.put_block

    def put(self, outcomes: Iterable[Outcome]) -> None:
        """See `ports.Sink`."""
        final = [checked for outcome in outcomes if (checked := self._check(outcome)) is not None]
        if final:
            self._recorder.put(final)

    def _check(self, outcome: Outcome) -> Outcome | None:
        """The outcome that counts; None: the row is asked for again."""
        schema: OutputSchema | None = outcome.row.form.schema
        body = None if outcome.error is not None else outcome.body
        if schema is None:
            flaws = () if body is None else flaws_of(body)
        else:
            text, flaws = ("", ()) if body is None else text_and_flaws_of(body)
            checked = self._fit(outcome, schema, text, flaws)
            if checked is None:
                return None
            outcome = checked
            self._feed.settle_checked(outcome.row)
            if outcome.error is None and outcome.row.earlier:
                flaws = (*flaws, ASKED_AGAIN)
        return _judged(outcome, flaws) if flaws and outcome.error is None else outcome

    def _fit(self, outcome: Outcome, schema: OutputSchema, text: str, flaws: Sequence[str]) -> Outcome | None:
        """The outcome with its answer, or an error; None: its answer is counted, and the row asked for again."""
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
        if not final and self._may_ask_again(row, schema, text):
            again = EarlierAnswer(text, problems, outcome.usage or Usage())
            self._recorder.put_usage(row.lease, again.usage)
            self._feed.ask_again(replace(row, earlier=(*row.earlier, again)))
            return None
        refused = next((flaw for flaw in flaws if flaw in row.lease.job.replies.fail_on), None)
        if refused is not None:
            return replace(outcome, error=error_of(refused))
        message = "; ".join([*final, *problems])[:MESSAGE_CHARS_MAX]
        asked = f" (asked {len(row.earlier) + 1} times)" if row.earlier else ""
        return replace(outcome, error=RowError(MISMATCH, message + asked))

    def _may_ask_again(self, row: Row, schema: OutputSchema, text: str) -> bool:
        return self._asks_again and len(row.earlier) < schema.attempts and len(text) <= REPEATED_CHARS_MAX


@lru_cache(maxsize=64)
def _validator_of(schema: OutputSchema) -> SchemaValidator:
    return require(f"{VALIDATION}:validator_of", "a schema")(schema)


def _judged(outcome: Outcome, flaws: Sequence[str]) -> Outcome:
    """The outcome with the flaws of its reply, or an error where the job does not accept one of them."""
    fail_on = outcome.row.lease.job.replies.fail_on
    refused = next((flaw for flaw in flaws if flaw in fail_on), None)
    return replace(outcome, warnings=tuple(flaws)) if refused is None else replace(outcome, error=error_of(refused))
