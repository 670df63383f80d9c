"""Which models /health tells of."""

import httpx2
from dialects.open_server import open_server

from batchmill.types import Scope


async def test_who_is_told_of_which_models(tmp_path):
    """Whoever may use a model, and who looks after the server, sees how its workers stand; nobody else does."""
    async with open_server(tmp_path) as running, httpx2.AsyncClient(base_url=running.url, trust_env=False) as http:
        assert (await http.post("/v1/chat/completions", json={"model": "double", "n": 1})).status_code == 200
        seen = {}
        for name, scope, models in (
            ("admin", Scope.ADMIN, frozenset({"gated"})),
            ("user", Scope.READ, frozenset({"double"})),
            ("other", Scope.READ, frozenset({"gated"})),
        ):
            key = (await running.services.keys.create(name=name, project="p", scope=scope, models=models)).key
            report = (await http.get("/health", headers={"authorization": f"Bearer {key}"})).json()
            seen[name] = [each["name"] for each in report["models"]]
        stranger = await http.get("/health")
    assert seen == {"admin": ["double"], "user": ["double"], "other": []}
    assert (stranger.status_code, stranger.json()) == (200, {"status": "ok"})
