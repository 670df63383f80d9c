"""A whole server in the process of a test: real services over a data directory of its own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from msgspec.structs import replace

from batchmill.config import load
from batchmill.serving import Running, serve

CODE = """
import asyncio
from pathlib import Path

HERE = Path(__file__).parent


def double(n, model=None):
    if n < 0:
        raise ValueError(f"{n} is less than nothing")
    return {"twice": 2 * n, "usage": {"prompt_tokens": n, "completion_tokens": 1}}


async def gated(n, model=None):
    while not (HERE / "gate").exists():
        await asyncio.sleep(0.01)
    return {"n": n}


async def count(to, stream=False):
    for n in range(to):
        yield {"n": n}
"""
CONFIG = """
[models.double]
engine = "function"
source = "app.py:double"

[models.gated]
engine = "function"
source = "app.py:gated"

[models.count]
engine = "function"
source = "app.py:count"

[projects.narrow]
models = ["gated"]
"""


@contextlib.asynccontextmanager
async def open_server(folder: Path, config: str = CONFIG, **drain: float) -> AsyncIterator[Running]:
    """Serves `config` and the functions of CODE from `folder`."""
    (folder / "app.py").write_text(CODE)
    (folder / "batchmill.toml").write_text(config)
    result = load(environ={}, cwd=folder, data_dir=str(folder / "data"))
    any_port = replace(result.server, port=0)  # a file may not ask for it, a command line may
    async with serve(replace(result, server=any_port), **drain) as running:
        yield running
