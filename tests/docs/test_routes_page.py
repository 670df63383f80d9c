"""The page about routes, done as it stands there with a provider and a service at the addresses that it shows."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest
from docs.pages import Session, read_page
from fakes.batch_provider import BatchProvider
from fakes.openai_service import OpenAIService

PAGE = Path(__file__).parents[2] / "docs" / "routes.md"


@pytest.mark.timeout(120)
async def test_the_page_of_routes_does_what_it_says() -> None:
    """Every command of the page prints what the page says, and the rows go where it says."""
    with tempfile.TemporaryDirectory(prefix="page-") as home:
        folder = Path(home) / "ada"
        folder.mkdir()
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environ = {"PATH": path, "BATCHMILL_DATA_DIR": str(Path(home) / "data")}
        async with BatchProvider() as provider, OpenAIService() as service:
            addresses = {"127.0.0.1:8000": f"127.0.0.1:{provider.port}", "127.0.0.1:8001": f"127.0.0.1:{service.port}"}
            async with Session(folder, environ, addresses) as session:
                await session.follow(read_page(PAGE.read_text()))
            assert len(provider.batches) == 1
