"""What container engines, Kubernetes and Prometheus ask a server, and what it answers."""

from __future__ import annotations

import re
from pathlib import Path

import httpx2
from deploy.deploy_files import DEPLOY, documents, walk
from dialects.open_server import open_server

from batchmill.server.auth import Hosts
from batchmill.types import Scope


def probed_paths() -> set[str]:
    """The paths that health checks of batchmill's own images and pods ask for."""
    found = set(re.findall(r"http://127\.0\.0\.1:8000(/\w+)", (DEPLOY / "Containerfile").read_text()))
    for each in walk(documents(DEPLOY / "kubernetes" / "server.yaml")):
        if isinstance(each, dict) and "httpGet" in each:
            found.add(each["httpGet"]["path"])
    return found


async def test_probes_are_answered_without_a_key(tmp_path: Path):
    """A probe gets 200 while the server takes work and 503 once it stops, although there are keys."""
    paths = probed_paths()
    assert paths == {"/ready"}
    async with open_server(tmp_path) as running, httpx2.AsyncClient(base_url=running.url, trust_env=False) as http:
        await running.services.keys.create(name="k", project="p", scope=Scope.ADMIN)
        answers = [(await http.get(path)).status_code for path in paths]
        running.services.stopping.set()
        answers += [(await http.get(path)).status_code for path in paths]
    assert answers == [200, 503]


def test_hosts_of_probes_are_accepted():
    """The kubelet calls a pod by its address, Prometheus and clients by the names of services."""
    for place, names in (
        ("compose", ["127.0.0.1:8000", "server:8000", "standby:8000"]),
        ("kubernetes", ["10.1.2.3:8000", "batchmill:8000", "batchmill.batchmill.svc:8000"]),
    ):
        text = (DEPLOY / place / "batchmill.toml").read_text()
        (allowed,) = re.findall(r"^allowed_hosts = \[(.*?)\]", text, re.MULTILINE)
        hosts = Hosts("0.0.0.0", re.findall(r'"([^"]+)"', allowed))
        for name in names:
            hosts.check("GET", [(b"host", name.encode())])
