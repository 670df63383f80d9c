"""The step that checks the lower bounds of dependencies against known advisories."""

from __future__ import annotations

import json
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parent.parent / "tools"
_spec = spec_from_file_location("check_advisories", TOOLS / "check_advisories.py")
assert _spec is not None and _spec.loader is not None
tool = module_from_spec(_spec)
_spec.loader.exec_module(tool)

ADVISORIES = [
    {"package": "a", "fixed": "1.10", "ids": ["CVE-1"], "what": "one"},
    {"package": "a", "fixed": "2.0", "ids": ["CVE-2"], "what": "two", "why_not": "it is not called"},
]


class Index(BaseHTTPRequestHandler):
    """A package index that knows two releases."""

    known = {"/pypi/a/1.9/json": ["CVE-2", "CVE-3"], "/pypi/b/3/json": []}

    def do_GET(self) -> None:
        found = self.known.get(self.path)
        self.send_response(200 if found is not None else 404)
        self.end_headers()
        each = [{"id": f"PYSEC-{name}", "aliases": [name], "fixed_in": ["9"]} for name in found or ()]
        self.wfile.write(json.dumps({"vulnerabilities": each}).encode())

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def index() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Index)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/simple"
    server.shutdown()
    server.server_close()


def test_no_bound_of_ours_allows_a_known_fault():
    """Every dependency has a lower bound, and none is below a fix without a reason."""
    root = TOOLS.parent
    low = tool.bounds(tomllib.loads((root / "pyproject.toml").read_text())["project"])
    advisories = tomllib.loads((TOOLS / "advisories.toml").read_text())["advisory"]
    assert tool.listed_flaws(low, advisories) == []
    assert {each["package"] for each in advisories} <= set(low)
    assert tool.parts(low["cryptography"]) >= (43, 0, 1)


def test_a_bound_below_a_fix_is_named():
    """The package, its bound, the advisory and the version to go to; numbers count as numbers."""
    [flaw] = tool.listed_flaws({"a": "1.9"}, ADVISORIES)
    assert flaw.startswith("a>=1.9: CVE-1: one; raise the bound to 1.10")
    assert tool.listed_flaws({"a": "1.10.0"}, ADVISORIES) == []
    assert tool.bounds({"dependencies": ["A_b[x]>=1"], "optional-dependencies": {"y": ["a-b>=0.9,<2"]}}) == {
        "a-b": "0.9"
    }
    with pytest.raises(SystemExit, match="'c' has no lower bound"):
        tool.bounds({"dependencies": ["c"]})


def test_an_index_adds_what_it_knows(index, capsys):
    """Advisories of the index count unless the list explains them; a release that it lacks is reported, not a flaw."""
    [flaw] = tool.index_flaws({"a": "1.9", "b": "3", "c": "1"}, ADVISORIES, index)
    assert flaw.startswith("a>=1.9: PYSEC-CVE-3: ") and flaw.endswith("fixed in 9")
    assert "not checked at the index: c 1" in capsys.readouterr().out
    with pytest.raises(OSError, match="404"):
        tool.index_flaws({"c": "1", "a": "1.9"}, ADVISORIES, index)
