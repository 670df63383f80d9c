"""The page about structured output, done as it stands there with a service and a provider at the addresses it shows."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from docs.test_examples import ANSWERS, follow
from fakes.batch_provider import BatchProvider

PAGE = "docs/structured-output.md"
SHOWN_PROVIDER = "127.0.0.1:8002"


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="page-") as place:
        yield Path(place)


def answer(body: dict[str, Any]) -> str:
    """As the service of the pages answers; what it cannot, with a temperature."""
    if "temperature" in body:
        return '{"label": "neutral", "score": 0.5}'
    return next(said for mark, said in ANSWERS.items() if mark in body["messages"][-1]["content"])


@pytest.mark.timeout(120)
async def test_the_page_does_what_it_says(home: Path) -> None:
    """Every command prints what the page says, and the provider is asked again with what was wrong, as it says."""
    async with BatchProvider() as provider:
        provider.answer = answer
        await follow(PAGE, home, {}, addresses={SHOWN_PROVIDER: f"127.0.0.1:{provider.port}"})
        first, again, retried = provider.batches.values()
    assert [len(batch.lines) for batch in (first, again, retried)] == [3, 2, 1]
    asked = [line["body"]["messages"][-2:] for line in again.lines]
    said = {answered["content"]: words["content"] for answered, words in asked}
    assert said.keys() == {"sorry", ANSWERS["as JSON: It cannot"]}
    assert "it is not JSON" in said["sorry"]
    assert '/label: "unsure" is not one of' in said[ANSWERS["as JSON: It cannot"]]
