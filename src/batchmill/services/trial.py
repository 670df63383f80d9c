"""A new version tried before anybody can call it: its process started, its setup run, its examples called, ended."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from batchmill.errors import ModelFailed
from batchmill.models.function_child import FunctionChild
from batchmill.types import Interface, ModelSpec
from batchmill.wire.calls import NAMED, POSITIONAL
from batchmill.wire.deploys import DeployOrder

FRAME_ARGUMENTS = "Deployments using DataFrame Mode can only have one argument."  # Modelbit's words


async def try_version(spec: ModelSpec, home: Path, order: DeployOrder) -> Interface:
    """What the function takes and returns. Raises: ModelFailed, with the traceback of what does not work."""
    home.mkdir(parents=True, exist_ok=True)
    child = FunctionChild(spec, home)
    try:
        interface = await child.start()
        if spec.function is not None and spec.function.frame_columns and interface.calls != "frame":
            raise ModelFailed(f"{spec.source}: {FRAME_ARGUMENTS}")
        for number, example in enumerate(order.examples):
            await _call(child, number + 1, example, spec, order)
        return interface
    finally:
        await child.stop()


async def _call(child: FunctionChild, number: int, example: Any, spec: ModelSpec, order: DeployOrder) -> None:
    answer: asyncio.Future[tuple[dict[str, Any], list[bytes]]] = asyncio.get_running_loop().create_future()

    def hear(come: list[Any]) -> None:
        for meta, buffers in come:
            if meta["kind"] == "results" and meta["id"] == number and not answer.done():
                answer.set_result((meta, buffers))

    def end() -> None:
        if not answer.done():
            answer.set_exception(ModelFailed(f"the example ended the process: {child.last_words()}"))

    child.heard, child.ended = hear, end
    layout = POSITIONAL if isinstance(example, list) else NAMED
    asked = {"kind": "ask", "id": number, "rows": 1, "layout": layout, "train": False, "exact": False}
    child.send(asked, [msgspec.json.encode([example])])
    limit_s = spec.limits.attempt_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            meta, buffers = await answer
    except TimeoutError:
        raise ModelFailed(f"the example {_shown(example)} had no answer after {limit_s:g} s") from None
    if meta["errors"]:
        code, message, trace = next(iter(meta["errors"].values()))
        told = trace.rstrip() or f"{code}: {message}"
        raise ModelFailed(f"the example {_shown(example)} was refused:\n{told}")
    _check_outputs(msgspec.json.decode(bytes(buffers[0]))[0], order)


def _check_outputs(value: Any, order: DeployOrder) -> None:
    """What the sample output names is in what the function returns."""
    if order.outputs is None:
        return
    names = sorted(value) if isinstance(value, dict) else []
    for output in order.outputs:
        if output.name not in names:
            told = f"it returns {', '.join(names)}" if names else f"it returns no dictionary, but {_shown(value)}"
            raise ModelFailed(f"the output {output.name!r} is not found in the inference response: {told}")


def _shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode(errors="replace")
    return text if len(text) <= 200 else f"{text[:199]}…"
