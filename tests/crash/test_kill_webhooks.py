"""A server that is killed again and again tells of every batch all the same."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from fakes.running_server import RunningServer
from fakes.webhook_receiver import WebhookReceiver
from openai import OpenAI
from story.openai_story import row, submit, write_project

SECRET = "whsec_" + "QUJD" * 8
BATCHES = 12
KILLS = (1, 4, 8)  # after so many deliveries


@pytest.mark.timeout(180)
async def test_every_batch_is_told_whatever_is_killed(tmp_path: Path):
    """Each batch has exactly one event, however often it is delivered: none is lost, and repetitions have one id."""
    async with WebhookReceiver() as receiver:
        result = (
            f'[server]\nprivate_hosts = ["127.0.0.1"]\n[[webhooks]]\nurl = "{receiver.url()}"\nsecret = "env:HOOK"\n'
        )
        server = RunningServer(tmp_path, write_project(tmp_path, result).read_text(), env={"HOOK": SECRET})
        await asyncio.to_thread(server.start)
        try:
            batches = await asyncio.to_thread(_submit, server.url)
            for deliveries in KILLS:
                await receiver.wait_for(deliveries)
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
            seen: dict[str, set[str]] = {}
            count = 0
            while len(seen) < BATCHES:
                count += 1
                delivery = (await receiver.wait_for(count))[-1]
                event = json.loads(delivery.body)
                seen.setdefault(event["data"]["id"], set()).add(delivery.id)
                assert event["type"] == "batch.completed"
        finally:
            await asyncio.to_thread(server.close)
    assert set(seen) == batches
    assert all(len(ids) == 1 for ids in seen.values())


def _submit(url: str) -> set[str]:
    with OpenAI(api_key="none", base_url=f"{url}/v1") as client:
        return {submit(client, [row("a", f"text {number}")]).id for number in range(BATCHES)}
