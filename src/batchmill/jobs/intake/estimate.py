"""Estimates tokens, cost and time of a job before it runs, from the plan and a sample of rows.

What is not known is said, not guessed. No numpy: the command line reads the structs.
"""

from __future__ import annotations

import importlib
import random
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from batchmill.datasets.checking.inspection import BYTES_A_TOKEN, OUTPUT_TOKENS_DEFAULT
from batchmill.datasets.readers import open_rows
from batchmill.datasets.sealed import DatasetRows
from batchmill.errors import InvalidRow
from batchmill.jobs.intake import asking_again
from batchmill.jobs.intake.lengths import AnswerLengths
from batchmill.jobs.ledger.plan import PlanReader, TargetPlan
from batchmill.jobs.ledger.sampled_rows import SampledRows, sampled_rows
from batchmill.types import ModelSpec, Request, Row, Usage
from batchmill.wire.input_urls import is_web_url
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.json_bytes import decode, encode, split_object
from batchmill.wire.media_tokens import MediaTokens
from batchmill.wire.native import Estimate, EstimateRange, ModelEstimate
from batchmill.wire.rows.forms import EMBEDDINGS, RERANK, SCORE, TableForm
from batchmill.wire.rows.rendered_rows import MediaPart, media_of
from batchmill.wire.sampling import in_words

MESSAGE_TOKENS = 4  # what a chat template puts around a message, about
ANSWERLESS_URLS = frozenset((EMBEDDINGS, RERANK, SCORE))
TOKENIZER = "tokenizer.json"  # in a model's folder
MEASURED = "the service"  # in rows that have run


class RowTokens(Struct, frozen=True, gc=False):
    """Tokens of one request. `output`: the most its answer may have, or the default where it sets no limit."""

    input: int = 0
    output: int = 0
    is_unlimited: bool = False
    media: int = 0  # of images, recordings and documents, about
    is_unseen: bool = False  # the size of some is not known before they are fetched: they count as large
    has_others: bool = False  # parts that are neither text nor media; they are not counted


class Counter(Protocol):
    name: str
    note: str  # what to know about its figures, or ""

    def count(self, text: str) -> int: ...


