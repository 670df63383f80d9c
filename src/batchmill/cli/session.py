"""What every command shares: the global options, the configuration, the way to `batchmill.connection`, and the edge
at which errors become one line and an exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, TypeVar

import click
from msgspec import Struct

from batchmill import config
from batchmill.cli.text import CHARS_MAX, clean, json_line
from batchmill.config import Config
from batchmill.errors import BatchmillError, InvalidInput, JobPaused, ModelFailed, StorageFailed, to_storage_error
from batchmill.models import redaction
from batchmill.types import JobOrder, JobView, ModelSpec, SalvageReport
from batchmill.wire.native import DeployReply, ModelInfo

if TYPE_CHECKING:
    from batchmill.cli.clients import JobsClient
    from batchmill.client.asynchronous import AsyncClient
    from batchmill.wire.native import Estimate, Explanation, SealReport


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """The first signal does what somebody asked for with `first_does`, if anybody did; else it stops the command.

    Stopping cancels the command's task, once: whatever comes after that must not disturb what it still has to close.
    """

    def __init__(self) -> None:
        self.count = 0
        self._task: asyncio.Task[object] | None = None
        self._first: Callable[[], None] | None = None
        self._stopping: Callable[[], None] = lambda: None
        self._is_stopped = False

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Catch the signals for the running task. One that is ignored, as by nohup, stays so."""
        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        caught = [each for each in SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
        for each in caught:
            loop.add_signal_handler(each, self._interrupt)
        try:
            yield
        finally:
            for each in caught:
                loop.remove_signal_handler(each)

    @contextlib.contextmanager
    def first_does(self, first: Callable[[], None], stopping: Callable[[], None]) -> Iterator[None]:
        """Call `first` at the first signal instead of stopping, and `stopping` when another one stops the command.

        A first signal that comes later does nothing: the command is about to end by itself, and orderly.
        """
        self._first, self._stopping = first, stopping
        try:
            yield
        finally:
            self._first = self._stopping = lambda: None

    def _interrupt(self) -> None:
        self.count += 1
        if self.count == 1 and self._first is not None:
            self._first()
        elif not self._is_stopped and self._task is not None:
            self._is_stopped = True
            self._stopping()
            self._task.cancel()


EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_ROWS_FAILED, EXIT_PAUSED, EXIT_INTERRUPTED = 0, 1, 2, 3, 4, 130
TRACE_CHARS_MAX = 20_000
EXIT_PIPE = 141  # as a shell shows a process that SIGPIPE ended
LOCAL, REMOTE = "batchmill.cli.local", "batchmill.cli.remote"  # modules that have an `app`
SERVER, API_KEY = "BATCHMILL_SERVER", "BATCHMILL_API_KEY"

C = TypeVar("C", bound=Callable[..., Any])
Progress = Callable[[float], None]
GLOBAL = ("verbose", "as_json", "config_file", "data_dir", "server", "api_key_env")


class OutputClosed(Exception):
    """The reader of our output has gone."""


class ResultStream(Struct, frozen=True):
    """A result file that is being read: what it is called, and its bytes in pieces."""

    name: str
    pieces: AsyncIterator[bytes]


class App(Protocol):
    """What commands call: the same whether jobs run on this machine or at a server."""

    def salvage(self, config: Config, progress: Callable[[str], None]) -> SalvageReport:
        """On this machine alone. Raises: InvalidConfig while another process uses the data directory."""

    def open_jobs(self, config: Config, project: str | None = None) -> AbstractAsyncContextManager[JobsClient]:
        """Args: project: whose are listed, on this machine; None: everybody's."""

    def preview_validate(self, order: JobOrder, config: Config, progress: Progress) -> Awaitable[SealReport]: ...

    def preview_plan(
        self, order: JobOrder, config: Config, progress: Progress
    ) -> Awaitable[tuple[SealReport, Explanation | None]]:
        """The plan is None where the dataset was refused."""

    def preview_estimate(
        self, order: JobOrder, config: Config, progress: Progress
    ) -> Awaitable[tuple[SealReport, Estimate | None]]: ...

    def partial_results(self, config: Config, job_id: str, out: BinaryIO) -> Awaitable[int]:
        """Write the lines of every row that has its outcome, in row order; return how many."""

    def results(self, config: Config, view: JobView, *, errors: bool) -> AbstractAsyncContextManager[ResultStream]:
        """The result file, or the error file, of a job that has ended."""

    def models(self, config: Config) -> Awaitable[list[ModelInfo]]: ...

    def open(self, config: Config, project: str | None) -> AbstractAsyncContextManager[AsyncClient]:
        """The SDK, at a server or over the connection to the owner of a data directory.

        Args: project: on whose behalf, on this machine; None: as each operation says.
        """

    def deploy(self, opened: AsyncClient, config: Config, bundle: BinaryIO) -> Awaitable[DeployReply]:
        """Raises: InvalidInput; ModelFailed (`deploy_failed`) with the traceback."""

    def deployed(self, config: Config, name: str) -> Awaitable[ModelSpec | None]:
        """The deployed function, or the model of a connector, that a name means here.

        None: there is none, or a server is to say.
        """

    def adapted(self, config: Config, model: ModelSpec) -> Awaitable[ModelSpec]:
        """A model with the adapters that were registered for it here."""


class Session:
    """One call of the command line. Tests hand in an App of their own."""

    def __init__(self, app: App | None = None) -> None:
        self._app = app
        self.data_dir: str | None = None
        self.config_file: str | None = None
        self.server: str | None = None
        self.api_key_env: str | None = None
        self.as_json = False
        self.verbose = False
        self.args: list[str] = []  # as they were typed
        self.interrupts = Interrupts()

    @property
    def app(self) -> App:
        if self._app is None:
            self._app = import_module(LOCAL if self.server_url is None else REMOTE).app(self)
        return self._app

    @property
    def server_url(self) -> str | None:
        """The server that commands work at; None: they work on this machine."""
        return (os.environ.get(SERVER) if self.server is None else self.server) or None

    def open(self, project: str | None = None) -> AbstractAsyncContextManager[AsyncClient]:
        """What is asked, wherever that is; see `App.open`."""
        return self.app.open(self.config(), project)

    def absolute(self, reference: str) -> str:
        """A reference to a secret, a file's by its absolute path: the owner runs in another folder."""
        kind, _, path = reference.partition(":")
        return f"file:{os.path.abspath(Path(path).expanduser())}" if kind == "file" else reference

    def api_key(self) -> str | None:
        """The key for that server. Raises: InvalidInput when the variable that was named is not set."""
        key = os.environ.get(self.api_key_env or API_KEY)
        if self.api_key_env is not None and not key:
            raise InvalidInput(f"the environment variable {self.api_key_env} of --api-key-env is not set")
        if key is not None:
            redaction.learn(key)
        return key

    def local_only(self, command: str, why: str) -> None:
        """Refuse --server, and stay on this machine whatever the environment says. Raises: InvalidInput."""
        if self.server:
            raise InvalidInput(f"`batchmill {command}` has no --server: {why}")
        self.server = ""

    @property
    def cwd(self) -> Path:
        return Path.cwd()

    def config(self) -> Config:
        """Raises: InvalidConfig; InvalidInput for a flag that says nothing to a server."""
        if self.server_url is not None:
            for flag, value in (("--data-dir", self.data_dir), ("--config", self.config_file)):
                if value is not None:
                    raise InvalidInput(
                        f"the server {self.server_url} has its own: leave {flag} out, or work on this machine with "
                        '--server ""'
                    )
        found = config.load(
            environ=os.environ, cwd=self.cwd, data_dir=self.data_dir, config_file=self.config_file,
            reads_file=self.server_url is None,
        )  # fmt: skip
        refuse_half_text(str(found.data_dir))
        return found

    def run(self, work: Coroutine[Any, Any, int | None]) -> int:
        """Run a command's coroutine to its exit code."""

        async def caught() -> int | None:
            with self.interrupts.caught():
                return await work

        try:
            return asyncio.run(caught()) or EXIT_OK
        except (asyncio.CancelledError, KeyboardInterrupt):
            self.say("stopped; finished rows are kept, and the same command resumes the job")
            return EXIT_INTERRUPTED

    def print(self, text: str = "") -> None:
        click.echo(text)

    def say(self, text: str) -> None:
        click.echo(text, err=True)

    def emit(self, kind: str, **fields: Any) -> None:
        """One JSON object on standard output."""
        click.echo(json_line({"type": kind, **fields}))

    def guard(self, call: Callable[[], Any]) -> int:
        """Run a command and turn whatever it raises into a message and an exit code."""
        try:
            code = call()
            sys.stdout.flush()
            return code if isinstance(code, int) else EXIT_OK
        except click.ClickException as error:
            if self.as_json or "--json" in self.args:  # the flag may follow an argument that could not be parsed
                self.emit("error", code="usage", message=error.format_message())
            error.show()
            return EXIT_USAGE
        except (click.Abort, KeyboardInterrupt):
            self.say("interrupted")
            return EXIT_INTERRUPTED
        except (OutputClosed, BrokenPipeError):
            # Python would complain once more when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_PIPE
        except Exception as error:  # the outermost handler: nothing above reports the error
            return self._failed(_single(error))

    def _failed(self, error: BaseException) -> int:
        if isinstance(error, OSError):
            error = to_storage_error(error, refusals=True) or error
        if not isinstance(error, BatchmillError):
            return self._crashed(error)
        if self.as_json:
            self.emit("error", code=error.code, message=error.message)
        chars_max = TRACE_CHARS_MAX if isinstance(error, ModelFailed) else CHARS_MAX  # its last line says most
        self.say(f"batchmill: {clean(error.message, chars_max, lines=True)}")
        if self.verbose:
            self.say(_trace(error))
        if isinstance(error, JobPaused) and not isinstance(error, StorageFailed):
            return EXIT_PAUSED
        return EXIT_USAGE if isinstance(error, InvalidInput) else EXIT_FAILED

    def _crashed(self, error: BaseException) -> int:
        if self.as_json:
            self.emit("error", code="internal_error", message=redaction.mask(str(error)))
        message = f"batchmill: internal error: {type(error).__name__}: {clean(redaction.mask(str(error)))}"
        if self.verbose:
            self.say(f"{message}\n{_trace(error)}")
            return EXIT_FAILED
        try:
            folder = self.config().data_dir / "crashes"
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}.log"
            path.write_text(f"{' '.join(sys.argv)}\n{_trace(error)}\n", encoding="utf-8", errors="backslashreplace")
        except (OSError, BatchmillError):  # no place to write to: then the terminal is it
            self.say(f"{message}\n{_trace(error)}")
            return EXIT_FAILED
        self.say(f"{message} (details: {path})")
        return EXIT_FAILED


