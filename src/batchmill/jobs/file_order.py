"""Rows in the order of the file, apart from those that were refused: no keys, no folding, no numpy."""

from __future__ import annotations

from array import array
from pathlib import Path

from batchmill.jobs.plan import Arranged, PlanOrder, PlanParts, Progress, TargetPlan

STEP_ROWS = 1024 * 1024


def arrange(order: PlanOrder, dataset: Path, parts: PlanParts, progress: Progress) -> Arranged:
    """Source: `plan.Ordering`. Without keys every row goes to the same model, whatever it is called."""
    models = {model for model, _ in order.targets}
    assert len(models) == 1, f"{dataset}: rows of several models need keys"
    rejected = parts.rejected
    if rejected:
        _write_gaps(parts, progress)
    target = TargetPlan(model=models.pop(), adapter=None, rows=parts.rows - len(rejected))
    return Arranged(targets=[target], permuted=len(rejected) > 0, followers=0)


def _write_gaps(parts: PlanParts, progress: Progress) -> None:
    """Every row number but the refused ones, a step of rows at a time."""
    rejected, at = parts.rejected, 0
    for start in range(0, parts.rows, STEP_ROWS):
        end = min(start + STEP_ROWS, parts.rows)
        numbers = array("I")
        while start < end:
            gap = rejected[at] if at < len(rejected) and rejected[at] < end else end
            numbers.extend(range(start, gap))
            start = gap + 1
            at += gap < end
        parts.order.write(numbers.tobytes())
        progress(end / parts.rows)
