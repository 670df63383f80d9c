"""A numpy function that is ten times cheaper for a row among 64, 64 connections of single rows: batches, and none.

Without `--window-ms` the window is the default, which adapts itself. Aims: 6 x the rate without batches; a median
latency no worse than mosec's with batches of the same size.
"""

from __future__ import annotations

import statistics
import sys
import timeit

import deployed
import hammer
import harness

sys.path.insert(0, str(hammer.PEERS))
import solving  # noqa: E402

BATCH_SIZE = 64
AIM, AIM_CHEAPER = 6, 10
MARK = "\n\nfrom batchmill import batched  # noqa: E402\n\nsolve = batched(64)(solve)\n"
BODY, CONNECTIONS = b'{"data": 0.5}', 64
WANTED = {"data": solving.solve([0.5])[0]}


def print_cheaper() -> None:
    """Say how much cheaper a row is among others, on this machine."""
    one, many = ([0.5] * rows for rows in (1, BATCH_SIZE))
    alone = min(timeit.repeat(lambda: solving.solve(one), number=10, repeat=10)) / 10
    among = min(timeit.repeat(lambda: solving.solve(many), number=2, repeat=10)) / 2 / BATCH_SIZE
    print(
        f"a row alone takes {alone * 1e6:,.0f} us, one among {BATCH_SIZE} {among * 1e6:,.0f} us: {alone / among:.1f} x"
    )


def code() -> str:
    """The function's file."""
    return (hammer.PEERS / "solving.py").read_text() + MARK


def main() -> None:
    """Run the three sides in turn and print what batches bring."""
    arguments = harness.parse_arguments(__doc__, seconds=5.0, window_ms=-1)
    print_cheaper()
    p50: dict[str, list[float]] = {"batches": [], "none": [], "mosec": []}
    python = harness.peer_python("mosec", "mosec==0.9.8", "numpy")

    def shoot(name: str, target: hammer.Target) -> float:
        hammer.fire(target, connections=CONNECTIONS, seconds=1.0)
        shot = hammer.fire(target, connections=CONNECTIONS, seconds=arguments.seconds)
        p50[name].append(shot.p50_ms)
        return shot.rate

    def ours(name: str, rows: int) -> float:
        with deployed.serving() as server:
            flags = ["--batch-window", f"{arguments.window_ms}ms"] if arguments.window_ms >= 0 else []
            server.deploy("solve", code(), "--batch-size", str(rows), *flags)
            target = hammer.Target(server.port, "/v1/solve/latest", BODY, server.key)
            assert hammer.ask(target) == WANTED
            return shoot(name, target)

    def mosec() -> float:
        target = hammer.Target(hammer.free_port(), "/inference", BODY)
        with hammer.peer(target, [python, "serve_mosec.py", str(target.port), "solve", str(BATCH_SIZE)], WANTED):
            return shoot("mosec", target)

    sides = {"batches": lambda: ours("batches", BATCH_SIZE), "none": lambda: ours("none", 1), "mosec": mosec}
    figures = harness.alternate(arguments.pairs, sides)
    for name, rates in figures.items():
        harness.print_side(name, rates, "requests/s")
        harness.print_side(f"  {name}, median latency", p50[name], "ms")
    harness.print_ratio(figures["batches"], figures["none"], AIM, "without batches")
    own, other = statistics.median(p50["batches"]), statistics.median(p50["mosec"])
    print(f"=> p50 {own:.2f} ms, mosec's {other:.2f} ms; aim: no worse: {harness.verdict(own <= other)}")


if __name__ == "__main__":
    main()
