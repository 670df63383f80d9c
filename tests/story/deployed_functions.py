"""A real server with functions deployed to it, and scripts of published clients that are run against it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fakes.running_server import RunningServer, running_server

COMMAND_S = 100
DOCS = Path(__file__).parents[2] / "docs"
SHOWN_ADDRESS = "127.0.0.1:8080"  # of the server, in pages


def batchmill(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command on the data directory of the server in `folder`."""
    return subprocess.run(
        [sys.executable, "-m", "batchmill", "--data-dir", str(folder / "data"), *words],
        cwd=folder, capture_output=True, text=True, timeout=COMMAND_S,
    )  # fmt: skip


def deploy(folder: Path, *words: str) -> None:
    done = batchmill(folder, "deploy", *words)
    assert done.returncode == 0, done.stdout + done.stderr


@contextlib.contextmanager
def server_of(folder: Path, code: str, deployments: Sequence[Sequence[str]], *words: str) -> Iterator[RunningServer]:
    """A server with the functions of `code` (functions.py): words of `batchmill deploy` for each."""
    (folder / "functions.py").write_text(code)
    (folder / "batchmill.toml").write_text("")
    for each in deployments:
        deploy(folder, *each)
    with running_server(folder, "", *words) as server:
        yield server


def run_script(python: str, script: str, *, within_s: float = COMMAND_S, **fields: Any) -> dict[str, Any]:
    """What a script says in `found` once it has ended, in the interpreter of a published client.

    It finds `told` under those names, and nothing of our own environment or packages.
    """
    text = f"import json\nfound = {{}}\nlocals().update(json.loads({json.dumps(json.dumps(fields))}))\n{script}\n"
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    done = subprocess.run(
        [python, "-c", text + "print('\\n' + json.dumps(found))"],
        capture_output=True, text=True, timeout=within_s, env=kept,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.rpartition("\n{")[2].join(["{", ""]))


def run_example(python: str, page: str, client: str, port: int, shown: str = SHOWN_ADDRESS) -> tuple[str, str]:
    """What the program below `<!-- CLIENT -->` in a page prints at a server of ours, and what the page says of it."""
    block = re.search(rf"<!-- {client} -->\n```python\n(.*?)```\n+```\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert block is not None, f"{page} has no program for {client}"
    script = block[1].replace(shown, f"127.0.0.1:{port}")
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, timeout=COMMAND_S, env=kept)
    assert done.returncode == 0, done.stderr
    return done.stdout, block[2]


def page_file(page: str, name: str) -> str:
    """A file that a page shows below `<!-- file: NAME -->`."""
    block = re.search(rf"<!-- file: {re.escape(name)} -->\n```\w*\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert block is not None, f"{page} shows no file {name}"
    return block[1]
