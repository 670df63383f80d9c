"""A live chat request through a whole `batchmill serve`, against the engine's own socket: both idle, in turn.

Aim: less than 5 ms more at the median.
"""

from __future__ import annotations

import statistics

import harness
import live_server

AIM_MS = 5.0


def main() -> None:
    """Ask both sides in turn and print the difference."""
    arguments = harness.parse_arguments(__doc__, requests=200, tokens=16)
    body = live_server.chat_body(arguments.tokens)
    with live_server.serving(live_server.llm_config()) as server:
        through = server.connect()
        print("starting the engine", flush=True)
        live_server.time_chat(through, body)
        direct = live_server.UnixConnection(server.engine_socket())
        sides = {"through batchmill": through, "engine's socket": direct}
        figures: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(arguments.requests + 10):
            for name in list(sides) if number % 2 else reversed(list(sides)):
                took = live_server.time_chat(sides[name], body)
                if number >= 10:  # both sides are warm by then
                    figures[name].append(took)
        for connection in sides.values():
            connection.close()
    for name, values in figures.items():
        harness.print_side(name, values, "ms")
    ours, theirs = figures["through batchmill"], figures["engine's socket"]
    print(f"=> ratio {statistics.median(ours) / statistics.median(theirs):.2f} x the engine's socket")
    more = statistics.median(ours) - statistics.median(theirs)
    harness.print_limit("more at the median", more, AIM_MS, "ms")


if __name__ == "__main__":
    main()
