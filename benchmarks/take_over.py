"""How long rows wait when the owner of a PostgreSQL database is killed, stopped or cut off.

A server owns the database and another one stands by; a batch runs. The time is from the fault to the first row that
runs under the successor. Then the old owner comes back, writes nothing and ends, and the batch is audited. Uses the
PostgreSQL server and the S3 server of `tests/fakes`. Linux only.
"""

from __future__ import annotations

import argparse
import logging
import signal
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

import harness
from fault_campaign import Campaign, Outcome
from fault_clients import TIMEOUT_S
from fault_servers import ClusterServer

from batchmill.services.data_dirs.databases import EXIT_REPLACED

ROWS, BEFORE = 2000, 50
TAKEN = "this server has taken the database over"
LIMITS_S = {"kill -9": 10.0, "SIGSTOP": 15.0, "cut network": 15.0}
START: dict[str, Callable[[ClusterServer], None]] = {
    "kill -9": lambda server: server.signal(signal.SIGKILL),
    "SIGSTOP": lambda server: server.signal(signal.SIGSTOP),
    "cut network": lambda server: server.proxy.cut(),
}
END: dict[str, Callable[[ClusterServer], None]] = {
    "kill -9": lambda _: None,
    "SIGSTOP": lambda server: server.signal(signal.SIGCONT),
    "cut network": lambda server: server.proxy.mend(),
}


def taken(server: ClusterServer) -> int:
    return server.log.read_text().count(TAKEN)


def measure(campaign: Campaign, fault: str, outcome: Outcome) -> tuple[float, float]:
    """The seconds until the standby owns the database, and until the first row under it."""
    lost, successor = campaign.owner, campaign.standby
    called, before = campaign.count_calls(), taken(successor)
    batch, texts = campaign.submit(ROWS)
    harness.wait_until(lambda: campaign.count_calls() >= called + BEFORE, TIMEOUT_S, "rows")
    began = time.monotonic()
    START[fault](lost)
    harness.wait_until(lambda: taken(successor) > before, TIMEOUT_S, "the take-over")
    owned_s, called = time.monotonic() - began, campaign.count_calls()
    harness.wait_until(lambda: campaign.count_calls() > called, TIMEOUT_S, "a row")
    seconds, written = time.monotonic() - began, lost.writes()
    END[fault](lost)
    expected = -signal.SIGKILL if fault == "kill -9" else EXIT_REPLACED
    if (code := lost.wait()) != expected:
        outcome.flaws.append(f"the old owner ended with {code}")
    if lost.writes() != written:
        outcome.flaws.append(f"the old owner changed {lost.writes() - written} objects")
    campaign.take_over()
    campaign.audit(batch, texts, outcome)
    campaign.count_again(texts, outcome)
    campaign.restart_standby()
    return owned_s, seconds


def main() -> None:
    """Measure each fault several times, and print medians and maxima."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--files", action="store_true", help="without an object store: both servers share a folder")
    parser.add_argument("--faults", nargs="+", choices=LIMITS_S, default=list(LIMITS_S))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # servers are ended on the way out
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    times: dict[str, list[tuple[float, float]]] = {fault: [] for fault in arguments.faults}
    outcome = Outcome("")
    with harness.work_folder() as folder, ExitStack() as stack:
        campaign = Campaign(folder, 1, stack, has_objects=not arguments.files)
        for number in range(arguments.runs):
            for fault in arguments.faults:
                times[fault].append(measure(campaign, fault, outcome))
                owned_s, seconds = times[fault][-1]
                print(f"run {number}, {fault}: {owned_s:.2f} s, first row {seconds:.2f} s", file=sys.stderr, flush=True)
    print(f"PostgreSQL and {'a shared folder' if arguments.files else 'an S3 store'}, {arguments.runs} runs each:")
    for fault, found in times.items():
        owned, rows = zip(*found, strict=True)
        medians = f"{statistics.median(owned):.1f} s until the take-over, {statistics.median(rows):.1f} s until a row"
        print(f"{fault}: medians {medians}")
        harness.print_limit("    the longest until a row", max(rows), LIMITS_S[fault], "s")
    sums = f"{outcome.lost} rows lost, {outcome.doubled} doubled, {outcome.wrong} wrong, {outcome.again} run again"
    print(f"{outcome.rows:,} rows: {sums}; {outcome.flaws or 'no flaw'}")
    sys.exit(bool(outcome.lost or outcome.doubled or outcome.wrong or outcome.flaws))


if __name__ == "__main__":
    main()
