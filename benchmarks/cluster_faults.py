"""Jobs through servers on PostgreSQL, an object store and Ray, while a seeded series of faults arrives.

One server owns the database and another stands by; a third one has its workers on a Ray cluster, if
BATCHMILL_RAY_PYTHON names an interpreter with batchmill[ray]; others have SQLite in their data directories. Each fault
strikes in the middle of a batch, while clients create batches of five rows, cancel some, read their results and remove
files. Then all batches are audited: one batch a create, one outcome a row, the right content, a sound ledger, and
everything as a client has seen it. Linux only.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from shutil import copyfile, rmtree

import harness
import httpx2
from fault_campaign import ALONE, CRAMPED, DATABASE, RAY, ROWS, Campaign, Injection, Outcome, Undo
from fault_clients import LOOK_S, TIMEOUT_S, Clients
from fault_servers import CrampedServer, LossyServer, RayCluster, Server
from transaction_pooler import TransactionPooler

from batchmill.services.data_dirs.databases import EXIT_REPLACED

sys.path.insert(0, str(harness.ROOT / "tests"))
from fakes.lossy_disk.disk import BYTES_LEFT, COMPILER, NAMES_LEFT
from fakes.small_disk import are_namespaces_allowed

HOSTILE_ACTOR = harness.ROOT / "tests" / "fakes" / "hostile_actor.py"
AWAY_S = 30.0
EXIT_USAGE = 2


def nothing() -> None:
    """For faults that are over at once."""


def end_sessions(campaign: Campaign, _: Outcome) -> Undo:
    """Some sessions of the database are ended by an administrator."""
    query = f"SELECT pid FROM pg_stat_activity WHERE datname = '{DATABASE}'"
    pids = [pid for (pid,) in campaign.postgres.execute(query)]
    for pid in campaign.chance.sample(pids, min(2, len(pids))):
        campaign.postgres.execute(f"SELECT pg_terminate_backend({pid})")
    return found_owner(campaign)


def found_owner(campaign: Campaign) -> Undo:
    """Wait for an owner: either of the two may have become it."""
    both = (campaign.owner, campaign.standby)
    harness.wait_until(lambda: any(each.is_owner() for each in both), TIMEOUT_S, "an owner", look_s=LOOK_S)
    if not campaign.owner.is_owner():
        campaign.take_over()
    return campaign.revive_standby


def database_stopped(campaign: Campaign, outcome: Outcome) -> Undo:
    """PostgreSQL crashes, and is away for some seconds."""
    campaign.postgres.stop(signal.SIGQUIT)
    time.sleep(campaign.chance.uniform(1, 5))
    campaign.postgres.start()
    return found_owner(campaign)


def owner_killed(campaign: Campaign, _: Outcome) -> Undo:
    """SIGKILL for the owner; its data directory stays."""
    campaign.owner.signal(signal.SIGKILL)
    campaign.owner.wait()
    campaign.take_over()
    return campaign.restart_standby


def owner_ended(campaign: Campaign, outcome: Outcome) -> Undo:
    """SIGTERM for the owner, as before an update."""
    end(campaign.owner, outcome)
    campaign.take_over()
    return campaign.restart_standby


def end(server: Server, outcome: Outcome) -> None:
    server.signal(signal.SIGTERM)
    if code := server.wait():
        outcome.flaws.append(f"a server that was ended exited with {code}")


def owner_lost(campaign: Campaign, _: Outcome) -> Undo:
    """SIGKILL for the owner and every process of it, and each folder of its data directory is deleted."""
    process = campaign.owner.process
    assert process is not None
    os.killpg(process.pid, signal.SIGKILL)
    campaign.owner.wait()
    for each in campaign.owner.data_dir.iterdir():
        if each.is_dir():
            rmtree(each)
    campaign.take_over()
    return campaign.restart_standby


def come_back(campaign: Campaign, outcome: Outcome, go_on: Undo) -> Undo:
    """The rest of the story of an owner that was replaced: it goes on, writes nothing, and ends itself."""

    def undo() -> None:
        before = campaign.standby.writes()
        go_on()
        code = campaign.standby.wait()
        if code != EXIT_REPLACED:
            outcome.flaws.append(f"a replaced owner ended with {code}")
        if written := campaign.standby.writes() - before:
            outcome.flaws.append(f"a replaced owner changed {written} objects")
        campaign.restart_standby()

    return undo


def owner_stopped(campaign: Campaign, outcome: Outcome) -> Undo:
    """SIGSTOP for the owner, SIGCONT after the take-over."""
    stopped = campaign.owner
    stopped.signal(signal.SIGSTOP)
    campaign.take_over()
    return come_back(campaign, outcome, lambda: stopped.signal(signal.SIGCONT))


def owner_cut_off(campaign: Campaign, outcome: Outcome) -> Undo:
    """What the owner sends to the database is held, and arrives after the take-over."""
    lost = campaign.owner
    lost.proxy.cut()
    campaign.take_over()
    return come_back(campaign, outcome, lost.proxy.mend)


def worker_killed(campaign: Campaign, _: Outcome) -> Undo:
    """SIGKILL for one process below the server."""
    if pids := campaign.server.processes():
        os.kill(campaign.chance.choice(pids), signal.SIGKILL)
    return nothing


def worker_stopped(campaign: Campaign, _: Outcome) -> Undo:
    """SIGSTOP for a worker, SIGCONT some seconds later."""
    for pid in campaign.server.processes("batchmill.executors.worker")[:1]:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(campaign.chance.uniform(1, 8))
        with suppress(ProcessLookupError):  # it was ended as one that hangs
            os.kill(pid, signal.SIGCONT)
    return nothing


def database_away(campaign: Campaign, outcome: Outcome) -> Undo:
    """PostgreSQL is stopped for half a minute."""
    campaign.postgres.stop()
    time.sleep(AWAY_S)
    campaign.postgres.start()
    return found_owner(campaign)


def store_fault(fault: str) -> Injection:
    """The next PUT and GET, or only the next GET, fail so."""

    def inject(campaign: Campaign, outcome: Outcome) -> Undo:
        store = campaign.owner.store
        for method in ("GET",) if fault == "truncated" else ("PUT", "GET"):
            store.fail(method, fault)

        def undo() -> None:
            outcome.unmet = len(store.faults)
            store.faults.clear()

        return undo

    return inject


def credentials_expired(campaign: Campaign, outcome: Outcome) -> Undo:
    """The store refuses the credentials of every request for a while."""
    store = campaign.owner.store
    store.always.update(dict.fromkeys(("PUT", "GET", "POST", "DELETE", "HEAD"), "expired"))
    time.sleep(campaign.chance.uniform(1, 3))
    store.always.clear()
    return nothing


def orphan_object(campaign: Campaign, outcome: Outcome) -> Undo:
    """An object is put, its reply is lost, and whoever put it may be killed before it tries again."""
    store = campaign.owner.store
    store.fail("PUT", "lost_reply")
    deadline = time.monotonic() + 2.0
    while store.faults and time.monotonic() < deadline:
        time.sleep(0.001)
    outcome.unmet = len(store.faults)
    store.faults.clear()
    for pid in campaign.owner.processes("batchmill.executors.worker"):
        os.kill(pid, signal.SIGKILL)
    return nothing


def pooled_server(campaign: Campaign, outcome: Outcome) -> Undo:
    """A third server comes through a pooler that shares sessions between transactions: it is refused."""
    pooler = TransactionPooler(campaign.postgres.port)
    try:
        code, said = campaign.refused_server(pooler.port)
    finally:
        pooler.close()
    if code != EXIT_USAGE or "is reached through a pooler" not in said:
        outcome.flaws.append(f"a server behind a pooler ended with {code}: {said[-300:]}")
    return nothing


# -- on Ray -----------------------------------------------------------------------------------------------------------


def on_ray(campaign: Campaign) -> tuple[Server, RayCluster]:
    return campaign.others[RAY], campaign.cluster


def signal_one(name: str, number: signal.Signals) -> Injection:
    """A signal for an actor of a worker."""

    def inject(campaign: Campaign, _: Outcome) -> Undo:
        _, cluster = on_ray(campaign)
        if pids := cluster.processes(name):
            os.kill(campaign.chance.choice(pids), number)
        return nothing

    return inject


def driver_killed(campaign: Campaign, _: Outcome) -> Undo:
    """SIGKILL for the owner's driver."""
    server, _cluster = on_ray(campaign)
    for pid in server.processes("batchmill.executors.ray.driver"):
        os.kill(pid, signal.SIGKILL)
    return nothing


