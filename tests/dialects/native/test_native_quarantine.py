"""Requests that engines died of, over batchmill's own API and on the command line: who sees them, and lets them go."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from dialects.open_server import open_server

from batchmill.serving import Running
from batchmill.types import Scope
from batchmill.types.models import Suspect

MODEL, URL = "org/base", "/batchmill/v1/quarantine"
OURS, OURS_TOO, THEIRS = "a1" * 32, "a2" * 32, "b1" * 32


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Running]:
    """One whose engines died of two requests of a project, and of one of another."""
    async with open_server(tmp_path) as running:
        for digest, project, deaths in ((OURS, "ours", 2), (OURS_TOO, "ours", 1), (THEIRS, "theirs", 2)):
            running.services.llms.quarantine.suspect(
                MODEL, Suspect(digest, project, "/v1/completions", deaths, time.time())
            )
        yield running


async def client_of(server: Running, project: str, scope: Scope) -> httpx2.AsyncClient:
    made = await server.services.keys.create(name="k", project=project, scope=scope)
    return httpx2.AsyncClient(base_url=server.url, headers={"authorization": f"Bearer {made.key}"})


def digests(reply: httpx2.Response) -> list[str]:
    assert reply.status_code == 200, reply.text
    return [each["digest"] for each in reply.json()["requests"]]


async def test_a_key_sees_those_of_its_project_and_an_admin_lets_them_go(server: Running) -> None:
    """What is another project's cannot be seen, nor let go; what is let go may run again."""
    async with (
        await client_of(server, "ours", Scope.SUBMIT) as reader,
        await client_of(server, "ours", Scope.ADMIN) as admin,
        await client_of(server, "theirs", Scope.ADMIN) as other,
    ):
        shown = (await reader.get(URL)).json()["requests"]
        assert [(each["digest"], each["is_refused"]) for each in shown] == [(OURS, True), (OURS_TOO, False)]
        assert {key: shown[0][key] for key in ("model", "project", "url", "deaths")} == {
            "model": MODEL, "project": "ours", "url": "/v1/completions", "deaths": 2,
        }  # fmt: skip
        for path in (URL, f"{URL}/{OURS}"):
            refused = await reader.delete(path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
        for unknown in (THEIRS, "c1" * 32):
            missing = await admin.delete(f"{URL}/{unknown}")
            assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_request")
        several = await admin.delete(f"{URL}/a")
        assert (several.status_code, several.json()["error"]["code"]) == (400, "ambiguous_request")
        assert digests(await admin.delete(f"{URL}/{OURS}")) == [OURS]
        assert digests(await admin.delete(URL)) == [OURS_TOO]
        assert digests(await reader.get(URL)) == []
        assert digests(await other.get(URL)) == [THEIRS]
    assert [each.digest for each in server.services.llms.quarantine.poison(MODEL).suspects] == [THEIRS]


async def command(*words: str, key: str = "") -> tuple[int, list[dict[str, Any]], str]:
    """`batchmill quarantine`: its exit code, what it said as JSON, and its standard error."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BATCHMILL_")}
    line = [sys.executable, "-m", "batchmill", "--json", "quarantine", *words]
    environment |= {"BATCHMILL_API_KEY": key} if key else {}
    done = await asyncio.to_thread(subprocess.run, line, capture_output=True, text=True, timeout=60, env=environment)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


async def test_the_command_lists_and_clears_beside_a_server_and_at_it(server: Running, tmp_path: Path) -> None:
    """On this machine it sees all projects, or the one that is named; at a server those of the key's own."""
    here = ("--data-dir", str(tmp_path / "data"), "--config", str(tmp_path / "batchmill.toml"))

    async def listed(*where: str, key: str = "") -> list[str]:
        code, lines, said = await command("list", *where, key=key)
        assert code == 0, said
        return [each["request"]["digest"] for each in lines]

    made = await server.services.keys.create(name="k", project="ours", scope=Scope.ADMIN)
    there = ("--server", server.url)
    assert await listed(*here) == [OURS, OURS_TOO, THEIRS]
    assert await listed(*here, "--project", "theirs") == [THEIRS]
    assert await listed(*there, key=made.key) == [OURS, OURS_TOO]
    code, _, said = await command("clear", THEIRS[:12], *there, key=made.key)
    assert (code, "no quarantined request" in said) == (2, True)
    assert (await command("clear", OURS[:12], *there, key=made.key))[0] == 0
    code, lines, said = await command("clear", "c1", *here)
    assert (code, lines[0]["code"]) == (2, "unknown_request")
    assert (await command("clear", *here))[0] == 2
    assert (await command("clear", OURS_TOO[:12], *here))[0] == 0
    assert (await command("clear", "--all", "--project", "ours", *here))[1] == []
    assert await listed(*here) == [THEIRS]
