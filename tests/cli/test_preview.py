"""validate, plan and estimate: they run nothing and say what they saw."""

import json

from batchmill.types import Problem, Seal, SealedFile
from batchmill.wire.native import Estimate, EstimateRange, Explanation, ModelEstimate, PlanGroup, SealReport

MODEL = ("in.jsonl", "--model", "function:app.py:f")
SEAL = Seal(
    rows=1000, bytes=2_500_000, digest="s", format="csv", columns=["a", "b\x1b"], files=[],
    sources=[SealedFile("/in", 1, 1, 1)],
)  # fmt: skip
BAD = SealReport(SEAL, [Problem("invalid_json", "no", 3, "/in")], problems_total=1, rejected=1)
GOOD = SealReport(SEAL, [], problems_total=0, rejected=0)


def test_validate_says_what_is_there(app, call):
    """A sound dataset is a line with its rows and format, and exit code 0."""
    app.report = GOOD
    result = call("validate", *MODEL)
    assert result.exit_code == 0
    assert result.stdout == "1,000 csv rows, 2.5 MB in 1 file, all valid\ncolumns: a, b\n"


def test_validate_lists_what_is_wrong(app, call):
    """Problems are listed by line and end with exit code 2, or 0 where bad rows are skipped."""
    app.report = BAD
    result = call("validate", *MODEL)
    assert result.exit_code == 2 and "/in:3: invalid_json: no" in result.stderr and "1 refused" in result.stdout
    assert call("validate", *MODEL, "--on-invalid", "skip").exit_code == 0
    assert json.loads(call("validate", *MODEL, "--json").stdout.splitlines()[-1])["report"]["problems_total"] == 1


def test_plan_explains_the_order(app, call):
    """A plan shows what runs, what is folded, how it is ordered, and each group."""
    app.report = GOOD
    app.explanation = Explanation(
        rows=1000, run=900, folded=90, rejected=10, shards=3, in_file_order=False, tokens=12_345, shared_prefix=0.78,
        groups=[PlanGroup("m", None, 500, 90, 3, 10_000, 7, 0.5), PlanGroup("m", "up", 400, 0, 3, None, 0, None)],
    )  # fmt: skip
    result = call("plan", *MODEL)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "1,000 rows: 900 run, 90 folded into identical ones, 10 refused",
        "order: by model, adapter, shared prefix and cost",
        "shared prefix: 78 % of the input repeats the beginning of the row before",
        "3 shards, about 12.3k tokens",
        "MODEL  ADAPTER  ROWS  FOLDED  SHARDS  PREFIX GROUPS  SHARED  TOKENS",
        "m      -        500   90      3       7              50 %    10.0k",
        "m      up       400   0       3       0              -       -",
    ]
    assert json.loads(call("plan", *MODEL, "--json").stdout)["plan"]["folded"] == 90


def test_plan_of_a_refused_dataset_lists_its_problems(app, call):
    """Without a plan the problems are shown, with exit code 2."""
    app.report, app.explanation = BAD, None
    result = call("plan", *MODEL)
    assert result.exit_code == 2 and "/in:3: invalid_json: no" in result.stderr


TOKENS, ANSWERS, COST = (
    EstimateRange(9e5, 1e6, 1.1e6),
    EstimateRange(16_000, 16_000, 16_000),
    EstimateRange(1.1, 1.234, 1.5),
)
ONE = ModelEstimate("m", 900, 100, TOKENS, ANSWERS, COST, COST, "the model's own tokenizer")
KNOWN = Estimate(
    rows=1000, run=900, folded=90, rejected=10, sampled=100, input_tokens=TOKENS, output_tokens=ANSWERS,
    rows_unlimited=0.0, shared_prefix=0.5, cost=COST, cost_input=COST, time_s=75.0, time_s_min=60.0, models=[ONE],
    notes=["answers are often\x1b[1m shorter"],
)  # fmt: skip


def test_estimate_shows_figures_with_their_ranges(app, call):
    """Tokens, cost and time are shown with their ranges, then what is not known."""
    app.report, app.estimate = GOOD, KNOWN
    result = call("estimate", *MODEL)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "1,000 rows: 900 run, 90 folded into identical ones, 10 refused",
        "  sample         100 rows read",
        "  input tokens   1.0M (900.0k to 1.1M)",
        "  output tokens  16.0k",
        "  shared prefix  50 % of the input",
        "  cost           $1.23 ($1.10 to $1.50); the input alone $1.23 ($1.10 to $1.50)",
        "  time           1:15 min",
        "                 at least 1:00 min, by the limits per minute",
        "  counted with   the model's own tokenizer",
        "note: answers are often shorter",
    ]
    assert json.loads(call("estimate", *MODEL, "--json").stdout.splitlines()[-1])["estimate"]["sampled"] == 100


def test_estimate_says_what_is_unknown(app, call):
    """A figure that nobody knows is called unknown; several models are shown one by one."""
    blank = ModelEstimate("f", 5, 0, None, None, None, None, "")
    app.report = GOOD
    app.estimate = Estimate(
        rows=5, run=5, folded=0, rejected=0, sampled=0, input_tokens=None, output_tokens=None, rows_unlimited=0.0,
        shared_prefix=None, cost=None, cost_input=None, time_s=None, time_s_min=None, models=[blank, ONE], notes=[],
    )  # fmt: skip
    lines = call("estimate", *MODEL).stdout.splitlines()
    assert lines[1:5] == [
        "  input tokens   unknown", "  output tokens  unknown", "  cost           unknown", "  time           unknown",
    ]  # fmt: skip
    assert lines[6].split() == ["f", "5", "0", "unknown", "unknown", "unknown"]


def test_estimate_of_a_refused_dataset_lists_its_problems(app, call):
    """Without an estimate the problems are shown, with exit code 2."""
    app.report, app.estimate = BAD, None
    result = call("estimate", *MODEL)
    assert result.exit_code == 2 and "/in:3: invalid_json: no" in result.stderr
