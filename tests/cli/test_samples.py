"""`--limit` and `--sample` of the real command line: look at some rows first, then run the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fakes.answering_service import AnsweringService, choice
from fakes.beside import beside

from batchmill.cli.main import cli
from batchmill.cli.session import Session

ROWS = 40
CONFIG = """
[models.m]
engine = "openai"
source = "m"
base_url = "{url}"
api_key = "env:KEY"
price = {{ input = 100.0, output = 200.0 }}
"""
MODEL = """
[models.{name}]
engine = "openai"
source = "{name}"
base_url = "{url}"
api_key = "env:KEY"
adapters = {{ {name}a = "{name}a" }}
"""


def answer(body: dict) -> dict:
    text = body["messages"][-1]["content"]
    return choice(None if "w3?" in text else f"about {text}", "length" if "w2?" in text else "stop")


class Commands:
    """Commands in one folder, with a service that counts its calls."""

    def __init__(self, folder: Path, service: AnsweringService) -> None:
        self.folder, self._service, self.service_url = folder, service, service.url
        (folder / "batchmill.toml").write_text(CONFIG.format(url=service.url))

    def call(self, verb: str, *words: str, rows: str = "in.jsonl", prompt: str = "{word}?") -> Result:
        order = (rows, "--model", "m", "--prompt", prompt) if verb in ("run", "plan", "estimate") else ()
        return CliRunner().invoke(cli, [verb, *order, *words, "--data-dir", "data"], obj=Session())

    def json(self, verb: str, *words: str, **kw: str) -> list[dict]:
        return [json.loads(line) for line in self.call(verb, *words, "--json", **kw).stdout.splitlines()]

    @property
    def asked(self) -> list[str]:
        return [body["messages"][-1]["content"] for body in self._service.bodies]

    def results(self, name: str = "out.jsonl") -> list[dict]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


@pytest.fixture
def commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEY", "k")
    rows = [{"word": f"w{n}", "note": "unused"} for n in range(ROWS)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with beside(AnsweringService(answer)) as service:
        yield Commands(tmp_path, service)


def test_look_at_the_first_rows_then_run_the_others(commands):
    """The first rows are shown beside what was asked, with what is wrong; the whole job pays for none of them again."""
    looked = commands.call("run", "--limit", "4", "-o", "out.jsonl")
    assert looked.exit_code == 0, looked.output
    assert "about w0?" in looked.output and "about w1?" in looked.output and "[truncated]" in looked.output
    assert "unused" not in looked.output and "w4" not in looked.output
    assert "the whole 40 rows: $0.0800" in looked.output and "by 4 rows that ran" in looked.output
    assert "its sample has run: the first 4 rows" in looked.output
    assert "to go on: batchmill resume job_" in looked.output
    assert sorted(commands.asked) == ["w0?", "w1?", "w2?", "w3?"] and not (commands.folder / "out.jsonl").exists()

    again = commands.call("run", "--limit", "4", "-o", "out.jsonl")
    assert again.exit_code == 0 and "about w0?" in again.output and len(commands.asked) == 4

    done = commands.call("run", "-o", "out.jsonl")
    assert done.exit_code == 0, done.output
    assert sorted(commands.asked) == sorted(f"w{n}?" for n in range(ROWS))
    assert [row["word"] for row in commands.results()] == [f"w{n}" for n in range(ROWS)]
    assert "about w7?" in commands.results()[7]["output"]


def test_a_sample_is_for_whatever_output_comes_later(commands):
    """A sample without -o, drawn at random, is taken over by a run with one, and `resume` runs the rest of another."""
    looked = commands.json("run", "--sample", "5", "--seed", "9")
    assert [event["type"] for event in looked if event["type"] in ("row", "summary")] == ["row"] * 5 + ["summary"]
    numbers = [event["number"] for event in looked if event["type"] == "row"]
    assert sorted(commands.asked) == sorted(f"w{n}?" for n in numbers) and numbers == sorted(numbers)
    summary = looked[-1]
    assert summary["exit_code"] == 0 and summary["job"]["sample"] == {"rows": 5, "seed": 9}
    assert summary["job"]["outlook"]["cost"]["mid"] == pytest.approx(ROWS * summary["job"]["cost"] / 5)

    done = commands.json("run", "-o", "out.jsonl")[-1]
    assert done["job"]["id"] == summary["job"]["id"] and done["job"]["state"] == "completed"
    assert done["job"]["output"] == str(commands.folder / "out.jsonl") and done["job"]["sample"] is None
    assert len(commands.asked) == len(set(commands.asked)) == len(commands.results()) == ROWS
    assert commands.json("run", "-o", "out.jsonl")[-1]["job"]["id"] == summary["job"]["id"]  # it is found there now
    assert len(commands.asked) == ROWS

    job = commands.json("run", "--limit", "2", "-o", "other.jsonl", prompt="{word}!")[-1]["job"]
    resumed = commands.call("resume", job["id"])
    assert resumed.exit_code == 0 and len(commands.results("other.jsonl")) == ROWS, resumed.output
    assert len(commands.asked) == len(set(commands.asked)) == 2 * ROWS


def test_another_prompt_with_the_same_output(commands):
    """A sample holds no output: the next prompt is tried with the same command line, and an older sample that goes on
    or is cancelled leaves the results of the newer job alone."""
    first = commands.json("run", "--limit", "2", "-o", "out.jsonl", prompt="{word}!")[-1]["job"]["id"]
    commands.json("run", "--limit", "2", "-o", "out.jsonl")
    assert commands.call("run", "-o", "out.jsonl").exit_code == 0
    newer = commands.results()
    refused = commands.call("resume", first)
    assert refused.exit_code == 2 and "has written" in refused.output
    assert commands.call("cancel", first).exit_code == 0
    assert commands.results() == newer and newer[0]["output"] == "about w0?"
    kept = [json.loads(line) for line in commands.call("results", first).stdout.splitlines()]
    assert [row["output"] for row in kept[:3]] == ["about w0!", "about w1!", None] and len(kept) == ROWS


def test_a_sample_that_is_the_whole_run(commands):
    """As many rows as there are, or more, are the run itself; an output that exists is refused before any row runs."""
    done = commands.call("run", "--limit", "41", "-o", "out.jsonl")
    assert done.exit_code == 0 and "completed" in done.output and "about w0?" in done.output, done.output
    assert len(commands.results()) == len(commands.asked) == ROWS
    refused = commands.call("run", "--limit", "3", "-o", "out.jsonl", prompt="{word}!")
    assert refused.exit_code == 2 and "--overwrite" in refused.output and len(commands.asked) == ROWS
    assert commands.call("run", "--limit", "3", "-o", "out.jsonl", "--overwrite", prompt="{word}!").exit_code == 0
    assert len(commands.results()) == ROWS and commands.results()[0]["output"] == "about w0?"
    assert commands.call("run", "-o", "out.jsonl", "--overwrite", prompt="{word}!").exit_code == 0
    assert commands.results()[0]["output"] == "about w0!" and len(commands.asked) == 2 * ROWS


def test_a_large_sample_as_json(commands, monkeypatch):
    """Its rows are printed as they are read, in their order, however many there are."""
    monkeypatch.setattr("batchmill.cli.jobs.samples.JSON_ROWS_MAX", 4)
    rows = [each for each in commands.json("run", "--limit", "11") if each["type"] == "row"]
    assert [(row["number"], row["inputs"]) for row in rows] == [(n, {"word": f"w{n}"}) for n in range(11)]


def test_results_of_a_sample_in_a_pipe(commands):
    """`-o -` prints the rows of the sample, and nothing else."""
    piped = commands.call("run", "--limit", "3", "-o", "-", "--output-format", "csv")
    assert piped.exit_code == 0
    assert piped.stdout.splitlines() == [
        "word,note,output,error,warnings", "w0,unused,about w0?,,", "w1,unused,about w1?,,",
        "w2,unused,about w2?,,truncated",
    ]  # fmt: skip


def test_an_estimate_learns_from_a_sample(commands):
    """`plan` and `estimate` say what a sample would run; after it, an estimate knows how long answers are."""
    planned = commands.call("plan", "--sample", "6")
    assert "sample: 6 rows drawn at random (seed 0): 6 run" in planned.output, planned.output
    before = commands.json("estimate", "--limit", "4")[-1]
    assert (before["estimate"]["rows"], before["estimate"]["run"]) == (4, 4)
    assert any("the first 4 rows, of 40 rows" in note for note in before["estimate"]["notes"])
    whole = commands.json("estimate")[-1]["estimate"]
    assert whole["cost"]["mid"] > 5 * before["estimate"]["cost"]["mid"]
    assert commands.asked == []
    job = commands.json("run", "--limit", "4")[-1]["job"]
    after = commands.json("estimate")[-1]["estimate"]
    assert after["output_tokens"]["mid"] == 5 * ROWS and after["models"][0]["learned_from"] == [job["id"]]
    assert after["output_tokens"]["low"] < 5 * ROWS < after["output_tokens"]["high"]
    assert any("as in 4 rows of this work" in note for note in after["notes"]), after["notes"]
    other = commands.json("estimate", prompt="{word}!")[-1]["estimate"]
    assert any("as in 1 earlier job of 4 rows" in note for note in other["notes"])


def test_samples_of_several_models_in_another_order(commands):
    """Rows of two models and their adapters, some folded, in samples that overlap: no call is made twice."""
    names = ("f", "g")
    tables = [MODEL.format(name=name, url=commands.service_url) for name in names]
    (commands.folder / "batchmill.toml").write_text("".join(tables))
    rows = [
        {"word": "same" if n % 5 == 0 else f"x{n}", "m": names[n % 2], "a": f"{names[n % 2]}a" if n % 3 else None}
        for n in range(ROWS)
    ]
    (commands.folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("run", "in.jsonl", "--model", "f", "--model", "g", "--prompt", "{word}?", "--model-column", "m")
    words = (*words, "--adapter-column", "a", "--dedupe", "-o", "out.jsonl", "--data-dir", "data")
    for sample in (("--sample", "7"), ("--limit", "9"), ("--sample", "20", "--seed", "3"), ()):
        result = CliRunner().invoke(cli, [*words, *sample], obj=Session())
        assert result.exit_code == 0 and ("its sample has run" in result.output) == bool(sample), result.output
    results = commands.results()
    assert [row["output"] for row in results] == [f"about {row['word']}?" for row in rows]
    called = [row for row in results if row.get("folded_from") is None]
    assert len(commands.asked) == len(called) == len({(row["word"], row["m"], row["a"]) for row in rows})


def test_bad_samples(commands):
    """What no sample is, or has no effect, is refused by name before anything runs."""
    for words, message in (
        (("--limit", "0"), "--limit"), (("--sample", "-1"), "--sample"), (("--limit", "2", "--sample", "2"), "exclude"),
        (("--seed", "2"), "seed"), (("--limit", "2", "--seed", "2"), "seed"), (("--limit", "4294967296"), "sample has"),
    ):  # fmt: skip
        refused = commands.call("run", *words)
        assert refused.exit_code == 2 and message in refused.output, refused.output
    assert commands.asked == []


def test_a_budget_in_a_sample(commands):
    """A budget pauses a sample as it does any job; resumed, the sample goes on, and then the rest."""
    words = ("--limit", "6", "-o", "out.jsonl", "--budget", "0.005", "--param", "max_tokens=5")
    stopped = commands.json("run", *words)
    job = stopped[-1]["job"]
    assert (stopped[-1]["exit_code"], job["reason"]) == (4, "budget") and job["rows_ok"] < 6
    assert commands.call("amend", job["id"], "--budget", "1").exit_code == 0
    (resumed,) = [each for each in commands.json("resume", job["id"]) if each["type"] == "summary"]
    assert resumed["job"]["reason"] == "sampled" and resumed["job"]["rows_ok"] == 6
    assert commands.call("resume", job["id"]).exit_code == 0
    assert len(commands.asked) == len(set(commands.asked)) == len(commands.results()) == ROWS
