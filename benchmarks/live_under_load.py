"""One live request a second (16 tokens) while a batch fills the engine: how long it takes, and what the batch keeps.

Each server is asked while idle, then runs a batch alone, then both. The last line is batchmill as it comes; those
before it hold the rows in flight to a number, which draws the curve. `--plain 1` adds servers without priorities, where
nothing but the number of rows in flight yields. Aims: p99 at most 1.5 x an idle engine's, the batch keeps half its
rate. The very first live request comes to rows at full speed: it is shown apart, and not counted.
"""

from __future__ import annotations

import http.client
import time
from dataclasses import dataclass

import harness
import live_server
import rows

TOKENS = 16
ROWS_IN, ROWS_OUT = 300, 32  # tokens of a row
AIM_P99, AIM_RATE = 1.5, 0.5
SETTLE_S = 6.0  # until the engine is full
LIMITS = (8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Measured:
    """What one server did."""

    name: str
    idle: list[float]  # milliseconds of each live request
    first: float  # of the request that came to a batch at full speed
    busy: list[float]  # of those after it, one a second
    rate_alone: float  # rows a second
    rate_beside: float

    def show(self) -> None:
        """One line of the curve."""
        idle, busy = ([live_server.percentile(each, share) for share in (0.5, 0.99)] for each in (self.idle, self.busy))
        print(
            f"{self.name:>22}: live p50 {busy[0]:6.1f} ms ({busy[0] / idle[0]:.2f} x idle), p99 {busy[1]:6.1f} ms "
            f"({busy[1] / idle[1]:.2f} x idle), batch {self.rate_beside:6.1f} rows/s, alone {self.rate_alone:6.1f}; "
            f"the first request {self.first:.0f} ms",
            flush=True,
        )


def ask_steadily(connection: http.client.HTTPConnection, requests: int, every_s: float) -> list[float]:
    """Milliseconds of requests that are sent one every so often."""
    body, took = live_server.chat_body(TOKENS), []
    due = time.perf_counter()
    for _ in range(requests):
        time.sleep(max(0.0, due - time.perf_counter()))
        due = max(due + every_s, time.perf_counter())
        took.append(live_server.time_chat(connection, body))
    return took


def done(connection: http.client.HTTPConnection, batch_id: str) -> int:
    """Rows of the batch that are finished."""
    counts = live_server.ask(connection, "GET", f"/v1/batches/{batch_id}")["request_counts"]
    if counts["failed"]:
        raise harness.CommandFailed(f"rows failed: {counts}")
    return counts["completed"]


def measure(name: str, config: str, *, requests: int, alone_s: float) -> Measured:
    """Ask one server while idle, run a batch alone, then both."""
    count = int(200 * (alone_s + SETTLE_S + requests))
    source = live_server.named_rows(rows.llm_plain_rows(count, ROWS_IN, ROWS_OUT), "tiny")
    with live_server.serving(config) as server:
        live, other = server.connect(), server.connect()
        ask_steadily(live, 5, 0.0)
        idle = ask_steadily(live, requests, 0.25)
        batch_id = live_server.start_batch(other, source)
        while not done(other, batch_id):
            time.sleep(0.1)
        time.sleep(SETTLE_S)
        first, began = done(other, batch_id), time.perf_counter()
        time.sleep(alone_s)
        second, middle = done(other, batch_id), time.perf_counter()
        [first_ms] = ask_steadily(live, 1, 1.0)
        time.sleep(1.0 - min(1.0, first_ms / 1000))
        busy = ask_steadily(live, requests, 1.0)
        third, ended = done(other, batch_id), time.perf_counter()
        live_server.ask(other, "POST", f"/v1/batches/{batch_id}/cancel", b"{}")
        live.close()
        other.close()
    measured = Measured(
        name, idle, first_ms, busy, (second - first) / (middle - began), (third - second) / (ended - middle)
    )
    measured.show()
    return measured


def main() -> None:
    """Draw the curve, and judge batchmill as it comes."""
    arguments = harness.parse_arguments(__doc__, requests=40, alone_s=20.0, curve=1, plain=0)
    wanted = {"requests": arguments.requests, "alone_s": arguments.alone_s}
    if arguments.plain:
        for limit in LIMITS:
            config = live_server.llm_config(in_flight_max=limit, **{"scheduling-policy": "fcfs"})
            measure(f"{limit} rows, no priority", config, **wanted)
    if arguments.curve:
        for limit in LIMITS:
            measure(f"{limit} rows", live_server.llm_config(in_flight_max=limit), **wanted)
    ours = measure("batchmill as it comes", live_server.llm_config(), **wanted)
    ratio = live_server.percentile(ours.busy, 0.99) / live_server.percentile(ours.idle, 0.99)
    reached = harness.verdict(ratio <= AIM_P99)
    print(f"=> p99 beside a batch: {ratio:.2f} x an idle engine's; aim: at most {AIM_P99} x: {reached}")
    kept = ours.rate_beside / ours.rate_alone
    reached = harness.verdict(kept >= AIM_RATE)
    print(f"=> the batch keeps {kept:.2f} of its rate; aim: at least {AIM_RATE}: {reached}")


if __name__ == "__main__":
    main()
