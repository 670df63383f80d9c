"""What the tests of the LLM engine share: rows, a feed and a sink in memory, an environment whose vLLM is the fake."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from batchmill.types import ModelSpec, Outcome, Row
from batchmill.wire.rows.forms import OpenAIForm

FAKE = Path(__file__).parents[1] / "fakes" / "engine_server.py"
CHAT = "/v1/chat/completions"


def chat_row(number: int, text: str, *, url: str = CHAT, **body: Any) -> Row:
    """Row `number`: one chat message."""
    return body_row(number, {"messages": [{"role": "user", "content": text}], **body}, url=url)


def body_row(number: int, body: dict[str, Any], *, url: str = CHAT) -> Row:
    line = {"custom_id": f"c{number}", "method": "POST", "url": url, "body": body}
    return Row(number, number, json.dumps(line).encode(), OpenAIForm())


class ListFeed:
    """Rows of a list, in order."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = list(rows)
        self.next = 0

    async def take(self, n: int) -> list[Row]:
        taken = self.rows[self.next : self.next + n]
        self.next += len(taken)
        return taken


class ListSink:
    """Outcomes by row number, each exactly once."""

    def __init__(self) -> None:
        self.outcomes: dict[int, Outcome] = {}

    def put(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            assert outcome.row.number not in self.outcomes, f"row {outcome.row.number} has two outcomes"
            self.outcomes[outcome.row.number] = outcome

    def text(self, number: int) -> str:
        """What the model answered."""
        outcome = self.outcomes[number]
        assert outcome.error is None, outcome.error
        assert outcome.body is not None
        return json.loads(outcome.body)["choices"][0]["message"]["content"]

    def code(self, number: int) -> str:
        error = self.outcomes[number].error
        assert error is not None, self.outcomes[number]
        return error.code


class FakeVllm:
    """An environment in which `python -m vllm.entrypoints.openai.api_server` is the fake server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.once = folder / "once"
        self.calls_file = folder / "calls"
        package = folder / "site" / "vllm" / "entrypoints" / "openai"
        package.mkdir(parents=True)
        self.once.mkdir()
        for parent in (package, package.parent, package.parent.parent):
            (parent / "__init__.py").touch()
        run = f"import runpy\nrunpy.run_path({str(FAKE)!r}, run_name='__main__')\n"
        (package / "api_server.py").write_text(run)
        self.env = {
            **os.environ,
            "PYTHONPATH": str(folder / "site"),
            "FAKE_ONCE": str(self.once),
            "FAKE_CALLS": str(self.calls_file),
            "FAKE_HEALTH_DELAY_S": "0",
        }

    def adapter(self, name: str, rank: int = 16) -> str:
        path = self.folder / "adapters" / name
        path.mkdir(parents=True)
        (path / "adapter_config.json").write_text(json.dumps({"r": rank}))
        return str(path)

    def model(self, **fields: Any) -> ModelSpec:
        source = self.folder / "model"
        source.mkdir(exist_ok=True)
        (source / "config.json").write_text("{}")
        return ModelSpec(**{"name": "tiny", "engine": "llm", "source": str(source), "python": sys.executable, **fields})

    def calls(self) -> list[dict[str, Any]]:
        """Every call that a server received."""
        return [json.loads(line) for line in self.calls_file.read_text().splitlines()]


class QuickClock:
    """The real time, in which waiting takes next to none: a test does not sit through a backoff."""

    def __init__(self) -> None:
        self.skipped_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.skipped_s

    def now(self) -> float:
        return time.time() + self.skipped_s

    async def sleep(self, seconds: float) -> None:
        step_s = min(seconds, 0.01)
        self.skipped_s += seconds - step_s
        await asyncio.sleep(step_s)