class ByLength:
    """Counts a token for every four bytes: right within a factor of two for most texts and tokenizers."""

    name = f"bytes / {BYTES_A_TOKEN}"

    def __init__(self, why: str) -> None:
        self.note = f"tokens are guessed as {BYTES_A_TOKEN} bytes each, {why}"

    def count(self, text: str) -> int:
        return -(-len(text.encode()) // BYTES_A_TOKEN)


class ByTokenizer:
    """Counts with a Hugging Face tokenizer, without the chat template of the model."""

    name, note = TOKENIZER, ""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


def counter_for(model: ModelSpec) -> Counter:
    """The model's own tokenizer if it is in the model's folder and its library is installed; else by length."""
    path = Path(model.source) / TOKENIZER
    if not path.is_file():
        return ByLength("as the model's tokenizer is not here")
    try:
        tokenizers = importlib.import_module("tokenizers")
    except ModuleNotFoundError as error:
        if error.name != "tokenizers":
            raise
        return ByLength("as the Python package tokenizers is not installed")
    return ByTokenizer(tokenizers.Tokenizer.from_file(str(path)))


def tokens_of(
    request: Request, counter: Counter, media: MediaTokens, sealed: list[MediaPart] | None = None
) -> RowTokens:
    """Count a request. Args: sealed: what its media are, where the request does not have them.

    Raises: MsgspecError for a body that cannot be read.
    """
    body = decode(request.body)
    parts = list(_parts(body))
    given = sum(part if isinstance(part, int) else counter.count(part) for part in parts if not isinstance(part, dict))
    others = [part for part in parts if isinstance(part, dict)]
    counts = [media.content(part) for part in others] if sealed is None else [media.part(part) for part in sealed]
    counted = RowTokens(
        given, media=sum(filter(None, counts)), has_others=None in counts,
        is_unseen=any(map(_is_url, others)) if sealed is None else any(part.url for part in sealed),
    )  # fmt: skip
    if request.url in ANSWERLESS_URLS:
        return counted
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or body.get("max_output_tokens")
    answers = body.get("n") or 1
    output = (limit or OUTPUT_TOKENS_DEFAULT) * answers
    return msgspec.structs.replace(counted, output=output, is_unlimited=limit is None)


def _is_url(part: dict[str, Any]) -> bool:
    match part:
        case {"image_url": {"url": str(url)}} | {"image_url": str(url)}:
            return is_web_url(url)
    return False


def _parts(body: dict[str, Any]) -> Iterator[str | int | dict[str, Any]]:
    """The prompt in pieces: text, a number of tokens, or a part that is not text."""
    if body.get("tools"):
        yield encode(body["tools"]).decode()
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        yield MESSAGE_TOKENS
        yield from _text(message.get("content") if isinstance(message, dict) else message)
    for name in ("instructions", "prompt", "input", "query", "documents", "text_1", "text_2"):
        yield from _text(body.get(name))


def _text(value: Any) -> Iterator[str | int | dict[str, Any]]:
    match value:
        case None:
            return
        case str():
            yield value
        case int():
            yield 1  # a token by its number
        case list():
            for item in value:
                yield from _text(item)
        case {"text": str(text)}:
            yield text
        case {"content": content}:
            yield MESSAGE_TOKENS
            yield from _text(content)
        case _:
            yield value if isinstance(value, dict) else {}


SAMPLE_ROWS = 1000  # of all models together, at most
SAMPLE_BYTES = 16 * 1024 * 1024
RESAMPLES = 200
SAMPLE_SHARE = 0.9  # of the progress
NEWLINE = b"\n"


class EstimateOrder(Struct, frozen=True):
    """What to estimate: a sealed and planned job. `rows_per_s`: measured when the same models ran before."""

    spec: JobSpec
    dataset: str
    plan: str
    rows_per_s: float | None = None
    lengths: list[AnswerLengths] = []  # of the answers of earlier jobs, by model

    @property
    def sampled(self) -> SampledRows | None:
        """The rows that run before all others; None: all run."""
        plan = PlanReader(Path(self.plan))
        sample = self.spec.sample
        if sample is None or sample.rows >= plan.plan.rows:
            return None
        return sampled_rows(plan, Path(self.dataset), sample)


def estimate_offloaded(order: bytes, progress: Callable[[float], None]) -> bytes:
    """Offloaded: EstimateOrder in, Estimate out, both as JSON."""
    return msgspec.json.encode(estimate(msgspec.json.decode(order, type=EstimateOrder), progress))


def estimate(order: EstimateOrder, progress: Callable[[float], None]) -> Estimate:
    """Estimate a job. The same job gives the same figures: the sample is drawn with the plan's checksum as its seed.

    Raises: InputChanged when the rows are not what was sealed.
    """
    reader, only = PlanReader(Path(order.plan)), order.sampled
    rows = open_rows(Path(order.dataset))
    try:
        samples = list(_samples(order, reader, rows, None if only is None else only.positions, progress))
    finally:
        rows.close()
    plan, models = reader.plan, [sample.estimate() for sample in samples]
    run = plan.leaders if only is None else only.run
    known = [sample for sample in samples if sample.counter is not None]
    sizes = [target for target in plan.targets if target.input_bytes and only is None]
    size = sum(target.input_bytes for target in sizes)
    sampled = sum(len(sample.tokens) for sample in known)
    unlimited = sum(row.is_unlimited for sample in known for row in sample.tokens)
    found = Estimate(
        rows=plan.rows if only is None else only.rows, run=run,
        folded=plan.followers if only is None else only.folded,
        rejected=plan.rejected if only is None else only.rejected, sampled=sampled,
        input_tokens=_sum([model.input_tokens for model in models], known),
        output_tokens=_sum([model.output_tokens for model in models], known),
        rows_unlimited=unlimited / sampled if sampled else 0.0,
        shared_prefix=sum(target.shared_bytes for target in sizes) / size if size else None,
        cost=_sum([model.cost for model in models], known),
        cost_input=_sum([model.cost_input for model in models], known),
        time_s=run / order.rows_per_s if order.rows_per_s else None,
        time_s_min=max(filter(None, map(_time_s_min, samples, models)), default=None),
        models=models, notes=[], cost_max=_cost_max(models, samples),
    )  # fmt: skip
    progress(1.0)
    notes = [] if only is None else [f"this is {in_words(only.sample)}, of {plan.rows:,} rows"]
    return msgspec.structs.replace(found, notes=[*notes, *_notes(found, samples)])


class _Sample:
    """Sampled rows of one model, extrapolated to all of its rows."""

    def __init__(
        self, model: ModelSpec, targets: list[TargetPlan], rows: int, counter: Counter | None, seed: str,
        lengths: AnswerLengths | None, attempts: int,
    ) -> None:  # fmt: skip
        """Args: rows: those of the targets that run. attempts: an answer may be asked for again so often."""
        self.model, self.counter, self.lengths, self.attempts = model, counter, lengths, attempts
        self.media = MediaTokens(model)
        planned = sum(target.rows for target in targets)
        self.rows = rows
        self.input_bytes = round(sum(target.input_bytes for target in targets) * rows / planned)
        self.tokens: list[RowTokens] = []
        self.bytes: list[int] = []
        self._random = random.Random(seed)

    def read(self, spec: JobSpec, rows: DatasetRows, numbers: list[int]) -> None:
        """Count the tokens of these rows, in an order in which every prefix is a sample."""
        assert self.counter is not None
        prompt, size = (spec.form.prompt or "") if isinstance(spec.form, TableForm) else "", 0
        has_media = isinstance(spec.form, TableForm) and bool(spec.form.media)
        for number in self._random.sample(numbers, len(numbers)):
            raw = rows.read_many([number])[0]
            try:
                request = spec.form.request(Row(position=-1, number=number, raw=raw, form=spec.form))
                sealed = media_of(split_object(raw)) if has_media else None
                counted = tokens_of(request, self.counter, self.media, sealed)
            except (InvalidRow, msgspec.MsgspecError):  # such a row ends as an error and uses no tokens
                counted = RowTokens()
            self.tokens.append(counted)
            self.bytes.append(len(raw) + len(NEWLINE) + len(prompt.encode()))  # as the plan counts them
            size += len(raw)
            if size >= SAMPLE_BYTES:
                return

    def estimate(self) -> ModelEstimate:
        usages = self._usages() if self.tokens else []
        price = self.model.price
        has_cost = price is not None and usages
        given = _range([usage.input_tokens for usage in usages]) if usages else None
        answers = _range([usage.output_tokens for usage in usages]) if usages else None
        cost = _range([price.cost(usage) for usage in usages]) if has_cost else None
        cost_max = self._cost_max(usages) if has_cost else None
        lengths = self.lengths if usages else None
        if lengths is not None:
            answers = self._learned(lengths)
            if lengths.input is not None:  # which has what re-asks and the chat template take
                given = self._of_all_rows(lengths.input)
            elif self.asked_again:
                given = asking_again.with_share(given, answers, self.rows, self.attempts, self.asked_again)
            if has_cost:
                bounds = zip((given.low, given.mid, given.high), (answers.low, answers.mid, answers.high), strict=True)
                costs = [price.cost(Usage(round(i), output_tokens=round(o))) for i, o in bounds]
                cost = EstimateRange(*(each if cost_max is None else min(each, cost_max) for each in costs))
        return ModelEstimate(
            model=self.model.name, rows=self.rows, sampled=len(self.tokens), input_tokens=given,
            output_tokens=answers, cost=cost,
            learned_from=[] if lengths is None else lengths.jobs, learned_rows=0 if lengths is None else lengths.rows,
            cost_input=self._cost_input(given) if has_cost else None,
            counted_by=self._counted_by,
            cost_max=cost_max,
        )  # fmt: skip

    def _cost_input(self, given: EstimateRange) -> EstimateRange:
        return EstimateRange(
            *(self.model.price.cost(Usage(round(each))) for each in (given.low, given.mid, given.high))
        )

    def _of_all_rows(self, row: EstimateRange) -> EstimateRange:
        return EstimateRange(*(round(each * self.rows) for each in (row.low, row.mid, row.high)))

    @property
    def knows_input(self) -> bool:
        """Whether rows of this work have run, whose input the service has counted."""
        return self.lengths is not None and self.lengths.input is not None and bool(self.tokens)

    @property
    def _counted_by(self) -> str:
        if self.counter is None:
            return ""
        return MEASURED if self.knows_input else self.counter.name

    @property
    def asked_again(self) -> float | None:
        """The share of rows that were asked for again before. None: not known, or none may be."""
        return None if self.lengths is None or not self.attempts else self.lengths.asked_again

    def _cost_max(self, usages: list[Usage]) -> float | None:
        if not self.attempts or self.output_max is None:
            return None
        given = _range([usage.input_tokens for usage in usages]).high
        return self.model.price.cost(asking_again.most(given, self.output_max, self.rows, self.attempts))

    def _learned(self, lengths: AnswerLengths) -> EstimateRange:
        """The output tokens of all rows by the answers of earlier jobs; none is longer than its row allows.

        Those of earlier jobs have the answers that were asked for again.
        """
        answers = 1 + self.attempts

        def total(length: float) -> float:
            rows = [length if row.is_unlimited else min(length, answers * row.output) for row in self.tokens]
            return sum(rows) / len(rows) * self.rows

        return EstimateRange(*(round(total(length)) for length in (lengths.low, lengths.mid, lengths.high)))

    @property
    def output_max(self) -> int | None:
        """The most output tokens that the rows allow; None: some set no limit."""
        if any(row.is_unlimited for row in self.tokens) or not self.tokens:
            return None
        return round(sum(row.output for row in self.tokens) / len(self.tokens) * self.rows)

    def _usages(self) -> list[Usage]:
        """The total tokens by each of many resamples; `_range` sorts them."""
        every = range(len(self.tokens))
        if len(every) == self.rows:
            return [self._usage(every)]
        return [self._usage(self._random.choices(every, k=len(every))) for _ in range(RESAMPLES)]

    def _usage(self, chosen: range | list[int]) -> Usage:
        """Extrapolate: text by the bytes of all rows, media and output by their number."""
        tokens, sizes = self.tokens, self.bytes
        size = sum(sizes[index] for index in chosen)
        per_byte = sum(tokens[index].input for index in chosen) / size
        total = self.input_bytes if len(tokens) < self.rows else size
        media, output = (
            sum(getattr(tokens[index], name) for index in chosen) / len(chosen) * self.rows
            for name in ("media", "output")
        )
        return Usage(input_tokens=round(total * per_byte + media), output_tokens=round(output))


def _samples(
    order: EstimateOrder, reader: PlanReader, rows: DatasetRows, only: array[int] | None,
    progress: Callable[[float], None],
) -> Iterator[_Sample]:  # fmt: skip
    """A sample for each model that has rows. Args: only: the positions that run, ascending; None: all."""
    lengths = {each.model: each for each in order.lengths}
    plan, lo, done = reader.plan, 0, 0
    share = max(1, SAMPLE_ROWS // max(1, len({target.model for target in plan.targets})))
    for number, model in enumerate(order.spec.models):
        targets = [target for target in plan.targets if target.model == number]
        hi = lo + sum(target.rows for target in targets)
        there = range(lo, hi) if only is None else only[bisect_left(only, lo) : bisect_left(only, hi)]
        lo = hi
        if not there:
            continue
        counter = None if model.takes_columns else counter_for(model)
        sample = _Sample(
            model, targets, len(there), counter, f"{plan.sha256}:{number}", lengths.get(model.name),
            asking_again.attempts_of(order.spec, model),
        )  # fmt: skip
        if counter is not None:
            chosen = sorted(random.Random(f"{plan.sha256}:{number}").sample(there, min(share, len(there))))
            numbers = [reader.row_numbers(position, position + 1)[0] for position in chosen]
            sample.read(order.spec, rows, numbers)
        done += len(there)
        progress(SAMPLE_SHARE * done / (plan.leaders if only is None else len(only)))
        yield sample


def _time_s_min(sample: _Sample, found: ModelEstimate) -> float | None:
    """The least seconds that the model's own limits allow."""
    limits, tokens = sample.model.limits, found.input_tokens
    per_row = found.rows / limits.requests_per_minute * 60 if limits.requests_per_minute else None
    per_token = tokens.low / limits.tokens_per_minute * 60 if limits.tokens_per_minute and tokens else None
    return max(filter(None, (per_row, per_token)), default=None)


def _range(values: list[float] | list[int]) -> EstimateRange:
    """The 10th, 50th and 90th percentile."""
    ordered = sorted(values)
    low, mid, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.5, 0.9))
    return EstimateRange(low, mid, high)


