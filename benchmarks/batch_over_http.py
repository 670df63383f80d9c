"""Rows a second of a batch over HTTP (upload, create, poll, download) against the same job with `batchmill run`.

With a function that does nothing on 1,000,000 rows, and with the real vLLM on some hundred. Aim: at least 0.95 x.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable
from pathlib import Path

import function_rows
import harness
import live_server
import llm_speed
import rows

AIM = 0.95
WORKERS = 2
POLL_S = 0.05
TOKENS_IN, TOKENS_OUT = 300, 32
ENDED = ("completed", "failed", "expired", "cancelled")


def run_batch(connection: http.client.HTTPConnection, source: Path, expected: int, output: Path) -> float:
    """Seconds from the first byte of the upload to the last of the results."""
    began = time.perf_counter()
    batch_id = live_server.start_batch(connection, source)
    while (batch := live_server.ask(connection, "GET", f"/v1/batches/{batch_id}"))["status"] not in ENDED:
        time.sleep(POLL_S)
    if batch["request_counts"]["completed"] != expected:
        raise harness.CommandFailed(f"rows are missing: {batch}")
    connection.request("GET", f"/v1/files/{batch['output_file_id']}/content")
    reply = connection.getresponse()
    with output.open("wb") as file:
        while piece := reply.read(1 << 20):
            file.write(piece)
    return time.perf_counter() - began


def time_function(source: Path, expected: int) -> float:
    """Rows a second over HTTP, with a server and a worker that are there: a first job of one row has seen to it."""
    small = live_server.named_rows(rows.chat_rows(1, 600), "nothing")
    with (
        harness.work_folder() as folder,
        live_server.serving(live_server.function_config("nothing", WORKERS)) as server,
    ):
        connection = server.connect()
        run_batch(connection, small, 1, folder / "small.jsonl")
        took_s = run_batch(connection, source, expected, folder / "out.jsonl")
        connection.close()
        function_rows.check_output(folder / "out.jsonl", expected)
        return expected / took_s


def time_llm(source: Path, expected: int) -> float:
    """Rows a second over HTTP, with an engine that runs already."""
    with harness.work_folder() as folder, live_server.serving(live_server.llm_config()) as server:
        connection = server.connect()
        live_server.time_chat(connection, live_server.chat_body(1))
        took_s = run_batch(connection, source, expected, folder / "out.jsonl")
        connection.close()
        llm_speed.check_answers(folder / "out.jsonl", expected, TOKENS_OUT)
        return expected / took_s


def compare(title: str, pairs: int, over_http: Callable[[], float], with_run: Callable[[], float]) -> None:
    """Run both sides in turn and print the figure."""
    print(f"{title}, {pairs} pairs")
    figures = harness.alternate(pairs, {"over HTTP": over_http, "batchmill run": with_run})
    for name, values in figures.items():
        harness.print_side(name, values, "rows/s")
    harness.print_ratio(figures["over HTTP"], figures["batchmill run"], AIM, "`batchmill run`")


def main() -> None:
    """Both engines, or those that are asked for any rows."""
    arguments = harness.parse_arguments(__doc__, rows=1_000_000, llm_rows=600, llm_pairs=1)
    if arguments.rows:
        plain = rows.chat_rows(arguments.rows, 600)
        named = live_server.named_rows(plain, "nothing")
        title = f"{arguments.rows:,} rows of 600 bytes through a function; HTTP: upload to download, run: whole command"
        compare(
            title,
            arguments.pairs,
            lambda: time_function(named, arguments.rows),
            lambda: function_rows.time_batchmill(plain, arguments.rows),
        )
    if arguments.llm_rows:
        plain = rows.llm_plain_rows(arguments.llm_rows, TOKENS_IN, TOKENS_OUT)
        named = live_server.named_rows(plain, "tiny")
        wanted = {"expected": arguments.llm_rows, "tokens_out": TOKENS_OUT}
        compare(
            f"{arguments.llm_rows} rows through vLLM; HTTP: upload to download, run: first request to last commit",
            arguments.llm_pairs,
            lambda: time_llm(named, arguments.llm_rows),
            lambda: llm_speed.time_batchmill(plain, {"max-model-len": "2048"}, **wanted),
        )


if __name__ == "__main__":
    main()
