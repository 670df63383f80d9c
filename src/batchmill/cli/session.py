"""What all commands share: the global options, the configuration, the choice of `App`, signals, and the conversion of
errors to one line and an exit code.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, TypeVar

import click
from msgspec import Struct

from batchmill import config
from batchmill.cli.text import CHARS_MAX, clean, json_line
from batchmill.config import Config
from batchmill.errors import BatchmillError, InvalidInput, JobPaused, ModelFailed, StorageFailed, to_storage_error
from batchmill.imports import import_large
from batchmill.models import redaction
from batchmill.types import JobOrder, JobView, ModelSpec, OutputSchema, SalvageReport
from batchmill.wire.native import DeployReply, ModelInfo

if TYPE_CHECKING:
    from batchmill.cli.clients import JobsClient
    from batchmill.client.asynchronous import AsyncClient
    from batchmill.wire.native import Estimate, Explanation, SealReport


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SIGNAL_S = 0.2  # in which a signal comes that has ended another process of the shell's group


class Interrupts:
    """Handles signals. The first one calls the function set with `first_does`, if any; otherwise it stops the command.

    Stopping cancels the command's task once: further signals must not disturb it while it closes.
    """

    def __init__(self) -> None:
        self.count = 0
        self._task: asyncio.Task[object] | None = None
        self._first: Callable[[], None] | None = None
        self._stopping: Callable[[], None] = lambda: None
        self._is_stopped = False

    @contextlib.contextmanager
    def catch(self) -> Iterator[None]:
        """Catch the signals for the running task. A signal that is ignored, as with nohup, stays ignored."""
        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        signals = [each for each in SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
        for each in signals:
            loop.add_signal_handler(each, self._interrupt)
        try:
            yield
        finally:
            for each in signals:
                loop.remove_signal_handler(each)

    @contextlib.contextmanager
    def first_does(self, first: Callable[[], None], stopping: Callable[[], None]) -> Iterator[None]:
        """Call `first` at the first signal instead of stopping, and `stopping` when another one stops the command. Both
        may print a message, as the last thing they do.

        Afterwards a first signal does nothing: the command is about to end by itself.
        """
        self._first, self._stopping = first, stopping
        try:
            yield
        finally:
            self._first = self._stopping = lambda: None

    async def tell_from_closing(self, error: BrokenPipeError) -> None:
        """Return if a signal has ended who reads this command's messages, as Ctrl-C in a shell does where they go
        through a pipe. Raises: the error, if a reader has closed them.
        """
        if not self.count:
            await asyncio.sleep(SIGNAL_S)
        if not self.count:
            raise error

    def _interrupt(self) -> None:
        self.count += 1
        with contextlib.suppress(BrokenPipeError):  # from what is said: see above
            if self.count == 1 and self._first is not None:
                self._first()
            elif not self._is_stopped and self._task is not None:
                self._is_stopped = True
                self._task.cancel()
                self._stopping()


EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_ROWS_FAILED, EXIT_PAUSED, EXIT_INTERRUPTED = 0, 1, 2, 3, 4, 130
TRACE_CHARS_MAX = 20_000
EXIT_PIPE = 141  # what a shell reports for a process that SIGPIPE ended
LOCAL, REMOTE = "batchmill.cli.local", "batchmill.cli.remote"  # modules with a function `app`
SERVER, API_KEY = "BATCHMILL_SERVER", "BATCHMILL_API_KEY"

C = TypeVar("C", bound=Callable[..., Any])
Progress = Callable[[float], None]
GLOBAL = ("verbose", "as_json", "config_file", "data_dir", "server", "api_key_env")


class OutputClosed(Exception):
    """The reader of the output closed it."""


class ResultStream(Struct, frozen=True):
    """A result file that is being read: its name, and its bytes in pieces."""

    name: str
    pieces: AsyncIterator[bytes]


class App(Protocol):
    """The operations that commands call, whether jobs run on this machine or at a server."""

    def salvage(self, config: Config, progress: Callable[[str], None]) -> SalvageReport:
        """Salvage a database on this machine. Raises: InvalidConfig if another process uses the data directory."""

    def open_jobs(self, config: Config, project: str | None = None) -> AbstractAsyncContextManager[JobsClient]:
        """Open the jobs. Args: project: lists only its jobs, on this machine; None: those of all projects."""

    def preview_validate(self, order: JobOrder, config: Config, progress: Progress) -> Awaitable[SealReport]: ...

    def preview_plan(
        self, order: JobOrder, config: Config, progress: Progress
    ) -> Awaitable[tuple[SealReport, Explanation | None]]:
        """The plan is None if the dataset was refused."""

    def preview_estimate(
        self, order: JobOrder, config: Config, progress: Progress
    ) -> Awaitable[tuple[SealReport, Estimate | None]]: ...

    def partial_results(self, config: Config, job_id: str, out: BinaryIO, *, sampled: bool = False) -> Awaitable[int]:
        """Write the lines of every finished row, in row order. Returns: their number.

        Args: sampled: only of the rows of the job's sample.
        """

    def results(self, config: Config, view: JobView, *, errors: bool) -> AbstractAsyncContextManager[ResultStream]:
        """The result file, or the error file, of a job that has ended."""

    def inputs(self, config: Config, view: JobView, folder: Path) -> Awaitable[list[str]]:
        """The input files of a job, in their order: paths, or URLs of objects. Raises: InvalidInput.

        Args: folder: an empty one for files of a server.
        """

    def models(self, config: Config) -> Awaitable[list[ModelInfo]]: ...

    def open(self, config: Config, project: str | None) -> AbstractAsyncContextManager[AsyncClient]:
        """The SDK, at a server or over the connection to the owner of a data directory.

        Args: project: acts for this project, on this machine; None: each operation has a default.
        """

    def deploy(self, client: AsyncClient, config: Config, bundle: BinaryIO) -> Awaitable[DeployReply]:
        """Raises: InvalidInput; ModelFailed (`deploy_failed`) with the traceback."""

    def deployed_schema(self, config: Config, name: str) -> Awaitable[OutputSchema]:
        """The deployed class with this name, as jobs have it; a server resolves the name. Raises: UnknownName."""

    def deployed(self, config: Config, name: str) -> Awaitable[ModelSpec | None]:
        """The deployed function or the model of a connector with this name.

        None: there is none, or the server resolves the name.
        """

    def adapted(self, config: Config, model: ModelSpec) -> Awaitable[ModelSpec]:
        """A model with the adapters that are registered for it."""


class Session:
    """One call of the command line. Tests pass their own App."""

    def __init__(self, app: App | None = None) -> None:
        self._app = app
        self.data_dir: str | None = None
        self.config_file: str | None = None
        self.server: str | None = None
        self.api_key_env: str | None = None
        self.as_json = False
        self.verbose = False
        self.prints_to_stderr = False  # standard output has results
        self.args: list[str] = []  # the command line
        self.interrupts = Interrupts()

    @property
    def app(self) -> App:
        if self._app is None:
            self._app = import_large(LOCAL if self.server_url is None else REMOTE).app(self)
        return self._app

    @property
    def server_url(self) -> str | None:
        """The server for commands; None: they work on this machine."""
        return (os.environ.get(SERVER) if self.server is None else self.server) or None

    def open(self, project: str | None = None) -> AbstractAsyncContextManager[AsyncClient]:
        """Open the SDK with the configuration; see `App.open`."""
        return self.app.open(self.config(), project)

    def absolute(self, reference: str) -> str:
        """A reference to a secret; that of a file with an absolute path, because the owner runs in another folder."""
        kind, _, path = reference.partition(":")
        return f"file:{os.path.abspath(Path(path).expanduser())}" if kind == "file" else reference

    def api_key(self) -> str | None:
        """The key for the server. Raises: InvalidInput if the variable of --api-key-env is not set."""
        key = os.environ.get(self.api_key_env or API_KEY)
        if self.api_key_env is not None and not key:
            raise InvalidInput(f"the environment variable {self.api_key_env} of --api-key-env is not set")
        if key is not None:
            redaction.learn(key)
        return key

    def local_only(self, command: str, why: str) -> None:
        """Refuse --server, and ignore the server of the environment. Raises: InvalidInput."""
        if self.server:
            raise InvalidInput(f"`batchmill {command}` has no --server: {why}")
        self.server = ""

    @property
    def cwd(self) -> Path:
        return Path.cwd()

    def config(self, *, executor: str | None = None) -> Config:
        """Load the configuration.

        Args: executor: instead of cluster.executor.
        Raises: InvalidConfig; InvalidInput for a flag that has no meaning at a server.
        """
        if self.server_url is not None:
            for flag, value in (("--data-dir", self.data_dir), ("--config", self.config_file)):
                if value is not None:
                    raise InvalidInput(
                        f"the server {self.server_url} has its own: leave {flag} out, or work on this machine with "
                        '--server ""'
                    )
        loaded = config.load(
            environ=os.environ, cwd=self.cwd, data_dir=self.data_dir, config_file=self.config_file,
            reads_file=self.server_url is None, executor=executor,
        )  # fmt: skip
        refuse_non_utf8(str(loaded.data_dir))
        return loaded

    def run(self, work: Coroutine[Any, Any, int | None]) -> int:
        """Run a command's coroutine to its exit code."""

        async def run_interruptible() -> int | None:
            with self.interrupts.catch():
                return await work

        try:
            return asyncio.run(run_interruptible()) or EXIT_OK
        except (asyncio.CancelledError, KeyboardInterrupt):
            self.say("stopped; finished rows are kept, and the same command resumes the job")
            return EXIT_INTERRUPTED

    def print(self, text: str = "") -> None:
        click.echo(text, err=self.prints_to_stderr)

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
            if self.as_json or "--json" in self.args:  # --json may follow an argument that could not be parsed
                self.emit("error", code="usage", message=error.format_message())
            error.show()
            return EXIT_USAGE
        except (click.Abort, KeyboardInterrupt):
            self.say("interrupted")
            return EXIT_INTERRUPTED
        except (OutputClosed, BrokenPipeError):
            # Otherwise Python reports another error when it flushes at exit.
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
        # A message with a traceback may be long: its last line matters most.
        chars_max = TRACE_CHARS_MAX if isinstance(error, ModelFailed) else CHARS_MAX
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
        except (OSError, BatchmillError):  # no file can be written: print the details instead
            self.say(f"{message}\n{_trace(error)}")
            return EXIT_FAILED
        self.say(f"{message} (details: {path})")
        return EXIT_FAILED


def _trace(error: BaseException) -> str:
    return clean(redaction.mask("".join(traceback.format_exception(error))), chars_max=100_000, lines=True)


def _single(error: BaseException) -> BaseException:
    """The only error of a task group, however nested."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def refuse_non_utf8(text: str) -> str:
    """Return `text` if it can be encoded as UTF-8. Raises: InvalidInput."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"{text!r} is not UTF-8: rename the file, or write the text in UTF-8") from None
    return text


def job_argument(command: C) -> C:
    """Add the argument for the id of a job, or a prefix of it."""
    return click.argument("job_id", metavar="ID", callback=lambda ctx, param, value: refuse_non_utf8(value))(command)


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Store a global option in the session, wherever it is on the command line; the last one wins."""
    if value not in (None, False):
        assert param.name is not None
        setattr(ctx.ensure_object(Session), param.name, value)


def global_options(command: C) -> C:
    """Add the options that may come before or after a command's name."""
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