def _sum(ranges: list[EstimateRange | None], known: list[_Sample]) -> EstimateRange | None:
    """The sum over models; None if a model with tokens has no figure. The range is the worst case."""
    there = [each for each in ranges if each is not None]
    if not known or len(there) < len(known):
        return None
    return EstimateRange(
        sum(each.low for each in there), sum(each.mid for each in there), sum(each.high for each in there)
    )


def _cost_max(models: list[ModelEstimate], samples: list[_Sample]) -> float | None:
    """The most that all models cost; None where no answer is asked for again, or a model has no upper bound."""
    known = [
        (model.cost_max if sample.attempts else model.cost and model.cost.high)
        for model, sample in zip(models, samples, strict=True)
        if sample.counter is not None
    ]
    is_asked = any(sample.attempts for sample in samples)
    return None if not is_asked or None in known else sum(each for each in known if each is not None)


def _notes(found: Estimate, samples: list[_Sample]) -> Iterator[str]:
    for sample in samples:
        name = sample.model.name
        if sample.counter is None:
            yield f"{name} is a function: what it does with tokens or money is not known before it runs"
            continue
        if sample.counter.note and not sample.knows_input:
            yield f"{name}: {sample.counter.note}"
        if sample.model.price is None:
            yield f"{name} has no price in the configuration: its cost is not known"
        if not sample.knows_input:
            yield from _media_notes(sample)
        if sample.lengths is not None and sample.tokens:
            yield _learned_note(sample, sample.lengths)
        elif any(row.output for row in sample.tokens):
            yield _guessed_note(sample)
        if sample.attempts and sample.tokens:
            lengths = sample.lengths
            rows, jobs = (0, []) if lengths is None else (lengths.rows, lengths.jobs)
            yield asking_again.estimate_note(sample.model, sample.attempts, rows, sample.asked_again, jobs)
    if found.time_s is None:
        yield "time is not known: these models have not run here before"


