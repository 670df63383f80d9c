"""Jobs whose schema is a class with code that validates: what it says goes to the model, and into errors."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from fakes.answering_service import AnsweringService, choice
from fakes.beside import beside
from fakes.packages import add_wheel, use_as_index

import batchmill
from batchmill.cli.main import cli
from batchmill.cli.session import Session

CODE = """
import os, time
import msgspec

class Review(msgspec.Struct):
    label: str
    score: float

    def __post_init__(self):
        if self.label == "hangs":
            time.sleep(1000)
        if self.label == "ends":
            os._exit(1)
        if self.score > 1:
            raise ValueError(f"the score {self.score:g} is above 1")
"""
ANSWERS = {
    "fits": ['{"label":"a","score":1}'],
    "second": ['{"label":"a","score":3}', '{"label":"a","score":0.5}'],
    "never": ['{"label":"a","score":9}'],
    "hangs": ['{"label":"hangs","score":1}'],
    "ends": ['{"label":"ends","score":1}'],
    "no json": ["no"],
}


def answer(body):
    asked = [message["content"] for message in body["messages"] if message["role"] == "user"]
    given = ANSWERS[asked[0]]
    return choice(given[min(len(asked) - 1, len(given) - 1)])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    (tmp_path / "reviews.py").write_text(CODE)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ANSWERS))
    return tmp_path


def invoke(*words):
    return CliRunner().invoke(cli, [*words, "--data-dir", "data"], obj=Session())


def run(url, *words):
    flags = ("--model", "openai:m", "--base-url", url, "--prompt", "{text}")
    return invoke("run", "in.jsonl", *flags, "-o", "out.jsonl", *words)


def read(path):
    return {row["text"]: row for row in map(json.loads, path.read_text().splitlines())}


@pytest.mark.parametrize("source", ["reviews.py:Review", "reviews:Review"])
def test_a_class_of_a_file(source, folder):
    """Its words go to the model; an answer that it hangs over, or dies of, is an error that says so."""
    with beside(AnsweringService(answer)) as service:
        result = run(service.url, "--schema", source)
    assert result.exit_code == 3, result.output
    rows = read(folder / "out.jsonl")
    assert [rows["fits"]["score"], rows["second"]["score"], rows["second"]["warnings"]] == [1, 0.5, "asked_again"]
    (told,) = [
        body["messages"] for body in service.bodies
        if body["messages"][0]["content"] == "second" and len(body["messages"]) == 3
    ]  # fmt: skip
    assert "the score 3 is above 1" in told[2]["content"]
    never = rows["never"]
    assert never["error"] == "schema_mismatch: the score 9 is above 1 (asked 3 times)"
    assert json.loads(never["output"]) == {"label": "a", "score": 9}
    assert rows["hangs"]["error"] == "schema_mismatch: the validator took more than 1 s and was stopped"
    assert "ended by exit 1" in rows["ends"]["error"] and "it is not JSON" in rows["no json"]["error"]
    # A hang or a death is not asked for again: the next answer would be no better.
    assert len(service.bodies) == 1 + 2 + 3 + 1 + 1 + 3


def test_the_code_is_part_of_the_job(folder):
    """The same command finds the job that has run; with other code it is another job."""
    (folder / "in.jsonl").write_text('{"text": "fits"}\n{"text": "second"}\n')
    with beside(AnsweringService(answer)) as service:
        assert run(service.url, "--schema", "reviews.py:Review").exit_code == 0
        calls = len(service.bodies)
        assert run(service.url, "--schema", "reviews.py:Review").exit_code == 0 and len(service.bodies) == calls
        (folder / "reviews.py").write_text(CODE.replace("> 1", "> 5"))
        again = run(service.url, "--schema", "reviews.py:Review", "--overwrite", "--reuse")
        assert again.exit_code == 0, again.output
        assert len(service.bodies) == calls + 2  # nothing is taken over from what another class has let pass
        assert read(folder / "out.jsonl")["second"]["score"] == 3


def test_code_that_changes_meanwhile_pauses_the_job(folder):
    """A resumed job does not validate with other code; its answers are not asked for again, and counted."""
    with beside(AnsweringService(lambda body: choice('{"label":"a","score":1}'))) as service:
        sampled = run(service.url, "--schema", "reviews.py:Review", "--limit", "1")
        assert "its sample has run" in sampled.output and len(service.bodies) == 1, sampled.output
        (folder / "reviews.py").write_text(CODE + "\n# changed\n")
        (job,) = [json.loads(line)["job"]["id"] for line in invoke("jobs", "--json").output.splitlines()]
        resumed = invoke("resume", job)
        assert "has changed since the job began" in resumed.output
        view = json.loads(invoke("show", job, "--json").output.splitlines()[-1])["job"]
    assert (view["state"], view["reason"]) == ("paused", "engine_failed")
    assert view["usage"]["output_tokens"] == 5 * len(service.bodies)


def test_bad_classes_are_refused(folder):
    """Before any row runs, by name."""
    with beside(AnsweringService(answer)) as service:
        for source, words in (
            ("reviews.py:Revue", "did you mean 'Review'"),
            ("none.py:Review", "cannot be read"),
            ("reviews.py:os", "is no class"),
        ):
            result = run(service.url, "--schema", source)
            assert result.exit_code not in (0, 3) and words in result.output, (source, result.output)
    assert service.bodies == []


PROGRAM = """
import dataclasses

