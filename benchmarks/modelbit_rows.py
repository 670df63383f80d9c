"""Bodies of 1,000 rows to a deployed function that does nothing, through a whole `batchmill serve` with one worker.

Aim: 1,000,000 rows a second, keys on, every answer compared.
"""

from __future__ import annotations

import json

import deployed
import harness

AIM_ROWS_S = 1_000_000
BODIES = 16  # different ones
CODE = "def trivial(x):\n    return x\n"


def make_load(server: deployed.Server, rows: int) -> deployed.Load:
    """Bodies as the published client writes them, but for its spaces."""
    requests, answers = [], []
    for number in range(BODIES):
        body = json.dumps({"data": [[row, row * 7 + number] for row in range(rows)]}, separators=(",", ":")).encode()
        requests.append(server.request("trivial", body))
        answers.append(body)
    return deployed.Load(requests, answers, rows)


def main() -> None:
    """Measure a few times and print the median."""
    arguments = harness.parse_arguments(__doc__, rows=1000, connections=8, seconds=5.0)
    with deployed.serving() as server:
        server.deploy("trivial", CODE)
        load = make_load(server, arguments.rows)
        deployed.measure(server, load, connections=arguments.connections, seconds=1.0)
        figures = []
        for number in range(arguments.pairs):
            figures.append(deployed.measure(server, load, connections=arguments.connections, seconds=arguments.seconds))
            print(f"  run {number + 1} of {arguments.pairs}: {figures[-1]:,.0f} rows/s", flush=True)
    harness.print_side("modelbit bodies", figures, "rows/s")
    middle = sorted(figures)[len(figures) // 2]
    print(f"=> {middle:,.0f} rows/s; aim: at least {AIM_ROWS_S:,}: {harness.verdict(middle >= AIM_ROWS_S)}")


if __name__ == "__main__":
    main()
