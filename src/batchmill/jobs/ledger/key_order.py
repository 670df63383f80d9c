"""Rows by model, adapter, shared prompt prefix and cost, and duplicates folded: with numpy, over the plan's columns.

Every array is at most 16 bytes a row, and few live at once: 10 million rows stay well under 1 GiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from msgspec import Struct

from batchmill.datasets.inspection import LEVEL_BITS, LEVELS
from batchmill.datasets.layout import COST, FOLD, OFFSETS, PREFIX, TARGET
from batchmill.errors import LedgerBroken
from batchmill.jobs.ledger.files import PartFile
from batchmill.jobs.ledger.plan import Arranged, PlanOrder, PlanParts, Progress, TargetPlan

STEP_ROWS = 1024 * 1024
_DEPTH_BYTES = np.array((0, *LEVELS), np.int64)  # levels in common -> bytes in common


class _Columns(Struct):
    """What the dataset knows of its rows."""

    prefix: np.ndarray  # u64
    cost: np.ndarray  # u32, estimated tokens
    bytes: np.ndarray  # u32, of the row and what the prompt adds


def arrange(order: PlanOrder, dataset: Path, parts: PlanParts, progress: Progress) -> Arranged:
    """Rows by model, adapter, prefix and cost. Source: `plan.Arrange`."""
    labels, rank = _ranked(order, dataset, parts)
    excluded = len(labels)
    followers = _fold(dataset, parts, rank < excluded)
    progress(0.4)
    folded = np.bincount(rank[followers], minlength=excluded)
    rank[followers] = excluded
    followed = len(followers)
    del followers
    by_target = np.argsort(rank, kind="stable").astype(np.uint32)
    counts = np.bincount(rank, minlength=excluded + 1)
    del rank
    progress(0.5)
    columns = _read_columns(order, dataset, parts.rows)
    targets, at, in_place = [], 0, True
    for label, rows, shared in zip(labels, counts[:excluded].tolist(), folded.tolist(), strict=True):
        numbers = by_target[at : at + rows]
        keeps_order = label[0] in order.file_order
        if not keeps_order:
            numbers = numbers[np.lexsort((~columns.cost[numbers], columns.prefix[numbers]))]
        in_place = _write_order(parts.order, numbers, at) and in_place
        if rows or shared:
            targets.append(_summary(label, numbers, columns, folded=shared, has_prefix=not keeps_order))
        at += rows
        progress(0.5 + 0.5 * at / max(parts.rows, 1))
    return Arranged(targets=targets, permuted=not in_place, followers=followed)


def _ranked(order: PlanOrder, dataset: Path, parts: PlanParts) -> tuple[list[tuple[int, str | None]], np.ndarray]:
    """The (model, adapter) pairs in the order in which they run, and each row's index there (past it: does not run)."""
    labels = sorted(set(order.targets), key=lambda pair: (pair[0], pair[1] is not None, pair[1] or ""))
    if len(labels) >= 2**16 - 1:
        raise LedgerBroken(f"{len(labels)} models and adapters in one job are more than a plan can tell apart")
    target = _read(dataset / TARGET, np.uint16, parts.rows)
    rejected = np.frombuffer(parts.rejected, np.uint32)
    target[rejected] = 0
    if parts.rows and int(target.max()) >= len(order.targets):
        raise LedgerBroken(f"{dataset}: a row goes to target {int(target.max())} of {len(order.targets)}")
    index = {pair: number for number, pair in enumerate(labels)}
    ranks = np.array([index[pair] for pair in order.targets], np.uint16)
    rank = ranks[target]
    rank[rejected] = len(labels)
    return labels, rank


