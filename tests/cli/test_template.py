"""`--template`: prompts that Jinja2 makes of the rows of a table, in jobs of the real command line."""

import csv
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fakes.answering_service import AnsweringService, choice
from fakes.beside import beside

from batchmill.cli.main import cli
from batchmill.cli.session import Session

ROWS = [
    {"q": "Hi", "tags": ["a", "b"], "note": None},
    {"q": "Ho", "tags": [], "note": "n"},
]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a command over rows and a template at a service that answers with the prompt."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    with beside(AnsweringService(lambda body: choice(json.dumps(body["messages"])))) as service:
        entry = '[models.m]\nengine = "openai"\nsource = "s"\nbase_url = "{}"\n'
        Path("batchmill.toml").write_text(entry.format(service.url))

        def go(template: str, *flags: str, verb: str = "run", source: str = "in.jsonl") -> Result:
            Path("ask.j2").write_text(template)
            output = ("-o", "out.jsonl") if verb == "run" and "-o" not in flags else ()
            command = [verb, source, "--model", "m", "--template", "ask.j2", *output, *flags, "--data-dir", "data"]
            return CliRunner().invoke(cli, command, obj=Session())

        go.calls = service.bodies
        yield go


def results() -> list[dict]:
    return [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]


def asked(row: dict) -> list[dict]:
    return json.loads(row["output"])


def test_the_prompt_is_what_the_template_makes_of_the_row(run):
    """Conditions and loops over typed columns make the user's message, `--system` stays, and results have the
    columns of the input alone."""
    result = run(
        "{{ q }}\n{% for tag in tags %}\n- {{ tag }}\n{% else %}\nnone\n{% endfor %}\n{{ note }} {{ row['tags'] }}",
        "--system", "Be {note}",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    first, second = results()
    assert asked(first) == [
        {"role": "system", "content": "Be "},
        {"role": "user", "content": 'Hi\n- a\n- b\n ["a","b"]'},
    ]
    assert asked(second)[1] == {"role": "user", "content": "Ho\nnone\nn []"}
    assert [list(row) for row in results()] == [["q", "tags", "note", "output", "error"]] * 2


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_tables_of_every_format(run, kind):
    """CSV and Parquet rows are rendered too, and results in their format have no other columns."""
    if kind == "csv":
        Path("in.csv").write_text("q,n\nHi,1\nHo,22\n")
    else:
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table({"q": ["Hi", "Ho"], "n": [1, 22]}), "in.parquet")
    result = run("{{ q }}{{ n }}", "-o", f"out.{kind}", source=f"in.{kind}")
    assert result.exit_code == 0, result.output
    if kind == "csv":
        with open("out.csv") as file:
            rows = list(csv.DictReader(file))
    else:
        rows = pq.read_table("out.parquet").to_pylist()
    assert [asked(row)[0]["content"] for row in rows] == ["Hi1", "Ho22"]
    assert [list(row) for row in rows] == [["q", "n", "output", "error"]] * 2


def test_a_template_that_names_no_such_column_is_refused(run):
    """Before anything runs, with the file, the line and the columns that there are."""
    result = run("\n{{ question }}")
    assert result.exit_code != 0
    assert all(word in result.output for word in ["ask.j2, line 2", "'question'", "q, tags, note"]), result.output
    assert "ask.j2: the file is empty" in run(" \n").output
    assert "nowhere.j2: No such file" in run("{{ q }}", "--template", "nowhere.j2").output
    assert run.calls == []


def test_a_constant_template_may_be_allowed(run):
    """`--allow-constant-prompt` says that it is meant."""
    result = run("all the same", "--allow-constant-prompt")
    assert result.exit_code == 0, result.output
    assert [asked(row)[0]["content"] for row in results()] == ["all the same"] * 2


def test_a_row_that_the_template_fails_for_is_an_error_and_the_others_run(run):
    """However bad rows of the dataset are handled: the template says what is wrong with a row of its own."""
    result = run("{% if q == 'Hi' %}\n{{ note.x.y }}{% else %}fine {{ q }}{% endif %}")
    first, second = results()
    assert first["error"].startswith("template_failed: ask.j2, line 2: "), result.output
    assert asked(second) == [{"role": "user", "content": "fine Ho"}]
    assert list(first) == ["q", "tags", "note", "output", "error"]
    assert len(run.calls) == 1


def test_nothing_runs_where_every_row_fails(run):
    """The job is refused, with the lines of the dataset and of the template."""
    result = run("{{ q.x.y }}")
    assert result.exit_code != 0
    assert "template_failed" in result.output and "line 1" in result.output
    assert run.calls == []


def test_plan_and_estimate_render_too(run):
    """Previews count the rows that fail, and equal prompts fold as equal requests."""
    Path("in.jsonl").write_text('{"q": "Hi", "n": 1}\n{"q": "Hi", "n": 2}\n')
    plan = run("{{ q }}", "--dedupe", verb="plan")
    assert plan.exit_code == 0 and "1 folded" in plan.output, plan.output
    assert run("{{ nothing }}", verb="estimate").exit_code != 0


def test_the_text_of_the_template_identifies_the_job(run):
    """The same command again is the same job; another text is another job, which does not write over its results."""
    assert run("{{ q }}").exit_code == 0
    assert run("{{ q }}").exit_code == 0
    assert len(run.calls) == 2
    assert "--overwrite" in run("{{ q }}!").output
    assert len(run.calls) == 2


def test_a_prompt_and_a_template_are_one_too_many(run):
    """Both make the same message."""
    assert "leave one of them out" in run("{{ q }}", "--prompt", "{q}").output
