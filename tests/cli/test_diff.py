"""`batchmill diff`: which answers of two jobs differ."""

import json

import pytest

from batchmill.jobs.results.gathering import TableSource, create_table

LINE = '{"id":"batch_req_%s_%d","custom_id":"%s","response":{"status_code":200,"body":"%s"},"error":null}\n'
FAILED = '{"id":"batch_req_%s_%d","custom_id":"%s","response":null,"error":{"code":"bad","message":"no"}}\n'


@pytest.fixture
def ended(app, view, place):
    """A job that has ended, with these results and errors."""

    def add(job, text, errors=None, **more):
        (place / f"{job}.jsonl").write_text(text)
        fields = {"id": job, "state": "completed", "output": str(place / f"{job}.jsonl"), **more}
        if errors is not None:
            (place / f"{job}.errors.jsonl").write_text(errors)
            fields["errors_output"] = str(place / f"{job}.errors.jsonl")
        app.jobs.add(view(**fields))

    return add


def table(*rows):
    return "".join(json.dumps({"id": key, "output": output, "error": None}) + "\n" for key, output in rows)


def test_answers_of_the_same_input(call, ended):
    """Rows of one input are matched by their number; the exit status says whether some answers differ."""
    ended("a", LINE % ("a", 0, "x", "one") + LINE % ("a", 2, "z", "three"), FAILED % ("a", 1, "y"))
    ended("b", LINE % ("b", 0, "x", "one") + LINE % ("b", 1, "y", "two") + LINE % ("b", 2, "z", "3"))
    result = call("diff", "a", "b")
    assert result.exit_code == 1 and "2 of 3 rows differ" in result.stderr
    assert [line.split() for line in result.stdout.splitlines()] == [
        ["ROW", "a", "b"], ["y", "error:", "bad:", "no", "two"], ["z", "three", "3"],
    ]  # fmt: skip
    lines = [json.loads(line) for line in call("diff", "a", "b", "--json").stdout.splitlines()]
    assert lines[0] == {
        "type": "difference", "row": "y",
        "left": {"output": None, "error": "bad: no"}, "right": {"output": "two", "error": None},
    }  # fmt: skip
    same = call("diff", "a", "a")
    assert same.exit_code == 0 and same.stdout == "" and "0 of 3 rows differ" in same.stderr


def test_answers_of_different_inputs(call, ended):
    """Rows of different inputs are refused, unless a column matches them; rows of one job alone are shown too."""
    ended("a", table((1, "one"), (2, "two"), (3, "three")))
    ended("b", table((3, "three"), (2, "2"), (4, "four")))
    refused = call("diff", "a", "b")
    assert refused.exit_code == 2 and "row 0" in refused.stderr and "--by COLUMN" in refused.stderr
    matched = call("diff", "a", "b", "--by", "id")
    assert matched.exit_code == 1 and "3 of 4 rows differ" in matched.stderr
    assert [line.split(None, 1)[0] for line in matched.stdout.splitlines()] == ["ROW", "2", "4", "1"]
    assert matched.stdout.count("(no such row)") == 2
    assert "it has id" in call("diff", "a", "b", "--by", "nope").stderr
    ended("c", table((1, "x"), (1, "y")))
    for jobs in (("a", "c"), ("c", "a")):
        assert "several rows" in call("diff", *jobs, "--by", "id").stderr


def test_numbers_are_compared_as_values(call, ended):
    """An answer is the same however its JSON is written."""
    ended("a", '{"id":1,"output":{"a":1.0,"b":[2]},"error":null}\n')
    ended("b", '{"id":1,"output":{"b": [2], "a": 1},"error":null}\n')
    assert call("diff", "a", "b").exit_code == 0


