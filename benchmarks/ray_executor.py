"""Workers as Ray actors against child processes, on one machine: rows of a function, of an endpoint, and of vLLM.

    BATCHMILL_RAY_PYTHON=.venv-ray/bin/python python benchmarks/ray_executor.py --kinds endpoint

Both run the same file in turn, on a cluster that is there; a first run of each is not counted. Function rows are timed
while the job runs; the others from the first request to the last commit, without the start of an engine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import harness
import rows
from commit_watch import watched_commits
from llm_speed import MODEL, check_answers, engine_environment
from local_endpoint import running_endpoint

sys.path.insert(0, str(harness.ROOT / "tests" / "cluster"))
from ray_support import ray_nodes, ray_python  # noqa: E402

AIM = 0.95
FUNCTION = "def double(n):\n    return 2 * n\n"
FUNCTION_ROWS, ENDPOINT_ROWS, VLLM_ROWS = 1_000_000, 20_000, 300
DELAY_MS, IN_FLIGHT = 20.0, 256
TOKENS_IN, TOKENS_OUT = 300, 32
KINDS = ("function", "endpoint", "vllm")


def variables(times: Path, kinds: Sequence[str]) -> dict[str, str]:
    """Of both sides."""
    return {**engine_environment(), "REQUEST_TIMES": str(times)} if "vllm" in kinds else {}


class Side:
    """One of the two executors."""

    def __init__(self, address: str | None, times: Path, environment: dict[str, str]) -> None:
        self._address, self._times, self._environment = address, times, environment

    def _run(self, folder: Path, *words: object) -> None:
        cluster = f'[cluster]\naddress = "{self._address}"\npython = "{ray_python()}"\nexecutor = "ray"\n'
        config = 'data_dir = "data"\n' + (f"{cluster}trusted_network = true\n" if self._address else "")
        (folder / "batchmill.toml").write_text(config)
        command = [harness.BATCHMILL, "run", *map(str, words), "-o", folder / "out.jsonl"]
        command += ["--config", folder / "batchmill.toml"]
        harness.run_whole(command, log=folder / "log", env=self._environment)

    def function(self) -> float:
        source = harness.made_input(f"numbers-{FUNCTION_ROWS}.jsonl", write_numbers)
        with harness.work_folder() as folder:
            (folder / "app.py").write_text(FUNCTION)
            self._run(folder, source, "--model", f"function:{folder / 'app.py'}:double")
            shown = [str(harness.BATCHMILL), "jobs", "--json", "--data-dir", str(folder / "data")]
            printed = subprocess.run(shown, capture_output=True, text=True, check=True).stdout
            job = json.loads(printed.splitlines()[0])["job"]
            if job["rows_ok"] != FUNCTION_ROWS:
                raise harness.CommandFailed(f"not all rows were run: {job}")
            return FUNCTION_ROWS / job["elapsed_s"]

    def endpoint(self) -> float:
        source = rows.chat_rows(ENDPOINT_ROWS, 600)
        with harness.work_folder() as folder, running_endpoint(folder, DELAY_MS) as endpoint:
            with watched_commits(folder / "data", ENDPOINT_ROWS) as watch:
                self._run(
                    folder, source, "--model", "openai:bench", "--base-url", endpoint.base_url, "--in-flight",
                    IN_FLIGHT,
                )  # fmt: skip
            calls = endpoint.calls()
            if len(calls) != ENDPOINT_ROWS or watch.last_commit is None:
                raise harness.CommandFailed(f"{len(calls)} calls for {ENDPOINT_ROWS} rows")
            return ENDPOINT_ROWS / (watch.last_commit - min(call.arrival for call in calls))

    def vllm(self) -> float:
        source = rows.llm_plain_rows(VLLM_ROWS, TOKENS_IN, TOKENS_OUT)
        flags = ("enforce-eager=true", "max-model-len=2048", "block-size=128", "middleware=request_times.RequestTimes")
        self._times.write_bytes(b"")
        with harness.work_folder() as folder:
            with watched_commits(folder / "data", VLLM_ROWS) as watch:
                words = [word for flag in flags for word in ("--engine-arg", flag)]
                self._run(folder, source, "--model", f"vllm:{MODEL}", *words)
            check_answers(folder / "out.jsonl", VLLM_ROWS, TOKENS_OUT)
            arrivals = [float(line.split()[0]) for line in self._times.read_text().splitlines()]
            assert watch.last_commit is not None, "a finished run has committed every row"
            return VLLM_ROWS / (watch.last_commit - min(arrivals))


def write_numbers(path: Path) -> None:
    path.write_text("".join(f'{{"n": {number}}}\n' for number in range(FUNCTION_ROWS)))


def main() -> None:
    """Run the pairs of each kind, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="vllm needs `make vllm`")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        times = stack.enter_context(harness.work_folder()) / "times"
        environment = variables(times, arguments.kinds)
        nodes = stack.enter_context(ray_nodes(2, environ=environment))
        local, ray = Side(None, times, environment), Side(nodes.address, times, environment)
        for kind in arguments.kinds:
            sides: dict[str, Callable[[], float]] = {"Ray": getattr(ray, kind), "local": getattr(local, kind)}
            print(f"rows of {kind}", flush=True)
            for run in sides.values():
                run()  # not counted: the first run on a fresh cluster is slow
            figures = harness.alternate(arguments.pairs, sides)
            for name, values in figures.items():
                harness.print_side(name, values, "rows/s")
            harness.print_ratio(figures["Ray"], figures["local"], AIM, "child processes")


if __name__ == "__main__":
    main()
