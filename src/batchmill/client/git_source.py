"""Code out of a git repository at one revision: `git+https://HOST/REPO@REV#subdirectory=FOLDER:FILE.py:NAME`.

What is recorded is the commit, and the address without whatever credentials stood in it.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from msgspec.structs import replace

from batchmill.client.sources import Collected, from_folder
from batchmill.errors import InvalidInput, Unavailable

PREFIX = "git+"
SCHEMES = ("https", "http", "ssh", "file", "git")
CLONE_S_MAX = 600.0
SHOWN_CHARS = 1000
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_SUBDIRECTORY = "subdirectory="


@contextlib.contextmanager
def collect_git(source: str) -> Iterator[Collected]:
    """The code, as long as the context lasts. Raises: InvalidInput for an address or revision that is not there."""
    address, revision, folder, target = _read(source)
    with tempfile.TemporaryDirectory(prefix="batchmill-git-") as place:
        _git(place, "init", "--quiet")
        _fetch(place, address, revision)
        commit = _git(place, "rev-parse", "HEAD")
        inside = Path(place, folder).resolve()
        if not inside.is_relative_to(Path(place).resolve()) or not inside.is_dir():
            raise InvalidInput(f"there is no folder {folder!r} in that repository", code="unknown_function")
        shown = f"{PREFIX}{hidden(address)}@{commit}"
        told = f"{shown}#{_SUBDIRECTORY}{folder}" if folder else shown
        found = from_folder(inside, target, told)
        yield replace(found, source=f"{told}:{found.target}")


def _read(source: str) -> tuple[str, str, str, str]:
    """Address, revision, folder and target."""
    url, _, fragment = source.removeprefix(PREFIX).partition("#")
    folder = target = ""
    if fragment:
        if not fragment.startswith(_SUBDIRECTORY):
            raise InvalidInput(f"after # stands {_SUBDIRECTORY}FOLDER, not {fragment[:80]!r}", code="invalid_source")
        folder, _, target = fragment.removeprefix(_SUBDIRECTORY).partition(":")
    elif match := re.search(r":([^/:]*[^:]*\.py:[\w.]+)$", url):
        url, target = url[: match.start()], match[1]
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or url.startswith("-"):
        raise InvalidInput(f"git addresses begin with {', '.join(f'git+{each}://' for each in SCHEMES)}")
    path, at, revision = parts.path.rpartition("@")
    if not at:
        path, revision = parts.path, "HEAD"
    if not revision or revision.startswith("-"):
        raise InvalidInput(f"{revision[:80]!r} is no revision", code="invalid_source")
    return urlunsplit(parts._replace(path=path)), revision, folder, target


def _fetch(place: str, address: str, revision: str) -> None:
    """One revision where the server gives it alone, otherwise all of them: a commit by its hash may need that."""
    try:
        _git(place, "fetch", "--quiet", "--depth=1", "--end-of-options", address, revision)
        _git(place, "checkout", "--quiet", "FETCH_HEAD")
    except InvalidInput:
        _git(place, "fetch", "--quiet", "--tags", "--end-of-options", address, "+refs/heads/*:refs/remotes/origin/*")
        _git(place, "checkout", "--quiet", "--detach", revision, "--")


def _git(place: str, *words: str) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_DIR")}
    environ |= {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    command = ["git", "-c", "core.hooksPath=/dev/null", "-c", "protocol.ext.allow=never", *words]
    try:
        done = subprocess.run(
            command, cwd=place, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=CLONE_S_MAX,
        )  # fmt: skip
    except FileNotFoundError:
        raise InvalidInput("there is no program `git` on the PATH: install it", code="no_git") from None
    except subprocess.TimeoutExpired:
        raise Unavailable(f"git {words[0]} took longer than {CLONE_S_MAX:.0f} s", code="git_timeout") from None
    if done.returncode:
        raise InvalidInput(f"git {words[0]}: {hidden(done.stderr.strip()[-SHOWN_CHARS:])}", code="git_failed")
    return done.stdout.strip()


def hidden(text: str) -> str:
    """A text without the credentials of addresses in it."""
    return _CREDENTIALS.sub("***", text)
