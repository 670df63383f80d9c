"""The page about providers' batches, done as it stands there with a provider at the address that it shows."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs.pages import Session, read_page
from fakes.batch_provider import BatchProvider

from batchmill.engines.provider_batch.gemini import GeminiBatches
from batchmill.engines.provider_batch.openai import OpenAIBatches
from batchmill.engines.provider_batch.settings import SHARED
from batchmill.models.providers import PROVIDERS

PAGE = Path(__file__).parents[2] / "docs" / "provider-batches.md"


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="page-") as place:
        yield Path(place)


@pytest.mark.timeout(120)
async def test_the_page_does_what_it_says(home: Path) -> None:
    """Every command of the page prints what the page says."""
    folder = home / "ada"
    folder.mkdir()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {"PATH": path, "BATCHMILL_DATA_DIR": str(home / "data")}
    async with BatchProvider() as provider:
        async with Session(folder, environ, {"127.0.0.1:8000": f"127.0.0.1:{provider.port}"}) as session:
            await session.follow(read_page(PAGE.read_text()))
        assert len(provider.batches) == 1


def test_every_argument_is_told() -> None:
    """The page names every provider, and every argument of the engine, of OpenAI's and of Gemini's batches."""
    text = PAGE.read_text()
    names = SHARED | OpenAIBatches.arguments | GeminiBatches.arguments | {f"{name}-batch" for name in PROVIDERS}
    assert [name for name in names if f"`{name}`" not in text] == []
