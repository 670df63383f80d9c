"""The command line: `batchmill COMMAND`. Parses, calls `batchmill.connection` and prints.

A command is imported only when it is called.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from batchmill import __version__
from batchmill.cli.session import OutputClosed, Session, global_options
from batchmill.imports import import_large

# command -> (module:attribute, its line in `batchmill --help`)
COMMANDS = {
    "run": ("batchmill.cli.jobs.run:run", "Run every row of a dataset and write the results."),
    "validate": ("batchmill.cli.jobs.preview:validate", "Check every row; run nothing."),
    "plan": ("batchmill.cli.jobs.preview:plan", "Explain the order in which rows would run."),
    "estimate": ("batchmill.cli.jobs.preview:estimate", "Estimate tokens, cost and time before anything is spent."),
    "jobs": ("batchmill.cli.jobs.jobs:jobs", "List the jobs."),
    "show": ("batchmill.cli.jobs.jobs:show", "Show a job."),
    "results": ("batchmill.cli.jobs.results:results", "Print or write a job's results, with --partial while it runs."),
    "diff": ("batchmill.cli.jobs.diff:diff", "Show the rows of two jobs whose answers differ."),
    "sql": ("batchmill.cli.jobs.sql:sql", "Query the results and the input of a job with DuckDB."),
    "explain": ("batchmill.cli.jobs.jobs:explain", "Explain why a job waits or is slow."),
    "amend": ("batchmill.cli.jobs.jobs:amend", "Change a job's priority, deadline or budget."),
    "cancel": ("batchmill.cli.jobs.jobs:cancel", "Cancel a job; finished rows are kept."),
    "pause": ("batchmill.cli.jobs.jobs:pause", "Pause a job."),
    "resume": ("batchmill.cli.jobs.jobs:resume", "Resume a paused job."),
    "fail": ("batchmill.cli.jobs.jobs:fail", "Give up failing rows of a job that waits."),
    "retry": ("batchmill.cli.jobs.jobs:retry", "Run the failed rows again."),
    "remote": ("batchmill.cli.jobs.remote_jobs:remote", "List a job's provider jobs; resolve unknown submissions."),
    "serve": ("batchmill.cli.admin.serve:serve", "Serve batches, live inference and files over HTTP."),
    "keys": ("batchmill.cli.admin.keys:keys", "Create, list and revoke API keys of a server."),
    "secrets": ("batchmill.cli.admin.secrets:secrets", "Store keys of remote services, encrypted."),
    "connectors": ("batchmill.cli.models.connectors:connectors", "Manage connectors to remote APIs, and their models."),
    "adapters": ("batchmill.cli.models.adapters:adapters", "Register LoRA adapters of language models."),
    "llms": ("batchmill.cli.models.llms:llms", "Deploy language models; manage their engines."),
    "quarantine": ("batchmill.cli.models.llms:quarantine", "List and release requests that crashed engines."),
    "quotas": ("batchmill.cli.models.llms:quotas", "Show a project's usage of its quotas."),
    "deploy": ("batchmill.cli.models.deploy:deploy", "Deploy a Python function as a model with versions."),
    "models": ("batchmill.cli.models.models:models", "List models; manage deployed functions."),
    "cluster": ("batchmill.cli.admin.cluster:cluster", "Show the nodes of a cluster, and what runs or waits."),
    "doctor": ("batchmill.cli.admin.cluster:doctor", "Check what batchmill uses beyond this machine."),
    "storage": ("batchmill.cli.admin.storage:storage", "Show or replace the owner of an object store's prefix."),
    "ledger": ("batchmill.cli.jobs.ledger:ledger", "Verify, rebuild or salvage the record of finished rows."),
}


class CommandLine(click.Group):
    """Imports commands when they are called, and turns every error into one line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        return getattr(import_large(module), name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])

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
    """Batch inference: a file of requests in, a file of results out, one result for each row."""


def main() -> NoReturn:
    """The entry point of `batchmill`."""
    try:
        cli.main()
    except SystemExit as end:
        if threading.active_count() > 1:  # Python waits for the others
            raise
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # `guard` has reported it
                if stream is not None:  # its descriptor was closed before this process started
                    stream.flush()
        assert isinstance(end.code, int), "`guard` returns a number"
        os._exit(end.code)  # taking all modules apart would take a tenth of a second
