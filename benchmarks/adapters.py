"""Chat rows at random over 32 adapters, at most 4 of them in the engine at once: batchmill, against the bare engine
with the rows grouped by adapter by hand, and against the bare engine in the file's order.

Every side is timed from the first request to the last result; the start of the engine is left out. The bare engine is
the same vLLM with the same flags and nothing of ours in it; its client keeps 256 requests in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import harness
import llm_speed
import rows
from commit_watch import watched_commits

AIM = 0.95
ADAPTERS, RESIDENT = 32, 4
TOKENS_IN, TOKENS_OUT = 120, 32
IN_FLIGHT = 256
RANK = 16
START_S = 600.0
FLAGS = {
    "enforce-eager": None,
    "max-model-len": "2048",
    "max-num-seqs": "256",
    "distributed-executor-backend": "uni",
    "max-loras": str(RESIDENT),
    "max-cpu-loras": str(RESIDENT),
}
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}


def adapter_rows(count: int) -> Path:
    """Chat rows that each name one of the adapters, at random."""

    def lines() -> Iterator[bytes]:
        rng = random.Random(32)
        for number in range(count):
            text = rows.draw_text(rng, TOKENS_IN)
            line = rows.llm_line(number, [{"role": "user", "content": text}], TOKENS_OUT)
            yield line.replace(b'"model":""', b'"model":"a%02d"' % rng.randrange(ADAPTERS))

    name = f"llm-adapters-{count}x{ADAPTERS}-{TOKENS_IN}-{TOKENS_OUT}.jsonl"
    return harness.made_input(name, lambda path: rows.write_lines(path, lines()))


def made_adapters(folder: Path) -> dict[str, Path]:
    """Copies of the two adapters of the small model, each in a folder of its own."""
    places = {}
    for number in range(ADAPTERS):
        places[f"a{number:02}"] = folder / f"a{number:02}"
        source = llm_speed.MODEL / "adapters" / ("upper", "reverse")[number % 2]
        shutil.copytree(source, places[f"a{number:02}"])
    return places


def time_batchmill(source: Path, expected: int) -> float:
    """Rows a second of batchmill, with a fresh data directory."""
    with harness.work_folder() as folder:
        times, output = folder / "times", folder / "out.jsonl"
        command = [harness.BATCHMILL, "run", source, "--model", f"vllm:{llm_speed.MODEL}", "-o", output]
        command += ["--data-dir", folder / "data", "--engine-arg", "middleware=request_times.RequestTimes"]
        for name, place in made_adapters(folder).items():
            command += ["--adapter", f"{name}={place}"]
        for flag, value in FLAGS.items():
            command += ["--engine-arg", f"{flag}={'true' if value is None else value}"]
        environment = {**llm_speed.engine_environment(), **ONE_PROCESS, "REQUEST_TIMES": str(times)}
        with watched_commits(folder / "data", expected) as watch:
            harness.run_whole(command, log=folder / "log", env=environment)
        llm_speed.check_answers(output, expected, TOKENS_OUT)
        check_models(source, output)
        assert watch.last_commit is not None, "a finished run has committed every row"
        began = min(float(line.split()[0]) for line in times.read_text().splitlines())
        return expected / (watch.last_commit - began)


def check_models(source: Path, output: Path) -> None:
    """Make sure that each row was answered by the adapter it names."""
    with source.open() as asked, output.open() as answered:
        for row, result in zip(map(json.loads, asked), map(json.loads, answered), strict=True):
            if result["response"]["body"]["model"] != row["body"]["model"]:
                raise harness.CommandFailed(f"{row['custom_id']} was answered by {result['response']['body']['model']}")


def time_bare(source: Path, *, is_grouped: bool) -> float:
    """Rows a second of the bare engine with one client."""
    bodies = [json.loads(line)["body"] for line in source.read_text().splitlines()]
    if is_grouped:
        bodies.sort(key=lambda body: body["model"])
    with harness.work_folder() as folder, bare_engine(folder) as (process, socket):
        return asyncio.run(drive(process, socket, bodies))


@contextlib.contextmanager
def bare_engine(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A vLLM server with the adapters registered, as its documentation has it."""
    with tempfile.TemporaryDirectory(prefix="bench-") as short:  # a socket's name has little room
        socket = Path(short) / "s"
        command = [harness.vllm_python(), "-m", "vllm.entrypoints.openai.api_server", f"--model={llm_speed.MODEL}"]
        command += [f"--uds={socket}", "--disable-uvicorn-access-log", "--enable-lora", f"--max-lora-rank={RANK}"]
        command += [f"--{flag}" if value is None else f"--{flag}={value}" for flag, value in FLAGS.items()]
        command += ["--lora-modules", *(f"{name}={place}" for name, place in made_adapters(folder).items())]
        environment = {**os.environ, **llm_speed.engine_environment(), **ONE_PROCESS}
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            try:
                yield process, socket
            finally:
                harness.end_group(process)


async def drive(process: subprocess.Popen[bytes], socket: Path, bodies: list[dict]) -> float:
    """Send the bodies in order, so many at a time; rows a second."""
    session = aiohttp.ClientSession(
        "http://vllm", connector=aiohttp.UnixConnector(str(socket), limit=0), timeout=aiohttp.ClientTimeout(total=None)
    )
    async with session:
        await until_healthy(process, session)
        waiting = iter(bodies)
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(IN_FLIGHT):
                group.create_task(send(session, waiting))
        return len(bodies) / (time.perf_counter() - began)


async def send(session: aiohttp.ClientSession, waiting: Iterator[dict]) -> None:
    for body in waiting:
        async with session.post("/v1/chat/completions", json=body) as reply:
            answer = await reply.json()
        if reply.status != 200 or answer["model"] != body["model"]:
            raise harness.CommandFailed(f"the engine answered {reply.status}: {answer}")
        if answer["usage"]["completion_tokens"] != TOKENS_OUT:
            raise harness.CommandFailed(f"an answer has {answer['usage']} instead of {TOKENS_OUT} tokens out")


async def until_healthy(process: subprocess.Popen[bytes], session: aiohttp.ClientSession) -> None:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get("/health") as reply:
                if reply.status == 200:
                    return
        await asyncio.sleep(0.2)
    raise harness.CommandFailed(f"the bare engine did not start (exit status {process.poll()})")


def main() -> None:
    """Run the sides in turn and print the ratios."""
    arguments = harness.parse_arguments(__doc__, rows=2000, pairs=3)
    source = adapter_rows(arguments.rows)
    sides = {
        "batchmill": lambda: time_batchmill(source, arguments.rows),
        "grouped by hand": lambda: time_bare(source, is_grouped=True),
        "in file order": lambda: time_bare(source, is_grouped=False),
    }
    print(f"{arguments.rows} rows over {ADAPTERS} adapters, {RESIDENT} resident, {IN_FLIGHT} in flight by hand")
    figures = harness.alternate(arguments.pairs, sides)
    for name, values in figures.items():
        harness.print_side(name, values, "rows/s")
    harness.print_ratio(figures["batchmill"], figures["grouped by hand"], AIM, "the bare engine, grouped by hand")
    harness.print_ratio(figures["batchmill"], figures["in file order"], AIM, "the bare engine in file order")


if __name__ == "__main__":
    main()
