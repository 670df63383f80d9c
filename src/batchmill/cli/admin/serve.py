"""`batchmill serve`: the server in the foreground, until a signal ends it."""

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

from batchmill.cli.session import EXIT_OK, Session, global_options
from batchmill.config import SERVER_MAX, Config
from batchmill.server import access_log
from batchmill.serving import REQUESTS_DRAIN_S, ROWS_DRAIN_S
from batchmill.serving import serve as open_server

log = logging.getLogger("batchmill.server")

THREADS_S = 1.0  # for threads that are at work when everything else has been closed
EXIT_STUCK = 1


def own_threads() -> ThreadPoolExecutor:
    """Have the running loop's work in threads done by these: `leave` does not wait for them without an end."""
    threads = ThreadPoolExecutor(thread_name_prefix="work")
    asyncio.get_running_loop().set_default_executor(threads)
    return threads


def end_within(seconds: float) -> None:
    """End this process then, whatever it does. What is durable stays so, as after a kill."""

    def end() -> None:
        log.error(
            "the server did not end within %g s: it is stopped now, and its jobs resume at the next start", seconds
        )
        _exit(EXIT_STUCK)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def leave(threads: ThreadPoolExecutor, code: int) -> None:
    """Return where no thread is at work any more; else end the process, which Python would keep for their sake."""
    threads.shutdown(wait=False, cancel_futures=True)
    until = time.monotonic() + THREADS_S
    others = [each for each in threading.enumerate() if each is not threading.main_thread() and not each.daemon]
    for each in others:
        each.join(max(0.0, until - time.monotonic()))
    if stuck := [each.name for each in others if each.is_alive()]:
        log.warning("threads that did not end: %s", ", ".join(stuck[:10]))
        _exit(code)


def _exit(code: int) -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


SPARE_S = 5.0  # besides what requests and rows have to end, for everything else


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
    stops the server at once. Running jobs resume at the next start.
    """
    session.local_only("serve", "it is one")
    config = session.config()
    given = {"host": host, "port": port, "grpc_port": grpc_port}
    fields = {name: value for name, value in given.items() if value is not None}
    config = replace(config, server=replace(config.server, **fields))
    access_log.configure(log_level)
    os.umask(0o077)  # files of the server and its workers are not readable by other users
    return session.run(_serve(session, config))


async def _serve(session: Session, config: Config) -> int:
    stop, threads = asyncio.Event(), own_threads()

    def stop_orderly() -> None:
        end_within(REQUESTS_DRAIN_S + ROWS_DRAIN_S + SPARE_S)
        stop.set()

    with session.interrupts.first_does(stop_orderly, lambda: log.warning("stopping at once")):
        async with open_server(config) as running:
            gc.collect()
            gc.freeze()  # what is there now stays: to look at it again and again would hold up every request
            if session.as_json:
                more = {} if running.grpc is None else {"grpc": running.grpc}
                session.emit("serving", url=running.url, **more)
            else:
                session.print(f"batchmill listens on {running.url}")
                if running.grpc is not None:
                    session.print(f"gRPC on {running.grpc}")
            await stop.wait()
            log.info("stopping: requests and rows in flight may finish; a second signal stops at once")
    leave(threads, EXIT_OK)
    return EXIT_OK
