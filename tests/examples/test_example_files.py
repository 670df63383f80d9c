"""The files of examples/ that need no engine: what they say they do."""

import csv
import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_prompts_are_what_their_script_writes(tmp_path: Path):
    """`make_prompts.py` writes the very file that lies beside it."""
    shutil.copy(EXAMPLES / "make_prompts.py", tmp_path)
    subprocess.run([sys.executable, tmp_path / "make_prompts.py"], check=True, timeout=60)
    assert (tmp_path / "prompts.jsonl").read_bytes() == (EXAMPLES / "prompts.jsonl").read_bytes()


def test_prompts_ask_every_model():
    """The prompts go to the base model, named or not, and to both adapters, twenty each."""
    rows = [json.loads(line) for line in (EXAMPLES / "prompts.jsonl").read_text().splitlines()]
    models = [row["body"]["model"] for row in rows]
    assert {name: models.count(name) for name in set(models)} == {"": 10, "tiny-llm": 10, "upper": 20, "reverse": 20}
    assert len({row["custom_id"] for row in rows}) == len(rows)


def result_line(custom_id: str, text: str) -> str:
    reply = {"choices": [{"message": {"role": "assistant", "content": text}}]}
    response = {"status_code": 200, "request_id": "r", "body": reply}
    return json.dumps({"id": "b", "custom_id": custom_id, "response": response, "error": None}) + "\n"


def test_results_are_shown_beside_their_prompts(tmp_path: Path):
    """`show_results.py` prints what was asked and answered, by model, and which rows have no result."""
    results = tmp_path / "results.jsonl"
    results.write_text(result_line("tiny-llm-00", "rwci akb") + result_line("upper-01", "MPKF XILQUMC"))
    command = [sys.executable, EXAMPLES / "show_results.py", EXAMPLES / "prompts.jsonl", results]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "upper (20 rows)" in shown
    assert any(line.split() == ["mpkf", "xilqumc", "->", "MPKF", "XILQUMC"] for line in shown.splitlines())
    assert "(no result: see the .errors.jsonl file)" in shown
    assert "2 of 60 rows have a result" in shown


@pytest.mark.parametrize("name", ["classify", "Classifier"])
def test_functions_classify_the_texts(name: str):
    """The functions of `app.py` agree on the texts of `texts.csv`."""
    found = runpy.run_path(str(EXAMPLES / "app.py"))[name]
    if name == "Classifier":
        instance = found()
        instance.setup()
        found = instance.predict
    with (EXAMPLES / "texts.csv").open(newline="") as file:
        labels = [found(row["text"]) for row in csv.DictReader(file)]
    expected = "positive negative neutral positive negative neutral positive neutral negative positive"
    assert labels == expected.split()
