"""An estimate of the real command line after a job of the same model."""

import json

from click.testing import CliRunner
from fakes.answering_service import AnsweringService, choice
from fakes.beside import beside

from batchmill.cli.main import cli
from batchmill.cli.session import Session


def test_an_estimate_learns_from_a_job(tmp_path, monkeypatch):
    """The output is as long as that of the job before, and not the most that the rows allow."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    (tmp_path / "few.jsonl").write_text("".join(json.dumps({"word": f"w{n}"}) + "\n" for n in range(4)))
    (tmp_path / "all.jsonl").write_text("".join(json.dumps({"word": f"w{n}"}) + "\n" for n in range(40)))
    with beside(AnsweringService(lambda body: choice("yes"))) as service:

        def call(verb, *args):
            flags = ("--model", "openai:m", "--base-url", service.url, "--data-dir", "data", "--prompt", "{word}?")
            result = CliRunner().invoke(
                cli, [verb, *args, *flags, "--param", "max_tokens=1000", "--json"], obj=Session()
            )
            assert result.exit_code == 0, result.output
            return json.loads(result.stdout.splitlines()[-1])

        before = call("estimate", "all.jsonl")["estimate"]
        job = call("run", "few.jsonl", "-o", "few.out.jsonl")["job"]
        after = call("estimate", "all.jsonl")["estimate"]
        assert before["output_tokens"]["mid"] == 40_000 and not before["models"][0]["learned_from"]
        assert after["output_tokens"]["mid"] == job["usage"]["output_tokens"] * 10 > 0
        assert (after["models"][0]["learned_from"], after["models"][0]["learned_rows"]) == ([job["id"]], 4)
        assert any("output tokens as in 4 rows of this work" in note for note in after["notes"])
        rest = call("estimate", "all.jsonl", "--reuse")["estimate"]
        assert (rest["run"], rest["output_tokens"]["mid"]) == (40, job["usage"]["output_tokens"] * 9)
        assert rest["models"][0]["output_tokens"]["mid"] == rest["output_tokens"]["mid"]
        assert any(note.startswith("4 of the rows that run take over") for note in rest["notes"])
