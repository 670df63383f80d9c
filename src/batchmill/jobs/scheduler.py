"""Which job the next free place of a worker goes to, and how large a shard is. Pure: snapshot in, decision out."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from batchmill.types import ModelSpec

# Rows of a shard, at least and at most: about two seconds of work at full speed for what each engine bears.
SHARD_ROWS = {"function": (1, 16_384), "http": (64, 1_024), "llm": (16, 64)}
SHARDS_PER_WORKER = 8  # at least, where the job has the rows for it: the last shards even the workers out


class Candidate(Struct, frozen=True):
    """A job with rows ready for the model in question."""

    job: str
    created: float
    rows_held: int  # rows of it that workers hold now


def choose(candidates: Sequence[Candidate]) -> str | None:
    """The job that holds the least; among equals the oldest."""
    if not candidates:
        return None
    return min(candidates, key=lambda c: (c.rows_held, c.created, c.job)).job


def shard_rows(model: ModelSpec, rows: int) -> int:
    """Rows of a shard of this model in a job of `rows` rows."""
    least, most = SHARD_ROWS[model.engine]
    return max(least, min(most, rows // (max(1, model.workers) * SHARDS_PER_WORKER)))