def lose_node(command: str) -> Injection:
    """A node is removed, or gets a termination notice and is removed later; another one comes."""

    def inject(campaign: Campaign, _: Outcome) -> Undo:
        _, cluster = on_ray(campaign)
        number = campaign.chance.choice(cluster.alive)
        cluster.nodes.does(f"{command} {number}")

        def undo() -> None:
            if command != "remove":
                cluster.nodes.does(f"remove {number}")
            cluster.replace_node(number)

        return undo

    return inject


def nodes_late(campaign: Campaign, _: Outcome) -> Undo:
    """All nodes are removed; the rows wait for room until others come."""
    _, cluster = on_ray(campaign)
    gone = list(cluster.alive)
    for number in gone:
        cluster.nodes.does(f"remove {number}")
    time.sleep(campaign.chance.uniform(1, 5))
    for number in gone:
        cluster.replace_node(number)
    return nothing


def head_killed(campaign: Campaign, _: Outcome) -> Undo:
    """SIGKILL for the head's control service; then the whole cluster ends, and another one starts at its address."""
    _, cluster = on_ray(campaign)
    for name in ("gcs_server", ""):
        for pid in cluster.processes(name):
            with suppress(ProcessLookupError):  # it has followed the head already
                os.kill(pid, signal.SIGKILL)
    cluster.end()
    cluster.start()
    return nothing


