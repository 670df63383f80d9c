"""Between an engine of language models and the recorder: a reply is checked before it counts as a row's result.

An answer that does not fit its job's schema is asked for again, with what was wrong with it: its row goes back to the
feed, ahead of others, under the same lease.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchmill.errors import JobPaused
from batchmill.executors.feed import GrantFeed
from batchmill.executors.recorder import Recorder
from batchmill.executors.validators.messages import Checked
from batchmill.executors.validators.validators import ValidatorFailed, Validators
from batchmill.models import redaction
from batchmill.optional import require
from batchmill.types import EarlierAnswer, Outcome, OutputSchema, Row, RowError, Usage
from batchmill.wire.replies import (
    ASKED_AGAIN,
    FILTERED,
    MISMATCH,
    REFUSED,
    TRUNCATED,
    error_of,
    flaws_of,
    text_and_flaws_of,
    with_text,
)
from batchmill.wire.schemas.output_schema import VALIDATION, read_json

if TYPE_CHECKING:
    from batchmill.wire.schemas.schema_validation import SchemaValidator

FINAL = (TRUNCATED, FILTERED, REFUSED)  # flaws of an answer that is not asked for again: the next one would have them
REPEATED_CHARS_MAX = 64 * 1024  # a longer answer is not sent back to its model
MESSAGE_CHARS_MAX = 1_000
REVOKED_S = 10.0  # so long a pause waits for answers that are being validated
FITS = Checked([])
UNFIT = "it did not fit when it was read before"


class ReplyChecks:
    """The sink of an engine whose results are the replies of a model or a service."""

    def __init__(
        self, feed: GrantFeed, recorder: Recorder, *, asks_again: bool, validators: Validators | None = None,
        failed: Callable[[str, JobPaused], None] = lambda job, error: None,
        time: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Args:
        asks_again: rows may go back to the feed; False: the engine takes all rows of a lease together.
        validators: of jobs whose schemas have a class; None: there are none.
        failed: pauses a job whose class cannot validate.
        """
        self._feed, self._recorder, self._asks_again = feed, recorder, asks_again
        self._validators, self._failed = validators, failed
        self._time = time
        self._revoked: dict[str, float] = {}  # job whose answers are still validated -> since when they are waited for
        self._unchecked: list[Outcome] = []  # answers that could not be validated: their rows stay undone
        self.put_block = recorder.put_block

    def put(self, outcomes: Iterable[Outcome]) -> None:
        """See `ports.engines.Sink`."""
        final: list[Outcome] = []
        for outcome in outcomes:
            checked, flaws = self._check(outcome)
            if isinstance(checked, _Misfit):
                final += self._asked_or_final(checked)
            elif (validators := self._validators_for(checked)) is not None:
                tell = partial(self._validated, checked, flaws)
                validators.check(checked.row.form.schema, checked.answer or b"", tell, checked.row.lease.job.id)
            else:
                final.append(self._counted(checked, flaws))
        if final:
            self._recorder.put(final)

    def _asked_or_final(self, misfit: _Misfit) -> list[Outcome]:
        """Ask for the row again, or return its outcome."""
        if self._asks_again and misfit.may_be_asked:
            self._ask_again(misfit)
            return []
        return [self._settled(misfit.outcome)]

    def _validated(self, outcome: Outcome, flaws: Sequence[str], verdict: Checked | ValidatorFailed | None) -> None:
        """What the class of a schema has said of an answer."""
        if verdict is None:
            self._unchecked.append(outcome)
        elif isinstance(verdict, ValidatorFailed):
            self._unchecked.append(outcome)
            self._failed(outcome.row.lease.job.id, verdict)
        elif verdict.problems:
            if final := self._asked_or_final(self._unfit(outcome, verdict)):
                self._recorder.put(final)
        else:
            self._recorder.put([self._counted(outcome, flaws)])

    def give_back(self, job_id: str) -> list[Row]:
        """Rows of a job whose answers could not be validated, or not soon; what they have cost is counted."""
        if self._validators is not None and self._validators.waits_for(job_id):
            if self._time() - self._revoked.setdefault(job_id, self._time()) >= REVOKED_S:
                self._validators.withdraw(job_id)
        else:
            self._revoked.pop(job_id, None)
        kept, self._unchecked = self._unchecked, []
        mine = [each for each in kept if each.row.lease.job.id == job_id]
        self._unchecked += [each for each in kept if each.row.lease.job.id != job_id]
        for outcome in mine:
            self._recorder.put_usage(outcome.row.lease, outcome.usage or Usage())
        return [each.row for each in mine]

    async def put_or_return(
        self, outcomes: Iterable[Outcome], stopping: asyncio.Future[None]
    ) -> tuple[list[Outcome], list[Outcome]]:
        """See `ports.engines.CheckingSink`."""
        checked = [self._check(outcome) for outcome in outcomes]
        verdicts = await self._verdicts([found for found, _ in checked], stopping)
        final: list[Outcome] = []
        returned: list[Outcome] = []
        unchecked: list[Outcome] = []
        for (found, flaws), verdict in zip(checked, verdicts, strict=True):
            if not isinstance(found, _Misfit):
                if verdict is None:
                    unchecked.append(found)
                    continue
                if verdict.problems:
                    found = self._unfit(found, verdict)
            if not isinstance(found, _Misfit):
                final.append(self._counted(found, flaws))
            elif found.may_be_asked:
                returned.append(found.returned())
            else:
                final.append(self._settled(found.outcome))
        if final:
            self._recorder.put(final)
        return returned, unchecked

    async def _verdicts(
        self, found: Sequence[Outcome | _Misfit], stopping: asyncio.Future[None]
    ) -> list[Checked | None]:
        """As `_verdict`; None of answers that were not validated when `stopping` is done."""
        together = f"{id(stopping)}"  # no id of a job, whose other answers wait for their own verdicts
        verdicts = asyncio.gather(*(self._verdict(each, together) for each in found))
        try:
            await asyncio.wait((verdicts, stopping), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            verdicts.cancel()
            raise
        if not verdicts.done() and self._validators is not None:
            self._validators.withdraw(together)
        return await verdicts

    async def _verdict(self, checked: Outcome | _Misfit, together: str = "") -> Checked | None:
        """What the class of a schema says of an answer; None if it was withdrawn. Raises: ValidatorFailed.

        Args: together: the name of answers that are withdrawn together.
        """
        if isinstance(checked, _Misfit) or (validators := self._validators_for(checked)) is None:
            return FITS
        return await validators.checked(checked.row.form.schema, checked.answer or b"", together)

    async def as_returned(self, outcome: Outcome) -> Outcome:
        """See `ports.engines.CheckingSink`."""
        schema: OutputSchema = outcome.row.form.schema
        text, _ = ("", ()) if outcome.body is None else text_and_flaws_of(outcome.body)
        found = self._fit(outcome, schema, text, ())
        if not isinstance(found, _Misfit):
            verdict = await self._verdict(found) or FITS
            found = self._unfit(found, verdict if verdict.problems else Checked([UNFIT]))
        return found.returned()

    def _validators_for(self, outcome: Outcome) -> Validators | None:
        """The validators, if the outcome has an answer that a class must check."""
        schema: OutputSchema | None = outcome.row.form.schema
        has_class = schema is not None and schema.validator and outcome.error is None and outcome.answer is not None
        return self._validators if has_class else None

    def _check(self, outcome: Outcome) -> tuple[Outcome | _Misfit, Sequence[str]]:
        """The outcome that counts unless a class objects, or an answer that does not fit; and the reply's flaws."""
        schema: OutputSchema | None = outcome.row.form.schema
        body = None if outcome.error is not None else outcome.body
        if schema is None:
            return outcome, () if body is None else flaws_of(body)
        text, flaws = ("", ()) if body is None else text_and_flaws_of(body)
        return self._fit(outcome, schema, text, flaws), flaws

    def _counted(self, outcome: Outcome, flaws: Sequence[str]) -> Outcome:
        """The outcome as it is recorded."""
        if outcome.row.form.schema is not None:
            self._settled(outcome)
            if outcome.error is None and outcome.row.earlier:
                flaws = (*flaws, ASKED_AGAIN)
        return _judged(outcome, flaws) if flaws and outcome.error is None else outcome

    def _settled(self, outcome: Outcome) -> Outcome:
        self._feed.settle_checked(outcome.row)
        return outcome

    def _fit(self, outcome: Outcome, schema: OutputSchema, text: str, flaws: Sequence[str]) -> Outcome | _Misfit:
        """The outcome with its answer; an answer that does not fit."""
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
        return _misfit_of(outcome, schema, text, problems, flaws)

    def _unfit(self, outcome: Outcome, verdict: Checked) -> _Misfit:
        """An answer that fits its JSON Schema, and not the class of it."""
        text, flaws = ("", ()) if outcome.body is None else text_and_flaws_of(outcome.body)
        found = _misfit_of(replace(outcome, answer=None), outcome.row.form.schema, text, verdict.problems, flaws)
        return replace(found, may_be_asked=found.may_be_asked and not verdict.is_final)

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
        """For `ports.engines.CheckingSink`, whose engine counts the usage itself."""
        row = self.outcome.row
        answer = EarlierAnswer(self.text, self.problems, Usage())
        return replace(self.outcome, row=replace(row, earlier=(*row.earlier, answer)))


def _misfit_of(
    outcome: Outcome, schema: OutputSchema, text: str, problems: list[str], flaws: Sequence[str]
) -> _Misfit:  # fmt: skip
    row = outcome.row
    final = [flaw for flaw in flaws if flaw in FINAL]
    refused = next((flaw for flaw in flaws if flaw in row.lease.job.replies.fail_on), None)
    if refused is not None:
        error = error_of(refused)
    elif final:
        error = _with_reasons(error_of(final[0]), problems)
    else:
        error = _mismatch(row, problems)
    return _Misfit(replace(outcome, error=error), text, problems, not final and _may_ask_again(row, schema, text))


def _with_reasons(error: RowError, problems: Sequence[str]) -> RowError:
    return replace(error, message="; ".join([error.message, *problems])[:MESSAGE_CHARS_MAX])


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
