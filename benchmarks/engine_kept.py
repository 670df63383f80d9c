"""How long the engine does nothing between two jobs on the same base model, through `batchmill serve`.

Two batches of chat rows: the second is uploaded and created once the first is seen to be completed; then again with
both created at once. A middleware in the engine server notes every call; the figure is the longest time between the
first call and the last with none under way. Aim: under 1 s, by one engine process.
"""

from __future__ import annotations

import http.client
import os
import statistics
import time
from pathlib import Path

import harness
import live_server
import rows

AIM_S = 1.0
ROWS_IN, ROWS_OUT = 100, 16  # tokens of a row
POLL_S = 0.05
END_S = 900.0
ENDED = ("completed", "failed", "expired", "cancelled")


def wait_for(connection: http.client.HTTPConnection, batch_id: str, count: int) -> None:
    """Until the batch has ended, with an answer to each row. Raises: CommandFailed."""
    until = time.monotonic() + END_S
    while time.monotonic() < until:
        batch = live_server.ask(connection, "GET", f"/v1/batches/{batch_id}")
        if batch["status"] in ENDED:
            if batch["request_counts"] != {"total": count, "completed": count, "failed": 0}:
                raise harness.CommandFailed(f"rows are missing: {batch}")
            return
        time.sleep(POLL_S)
    raise harness.CommandFailed(f"the batch {batch_id} did not end in {END_S:.0f} s")


def longest_idle_s(times: Path, before: int, count: int) -> float:
    """The longest time with no call under way, among those that follow the first `before`."""
    calls = sorted((float(begin), float(end)) for begin, end in map(str.split, times.read_text().splitlines()))
    if len(calls) != before + count:
        raise harness.CommandFailed(f"the engine had {len(calls)} calls, not {before + count}")
    longest, busy_until = 0.0, calls[before][1]
    for begin, end in calls[before:]:
        longest, busy_until = max(longest, begin - busy_until), max(busy_until, end)
    return longest


def main() -> None:
    """Run both kinds of pairs in turn on one engine, and print how long it was idle."""
    arguments = harness.parse_arguments(__doc__, rows=100)
    count = arguments.rows
    source = live_server.named_rows(rows.llm_plain_rows(count, ROWS_IN, ROWS_OUT), "tiny")
    idle: dict[str, list[float]] = {"one after the other": [], "both at once": []}
    with harness.work_folder() as folder:
        times = folder / "times"
        os.environ["REQUEST_TIMES"] = str(times)
        with live_server.serving(live_server.llm_config(middleware="request_times.RequestTimes")) as server:
            connection = server.connect()
            print("starting the engine", flush=True)
            wait_for(connection, live_server.start_batch(connection, source), count)
            socket, before = server.engine_socket(), count
            for _ in range(arguments.pairs):
                for name, figures in idle.items():
                    batch_ids = [live_server.start_batch(connection, source)]
                    if name == "one after the other":
                        wait_for(connection, batch_ids[0], count)
                    batch_ids.append(live_server.start_batch(connection, source))
                    for batch_id in batch_ids:
                        wait_for(connection, batch_id, count)
                    figures.append(longest_idle_s(times, before, 2 * count))
                    before += 2 * count
            if server.engine_socket() != socket:
                raise harness.CommandFailed("the engine was started again")
            connection.close()
    for name, figures in idle.items():
        harness.print_side(f"idle between two jobs, {name}", [1000 * each for each in figures], "ms")
        harness.print_limit(f"longest, {name}", max(figures), AIM_S, "s")
    print(f"=> median {statistics.median(idle['one after the other']):.3f} s between one job and the next", flush=True)


if __name__ == "__main__":
    main()
