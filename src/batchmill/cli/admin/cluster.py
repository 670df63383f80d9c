"""`batchmill cluster` and `batchmill doctor`: the cluster on which workers run, and what is wrong with it."""

from __future__ import annotations

import asyncio

import click

from batchmill.cli.session import EXIT_FAILED, EXIT_OK, Session, global_options
from batchmill.cli.text import clean, table
from batchmill.client.calls import typed_request
from batchmill.control.operations import SHOW_CLUSTER
from batchmill.services.doctor import examine
from batchmill.types.cluster import Check, ClusterNode, ClusterView
from batchmill.types.machines import size_text

BESIDE = "run it on the server's machine, in its data directory"
SHOWN_CHARS = 1000
SHORT_ID = 8


@click.command()
@global_options
@click.pass_obj
def cluster(session: Session) -> int:
    """Show the cluster: its nodes and their resources, what runs where, and what waits."""
    session.local_only("cluster", BESIDE)
    return session.run(_cluster(session))


@click.command()
@global_options
@click.pass_obj
def doctor(session: Session) -> int:
    """Check what batchmill is configured to use, and say what to do. Exit code 1 if something is wrong."""
    session.local_only("doctor", BESIDE)
    return session.run(_doctor(session))


async def _view(session: Session) -> ClusterView:
    async with session.open() as client:
        return await client.call(typed_request(SHOW_CLUSTER))


async def _cluster(session: Session) -> int:
    view = await _view(session)
    if session.as_json:
        session.emit("cluster", cluster=view)
        return EXIT_OK
    session.print(f"cluster {clean(view.address)}")
    if view.nodes:
        rows = [["NODE", "ADDRESS", "FREE", "STATE"], *(_node_row(node) for node in view.nodes)]
        for line in table(rows):
            session.print(line)
    addresses = {node.id: node.address for node in view.nodes}
    for worker in view.workers:
        place = f"runs on {addresses.get(worker.node, worker.node)}" if worker.node else f"waits: {worker.waits}"
        session.print(clean(f"{worker.model} {worker.replica}: {place}", SHOWN_CHARS))
    for check in view.checks:
        if not check.is_ok:
            session.say(clean(f"{check.name}: {check.message}", SHOWN_CHARS))
    return EXIT_OK


def _node_row(node: ClusterNode) -> list[str]:
    names = [name for name in node.total if name != "object_store_memory"]
    free = ", ".join(
        f"{_amount(name, node.free.get(name, 0))} of {_amount(name, node.total[name])} {name}" for name in names
    )
    return [node.id[:SHORT_ID], node.address, free, node.flaw or ("leaving" if node.is_draining else "ready")]


def _amount(name: str, amount: float) -> str:
    return size_text(int(amount)) if name == "memory" else f"{amount:g}"


async def _doctor(session: Session) -> int:
    config = session.config()
    checks = await asyncio.to_thread(examine, config)
    if config.cluster.executor is not None:
        checks += [Check(f"cluster: {each.name}", each.is_ok, each.message) for each in (await _view(session)).checks]
    code = EXIT_OK if all(each.is_ok for each in checks) else EXIT_FAILED
    if session.as_json:
        session.emit("doctor", exit_code=code, checks=checks)
        return code
    for row in table([["ok" if each.is_ok else "WRONG", each.name, each.message] for each in checks]):
        session.print(clean(row, SHOWN_CHARS))
    return code
