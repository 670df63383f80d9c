"""An order gives the same results, counts and messages whether it is sealed on the loop, in a thread, or in a child."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from fakes.databases import open_ledger
from fakes.job_service import end_of, job_service

from batchmill.engines.clock import SystemClock
from batchmill.errors import BatchmillError
from batchmill.executors.local import LocalExecutor
from batchmill.jobs.ledger import packed
from batchmill.jobs.service import JobService
from batchmill.types import DatasetSpec, JobOrder, ModelSpec, Policy

CODE = """
def odd(n):
    if n % 3 == 1:
        raise ValueError(f"no {n}")
    return {"n": n, "text": "é" * n}
def even(n):
    return [n]
"""
PATHS = {
    "loop": (packed.SHORT_BYTES_MAX, packed.INPUT_BYTES_MAX),
    "thread": (-1, packed.INPUT_BYTES_MAX),
    "child": (-1, -1),
}


def line(n: int | str, custom_id: str | None = None, model: str = "odd") -> bytes:
    row = f'{{"custom_id":"{custom_id or n}","method":"POST","url":"/v1/x","body":{{"model":"{model}","n":{n}}}}}'
    return row.encode()


INPUTS = {
    "plain": b"\n".join(line(n) for n in range(7)) + b"\n",
    "no end of the last line": b"\n".join(line(n) for n in range(5)),
    "CRLF and blank lines": b"\r\n".join([line(0), b"", line(1), b"  ", line(2), b""]),
    "a mark of its encoding": b"\xef\xbb\xbf" + line(0) + b"\n",
    "no UTF-8": line(0) + b"\n" + b'{"custom_id":"\xff","method":"POST","url":"/v1/x","body":{}}\n',
    "empty": b"",
    "only blank lines": b"\n\n \n",
    "no JSON": line(0) + b"\nnothing\n[1]\n",
    "an id twice": line(0) + b"\n" + line(1) + b"\n" + line(2, "0") + b"\n",
    "equal rows": b"\n".join([line(0, "a"), line(0, "b"), line(3, "c"), line(0, "d")]),
    "another model": line(0) + b"\n" + line(1, model="unknown") + b"\n",
    "an argument too many": line(0) + b"\n" + line('2,"m":1', "x") + b"\n",
    "a number of many digits": line("3.000000000000000000001") + b"\n" + line(10**30, "big") + b"\n",
    "the most lines of a short one": b"{}\n" * packed.SHORT_ROWS_MAX,
    "one line more": b"{}\n" * (packed.SHORT_ROWS_MAX + 1),
    "many rows": b"\n".join(line(n % 2, f"r{n}") for n in range(150)),
    "as long as a short one may be": line(0).ljust(packed.SHORT_BYTES_MAX),
    "one byte longer": line(0).ljust(packed.SHORT_BYTES_MAX + 1),
    "as many blank lines as a short one may have": line(0) + b"\n" * packed.SHORT_ROWS_MAX,
    "one blank line more": line(0) + b"\n" * (packed.SHORT_ROWS_MAX + 1),
    "two models": b"\n".join([line(0, "a", "even"), line(0, "b"), line(3, "c"), line(0, "d", "even"), line(0, "e")]),
    "all rows equal": b"\n".join(line(0, f"r{n}") for n in range(50)),
    "NUL": line(0, r"a\u0000b") + b"\n\x00\n" + line(1),
    "half a surrogate pair": line(0, r"a\ud800") + b"\n" + line(1),
    "a lone CR": line(0) + b"\r" + line(1),
    "a field twice": b'{"custom_id":"a","custom_id":"b","method":"POST","url":"/v1/x","body":{"model":"odd","n":0}}',
    "numbers": b"1\n" * 40,
}


@pytest.fixture
async def opened(tmp_path) -> AsyncIterator[Callable[[str], JobService]]:
    services: list[JobService] = []
    (tmp_path / "app.py").write_text(CODE)

    def open_service(name: str) -> JobService:
        data = tmp_path / name
        data.mkdir()
        ledger = open_ledger(data / "batchmill.db")
        services.append(job_service(data, ledger, LocalExecutor(data / "workers"), SystemClock(), idle_timeout_s=60.0))
        return services[-1]

    yield open_service
    for service in services:
        await service.close(at_once=True)


def text_of(path: str | None, job_id: str) -> str | None:
    if path is None or not Path(path).exists():
        return None
    return re.sub(r"(batch_req|req|resp)_[0-9a-f-]+", r"\1", Path(path).read_text()).replace(job_id, "JOB")


async def outcome(service: JobService, folder: Path, source: Path, models: list[str]) -> dict[str, object]:
    """All that a caller can see of a job, but for times and ids. Rows of several models are sorted and folded."""
    specs = [ModelSpec(name, "function", f"{folder / 'app.py'}:{name}", allowed=[name]) for name in models]
    dataset, policy = DatasetSpec([str(source)], format="openai"), Policy(dedupe=len(models) > 1)
    order = JobOrder(dataset, specs, policy=policy, origin={"frontend": "openai"}, default_model=False)
    try:
        view = await end_of(service, (await service.submit(order)).id)
    except BatchmillError as error:
        return {"refused": (error.code, error.message)}
    names = (
        "state",
        "reason",
        "message",
        "rows",
        "rows_ok",
        "rows_failed",
        "problems_total",
        "problems",
        "warnings",
        "errors",
    )
    seen = {name: str(getattr(view, name)).replace(view.id, "JOB") for name in names if hasattr(view, name)}
    return seen | {"output": text_of(view.output, view.id), "errors_output": text_of(view.errors_output, view.id)}


@pytest.mark.parametrize("models", [["odd"], ["odd", "even"]], ids=["in file order", "sorted and folded"])
async def test_every_path_gives_the_same(opened, tmp_path, monkeypatch, models):
    """Whatever is odd about an input: its results, what is refused of it, and why, do not depend on its size."""
    found: dict[str, dict[str, dict[str, object]]] = {name: {} for name in INPUTS}
    for path, (short, small) in PATHS.items():
        monkeypatch.setattr(packed, "SHORT_BYTES_MAX", short)
        monkeypatch.setattr(packed, "INPUT_BYTES_MAX", small)
        service = opened(path)
        for name, data in INPUTS.items():
            source = tmp_path / f"{name}.jsonl"
            source.write_bytes(data)
            found[name][path] = await outcome(service, tmp_path, source, models)
    folders = {path: len(list((tmp_path / path / "jobs").glob("*/dataset"))) for path in PATHS}
    assert folders["loop"] == folders["thread"] == 0 < folders["child"], "each took its path"
    for name, by_path in found.items():
        assert by_path["loop"] == by_path["child"], name
        assert by_path["thread"] == by_path["child"], name
