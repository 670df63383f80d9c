"""`batchmill serve`: runs the server in the foreground until a signal stops it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import click
from msgspec.structs import replace

from batchmill.cli.session import EXIT_FAILED, EXIT_OK, Session, global_options
from batchmill.config import SERVER_MAX, Config
from batchmill.server import access_log
from batchmill.serving import REQUESTS_DRAIN_S, ROWS_DRAIN_S, Running
from batchmill.serving import serve as open_server

log = logging.getLogger("batchmill.server")

# New objects until they are searched for cycles, and how often until those are that stayed. With Python's 700, a job of
# five rows is searched several times while it runs, and little of it goes.
COLLECTED_AT = 10_000, 10, 10
# How long a thread waits until the event loop lets it have the interpreter. A client's write waits for that twice:
# before its transaction is committed in a thread, and after. Python's 5 ms are most of a short transaction.
SWITCH_S = 0.001
THREADS_S = 1.0  # for threads that still run when everything else is closed
EXIT_STUCK = 1
ON_RESUMPTION = "The next start resumes jobs that came over HTTP; `batchmill resume` resumes those of commands"


def own_threads() -> ThreadPoolExecutor:
    """Set a thread pool for the running loop, so that `leave` can limit how long it waits for the threads."""
    threads = ThreadPoolExecutor(thread_name_prefix="work")
    asyncio.get_running_loop().set_default_executor(threads)
    return threads


def end_within(seconds: float) -> None:
    """End this process after `seconds` in any case. Durable state is safe, as after a kill."""

    def end() -> None:
        log.error("the server did not end within %g s: it is killed now. %s", seconds, ON_RESUMPTION)
        _exit(EXIT_STUCK)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def leave(threads: ThreadPoolExecutor, code: int) -> None:
    """Return if all threads have ended. Otherwise end the process: Python would wait for the threads."""
    threads.shutdown(wait=False, cancel_futures=True)
    deadline = time.monotonic() + THREADS_S
    others = [each for each in threading.enumerate() if each is not threading.main_thread() and not each.daemon]
    for each in others:
        each.join(max(0.0, deadline - time.monotonic()))
    if stuck := [each.name for each in others if each.is_alive()]:
        log.warning("threads that did not end: %s", ", ".join(stuck[:10]))
        _exit(code)


def _exit(code: int) -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


SPARE_S = 5.0  # for everything but the requests and rows in flight


@click.command()
@global_options
@click.option("--host", metavar="ADDRESS", help="The address to listen on [127.0.0.1].")
@click.option(
    "--port", type=click.IntRange(0, SERVER_MAX["port"]), metavar="PORT", help="The port [8000]; 0: a free one."
)
@click.option(
    "--grpc-port",
    type=click.IntRange(0, SERVER_MAX["grpc_port"]),
    metavar="PORT",
    help="The port for gRPC (usually 8001); 0: a free one. Needs 'batchmill[grpc]'.",
)
@click.option(
    "--log-level", type=click.Choice(access_log.LEVELS), default="info", show_default=True,
    help="The log level for JSON lines on standard error.",
)  # fmt: skip
@click.pass_obj
def serve(session: Session, host: str | None, port: int | None, grpc_port: int | None, log_level: str) -> int:
    """Serve OpenAI's Files, Batches and live inference, and batchmill's own API, over HTTP.

    Models are those of the configuration. SIGTERM or Ctrl-C lets requests and rows in flight finish; a second one
    stops the server at once. Running jobs that came over HTTP resume at the next start.
    """
    session.local_only("serve", "it runs a server itself")
    config = session.config()
    options = {"host": host, "port": port, "grpc_port": grpc_port}
    fields = {name: value for name, value in options.items() if value is not None}
    config = replace(config, server=replace(config.server, **fields))
    access_log.configure(log_level)
    os.umask(0o077)  # files of the server and its workers are not readable by other users
    return session.run(_serve(session, config))


async def _serve(session: Session, config: Config) -> int:
    stop, threads, code = asyncio.Event(), own_threads(), EXIT_OK
    task, is_open, is_cut_off = asyncio.current_task(), False, False

    def begin_stop() -> None:
        nonlocal is_cut_off
        end_within(REQUESTS_DRAIN_S + ROWS_DRAIN_S + SPARE_S)
        stop.set()
        if task is not None and not is_open:
            is_cut_off = task.cancel()  # nothing runs yet, and a start may wait for minutes

    with session.interrupts.first_does(begin_stop, lambda: log.warning("stopping at once")):
        try:
            async with open_server(config) as running:
                is_open = True
                _tune_interpreter()
                _announce(session, running)
                if not await _stops_in_order(stop, running):
                    code = EXIT_FAILED
                    log.critical("this server ends because no job goes on. %s", ON_RESUMPTION)
                    begin_stop()
                log.info("stopping: requests and rows in flight may finish; a second signal stops at once")
        except asyncio.CancelledError:
            if task is None or not is_cut_off:
                raise
            task.uncancel()
            log.info("stopped before it served")
    leave(threads, code)
    return code


def _tune_interpreter() -> None:
    gc.collect()
    gc.freeze()  # these objects stay: scanning them again and again would delay every request
    gc.set_threshold(*COLLECTED_AT)
    sys.setswitchinterval(SWITCH_S)


def _announce(session: Session, running: Running) -> None:
    if session.as_json:
        more = {} if running.grpc is None else {"grpc": running.grpc}
        session.emit("serving", url=running.url, **more)
    else:
        session.print(f"batchmill listens on {running.url}")
        if running.grpc is not None:
            session.print(f"gRPC on {running.grpc}")


async def _stops_in_order(stop: asyncio.Event, running: Running) -> bool:
    """Wait until the server is to stop. Returns: False where it has failed."""
    waiting = [asyncio.ensure_future(each) for each in (stop.wait(), running.wait_failed())]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        return waiting[0].done()
    finally:
        for each in waiting:
            each.cancel()