def _media_notes(sample: _Sample) -> Iterator[str]:
    name, rows = sample.model.name, sample.tokens
    if any(row.media for row in rows):
        mean = sum(row.media for row in rows) / len(rows)
        yield f"{name}: images, audio and documents count as {mean:,.0f} tokens a row, by what their heads say"
    if unseen := sum(row.is_unseen for row in rows):
        yield f"{name}: {unseen:,} of {len(rows):,} sampled rows have URLs; what they lead to counts as large"
    if any(row.has_others for row in rows):
        yield f"{name}: parts of messages that are neither text, images, audio nor documents are not counted"


def _guessed_note(sample: _Sample) -> str:
    """What stands for the length of answers of which no job tells."""
    name, rows = sample.model.name, sample.tokens
    if unlimited := sum(row.is_unlimited for row in rows):
        return (
            f"{name}: {unlimited / len(rows):.0%} of its rows set no limit on their answer: its output has no upper "
            f"bound, each of them counts with {OUTPUT_TOKENS_DEFAULT} tokens"
        )
    return f"{name}: output tokens are the most that the rows allow; answers are often shorter"


def _learned_note(sample: _Sample, lengths: AnswerLengths) -> str:
    """From which jobs the length of answers is known, and how sure that is."""
    most = "the rows set no limit" if sample.output_max is None else f"the rows allow {sample.output_max:,}"
    if lengths.is_same:
        what = "output" if lengths.input is None else "input and output"
        return (
            f"{lengths.model}: {what} tokens as in {lengths.rows:,} rows of this work that have run (the newest job: "
            f"{lengths.jobs[0]}): {lengths.low:,.1f} to {lengths.high:,.1f} tokens an answer, in 8 of 10 cases; {most}"
        )
    jobs = "1 earlier job" if len(lengths.jobs) == 1 else f"{len(lengths.jobs)} earlier jobs"
    sure = (
        f"means of {lengths.low:,.1f} to {lengths.high:,.1f} tokens a row"
        if lengths.is_sure
        else f"{lengths.mid:,.1f} tokens a row; from so few jobs, it may be half or twice as much"
    )
    return (
        f"{lengths.model}: output tokens as in {jobs} of {lengths.rows:,} rows (the newest: {lengths.jobs[0]}): "
        f"{sure}; other prompts have other lengths; {most}"
    )