def test_formats_make_no_difference(call, ended, app, view, place):
    """The same answers in lines, Parquet and CSV are the same: values of several types, numbers, objects, nothing."""
    answers = [{"n": 1, "t": "a"}, 1, "x", None, [True, None]]
    rows = [{"id": n, "text": "é,\n", "output": answer, "error": None} for n, answer in enumerate(answers)]
    lines = [json.dumps(row).encode() for row in rows]
    ended("lines", b"\n".join(lines).decode() + "\n")
    for kind in ("parquet", "csv"):
        table = create_table(kind, place / f"r.{kind}", TableSource(place, ["id", "text"], False))
        table.learn(lines)
        table.write(lines)
        table.publish()
        app.jobs.add(view(id=kind, state="completed", output=str(place / f"r.{kind}")))
    for other in ("parquet", "csv"):
        result = call("diff", "lines", other)
        assert result.exit_code == 0 and "0 of 5 rows differ" in result.stderr, (other, result.output)
    assert call("diff", "parquet", "csv").exit_code == 0
    ended("true", json.dumps({**rows[1], "output": True}) + "\n")
    ended("one", json.dumps(rows[1]) + "\n")
    assert call("diff", "true", "one").exit_code == 1  # true is not 1
    ended("huge", '{"id":1,"output":1e999,"error":null}\n')
    ended("larger", '{"id":1,"output":1e998,"error":null}\n')
    assert call("diff", "huge", "larger").exit_code == 1


def test_a_running_job_is_refused(call, ended, app, view):
    """Both jobs must have ended."""
    ended("a", table((1, "one")))
    app.jobs.add(view(id="run"))
    refused = call("diff", "a", "run")
    assert refused.exit_code == 2 and "is running" in refused.stderr


ADDED = ["label", "score", "output", "error", "warnings", "folded_from"]


def fields(*rows):
    """Lines of a job with a schema: (id, label, more members)."""
    return "".join(json.dumps({"id": key, "label": label, "error": None, **more}) + "\n" for key, label, more in rows)


def test_fields_are_compared_and_warnings_are_not(call, ended):
    """The fields of a schema are answers, wherever rows are matched; a flaw of a reply is no difference."""
    ended("a", fields((1, "x", {"score": 1.0}), (2, "y", {"score": 2})), added_columns=ADDED)
    ended("b", fields((1, "x", {"score": 1, "warnings": "asked_again"}), (2, "z", {"score": 2})), added_columns=ADDED)
    for by in ((), ("--by", "id")):
        found = call("diff", "a", "b", *by)
        assert found.exit_code == 1 and "1 of 2 rows differ" in found.stderr, found.stderr
        assert '{"label":"y","score":2}' in found.stdout and '{"label":"z","score":2}' in found.stdout
        (line,) = [json.loads(line) for line in call("diff", "a", "b", *by, "--json").stdout.splitlines()]
        assert line["left"] == {"label": "y", "score": 2, "error": None} and line["right"]["label"] == "z"
    unknown = call("diff", "a", "b", "--by", "nope")
    assert "it has id" in unknown.stderr and "label" not in unknown.stderr


def test_a_job_with_a_schema_and_one_without(call, ended):
    """They have the same input, and other answers; a failed row shows its error."""
    ended("a", fields((1, "x", {}), (2, None, {"error": "bad: no", "output": "said"})), added_columns=ADDED)
    ended("b", table((1, "x"), (2, "y")), added_columns=ADDED[2:])
    found = call("diff", "a", "b")
    assert found.exit_code == 1 and "2 of 2 rows differ" in found.stderr, found.stderr
    assert '{"label":"x"}' in found.stdout and "error: bad: no" in found.stdout


def test_an_input_column_may_be_called_as_what_others_add(call, ended):
    """A function's input may have a column `warnings`: it is compared as input."""
    own = ["output", "error", "folded_from"]
    for job, warnings in (("a", "one"), ("b", "two")):
        ended(job, json.dumps({"warnings": warnings, "output": 1, "error": None}) + "\n", added_columns=own)
    refused = call("diff", "a", "b")
    assert refused.exit_code == 2 and "row 0" in refused.stderr
