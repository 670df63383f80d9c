"""Batches of 64 rows under 1 to 128 connections: an adaptive window, none, one that is fixed, and mosec.

The function of `function_batches.py`. `--other /path/to/bin/batchmill` names a version whose window of 10 ms is fixed:
the last one is commit 979a6e7. Published, without an aim.
"""

from __future__ import annotations

import argparse
import json
import statistics
from contextlib import ExitStack
from pathlib import Path

import deployed
import function_batches
import hammer
import harness

CONNECTIONS = (1, 2, 4, 8, 16, 32, 64, 128)
WARM_UP_S = 1.0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3, help="default: 3")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each shot; default: 2")
    parser.add_argument("--connections", type=int, nargs="*", default=CONNECTIONS, help="default: 1 2 4 … 128")
    parser.add_argument("--other", type=Path, help="the `batchmill` of a version whose window is fixed")
    return parser.parse_args()


def start_all(stack: ExitStack, other: Path | None) -> dict[str, hammer.Target]:
    """A server for each side, by its name."""
    sides = {"adaptive": start(stack, harness.BATCHMILL), "none": start(stack, harness.BATCHMILL, "0")}
    if other is not None:
        sides["fixed"] = start(stack, other, "10ms")
    python = harness.peer_python("mosec", "mosec==0.9.8", "numpy")
    target = hammer.Target(hammer.free_port(), "/inference", function_batches.BODY)
    command = [python, "serve_mosec.py", str(target.port), "solve", str(function_batches.BATCH_SIZE)]
    stack.enter_context(hammer.peer(target, command, function_batches.WANTED))
    return sides | {"mosec": target}


def start(stack: ExitStack, program: Path, window: str = "") -> hammer.Target:
    server = stack.enter_context(deployed.serving(program=program))
    flags = ["--batch-window", window] if window else []
    server.deploy("solve", function_batches.code(), "--batch-size", str(function_batches.BATCH_SIZE), *flags)
    target = hammer.Target(server.port, "/v1/solve/latest", function_batches.BODY, server.key)
    if (answer := hammer.ask(target)) != function_batches.WANTED:
        raise harness.CommandFailed(f"the function answers {json.dumps(answer)}")
    return target


def main() -> None:
    """Fire at every side in turn, for each number of connections, and print a table."""
    arguments = parse_arguments()
    with ExitStack() as stack:
        sides = start_all(stack, arguments.other)
        print(f"connections | {' | '.join(f'{name}: requests/s, p50, p99 ms' for name in sides)}")
        for connections in arguments.connections:
            shots: dict[str, list[hammer.Shot]] = {name: [] for name in sides}
            for target in sides.values():
                hammer.fire(target, connections=connections, seconds=WARM_UP_S)
            for _ in range(arguments.pairs):
                for name, target in sides.items():
                    shots[name].append(hammer.fire(target, connections=connections, seconds=arguments.seconds))
            print(f"{connections} | {' | '.join(_shown(each) for each in shots.values())}", flush=True)


def _shown(shots: list[hammer.Shot]) -> str:
    """The medians."""
    rate, p50, p99 = (
        statistics.median(values) for values in zip(*[(s.rate, s.p50_ms, s.p99_ms) for s in shots], strict=True)
    )
    return f"{rate:,.0f}, {p50:.2f}, {p99:.1f}"


if __name__ == "__main__":
    main()
