"""A table whose cells name the model of each row, in a job of the real command line."""

import csv

from click.testing import CliRunner
from fakes.answering_service import AnsweringService, choice
from fakes.beside import beside

from batchmill.cli.main import cli
from batchmill.cli.session import Session


def test_rows_go_to_the_model_that_their_cell_names(tmp_path, monkeypatch):
    """Each row is a call of its own model; an empty cell is one of the first. What names none is refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    (tmp_path / "in.csv").write_text("q,which\na,two\nb,\nc,one\nd,two\n")
    with beside(AnsweringService(lambda body: choice(body["model"]))) as service:
        entry = '[models.{0}]\nengine = "openai"\nsource = "s-{0}"\nbase_url = "{1}"\n'
        (tmp_path / "batchmill.toml").write_text(entry.format("one", service.url) + entry.format("two", service.url))
        flags = ("--model", "one", "--model", "two", "--prompt", "{q}", "--model-column", "which", "-o", "out.csv")
        result = CliRunner().invoke(cli, ["run", "in.csv", *flags, "--data-dir", "data"], obj=Session())
        (tmp_path / "wrong.csv").write_text("q,which,lora\na,three,\nb,,x\nc,,two\n")
        flags = (*flags[:-2], "--adapter-column", "lora", "--data-dir", "data")
        wrong = CliRunner().invoke(cli, ["validate", "wrong.csv", *flags], obj=Session())
    assert result.exit_code == 0, result.output
    assert wrong.exit_code == 2
    for text in (
        "2: unknown_model: the column 'which' names 'three'; this job has one, s-one, ",
        "3: unknown_model: the column 'lora' names 'x'; this job has no adapters",
        "4: wrong_adapter: the column 'lora' names 'two', which is a model and no adapter; this job has no adapters",
    ):
        assert f"wrong.csv:{text}" in wrong.output, wrong.output
    with (tmp_path / "out.csv").open() as file:
        assert [row["output"] for row in csv.DictReader(file)] == ["s-two", "s-one", "s-one", "s-two"]