def _trace(error: BaseException) -> str:
    return clean(redaction.mask("".join(traceback.format_exception(error))), chars_max=100_000, lines=True)


def _single(error: BaseException) -> BaseException:
    """The one error of a task group that failed for one reason."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def refuse_half_text(text: str) -> str:
    """`text`, unless it holds bytes that are no UTF-8. Raises: InvalidInput."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"{text!r} is not UTF-8: rename the file, or write the text in UTF-8") from None
    return text


def job_argument(command: C) -> C:
    """The id of a job, or its first letters."""
    return click.argument("job_id", metavar="ID", callback=lambda ctx, param, value: refuse_half_text(value))(command)


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Keep a global option in the session, wherever on the line it stood; the last one wins."""
    if value not in (None, False):
        assert param.name is not None
        setattr(ctx.ensure_object(Session), param.name, value)


def global_options(command: C) -> C:
    """The options that may come before or after a command's name."""
    for option in (
        click.option("--verbose", is_flag=True, help="Show tracebacks of errors."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line on standard output."),
        click.option("--config", "config_file", metavar="FILE", help="The configuration file [batchmill.toml]."),
        click.option("--data-dir", metavar="DIR", help="The data directory."),
        click.option(
            "--api-key-env",
            metavar="NAME",
            help="The environment variable that holds the key for --server "
            f"[{API_KEY}], or for the service at --base-url.",
        ),
        click.option("--server", metavar="URL", help=f"Use this server [{SERVER}]."),
    ):
        command = option(command)
    for param in getattr(command, "params", getattr(command, "__click_params__", [])):
        if param.name in GLOBAL:
            param.callback, param.expose_value = _remember, False
    return command
