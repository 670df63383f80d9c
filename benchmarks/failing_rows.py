"""Rows that raise beside rows that do not: what 10 % of them cost, and whether the other 90 % are right.

A function that is called row by row, against itself without such rows: at least 0.7 x. One that is called for batches
of 64 (each call costs as much as ten rows do), against itself one row at a time: at least 0.5 x.
"""

from __future__ import annotations

import json

import deployed
import harness

ROWS, BODIES = 640, 8
EACH = 10  # one row of so many raises
PER_ROW = """
def per_row(x):
    if x < 0:
        raise ValueError("told to fail")
    return x + 1
"""
BATCHED = """
import time

from batchmill import batched


@batched({size})
def {name}(xs):
    until = time.perf_counter() + 100e-6 + 10e-6 * len(xs)
    while time.perf_counter() < until:
        pass
    if any(x < 0 for x in xs):
        raise ValueError("told to fail")
    return [x + 1 for x in xs]
"""
FAILED = {"error": "ValueError: told to fail"}


def make_load(server: deployed.Server, name: str, *, fail: bool) -> deployed.Load:
    """Bodies that ask for errors by row."""
    requests, answers = [], []
    for number in range(BODIES):
        values = [row + number for row in range(ROWS)]
        if fail:
            values = [-1 if (row * 7 + number) % EACH == 0 else value for row, value in enumerate(values)]
        asked = {"data": [[row, value] for row, value in enumerate(values)], "row_errors": True}
        received = [[row, None, FAILED] if value < 0 else [row, value + 1] for row, value in enumerate(values)]
        requests.append(server.request(name, _json(asked)))
        answers.append(_json({"data": received}))
    return deployed.Load(requests, answers, ROWS)


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def main() -> None:
    """Measure both functions in turn with themselves."""
    arguments = harness.parse_arguments(__doc__, connections=4, seconds=4.0)
    with deployed.serving() as server:
        server.deploy("per_row", PER_ROW)
        server.deploy("batched", BATCHED.format(name="batched", size=64))
        server.deploy("alone", BATCHED.format(name="alone", size=1))

        def side(name: str, *, fail: bool):
            load = make_load(server, name, fail=fail)
            deployed.measure(server, load, connections=arguments.connections, seconds=0.5)
            return lambda: deployed.measure(server, load, connections=arguments.connections, seconds=arguments.seconds)

        rows = harness.alternate(
            arguments.pairs, {"10 % raise": side("per_row", fail=True), "none raises": side("per_row", fail=False)}
        )
        batches = harness.alternate(
            arguments.pairs, {"10 % raise": side("batched", fail=True), "one at a time": side("alone", fail=True)}
        )
    for kind, figures in (("row by row", rows), ("in batches", batches)):
        for name, values in figures.items():
            harness.print_side(f"{kind}, {name}", values, "rows/s")
    harness.print_ratio(rows["10 % raise"], rows["none raises"], 0.7, "none raises, row by row")
    harness.print_ratio(batches["10 % raise"], batches["one at a time"], 0.5, "one row at a time")


if __name__ == "__main__":
    main()