def ray_owner_killed(campaign: Campaign, _: Outcome) -> Undo:
    """SIGKILL for the owner of workers on Ray, which is started again."""
    server, _cluster = on_ray(campaign)
    kill_and_start(campaign, server)
    return nothing


def hostile_pickle(campaign: Campaign, outcome: Outcome) -> Undo:
    """Actors return, yield and raise pickles that run code in whoever reads them; a driver of ours gets them."""
    _, cluster = on_ray(campaign)
    trap = campaign.folder / "trap"
    command = [os.environ["BATCHMILL_RAY_PYTHON"], "-P", str(HOSTILE_ACTOR), cluster.nodes.address, str(trap)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if trap.exists() or "returned NOT_BYTES" not in done.stdout:
        outcome.flaws.append(f"a pickle was read: {done.stdout} {done.stderr[-500:]}")
    return nothing


# -- on one machine ---------------------------------------------------------------------------------------------------


def alone(campaign: Campaign) -> Server:
    return campaign.others[ALONE]


def kill_and_start(campaign: Campaign, server: Server) -> None:
    """SIGKILL for a server; its workers end by themselves, or live to see the next one."""
    server.signal(signal.SIGKILL)
    server.wait()
    server.start()
    campaign.wait_for(server)


def alone_killed(campaign: Campaign, _: Outcome) -> Undo:
    """SIGKILL for the server, which is started again."""
    kill_and_start(campaign, alone(campaign))
    return nothing


def alone_group_killed(campaign: Campaign, _: Outcome) -> Undo:
    """SIGKILL for the server and every process of it, and it is started again."""
    server = alone(campaign)
    assert server.process is not None
    os.killpg(server.process.pid, signal.SIGKILL)
    kill_and_start(campaign, server)
    return nothing


def alone_stopped(campaign: Campaign, _: Outcome) -> Undo:
    """SIGSTOP for the server, SIGCONT some seconds later: clients have given up on some of their requests by then."""
    server = alone(campaign)
    server.signal(signal.SIGSTOP)
    time.sleep(campaign.chance.uniform(1, 8))
    server.signal(signal.SIGCONT)
    return nothing


def alone_ended(campaign: Campaign, outcome: Outcome) -> Undo:
    """SIGTERM for the server, which is started again."""
    server = alone(campaign)
    end(server, outcome)
    server.start()
    campaign.wait_for(server)
    return nothing


def power_lost(campaign: Campaign, _: Outcome) -> Undo:
    """Power is lost: every process ends, and what was not synced may be gone. The server is started again."""
    server = alone(campaign)
    assert isinstance(server, LossyServer)
    names, content = campaign.chance.choice(NAMES_LEFT), campaign.chance.choice(BYTES_LEFT)
    server.disk.lose_power(campaign.chance, names, content)
    server.wait()
    server.start()
    campaign.wait_for(server)
    return nothing


def disk_full(campaign: Campaign, _: Outcome) -> Undo:
    """Others take all the room of the disk, and for some seconds what the server makes free."""
    server = campaign.others[CRAMPED]
    assert isinstance(server, CrampedServer)
    deadline = time.monotonic() + campaign.chance.uniform(0, 8)
    server.disk.fill()
    while time.monotonic() < deadline:
        time.sleep(LOOK_S)
        server.disk.fill()
    server.disk.make_room()
    return nothing


# Each fault, and how many of 240 it is.
FAULTS: dict[str, tuple[Injection, int]] = {
    "store_slow_down": (store_fault("slow_down"), 22), "store_reset": (store_fault("reset"), 22),
    "store_lost_reply": (store_fault("lost_reply"), 22), "store_truncated": (store_fault("truncated"), 22),
    "store_changed": (store_fault("changed"), 6), "orphan_object": (orphan_object, 14),
    "credentials_expired": (credentials_expired, 4), "worker_killed": (worker_killed, 17),
    "worker_stopped": (worker_stopped, 3), "pooled_server": (pooled_server, 1),
    "end_sessions": (end_sessions, 20), "database_stopped": (database_stopped, 5), "database_away": (database_away, 1),
    "owner_killed": (owner_killed, 4), "owner_ended": (owner_ended, 4), "owner_lost": (owner_lost, 4),
    "owner_stopped": (owner_stopped, 4), "owner_cut_off": (owner_cut_off, 3),
}  # fmt: skip
OBJECT_FAULTS = (*(kind for kind in FAULTS if kind.startswith("store_")), "orphan_object", "credentials_expired",
                 "owner_lost")  # fmt: skip
RAY_FAULTS: dict[str, tuple[Injection, int]] = {
    "actor_killed": (signal_one("ray::HostedWorker", signal.SIGKILL), 10),
    "actor_evicted": (signal_one("ray::HostedWorker", signal.SIGTERM), 6),
    "driver_killed": (driver_killed, 2), "node_removed": (lose_node("remove"), 5),
    "node_drained": (lose_node("drain"), 2), "nodes_late": (nodes_late, 1), "head_killed": (head_killed, 2),
    "ray_owner_killed": (ray_owner_killed, 1), "hostile_pickle": (hostile_pickle, 1),
}  # fmt: skip
ALONE_FAULTS: dict[str, tuple[Injection, int]] = {
    "alone_killed": (alone_killed, 12), "alone_group_killed": (alone_group_killed, 8),
    "alone_stopped": (alone_stopped, 4), "alone_ended": (alone_ended, 4), "alone_worker_killed": (worker_killed, 6),
    "alone_worker_stopped": (worker_stopped, 2), "power_lost": (power_lost, 16),
}  # fmt: skip
CRAMPED_FAULTS: dict[str, tuple[Injection, int]] = {"disk_full": (disk_full, 8)}
ALL_FAULTS = {**FAULTS, **RAY_FAULTS, **ALONE_FAULTS, **CRAMPED_FAULTS}
# The server that the rows go to, where it is none of the first two.
TARGETS = {
    **dict.fromkeys(RAY_FAULTS, RAY),
    **dict.fromkeys(ALONE_FAULTS, ALONE),
    **dict.fromkeys(CRAMPED_FAULTS, CRAMPED),
}
TAKE_OVERS = ("end_sessions", "database_stopped", "database_away", "owner_killed", "owner_ended", "owner_lost",
              "owner_stopped", "owner_cut_off")  # fmt: skip


def series(seed: int, count: int, kinds: list[str]) -> Iterator[str]:
    """Each kind once in a random order, then each as often as its weight says, in a random order."""
    chance = random.Random(seed)
    yield from (first := chance.sample(kinds, len(kinds)))[:count]
    count -= len(first)
    while count > 0:
        rest = [kind for kind in kinds for _ in range(ALL_FAULTS[kind][1])]
        for kind in kinds:
            rest.remove(kind)  # it came at first
        rest = chance.sample(rest or kinds, len(rest or kinds))[:count]
        count -= len(rest)
        yield from rest


def possible(kinds: list[str], *, has_objects: bool) -> list[str]:
    """Those of the kinds that can be injected here; says why others cannot."""
    lacking: dict[str, str] = {}
    if not os.environ.get("BATCHMILL_RAY_PYTHON"):
        lacking |= dict.fromkeys(RAY_FAULTS, "BATCHMILL_RAY_PYTHON is not set")
    if COMPILER is None:
        lacking["power_lost"] = "there is no C compiler"
    if not are_namespaces_allowed():
        lacking["disk_full"] = "this user may not mount a file system"
    for why in {lacking[kind] for kind in kinds if kind in lacking}:
        print(f"without some faults: {why}", file=sys.stderr)
    return [kind for kind in kinds if kind not in lacking and (has_objects or kind not in OBJECT_FAULTS)]


@contextmanager
def running_campaign(arguments: argparse.Namespace, kinds: list[str]) -> Iterator[Campaign]:
    clients = Clients(arguments.clients, arguments.pause) if arguments.clients else None
    with harness.work_folder() as folder, ExitStack() as stack:
        yield Campaign(
            folder, arguments.seed, stack, others={TARGETS[kind] for kind in kinds if kind in TARGETS},
            has_objects=not arguments.files, clients=clients,
        )  # fmt: skip


def print_table(outcomes: list[Outcome]) -> None:
    print(
        "| fault | times | between calls | jobs | short | rows | again | lost | doubled | wrong | recovery median, max "
        "| all | flaws | unmet |"
    )
    print("|" + " --- |" * 14)
    for fault in ALL_FAULTS:
        if found := [each for each in outcomes if each.fault == fault]:
            names = ("jobs", "short", "rows", "again", "lost", "doubled", "wrong")
            sums = [sum(getattr(each, name) for each in found) for name in names]
            cells = [len(found), sum(0 < each.called < ROWS for each in found), *sums]
            times = [each.recovery_s for each in found]
            cells.append(f"{statistics.median(times):.1f} s, {max(times):.1f} s")
            cells.append(f"{statistics.median(each.whole_s for each in found):.1f} s")
            cells += [sum(len(each.flaws) for each in found), sum(each.unmet for each in found)]
            print(f"| {fault} | {' | '.join(map(str, cells))} |")


def main() -> None:
    """Run the series, and print what became of the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=240)
    parser.add_argument("--kinds", nargs="+", choices=ALL_FAULTS, default=None)
    parser.add_argument("--seconds", type=float, default=7200.0, help="no fault begins later")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=4, help="that create batches of five rows meanwhile")
    parser.add_argument("--pause", type=float, default=0.5, help="of a client, between two batches, in seconds")
    parser.add_argument("--files", action="store_true", help="without an object store, and so without its faults")
    parser.add_argument("--logs", type=Path, help="a folder that gets the logs of the servers if there is a flaw")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # servers are ended on the way out
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    outcomes: list[Outcome] = []
    began = time.monotonic()
    kinds = possible(arguments.kinds or list(ALL_FAULTS), has_objects=not arguments.files)
    with running_campaign(arguments, kinds) as campaign:
        for number, fault in enumerate(series(arguments.seed, arguments.faults, kinds), 1):
            if time.monotonic() - began > arguments.seconds:
                break
            try:
                if fault in TAKE_OVERS:
                    campaign.ensure_standby()
                target = campaign.others[TARGETS[fault]] if fault in TARGETS else None
                outcomes.append(campaign.strike(fault, ALL_FAULTS[fault][0], target))
            except (AssertionError, harness.CommandFailed, subprocess.TimeoutExpired, httpx2.HTTPError) as error:
                outcomes.append(Outcome(fault, flaws=[f"did not recover: {error!r}"]))
            last = outcomes[-1]
            print(f"seed {arguments.seed}, fault {number}: {last}", file=sys.stderr, flush=True)
            if last.flaws:
                for each in campaign.servers:
                    print(f"{each.folder.name}: {each.log.read_text()[-2000:]}", file=sys.stderr)
                    if arguments.logs is not None:
                        copyfile(each.log, arguments.logs / f"{each.folder.name}.log")
                break
    if arguments.json:
        print(json.dumps({"seed": arguments.seed, "faults": [asdict(each) for each in outcomes]}))
    else:
        print_table(outcomes)
    sys.exit(any(each.lost or each.doubled or each.wrong or each.flaws for each in outcomes))


if __name__ == "__main__":
    main()
