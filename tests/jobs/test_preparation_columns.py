"""How many columns a dataset may have depends on what its results become."""

import pytest

from batchmill.jobs.preparation import seal_order
from batchmill.jobs.results import COLUMNS_MAX
from batchmill.types import DatasetSpec, ModelSpec, Policy
from batchmill.wire.forms import TableForm
from batchmill.wire.job_spec import JobSpec


@pytest.mark.parametrize(
    ("output", "columns_max"),
    [
        ("/o.csv", COLUMNS_MAX),
        ("/o.csv.gz", COLUMNS_MAX),
        ("/o.parquet", COLUMNS_MAX),
        ("/o.jsonl", None),
        (None, None),
    ],
)
def test_only_tables_bound_the_columns(output, columns_max):
    """Rows that would not fit into a table are refused before one runs; JSON lines take any columns."""
    spec = JobSpec(
        id="job_1", dataset=DatasetSpec(["/in.jsonl"]), models=[ModelSpec("m", "function", "a.py:f")],
        form=TableForm(), policy=Policy(), output=output, identity="", code={}, created=0.0,
    )  # fmt: skip
    assert seal_order(spec).columns_max == columns_max