def _fold(dataset: Path, parts: PlanParts, runs: np.ndarray) -> np.ndarray:
    """Write (follower, leader) pairs for rows with the same key; returns the followers, ascending."""
    keys = _read(dataset / FOLD, np.uint64, 2 * parts.rows).reshape(-1, 2)
    numbers = np.flatnonzero(runs & keys.any(axis=1)).astype(np.uint32)
    numbers, high, low = _repeated(keys, numbers)
    del keys
    begins = np.ones(len(numbers), bool)
    begins[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
    del high, low
    starts = np.flatnonzero(begins)
    if not len(starts):
        return numbers
    leaders = np.minimum.reduceat(numbers, starts)[np.cumsum(begins) - 1]
    follows = numbers != leaders
    followers, leaders = numbers[follows], leaders[follows]
    by_row = np.argsort(followers)
    followers, leaders = followers[by_row], leaders[by_row]
    for start in range(0, len(followers), STEP_ROWS):
        step = slice(start, start + STEP_ROWS)
        _write(parts.followers, np.stack((followers[step], leaders[step]), axis=1))
    return followers


def _repeated(keys: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, first half, second half) of those `numbers` whose first half is not the only one, equal keys together."""
    high = keys[numbers, 0]
    by_high = np.argsort(high)
    high = high[by_high]
    same = np.zeros(len(high) + 1, bool)
    same[1:-1] = high[1:] == high[:-1]
    several = same[1:] | same[:-1]
    numbers, high = numbers[by_high[several]], high[several]
    low = keys[numbers, 1]
    if np.any((high[1:] == high[:-1]) & (low[1:] != low[:-1])):
        by_key = np.lexsort((low, high))
        numbers, high, low = numbers[by_key], high[by_key], low[by_key]
    return numbers, high, low


def _read_columns(order: PlanOrder, dataset: Path, rows: int) -> _Columns:
    offsets = _read(dataset / OFFSETS, np.uint64, rows + 1)
    sizes = np.diff(offsets)
    del offsets
    return _Columns(
        prefix=_read(dataset / PREFIX, np.uint64, rows),
        cost=_read(dataset / COST, np.uint32, rows),
        bytes=np.minimum(sizes + np.uint64(order.prompt_bytes), 2**32 - 1).astype(np.uint32),
    )


def _write_order(file: PartFile, numbers: np.ndarray, at: int) -> bool:
    """Append row numbers for the positions from `at` on. Returns whether each equals its position."""
    in_place = True
    for start in range(0, len(numbers), STEP_ROWS):
        step = numbers[start : start + STEP_ROWS]
        in_place = in_place and np.array_equal(step, np.arange(at + start, at + start + len(step), dtype=np.uint32))
        _write(file, step)
    return in_place


def _summary(
    label: tuple[int, str | None], numbers: np.ndarray, columns: _Columns, *, folded: int, has_prefix: bool
) -> TargetPlan:
    tokens = sum(int(columns.cost[step].sum(dtype=np.int64)) for step in _steps(numbers))
    groups = shared = size = 0
    if has_prefix:
        groups, shared, size = _sharing(numbers, columns)
    return TargetPlan(
        model=label[0], adapter=label[1], rows=len(numbers), folded=folded, tokens=tokens,
        prefix_groups=groups, shared_bytes=shared, input_bytes=size,
    )  # fmt: skip


def _sharing(numbers: np.ndarray, columns: _Columns) -> tuple[int, int, int]:
    """(groups, bytes in common with the row before, bytes) of rows in plan order.

    A group is a run of rows with a prefix in common that is as long as saves most: at 4,096 bytes rows with the same
    long system prompt form one; at 128 the opening words that all rows share would.
    """
    deeper = np.zeros(len(LEVELS) + 1, np.int64)  # rows that share at least that many levels with the row before
    begun = np.zeros(len(LEVELS) + 1, np.int64)  # of those, the row before does not
    shared = size = 0
    before, depth_before = np.zeros(1, np.uint64), np.zeros(1, np.uint8)
    for step in _steps(numbers):
        keys = columns.prefix[step]
        depth = _depth(keys, np.concatenate((before, keys[:-1])))
        previous = np.concatenate((depth_before, depth[:-1]))
        for level in range(1, len(LEVELS) + 1):
            at_least = depth >= level
            deeper[level] += np.count_nonzero(at_least)
            begun[level] += np.count_nonzero(at_least & (previous < level))
        sizes = columns.bytes[step].astype(np.int64)
        shared += int(np.minimum(_DEPTH_BYTES[depth], sizes).sum())
        size += int(sizes.sum())
        before, depth_before = keys[-1:], depth[-1:]
    best = int(np.argmax(deeper * _DEPTH_BYTES))
    return int(begun[best]), shared, size


def _depth(keys: np.ndarray, before: np.ndarray) -> np.ndarray:
    """How many levels each key has in common with the one before; none where there is no key (0)."""
    differ = keys ^ before
    depth = np.zeros(len(keys), np.uint8)
    for level in range(1, len(LEVELS) + 1):
        depth += (differ >> np.uint64(LEVEL_BITS * (len(LEVELS) - level))) == 0
    depth[keys == 0] = 0
    return depth


def _steps(numbers: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(numbers), STEP_ROWS):
        yield numbers[start : start + STEP_ROWS]


def _read(path: Path, kind: type, count: int) -> np.ndarray:
    """A whole column. Raises: LedgerBroken when it has another length than the dataset."""
    column = np.fromfile(path, kind)
    if len(column) != count:
        raise LedgerBroken(f"{path} has {len(column)} values instead of {count}")
    return column


def _write(file: PartFile, numbers: np.ndarray) -> None:
    file.write(numbers.tobytes())
