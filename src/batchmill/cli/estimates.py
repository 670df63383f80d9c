"""An estimate for people: figures with their ranges, and what is not known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchmill.cli.text import clean, count, duration, money, percent, short, table

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchmill.wire.previews import Estimate, ModelEstimate, Range

WIDTH = 15
NOTE_CHARS_MAX = 300


def estimate_lines(found: Estimate) -> list[str]:
    """Every figure of an estimate, with "unknown" where there is none."""
    head = f"{count(found.rows, 'row')}: {count(found.run)} run"
    head += f", {count(found.folded)} folded into identical ones" if found.folded else ""
    head += f", {count(found.rejected)} refused" if found.rejected else ""
    lines = [head]
    if found.sampled:
        lines.append(_line("sample", f"{count(found.sampled, 'row')} read"))
    lines.append(_line("input tokens", ranged(found.input_tokens, short)))
    lines.append(_line("output tokens", ranged(found.output_tokens, short)))
    if found.shared_prefix is not None:
        lines.append(_line("shared prefix", f"{percent(found.shared_prefix, 1)} of the input"))
    cost = ranged(found.cost, money)
    if found.cost_input is not None:
        cost += f"; the input alone {ranged(found.cost_input, money)}"
    lines.append(_line("cost", cost))
    lines.append(_line("time", "unknown" if found.time_s is None else duration(found.time_s)))
    if found.time_s_min is not None:
        lines.append(_line("", f"at least {duration(found.time_s_min)}, by the limits per minute"))
    if len(found.models) > 1:
        columns = ["MODEL", "ROWS", "SAMPLED", "INPUT", "OUTPUT", "COST"]
        lines += table([columns, *(_model(model) for model in found.models)])
    counted = dict.fromkeys(model.counted_by for model in found.models if model.counted_by)
    if counted:
        lines.append(_line("counted with", ", ".join(clean(name, 200) for name in counted)))
    return lines + [f"note: {clean(note, NOTE_CHARS_MAX)}" for note in found.notes]


def ranged(found: Range | None, show: Callable[[float], str]) -> str:
    """The middle of a figure, and its range where that shows."""
    if found is None:
        return "unknown"
    low, mid, high = show(found.low), show(found.mid), show(found.high)
    return mid if low == high else f"{mid} ({low} to {high})"


def _model(model: ModelEstimate) -> list[str]:
    return [
        clean(model.model, 60), count(model.rows), count(model.sampled), ranged(model.input_tokens, short),
        ranged(model.output_tokens, short), ranged(model.cost, money),
    ]  # fmt: skip


def _line(name: str, value: str) -> str:
    return f"  {name:<{WIDTH}}{value}"
