"""Results that stay with their job: what they may be, and that their name leads nowhere else."""

from pathlib import Path

import pytest

from batchmill.errors import InvalidInput
from batchmill.jobs.intake import orders
from batchmill.jobs.ledger.files import JobFiles
from batchmill.jobs.results import publishing
from batchmill.jobs.results.results import STORED, check_output, output_kind, stored_name
from batchmill.types import DatasetSpec, JobOrder, ModelSpec

OPENAI = '{"custom_id": "a", "method": "POST", "url": "/x", "body": {}}\n'


@pytest.fixture
def order(tmp_path):
    (tmp_path / "app.py").write_text("def f(a=1):\n    return a\n")
    (tmp_path / "t.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "r.jsonl").write_text(OPENAI)

    def order(output_format, name="t.jsonl"):
        model = ModelSpec("f", "function", f"{tmp_path}/app.py:f")
        return JobOrder(DatasetSpec([str(tmp_path / name)]), [model], output_format=output_format)

    return order


@pytest.mark.parametrize("output_format", STORED)
def test_every_kind_has_its_place_with_the_job(order, tmp_path, output_format):
    """A job without an output keeps its results beside its own files, in the kind that was asked for."""
    spec = orders.describe(order(output_format), 1.0)
    path = publishing.output_of(spec, JobFiles(tmp_path, spec.id))
    assert path == tmp_path / "jobs" / spec.id / f"results.{output_format}"
    assert "".join(output_kind(path)) == output_format


@pytest.mark.parametrize("output_format", ["", "xml", "parquet.gz", "/../../x.jsonl", "jsonl/../../x.jsonl"])
def test_other_kinds_are_refused(order, output_format):
    """What is not a kind of results, or would lead out of the job's folder, is refused with those there are."""
    for ask in (lambda: stored_name(output_format), lambda: orders.describe(order(output_format), 1.0)):
        with pytest.raises(InvalidInput) as caught:
            ask()
        assert caught.value.code == "invalid_output" and "parquet" in caught.value.message


def test_openai_rows_stay_lines(order):
    """Results of OpenAI rows are JSONL wherever they lie."""
    with pytest.raises(InvalidInput):
        orders.describe(order("csv", "r.jsonl"), 1.0)
    assert orders.describe(order("jsonl", "r.jsonl"), 1.0).output_format == "jsonl"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no folder that root cannot write to")
def test_outputs_that_cannot_be_written(tmp_path):
    """Neither in a place without files of users, nor under a name that is too long with its ending: both are refused by
    name before anything runs, and nothing is left behind where one can be written."""
    longest = tmp_path / ("x" * (255 - len(".part") - len(".csv")) + ".csv")
    for path in (Path("/proc/x.csv"), Path("/proc/self/x.csv"), longest.with_name("x" + longest.name)):
        with pytest.raises(InvalidInput, match=f"folder '{path.parent}' of the output cannot be written: ") as refused:
            check_output(str(path), "csv")
        assert refused.value.code == "invalid_output"
    with pytest.raises(InvalidInput, match="folder '/proc' of the output cannot be written: "):
        check_output("/proc/parts/", "csv", "csv")
    check_output(str(longest), "csv")
    check_output(f"{tmp_path}/parts/", "csv", "csv")
    assert list(tmp_path.iterdir()) == []
