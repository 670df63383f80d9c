"""A whole server in this process whose language models run in the fake engine server."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from dialects.open_server import open_server
from engines.llm_support import FakeVllm

from batchmill.serving import Running

TENANT = "default"
TIMEOUT_S = 120.0
WINDOW = 2048  # of the fake's engine


def config_of(fake: FakeVllm, more: str = "") -> str:
    model = fake.folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": WINDOW}))
    return f"""
[server]
worker_environment = ["FAKE_*"]

[models.tiny]
engine = "vllm"
source = "{model}"
python = "{sys.executable}"
adapters = {{ upper = "{fake.adapter("upper")}", reverse = "{fake.adapter("reverse")}" }}
price = {{ input = 0.5, output = 0.5 }}

[models.sorter]
engine = "vllm"
source = "{model}"
python = "{sys.executable}"
engine_args = {{ runner = "pooling" }}
{more}
"""


@contextlib.asynccontextmanager
async def open_llms(folder: Path, more: str = "") -> AsyncIterator[tuple[Running, httpx2.AsyncClient, FakeVllm]]:
    """The server, a client of it, and the fake in which its engines run."""
    fake = FakeVllm(folder / "fake")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PYTHONPATH", "FAKE_ONCE", "FAKE_CALLS", "FAKE_HEALTH_DELAY_S"):
            patch.setenv(name, fake.env[name])
        async with (
            open_server(folder, config_of(fake, more)) as running,
            httpx2.AsyncClient(base_url=running.url, timeout=TIMEOUT_S, trust_env=False) as http,
        ):
            yield running, http, fake
