"""Functions for tests of the tensor dialects: a whole server in this process, and functions deployed to it."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
from dialects.open_server import open_server

from batchmill.serving import Running
from batchmill.wire import bundles
from batchmill.wire.bundles import DeployOrder

TIMEOUT_S = 60.0
CODE = """
from typing import Annotated, Optional

import numpy as np

from batchmill import batched, tensor

Sixteen = Annotated[np.ndarray, tensor("INT32", [-1, 16])]


def simple(INPUT0: Sixteen, INPUT1: Sixteen):
    '''Add and subtract.'''
    return {"OUTPUT0": INPUT0 + INPUT1, "OUTPUT1": INPUT0 - INPUT1}


def identity(INPUT0: Annotated[np.ndarray, tensor("FP32", [-1])]):
    return {"OUTPUT0": INPUT0}


def words(text: list[str]):
    return {"text": text, "length": len(text)}


def exact(n: int, bonus: Optional[int] = None):
    return {"n": n + (bonus or 0)}


def nan(n: int):
    return {"x": [float("nan"), 1.0]}


def fail(n: int):
    raise ValueError(f"{n} is no good")


def greet(text_input: str, times: int = 1):
    return " ".join([text_input] * times)


def described(text_input: str, id: str = "none"):
    return {"text": text_input, "id": id}


def count(to: int, bad: bool = False):
    for n in range(to):
        yield {"n": n}
    if bad:
        raise ValueError("no more")
"""
NAMES = ("simple", "identity", "words", "exact", "nan", "fail", "greet", "described", "count")


async def deploy(running: Running, name: str, code: str = CODE, **fields: Any) -> None:
    """A new version of the function `name` of `code`."""
    out = io.BytesIO()
    order = DeployOrder(**{"name": name, "target": f"app.py:{name}", "source": f"app.py:{name}"} | fields)
    bundles.write(out, order, {"app.py": code.encode()})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bundle.tar.gz"
        path.write_bytes(out.getvalue())
        await running.services.versions.deploy(path)


@contextlib.asynccontextmanager
async def tensor_server(
    folder: Path, names: tuple[str, ...] = NAMES
) -> AsyncIterator[tuple[Running, httpx2.AsyncClient]]:
    """A server with the functions of CODE, and a client that asks it for nothing in particular."""
    headers = {"accept-encoding": "identity"}
    async with open_server(folder, "") as running:
        for name in names:
            await deploy(running, name)
        async with httpx2.AsyncClient(base_url=running.url, timeout=TIMEOUT_S, headers=headers) as client:
            yield running, client


def tensor(name: str, datatype: str, data: list[Any], shape: list[int] | None = None, **more: Any) -> dict[str, Any]:
    """One input as JSON; its shape is that of a flat list where none is said."""
    return {"name": name, "datatype": datatype, "shape": [len(data)] if shape is None else shape, "data": data} | more


def outputs(reply: httpx2.Response) -> dict[str, Any]:
    """The data of each output of a reply in JSON, by name."""
    assert reply.status_code == 200, reply.text
    return {each["name"]: each["data"] for each in reply.json()["outputs"]}
