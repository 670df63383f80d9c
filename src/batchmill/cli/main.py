"""The command line: `batchmill COMMAND`. Parses, calls `batchmill.connection` and prints; a command costs its imports
only once it is called."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import click

from batchmill import __version__
from batchmill.cli.session import OutputClosed, Session, global_options

# command -> (module:attribute, what `batchmill --help` says of it)
COMMANDS = {
    "run": ("batchmill.cli.run:run", "Run every row of a dataset and write the results."),
    "validate": ("batchmill.cli.preview:validate", "Check every row; run none."),
    "plan": ("batchmill.cli.preview:plan", "Explain the order in which rows would run."),
    "estimate": ("batchmill.cli.preview:estimate", "Estimate tokens, cost and time before anything is spent."),
    "jobs": ("batchmill.cli.jobs:jobs", "List the jobs."),
    "show": ("batchmill.cli.jobs:show", "Show a job."),
    "results": ("batchmill.cli.jobs:results", "Print a job's results, with --partial while it runs."),
    "explain": ("batchmill.cli.tuning:explain", "Explain why a job waits, or goes no faster."),
    "amend": ("batchmill.cli.tuning:amend", "Change a job's priority, deadline or budget."),
    "cancel": ("batchmill.cli.jobs:cancel", "Cancel a job; finished rows are kept."),
    "pause": ("batchmill.cli.jobs:pause", "Pause a job."),
    "resume": ("batchmill.cli.jobs:resume", "Go on with a paused job."),
    "fail": ("batchmill.cli.jobs:fail", "Give up the rows of a job that fail and wait."),
    "retry": ("batchmill.cli.jobs:retry", "Run the rows again that failed, and only those."),
    "remote": ("batchmill.cli.remote_jobs:remote", "Look at a job's jobs at providers; settle unknown ones."),
    "serve": ("batchmill.cli.serve:serve", "Answer HTTP: batches, live inference, files."),
    "keys": ("batchmill.cli.keys:keys", "Make, list and revoke the keys of a server."),
    "secrets": ("batchmill.cli.secrets:secrets", "Keep keys of remote services, encrypted."),
    "connectors": ("batchmill.cli.connectors:connectors", "Describe remote APIs, and make models of them."),
    "adapters": ("batchmill.cli.adapters:adapters", "Register LoRA adapters of language models."),
    "llms": ("batchmill.cli.llms:llms", "Deploy language models; look after their engines."),
    "quarantine": ("batchmill.cli.quarantine:quarantine", "Requests that engines died of: list them, let them go."),
    "quotas": ("batchmill.cli.quotas:quotas", "What a project has of what it may have."),
    "deploy": ("batchmill.cli.deploy:deploy", "Make a Python function a model, with versions."),
    "models": ("batchmill.cli.models:models", "List models; look after those that were deployed."),
    "ledger": ("batchmill.cli.ledger:ledger", "Verify, rebuild or salvage the record of which rows are done."),
}


class CommandLine(click.Group):
    """Commands by name, imported when they are asked for; every error becomes one line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        return getattr(import_module(module), name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, told) for name, (_, told) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise OutputClosed from None  # click would end the process with the exit code of a failure

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> NoReturn:
        extra["standalone_mode"] = False
        session = extra.setdefault("obj", None) or Session()
        extra["obj"] = session
        session.args = list(sys.argv[1:] if args is None else args)
        sys.exit(session.guard(lambda: super(CommandLine, self).main(args, prog_name or "batchmill", **extra)))


@click.command(cls=CommandLine, context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=True)
@global_options
@click.version_option(__version__, prog_name="batchmill")
def cli() -> None:
    """Batch inference: a file of requests in, a file of results out, every row accounted for."""


def main() -> NoReturn:
    """The entry point of `batchmill`."""
    cli.main()