@dataclasses.dataclass
class Score:
    label: str
    score: float

    def __post_init__(self) -> None:
        if self.score > 1:
            raise ValueError(f"the score {self.score:g} is above 1")
"""


def test_a_class_of_a_program(folder, monkeypatch):
    """`batchmill.run` takes the class itself."""
    (folder / "scored.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(folder)
    Score = importlib.import_module("scored").Score
    with beside(AnsweringService(answer)) as service:
        data = {"text": ["fits", "second", "never"]}
        job = batchmill.run(
            data, model="openai:m", base_url=service.url, prompt="{text}", schema=Score, data_dir=folder / "data"
        )
        assert (job.view.rows_ok, job.view.rows_failed) == (2, 1)
        assert "the score 9 is above 1" in job.failures()["error"][0].as_py()


def test_a_class_that_is_deployed_here(folder):
    """Commands of this machine name it too, and `batchmill.run`; it stays what it was when the file changes."""
    (folder / "in.jsonl").write_text('{"text": "fits"}\n{"text": "never"}\n')
    done = invoke("deploy", "reviews.py:Review", "--schema", "--name", "review")
    assert done.exit_code == 0 and "review@main/1 is ready: a schema with the fields label, score" in done.output
    (folder / "reviews.py").write_text(CODE.replace("> 1", "> 99"))
    with beside(AnsweringService(answer)) as service:
        result = run(service.url, "--validator", "review@1")
        assert result.exit_code == 3, result.output
        assert "the score 9 is above 1" in read(folder / "out.jsonl")["never"]["error"]
        both = run(service.url, "--validator", "review", "--fields", "a: int")
        assert "give one of them" in both.output and both.exit_code not in (0, 3)
        unknown = run(service.url, "--validator", "revue", "--overwrite")
        assert "'revue' does not exist" in unknown.output and "deploy FILE.py:CLASS --schema" in unknown.output
        job = batchmill.run(
            {"text": ["never"]}, model="openai:m", base_url=service.url, prompt="{text}", validator="review",
            data_dir=folder / "data",
        )  # fmt: skip
        assert "the score 9 is above 1" in job.failures()["error"][0].as_py()
    shown = invoke("models", "show", "review")
    assert "a schema with the fields label, score" in shown.output, shown.output
    assert "review" not in invoke("models").output


PACKAGED = """
from batchmill_answer_of_test import VALUE

class Validator:
    def validate_json(self, text):
        if b"3" in text:
            raise ValueError("three is too many")

