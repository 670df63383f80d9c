"""A new version tried before anybody can call it: its process started, its setup run, its examples called, ended."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from batchmill.errors import ModelFailed
from batchmill.models.function_child import FunctionChild
from batchmill.models.redaction import mask_known
from batchmill.models.secrets import Secret, resolve
from batchmill.ports import Provisions
from batchmill.types import Interface, Isolation, ModelSpec, Tensor
from batchmill.wire.calls import NAMED, POSITIONAL
from batchmill.wire.deploys import DeployOrder


class Trials:
    """A `deploying.Trial` whose functions are given the secrets that they name."""

    def __init__(self, provisions: Provisions) -> None:
        self._provisions = provisions

    async def __call__(self, spec: ModelSpec, home: Path, order: DeployOrder) -> Interface:
        provision = await self._provisions.of(spec)
        return await try_version(spec, home, order, given=provision.secrets, isolation=provision.isolation)


async def try_version(
    spec: ModelSpec, home: Path, order: DeployOrder, *, given: Mapping[str, str] = MappingProxyType({}),
    isolation: Isolation | None = None,
) -> Interface:  # fmt: skip
    """What the function takes and returns. Raises: ModelFailed, with the traceback of what does not work.

    Args:
        given: what each "secret:NAME" that it names stands for.
        isolation: in which it is tried, as it will run.
    """
    home.mkdir(parents=True, exist_ok=True)
    try:
        child = FunctionChild(
            spec, home, resolve=lambda name: Secret(given[name]) if name in given else resolve(name),
            isolation=isolation,
        )  # fmt: skip
        return await _try(child, spec, order)
    except ModelFailed as error:
        raise ModelFailed(mask_known(error.message), code=error.code) from None


async def _try(child: FunctionChild, spec: ModelSpec, order: DeployOrder) -> Interface:
    try:
        interface = await child.start()
        _check_batches(interface, spec)
        for number, example in enumerate([*order.examples, *_sample(interface, spec, order)], 1):
            await _call(child, number, example, spec)
        return interface
    finally:
        await child.stop()


def _check_batches(interface: Interface, spec: ModelSpec) -> None:
    """Raises: ModelFailed for settings that would have no effect."""
    function = spec.function
    assert function is not None, "it is being deployed"
    if interface.calls == "row" and (function.batch_size > 1 or function.batch_window_s):
        raise ModelFailed(
            f"{spec.source} takes one row at a time, so a batch size or window has no effect: let it take lists and "
            "mark it @batched(N) (an Inferless class has BATCH_SIZE), or leave them out"
        )
    if function.batch_size and function.batch_size != interface.batch_size:
        raise ModelFailed(
            f"the batch size is {function.batch_size:,}, and {spec.source} can be given {interface.batch_size:,} rows "
            "at most"
        )


async def _call(child: FunctionChild, number: int, example: Any, spec: ModelSpec) -> None:
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
            meta, _ = await answer
    except TimeoutError:
        raise ModelFailed(f"the example {_shown(example)} had no answer after {limit_s:g} s") from None
    if meta["errors"]:
        code, message, trace = next(iter(meta["errors"].values()))
        told = trace.rstrip() or f"{code}: {message}"
        raise ModelFailed(f"the example {_shown(example)} was refused:\n{told}")


def _sample(interface: Interface, spec: ModelSpec, order: DeployOrder) -> list[Any]:
    """The call that the deprecated sample input shows; none where there is none. The process checks what comes back."""
    assert spec.function is not None
    if order.has_samples and interface.takes != "dict":
        raise ModelFailed(
            f"{spec.source} is no InferlessPythonModel: input.json and output.json describe only such a class; leave "
            "them out, or give --example"
        )
    place = Path(spec.function.folder, spec.source.partition(":")[0]).parent
    if interface.takes != "dict" or not (place / "input.json").is_file():
        return []
    return [{tensor.name: _value(tensor) for tensor in interface.inputs if tensor.example is not None}]


def _value(tensor: Tensor) -> Any:
    is_single = tensor.shape == [1] and isinstance(tensor.example, list) and len(tensor.example) == 1
    return tensor.example[0] if is_single else tensor.example


def _shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode(errors="replace")
    return text if len(text) <= 200 else f"{text[:199]}…"
