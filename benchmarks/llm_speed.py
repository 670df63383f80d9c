"""What the two LLM figures share: a file through `batchmill run` and through vLLM's `run_batch`, with the same flags.

Both are timed from the first request to the last result; the start of the engine, the same for both, is left out.
run_batch: its progress tracker notes both times (`peers/run_batch_timed.py`). batchmill: a middleware in the engine
server notes the first request (`peers/request_times.py`), and the end is the commit of the last row.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import harness
from commit_watch import watched_commits

MODEL = harness.ROOT / "examples" / "tiny-llm"
Flags = dict[str, str | None]  # an engine's flag -> its value, None for a switch


def engine_environment() -> dict[str, str]:
    """What both sides' engines find in their environment."""
    peers = str(harness.FOLDER / "peers")
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "BATCHMILL_VLLM_PYTHON": str(harness.vllm_python()),
        "PYTHONPATH": os.pathsep.join(filter(None, [peers, os.environ.get("PYTHONPATH")])),
    }


def count_answers(path: Path, tokens_out: int) -> int:
    """The rows of an output file that have an answer of exactly `tokens_out` tokens."""
    with path.open() as file:
        results = [json.loads(line) for line in file]
    bodies = [(result.get("response") or {}).get("body") or {} for result in results]
    return sum((body.get("usage") or {}).get("completion_tokens") == tokens_out for body in bodies)


def check_answers(path: Path, expected: int, tokens_out: int) -> None:
    """Make sure that a side did all of the work."""
    found = count_answers(path, tokens_out)
    if found != expected:
        raise harness.CommandFailed(f"{path.name}: {found} of {expected} rows have {tokens_out} tokens out")


def time_run_batch(source: Path, flags: Flags, *, expected: int, tokens_out: int) -> float:
    """Rows a second of vLLM's run_batch."""
    with harness.work_folder() as folder:
        named = folder / "named.jsonl"  # run_batch wants the model's name in every row; batchmill fills it in
        named.write_bytes(source.read_bytes().replace(b'"model":""', b'"model":"tiny-llm"'))
        times, output = folder / "times.json", folder / "out.jsonl"
        command = [harness.vllm_python(), harness.FOLDER / "peers" / "run_batch_timed.py", times]
        command += ["-i", named, "-o", output, "--model", MODEL, "--served-model-name", "tiny-llm"]
        for flag, value in flags.items():
            command += [f"--{flag}"] if value is None else [f"--{flag}", value]
        harness.run_whole(command, log=folder / "log", env=engine_environment())
        check_answers(output, expected, tokens_out)
        noted = json.loads(times.read_text())
        return expected / (noted["last_result"] - noted["first_request"])


def time_batchmill(source: Path, flags: Flags, *, expected: int, tokens_out: int) -> float:
    """Rows a second of batchmill, with a fresh data directory."""
    with harness.work_folder() as folder:
        times, output = folder / "times", folder / "out.jsonl"
        command = [harness.BATCHMILL, "run", source, "--model", f"vllm:{MODEL}", "-o", output]
        command += ["--data-dir", folder / "data", "--engine-arg", "middleware=request_times.RequestTimes"]
        for flag, value in flags.items():
            command += ["--engine-arg", f"{flag}={'true' if value is None else value}"]
        environment = {**engine_environment(), "REQUEST_TIMES": str(times)}
        with watched_commits(folder / "data", expected) as watch:
            harness.run_whole(command, log=folder / "log", env=environment)
        check_answers(output, expected, tokens_out)
        calls = [line.split() for line in times.read_text().splitlines()]
        if len(calls) != expected:
            raise harness.CommandFailed(f"batchmill made {len(calls)} calls for {expected} rows")
        assert watch.last_commit is not None, "a finished run has committed every row"
        return expected / (watch.last_commit - min(float(arrival) for arrival, _ in calls))


def compare(source: Path, flags: Flags, *, expected: int, tokens_out: int, pairs: int, aim: float) -> None:
    """Run both sides in turn and print the figure."""
    wanted = {"expected": expected, "tokens_out": tokens_out}
    sides = {
        "batchmill": lambda: time_batchmill(source, flags, **wanted),
        "run_batch": lambda: time_run_batch(source, flags, **wanted),
    }
    shown = " ".join(f"--{flag}" + ("" if value is None else f" {value}") for flag, value in flags.items())
    print(f"{expected} rows, engine flags of both sides: {shown}")
    figures = harness.alternate(pairs, sides)
    for name, values in figures.items():
        harness.print_side(name, values, "rows/s")
    harness.print_ratio(figures["batchmill"], figures["run_batch"], aim, "vLLM's run_batch")
