"""What looking at a dataset finds before any row runs: what sealing refused, the plan in figures, an estimate."""

from __future__ import annotations

from msgspec import Struct

from batchmill.types import Problem, Seal


class SealReport(Struct, frozen=True):
    """What sealing found. `problems` are the first ones, in the order of the lines."""

    seal: Seal
    problems: list[Problem]
    problems_total: int
    rejected: int
    adapters: list[str] = []  # ids of a model hub that rows name and that are fetched before any row runs


class PlanGroup(Struct, frozen=True):
    """The rows of one model and adapter, as people see them."""

    model: str
    adapter: str | None
    rows: int  # that run
    folded: int
    shards: int  # of the model; shards may hold rows of several of its adapters
    tokens: int | None  # estimated: input and output of the rows that run
    prefix_groups: int  # runs of two or more rows with a prompt prefix in common
    shared_prefix: float | None  # share of the input bytes that the row before has too; None: unknown


class Explanation(Struct, frozen=True):
    """What a plan is going to do."""

    rows: int
    run: int
    folded: int
    rejected: int
    shards: int
    in_file_order: bool
    tokens: int | None
    shared_prefix: float | None
    groups: list[PlanGroup]
    notes: list[str] = []  # why models that have several routes go the ways they go


class Range(Struct, frozen=True):
    """A figure out of a sample: in 8 of 10 samples it lies between `low` and `high`. Equal where all rows were read."""

    low: float
    mid: float
    high: float


class ModelEstimate(Struct, frozen=True):
    """The rows of one model."""

    model: str
    rows: int  # that run
    sampled: int
    input_tokens: Range | None  # None: the engine knows no tokens
    output_tokens: Range | None  # if each row used its whole limit; see `rows_unlimited`
    cost: Range | None  # USD, of these tokens; None: no price is known
    cost_input: Range | None  # USD, of the input alone: what is spent however short the answers are
    counted_by: str  # what tokens were counted with


class Estimate(Struct, frozen=True):
    """What a job is going to take. `notes`: sentences on what is not known, and why."""

    rows: int
    run: int
    folded: int
    rejected: int
    sampled: int
    input_tokens: Range | None
    output_tokens: Range | None
    rows_unlimited: float  # share of sampled rows that set no limit: they count as OUTPUT_TOKENS_DEFAULT
    shared_prefix: float | None  # share of the input that a prefix cache may hold
    cost: Range | None
    cost_input: Range | None
    time_s: float | None  # at the rate measured before; None: unknown
    time_s_min: float | None  # what the limits per minute alone ask for; None: there are none
    models: list[ModelEstimate]
    notes: list[str]
