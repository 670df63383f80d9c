"""One project and strangers attack a `batchmill serve` in every way they know, while another project goes on working.

Each attack has a server of its own with two projects, keys, a deployed function and a connector, and for poison vLLM.
The other project calls the function every 20 ms on a kept connection and every 100 ms on a new one, and the connector
every 50 ms; strangers ask for GET /health. First alone, then beside the attack, which goes on while SIGTERM ends the
server. Aims: no call of the other project lost, p99 under 5 x idle, 600 MiB resident at most, an end within the drain
and 5 s; and with an engine the other project's batch goes on within 30 s of each death.

    python benchmarks/hostile.py --only slow_bodies,large_json
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import harness
import rows
from attacks.target import Target
from batch_watch import BatchWatch
from steady_callers import Caller, Heard, Kind, all_steadily
from two_projects import DRAIN_S, END_MAX_S, Server, serving

RATIO_AIM, MEMORY_AIM_MIB, RESUME_AIM_S, END_AIM_S = 5.0, 600.0, 30.0, DRAIN_S + 5.0
WARM_S, BEGIN_S, TALLY_S = 2.0, 90.0, 15.0
ROWS, ROWS_IN, ROWS_OUT = 3_000, 60, 48  # of the other project's batch, and tokens of each
KILLS = 2
SOURCE = "127.0.0.2"  # where the other project calls from
ALL = (
    "slow_bodies", "slow_bodies_spread", "slow_bodies_key", "slow_heads", "no_body_held", "bodies_held",
    "grpc_messages", "large_json", "filters", "searches", "poison_live", "poison_rows", "engine_killed",
)  # fmt: skip
WITH_ENGINE = ("poison_live", "poison_rows", "engine_killed")
DOUBLE = {"method": "POST", "path": "/v1/double/latest", "body": b'{"data": [[1, 21]]}', "answer": b'"data":[[1,42]]'}
KINDS = (
    Kind("kept", **DOUBLE, every_s=0.02),
    Kind("new", **DOUBLE, every_s=0.1, is_kept=False),
    Kind("echo", "POST", "/v1/echo", b'{"model": "echo", "text": 21}', b"21", every_s=0.05),
    Kind("health", "GET", "/health", b"", b'"status":"ok"', every_s=0.2, is_kept=False),
)


@dataclass
class Result:
    """What became of one attack."""

    name: str
    idle: dict[str, Heard]
    attacked: dict[str, Heard]
    owner: float = 0.0  # MiB
    worker: float = 0.0
    worker_name: str = ""
    was_killed: bool = False
    ended_after_s: float | None = None
    left: int = 0
    standstills: list[float] = field(default_factory=list)  # seconds of the batch after each death of its engine
    longest_gap: float | None = None  # seconds in which no row of the batch was done
    engine: float = 0.0  # MiB, of an engine
    rows_lost: int = 0
    tally: dict[str, int] = field(default_factory=dict)

    def ratio(self) -> float:
        """The worst of the callers."""
        return max(self.attacked[name].p99() / heard.p99() for name, heard in self.idle.items())

    def lost(self) -> list[str]:
        return [f"{name}: {what}" for name, heard in self.attacked.items() for what in heard.lost]

    def misses(self) -> list[str]:
        """The aims that were not reached."""
        found = {
            "lost calls": bool(self.lost() or self.rows_lost),
            "p99": not self.ratio() < RATIO_AIM,
            "memory": self.was_killed or max(self.owner, self.worker) >= MEMORY_AIM_MIB,
            "end": self.ended_after_s is None or self.ended_after_s > END_AIM_S or self.left > 0,
            "batch": max([*self.standstills, self.longest_gap or 0.0]) > RESUME_AIM_S,
        }
        return [name for name, is_missed in found.items() if is_missed]


@contextmanager
def attacking(name: str, server: Server, model: str, tally: dict[str, int]) -> Iterator[None]:
    """The attack in a process of its own, under way when this begins, ended when it is left; `tally` is filled."""
    process = subprocess.Popen(
        [sys.executable, harness.FOLDER / "attacks" / "run.py", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    target = Target(server.host, server.port, server.grpc, server.tenant, server.upstream, model)
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(dataclasses.asdict(target)).encode() + b"\n")
        process.stdin.flush()
        os.set_blocking(process.stdout.fileno(), False)
        said = b""

        def has_begun() -> bool:
            nonlocal said
            said += process.stdout.read() or b""
            return b"begun" in said or process.poll() is not None

        with contextlib.suppress(harness.CommandFailed):  # a server that takes no more connections is attacked too
            harness.wait_until(has_begun, BEGIN_S, "the attack to begin")
        os.set_blocking(process.stdout.fileno(), True)
        yield
        process.send_signal(signal.SIGTERM)
        said += process.communicate(timeout=TALLY_S)[0]
        tally.update(json.loads(said.splitlines()[-1]))
    finally:
        process.kill()
        process.wait()


def warm(callers: dict[str, Caller]) -> None:
    """Every caller is answered once, however long its model takes to start."""
    for name, caller in callers.items():
        problems: list[str] = []

        def is_answered(caller: Caller = caller, problems: list[str] = problems) -> bool:
            problems.append(caller.once())
            return not problems[-1]

        try:
            harness.wait_until(is_answered, BEGIN_S, f"an answer to {name}")
        except harness.CommandFailed as error:
            raise harness.CommandFailed(f"{error}: {problems[-1]}") from None
    all_steadily(callers, WARM_S)


def measure(name: str, idle_s: float, attack_s: float) -> Result:
    """One attack on a server of its own."""
    with_engine = name in WITH_ENGINE
    with serving(with_engine=with_engine, with_grpc=name == "grpc_messages") as server:
        keys = {kind.name: "" if kind.name == "health" else server.other for kind in KINDS}
        callers = {kind.name: Caller(kind, server.host, server.port, keys[kind.name], SOURCE) for kind in KINDS}
        warm(callers)
        batch = None
        if with_engine:
            batch = BatchWatch(server, rows.llm_plain_rows(ROWS, ROWS_IN, ROWS_OUT), "tiny", SOURCE)
            batch.wait_for_rows()
        result = Result(name, all_steadily(callers, idle_s), {})
        with attacking(name, server, "tiny" if with_engine else "", result.tally):
            if batch is not None:
                batch.kill_engines(KILLS if name == "engine_killed" else 0)
            result.attacked = all_steadily(callers, attack_s)
            if batch is not None:
                result.standstills, result.longest_gap, result.rows_lost = batch.close()
            server.end()
        result.owner, result.worker = server.watch.owner / 2**20, server.watch.worker / 2**20
        result.engine = server.watch.engine / 2**20
        result.worker_name, result.was_killed = server.watch.worker_name, server.watch.was_killed
        result.ended_after_s, result.left = server.ended_after_s, server.left
    return result


HEADINGS = ("attack", "idle p99", "attacked", "ratio", "lost", "owner", "largest other", "batch stood", "end", "")


def stood_of(result: Result) -> str:
    """How long the batch did nothing after each death of its engine, and at most."""
    if result.longest_gap is None:
        return "-"
    deaths = ", ".join(f"{seconds:.0f} s" for seconds in result.standstills)
    return f"{result.longest_gap:.0f} s; deaths: {deaths or 'none'}"


def line_of(result: Result) -> tuple[str, ...]:
    """One line of the table, of the caller that fared worst."""
    worst = max(result.idle, key=lambda name: result.attacked[name].p99() / result.idle[name].p99())
    is_answered = bool(result.attacked[worst].took)
    end = f"> {END_MAX_S:.0f} s" if result.ended_after_s is None else f"{result.ended_after_s:.1f} s"
    end += f", {result.left} left" if result.left else ""
    misses = result.misses()
    return (
        result.name,
        f"{result.idle[worst].p99():,.1f} ms",
        f"{result.attacked[worst].p99():,.0f} ms {worst}" if is_answered else f"no {worst}",
        f"{result.ratio():,.1f} x" if is_answered else "-",
        f"{len(result.lost()):,} of {sum(len(each.took) + len(each.lost) for each in result.attacked.values()):,}",
        f"{result.owner:,.0f} MiB" + (", killed" if result.was_killed else ""),
        f"{result.worker:,.0f} MiB",
        stood_of(result),
        end,
        "reached" if not misses else "MISSED: " + ", ".join(misses),
    )


def show(results: list[Result]) -> None:
    """The table, and the aims."""
    lines = [HEADINGS, *[line_of(result) for result in results]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    for line in lines:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip(), flush=True)
    reached = harness.verdict(not any(result.misses() for result in results))
    print(
        f"=> aims: no call lost, p99 under {RATIO_AIM:g} x idle, under {MEMORY_AIM_MIB:g} MiB, batch goes on within "
        f"{RESUME_AIM_S:g} s of each death, end within {END_AIM_S:g} s: {reached}"
    )


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended on the way out
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help=f"attacks, with commas between: {', '.join(ALL)}")
    parser.add_argument("--idle-s", type=float, default=15.0, help="default: 15")
    parser.add_argument("--attack-s", type=float, default=20.0, help="default: 20; with an engine --engine-s")
    parser.add_argument("--engine-s", type=float, default=120.0, help="default: 120")
    arguments = parser.parse_args()
    names = [name for name in arguments.only.split(",") if name] or list(ALL)
    if unknown := set(names) - set(ALL):
        parser.error(f"there is no attack {', '.join(sorted(unknown))}: {', '.join(ALL)}")
    results = []
    for name in names:
        began = time.monotonic()
        seconds = arguments.engine_s if name in WITH_ENGINE else arguments.attack_s
        result = measure(name, arguments.idle_s, seconds)
        results.append(result)
        print(f"{name}: {time.monotonic() - began:.0f} s; the attackers got {result.tally}", flush=True)
        if lost := Counter(result.lost()):
            print(f"  lost: {dict(lost.most_common(8))}", flush=True)
        if result.engine:
            print(f"  the largest process of an engine: {result.engine:,.0f} MiB", flush=True)
        print("  " + "  ".join(line_of(result)), flush=True)
    show(results)


if __name__ == "__main__":
    main()
