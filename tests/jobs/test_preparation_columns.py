"""What of a dataset a job allows: its columns by what they become, its bodies by who sent it."""

import pytest

from batchmill.jobs.intake.preparation import seal_order
from batchmill.jobs.results.results import COLUMNS_MAX
from batchmill.types import DatasetSpec, ModelSpec, Policy
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.rows.forms import OpenAIForm, TableForm


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


@pytest.mark.parametrize(("origin", "features"), [(None, None), ({"frontend": "openai"}, ["stored"])])
def test_only_callers_of_a_server_are_bounded(origin, features):
    """Rows that came over a server may ask for what its configuration allows; a command of the machine for anything."""
    model = ModelSpec("m", "http", "remote", features=["stored"], paths=["/v1/own"])
    spec = JobSpec(
        id="job_1", dataset=DatasetSpec(["/in.jsonl"]), models=[model], form=OpenAIForm(), policy=Policy(),
        output=None, identity="", code={}, created=0.0, origin=origin,
    )  # fmt: skip
    order = seal_order(spec)
    assert order.features == [features]
    assert order.urls[0] is not None and {"/v1/own", "/v1/responses"} <= order.urls[0] and order.any_path_models == []
