"""Jobs of 10 rows beside one of 100,000 on the same model, through a server: when they begin and end, what it costs.

A function that sleeps 0.1 s a row, and one small job every few seconds. Aim: each begins within 5 s. Then a function
that does nothing and ten small jobs a second: the large job must keep on, and its rate beside the rate alone is told.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import time
from pathlib import Path

import get_latency
import harness
import rows

AIM_BEGIN_S = 5.0
POLL_S = 0.02
SETTLE_S = 3.0  # the large job runs alone for so long first
SMALL_ROWS = 10


class Shop:
    """A server and one connection to it."""

    def __init__(self, folder: Path, model: str) -> None:
        self.server = get_latency.Server(folder, 1, model)
        self.connection = http.client.HTTPConnection(self.server.address, timeout=60.0)
        self._model, self._folder = model, folder

    def submit(self, count: int) -> str:
        """The id of a batch of so many rows."""
        path = self._folder / f"rows-{count}.jsonl"
        if not path.exists():
            row = '{"custom_id":"r%d","method":"POST","url":"/v1/chat/completions","body":{"model":"%s"}}\n'
            rows.write_lines(path, ((row % (n, self._model)).encode() for n in range(count)))
        file_id = get_latency.upload(self.connection, path)
        asked = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        body = json.dumps(asked).encode()
        return get_latency.ask(self.connection, "POST", "/v1/batches", body, "application/json")["id"]

    def look(self, batch_id: str) -> tuple[int, str]:
        """(rows that have run, status)."""
        batch = get_latency.ask(self.connection, "GET", f"/v1/batches/{batch_id}")
        return batch["request_counts"]["completed"], batch["status"]

    def wait_for(self, batch_id: str, count: int) -> None:
        while self.look(batch_id)[0] < count:
            time.sleep(POLL_S)


def time_small_jobs(shop: Shop, large: str, count: int) -> None:
    """One small job after another: seconds to its first row and to its end."""
    began, ended = [], []
    for _ in range(count):
        start = time.perf_counter()
        small = shop.submit(SMALL_ROWS)
        shop.wait_for(small, 1)
        began.append(time.perf_counter() - start)
        while shop.look(small)[1] not in get_latency.ENDED:
            time.sleep(POLL_S)
        ended.append(time.perf_counter() - start)
    print(f"0.1 s a row: to the end median {statistics.median(ended):.2f} s, max {max(ended):.2f} s", flush=True)
    print(f"the large job has run {shop.look(large)[0]:,} rows meanwhile", flush=True)
    harness.print_limit("the last of them began within", max(began), AIM_BEGIN_S, "s")


def rate_of(shop: Shop, large: str, seconds: float, every_s: float | None) -> float:
    """Rows a second of the large job while a small one is submitted every so often, and how these fared."""
    before, start = shop.look(large)[0], time.perf_counter()
    small: list[str] = []
    due = start
    while (now := time.perf_counter()) < start + seconds:
        if every_s is not None and now >= due:
            small.append(shop.submit(SMALL_ROWS))
            due += every_s
        time.sleep(max(0.0, min(due, start + seconds) - time.perf_counter()) if every_s else POLL_S)
    rate = (shop.look(large)[0] - before) / (time.perf_counter() - start)
    if small:
        waited = time.perf_counter()
        done = [0 for each in small if shop.look(each)[0] == SMALL_ROWS]
        for each in small:
            shop.wait_for(each, SMALL_ROWS)
        waited = time.perf_counter() - waited
        print(f"{len(small)} small jobs submitted, {len(done)} through by then, the others {waited:.1f} s later")
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small-jobs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    for model, is_slow in (("tenth", True), ("milli", False)):
        with harness.work_folder() as folder:
            shop = Shop(folder, model)
            try:
                large = shop.submit(100_000)
                shop.wait_for(large, 1)
                time.sleep(SETTLE_S)
                if is_slow:
                    time_small_jobs(shop, large, arguments.small_jobs)
                    continue
                alone = rate_of(shop, large, arguments.seconds, None)
                beside = rate_of(shop, large, arguments.seconds, 0.1)
                print(f"1 ms a row: the large job alone {alone:,.0f} rows/s, beside ten small a second {beside:,.0f}")
            finally:
                shop.connection.close()
                shop.server.close()


if __name__ == "__main__":
    main()