class Review:
    __pydantic_core_schema__ = {"type": "function-plain"}
    __pydantic_validator__ = Validator()

    @classmethod
    def model_json_schema(cls):
        properties = {"label": {"type": "string", "description": VALUE}, "score": {"type": "number"}}
        return {"type": "object", "properties": properties}
"""


def test_a_class_that_needs_packages(folder, monkeypatch):
    """`--schema-requirements` gives it an environment of its own, and the same command is the same job; without, and
    where there is no class, the message says so."""
    (folder / "in.jsonl").write_text('{"text": "fits"}\n{"text": "second"}\n')
    (folder / "reviews.py").write_text(PACKAGED)
    (folder / "needs.txt").write_text("batchmill-answer-of-test\n")
    (folder / "index").mkdir()
    add_wheel(folder / "index", "1.0")
    use_as_index(folder / "index", monkeypatch)
    with beside(AnsweringService(answer)) as service:
        words = ("--schema", "reviews.py:Review", "--schema-requirements", "needs.txt")
        result = run(service.url, *words)
        assert result.exit_code == 0, result.output
        assert {row["label"] for row in read(folder / "out.jsonl").values()} == {"a"}
        again = run(service.url, *words)
        assert again.exit_code == 0 and "already" in again.output, again.output
        bare = run(service.url, "--schema", "reviews.py:Review", "--overwrite")
        assert "name it in --schema-requirements FILE" in " ".join(bare.output.split()), bare.output
        for words in (("--fields", "a: int"), ("--schema", "needs.txt"), ()):
            wrong = run(service.url, *words, "--schema-requirements", "needs.txt")
            assert wrong.exit_code == 2 and "--schema" in wrong.output, wrong.output


NOTEBOOK = """
import sys
import batchmill
from pydantic import BaseModel, field_validator

LIMIT = 1

class Score(BaseModel):
    label: str
    score: float

    @field_validator("score")
    @classmethod
    def at_most(cls, value):
        if value > LIMIT:
            raise ValueError(f"above {LIMIT}")
        return value

def made(limit):
    class Held(Score):
        @field_validator("label")
        @classmethod
        def short(cls, value):
            if len(value) > limit:
                raise ValueError("too long")
            return value
    return Held

for schema in (Score, made(0)):
    job = batchmill.run(
        {"text": ["fits", "second"]}, model="openai:m", base_url=sys.argv[1], prompt="{text}", schema=schema,
        data_dir="data", progress=False,
    )
    print(job.view.rows_ok, job.view.rows_failed)
"""


def test_a_class_of_a_notebook(folder):
    """One that source says travels as source; one that holds more is pickled."""
    pytest.importorskip("pydantic")
    pytest.importorskip("cloudpickle")
    (folder / "notebook.py").write_text(NOTEBOOK)
    with beside(AnsweringService(answer)) as service:
        done = subprocess.run(
            [sys.executable, "notebook.py", service.url], capture_output=True, text=True, timeout=120, env=os.environ
        )
    assert done.stdout.split("\n")[:2] == ["2 0", "0 2"], done.stderr


class Plain(msgspec.Struct):
    label: str


def test_a_class_without_code_needs_no_process(folder):
    """It is its JSON Schema."""
    with beside(AnsweringService(answer)) as service:
        job = batchmill.run(
            {"text": ["no json"]}, model="openai:m", base_url=service.url, prompt="{text}", schema=Plain,
            schema_attempts=0, data_dir=Path("data"),
        )  # fmt: skip
    assert job.view.rows_failed == 1


def test_a_function_has_no_answers_to_validate(folder):
    """A schema beside a function is refused before its class is loaded, and before its packages are looked at."""
    (folder / "app.py").write_text("def double(text):\n    return text\n")
    (folder / "packages.txt").write_bytes(b"\xff")
    for words in (["gone.py:Review"], ["reviews.py:Review", "--schema-requirements", "packages.txt"]):
        done = invoke("run", "in.jsonl", "--model", "function:app.py:double", "-o", "out.jsonl", "--schema", *words)
        assert done.exit_code == 2 and "a schema is for the answers of language models" in done.output
