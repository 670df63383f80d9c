"""`batchmill serve`: the server in the foreground, until a signal ends it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os

import click
from msgspec.structs import replace

from batchmill.cli import ending
from batchmill.cli.session import EXIT_OK, Session, global_options
from batchmill.config import SERVER_MAX, Config
from batchmill.server import access_log
from batchmill.serving import REQUESTS_DRAIN_S, ROWS_DRAIN_S
from batchmill.serving import serve as open_server

SPARE_S = 5.0  # besides what requests and rows have to end, for everything else

log = logging.getLogger("batchmill.server")


@click.command()
@global_options
@click.option("--host", metavar="ADDRESS", help="Where to listen [127.0.0.1].")
@click.option(
    "--port", type=click.IntRange(0, SERVER_MAX["port"]), metavar="PORT", help="The port [8000]; 0: any that is free."
)
@click.option(
    "--grpc-port",
    type=click.IntRange(0, SERVER_MAX["grpc_port"]),
    metavar="PORT",
    help="Take tensors over gRPC too, on this port (usually 8001); 0: any that is free. Needs 'batchmill[grpc]'.",
)
@click.option(
    "--log-level", type=click.Choice(access_log.LEVELS), default="info", show_default=True,
    help="What is written to standard error, as JSON lines.",
)  # fmt: skip
@click.pass_obj
def serve(session: Session, host: str | None, port: int | None, grpc_port: int | None, log_level: str) -> int:
    """Answer HTTP: OpenAI's files, batches and live inference, and batchmill's own API.

    Models are those of the configuration. SIGTERM or Ctrl-C ends requests and rows under way and stops; a second one
    stops at once. Jobs that were running go on with the next start.
    """
    session.local_only("serve", "it is one")
    config = session.config()
    given = {"host": host, "port": port, "grpc_port": grpc_port}
    told = {name: value for name, value in given.items() if value is not None}
    config = replace(config, server=replace(config.server, **told))
    access_log.configure(log_level)
    os.umask(0o077)  # whatever the server and its workers write is for nobody else on this machine
    return session.run(_serve(session, config))


async def _serve(session: Session, config: Config) -> int:
    stop, threads = asyncio.Event(), ending.own_threads()

    def stop_orderly() -> None:
        ending.end_within(REQUESTS_DRAIN_S + ROWS_DRAIN_S + SPARE_S)
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
            log.info("stopping: requests and rows under way may end; once more stops at once")
    ending.leave(threads, EXIT_OK)
    return EXIT_OK
