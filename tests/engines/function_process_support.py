"""Deployed functions for tests: their folder, their spec, and a place for answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from contract.engine_suite import PATIENCE_S

from batchmill.engines.function.engine import FunctionEngine
from batchmill.types import FunctionRequest, FunctionSpec, Limits, ModelSpec, Row
from batchmill.wire.messages import FunctionReply
from batchmill.wire.rows.forms import OpenAIForm, TableForm


def deployed(folder: Path, text: str, *, source: str = "app.py:f", limits: Limits = Limits(), **how: Any) -> ModelSpec:
    """The spec of a function whose code is `text`; `how` are fields of its FunctionSpec."""
    code = folder / "code"
    code.mkdir(parents=True, exist_ok=True)
    (code / "app.py").write_text(text)
    function = FunctionSpec(version="main/1", folder=str(code), digest="0", **how)
    return ModelSpec("f", "function_process", source, limits=limits, function=function)


@asynccontextmanager
async def running(spec: ModelSpec, home: Path) -> AsyncIterator[FunctionEngine]:
    """A started engine, stopped afterwards."""
    engine = FunctionEngine(spec, home)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()


class Answers:
    """`ports.engines.AnswerSink` that lets a test wait for one answer."""

    def __init__(self, engine: FunctionEngine) -> None:
        self._engine = engine
        self._waiting: dict[int, asyncio.Future[FunctionReply]] = {}
        self._next = 0

    def put(self, answer: FunctionReply) -> None:
        self._waiting.pop(answer.id).set_result(answer)

    def ask(self, form: str, body: object, **how: Any) -> asyncio.Future[FunctionReply]:
        """Ask at once; the future has the answer."""
        self._next += 1
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        future = self._waiting[self._next] = asyncio.get_running_loop().create_future()
        self._engine.call(FunctionRequest(self._next, form, data, **how), self)
        return future

    async def value(self, body: object, *, form: str = "arguments", **how: Any) -> Any:
        """The JSON of the answer. Raises: what the answer raises."""
        async with asyncio.timeout(PATIENCE_S):
            answer = await self.ask(form, body, **how)
        if answer.raised is not None:
            raise answer.raised.error()
        return json.loads(answer.body)


def table_rows(*rows: dict[str, Any]) -> list[Row]:
    """Rows of a table."""
    return [Row(n, n, json.dumps(row).encode(), TableForm()) for n, row in enumerate(rows)]


def openai_rows(*bodies: dict[str, Any], url: str = "/v1/chat/completions") -> list[Row]:
    """Rows of an OpenAI batch file."""
    lines = [{"custom_id": f"row-{n}", "method": "POST", "url": url, "body": body} for n, body in enumerate(bodies)]
    return [Row(n, n, json.dumps(line).encode(), OpenAIForm()) for n, line in enumerate(lines)]
