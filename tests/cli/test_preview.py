"""validate, plan and estimate: they run nothing and say what they saw."""

import json

from batchmill.datasets.orders import SealReport
from batchmill.jobs.plan import Explanation, PlanGroup
from batchmill.types import Problem, Seal, SealedFile

MODEL = ("in.jsonl", "--model", "function:app.py:f")
SEAL = Seal(
    rows=1000, bytes=2_500_000, sha256="s", format="csv", columns=["a", "b\x1b"], files=[],
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
