"""Orders of tables as descriptions: what a job's form knows of its cells."""

from batchmill.jobs.intake.orders import describe
from batchmill.types import DatasetSpec, JobOrder, ModelSpec


def test_a_csv_is_known_to_hold_text(tmp_path):
    """The form of a job on a CSV says that its cells are text; that of JSON lines does not."""
    (tmp_path / "in.csv").write_text("a\n1\n")
    (tmp_path / "in.jsonl").write_text('{"a":1}\n')
    models = [ModelSpec("f", "function", f"{tmp_path}/app.py:f")]
    (tmp_path / "app.py").write_text("def f(a): ...\n")
    forms = [describe(JobOrder(DatasetSpec([str(tmp_path / n)]), models), 1.0).form for n in ("in.csv", "in.jsonl")]
    assert [form.is_text for form in forms] == [True, False]
