"""Why a cluster is not reached, in words: what the log of a driver ends with, and the way out where one is known."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

LOG_LINES, LOG_BYTES = 3, 4096  # of the driver's log
ANSWER_S = 5.0  # for a head to take a connection
_MISSING = re.compile(r"No module named '(ray|batchmill|msgspec)")
# Ray's words for another version of itself, or of Python, on the cluster: theirs, then ours.
_VERSIONS = re.compile(r"Version mismatch:.*?\n\s+Ray: (.+)\n\s+Python: (.+)\n.*\n\s+Ray: (.+)\n\s+Python: (.+)")
TEMPORARY = "/tmp"  # where Ray has its folder, unless RAY_TMPDIR or TMPDIR names another place
FREE_BYTES_MIN = 16 * 1024 * 1024  # there, for a cluster to start
_TRACEBACK = (" ", "Traceback ", "During handling ", "The above exception ")  # what its lines begin with


def find_flaw(log: Path, python: str, error: OSError | None = None) -> str:
    """Args: error: what the owner met, for a driver that has said nothing."""
    text = _end_of(log)
    if versions := _VERSIONS.search(text):
        return (
            f"the cluster has Ray {versions[1]} and Python {versions[2]}, the driver here Ray {versions[3]} and Python "
            f"{versions[4]}: install the same versions on every node and here (cluster.python)"
        )
    lines = _last_lines(text)
    if lines and (missing := _MISSING.search(lines[-1])):
        name = "Ray" if missing[1] == "ray" else "batchmill"
        return (
            f"the interpreter {python} has no {name}: `{python} -m pip install 'batchmill[ray]'`, or set "
            "cluster.python to an interpreter that has it"
        )
    if isinstance(error, FileNotFoundError | PermissionError) and error.filename == python:
        return f"cluster.python: {python} cannot be run: {error.strerror}"
    return " | ".join(lines) or ("" if error is None else str(error))


def find_full_disk(environ: Mapping[str, str]) -> str:
    """Why no cluster can be started here, if Ray's folder for sockets and logs has no room; empty: it has.

    Ray itself waits for a file of its head that cannot be written, and says so.
    """
    folder = Path(next(filter(None, map(environ.get, ("RAY_TMPDIR", "TMPDIR"))), TEMPORARY))
    there = next(
        each for each in (folder.absolute(), *folder.absolute().parents) if each.exists()
    )  # Ray makes the rest
    if shutil.disk_usage(there).free >= FREE_BYTES_MIN:
        return ""
    return f"the disk of Ray's folder {folder} is full: make room there, or set RAY_TMPDIR to a folder with room"


def _end_of(log: Path) -> str:
    try:
        return log.read_bytes()[-LOG_BYTES:].decode(errors="replace")
    except FileNotFoundError:
        return ""


def _last_lines(text: str) -> list[str]:
    """The last lines of a log, without those of tracebacks before the error itself."""
    return [line for line in text.splitlines() if line.strip() and not line.startswith(_TRACEBACK)][-LOG_LINES:]


async def silence_of(address: str) -> str:
    """Why nobody answers at HOST:PORT, found out by a connection: Ray says so only after a minute. Empty: one does."""
    host, _, port = address.rpartition(":")
    if not host:
        return ""
    try:
        async with asyncio.timeout(ANSWER_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except TimeoutError:
        return f"nothing answers at {address} within {ANSWER_S:g} s"
    except OSError as error:
        why = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error.strerror or str(error)
        return f"nothing answers at {address}: {why}"
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return ""


__all__ = ["find_flaw", "find_full_disk", "silence_of"]
