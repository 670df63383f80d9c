"""--server: which server, with which key, and what has no meaning there. What a server does is told in the stories."""

import asyncio

import pytest
from click.testing import CliRunner

from batchmill.cli.jobs.run import follow
from batchmill.cli.main import cli
from batchmill.cli.session import Session
from batchmill.errors import InvalidInput
from batchmill.types import JobView

URL = "http://127.0.0.1:9"
RUN = ("run", "in.jsonl", "--server", URL, "--model", "m")
IN_PLACE = [
    ("--adapter", "a=b"), ("--base-url", "http://h/v1"), ("--engine-arg", "a=b"), ("--python", "python3"),
    ("--workers", "2"), ("--rpm", "5"), ("--tpm", "5"), ("--in-flight", "5"), ("--timeout", "5"), ("--copy",),
    ("--restart",), ("--gpus", "1"),
]  # fmt: skip


@pytest.fixture
def there(place):
    """Call the command line without an App of the test's: it works at the server it is told of."""
    return lambda *args: CliRunner().invoke(cli, list(args), obj=Session())


@pytest.mark.parametrize("flags", IN_PLACE, ids=lambda flags: flags[0])
def test_what_only_this_machine_can_do_is_refused_by_name(there, flags):
    """A flag that describes a model, or this machine, is refused at a server and not ignored."""
    result = there(*RUN, *flags)
    assert result.exit_code == 2 and f"{flags[0]} has no meaning at a server" in result.stderr


@pytest.mark.parametrize("model", ["function:app.py:f", "vllm:tiny", "openai:gpt", "app.py:f"])
def test_a_model_in_place_is_refused(there, model):
    """A server runs its own models: ENGINE:SOURCE is refused with where its names are listed."""
    result = there("run", "in.jsonl", "--server", URL, "--model", model)
    assert result.exit_code == 2 and "batchmill models" in result.stderr


@pytest.mark.parametrize("flags", [("--data-dir", "d"), ("--config", "c.toml")])
def test_a_servers_own_settings_are_its_own(there, flags):
    """A data directory or configuration beside a server is a contradiction, wherever the server was named."""
    result = there("jobs", *flags, "--server", URL)
    assert result.exit_code == 2 and f"leave {flags[0]} out" in result.stderr
    result = CliRunner(env={"BATCHMILL_SERVER": URL}).invoke(cli, ["jobs", *flags], obj=Session())
    assert result.exit_code == 2


def test_an_empty_server_is_this_machine(place, monkeypatch):
    """`--server ""` works here although the environment names a server."""
    monkeypatch.setenv("BATCHMILL_SERVER", URL)
    result = CliRunner().invoke(cli, ["jobs", "--server", ""], obj=Session())
    assert result.exit_code == 0 and "there are no jobs" in result.stdout


def test_a_broken_configuration_here_is_no_concern_there(place, there):
    """A server's commands do not read the batchmill.toml of the working directory."""
    (place / "batchmill.toml").write_text("nonsense")
    result = there("jobs", "--server", "http://127.0.0.1:1/?x")
    assert "is not an address of a server" in result.stderr


def test_commands_that_have_no_server_say_so(there):
    """`serve` and `ledger rebuild` work on a data directory: with --server they are refused."""
    for words in (("serve",), ("ledger", "rebuild", "job_1")):
        result = there(*words, "--server", URL)
        assert result.exit_code == 2 and "has no --server" in result.stderr


def test_a_key_comes_from_the_variable_that_is_named(monkeypatch):
    """--api-key-env names it, BATCHMILL_API_KEY is asked otherwise; one that is not set is an error."""
    session = Session()
    monkeypatch.setenv("BATCHMILL_API_KEY", "bm_default")
    assert session.api_key() == "bm_default"
    session.api_key_env = "MY_KEY"
    with pytest.raises(InvalidInput, match="MY_KEY"):
        session.api_key()
    monkeypatch.setenv("MY_KEY", "bm_mine")
    assert session.api_key() == "bm_mine"


class Shown:
    def __init__(self):
        self.views, self.said = [], []

    def update(self, view):
        self.views.append(view)

    def say(self, text):
        self.said.append(text)

    def close(self):
        pass


async def test_leaving_a_job_leaves_it_running():
    """Ctrl-C at a server ends the looking and nothing else: the job is not paused."""
    session = Session()
    session.server = URL
    display = Shown()
    looks = []

    class Jobs:
        async def watch(self, job_id, interval_s=0.5):
            looks.append(job_id)
            yield JobView(job_id, "running")
            session.interrupts._interrupt()
            await asyncio.Event().wait()

    with session.interrupts.catch():
        followed = await asyncio.wait_for(follow(Jobs(), "job_1", display, session=session), 10)
    assert followed.was_interrupted and followed.view.state == "running" and looks == ["job_1"]
    assert display.said == ["leaving: the job continues on the server"]
