"""Deployed functions in namespaces of their own: how bubblewrap is called so that code sees itself and the system.

A list of what is there, never of what is hidden: the system's programs and libraries, the interpreter, the function's
own environment and code, all read-only, and an empty `/tmp`. Everything else of the machine's files is absent.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from msgspec.structs import replace

from batchmill.errors import InvalidConfig, ModelFailed
from batchmill.types import Isolation
from batchmill.types.isolation import FunctionsEntry

PROGRAM = "bwrap"
TMP_BYTES = 1024**3  # of /tmp and of /dev/shm, each: they are memory
TRY_S = 30.0
INTERPRETERS_MAX = 64  # whose places are remembered
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
# Of /etc what programs look up: names, certificates, how libraries are found. No keys, no password hashes.
ETC = (
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "timezone", "mime.types", "passwd"),
    *("group", "nsswitch.conf", "resolv.conf", "hosts", "host.conf", "gai.conf", "services", "protocols"),
    *("ssl/certs", "ssl/openssl.cnf", "ca-certificates", "pki/tls/certs", "pki/ca-trust", "crypto-policies", "fonts"),
)
GPU_NODES = ("nvidia*", "nvidia-caps", "dri", "kfd")
DROPPED = frozenset({"HOME", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "HF_HOME"})  # places that are not there
_ASK = "import sys; print(sys.prefix); print(sys.base_prefix)"


def require(isolation: Isolation) -> Isolation:
    """The same, with the program's path. Blocks while it is tried.

    Raises: InvalidConfig where bubblewrap is missing, or cannot make namespaces here.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        raise InvalidConfig(
            'functions.isolate is "bubblewrap", and there is no program bwrap on the PATH: install the package '
            'bubblewrap, or set functions.isolate = "none"',
            code="no_isolation",
        )
    isolation = replace(isolation, program=program)
    command = [*_namespaces(isolation), "--", "/bin/true" if os.path.exists("/bin/true") else "/usr/bin/true"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TRY_S, check=False, env={}, text=True
        )
        problem = done.stderr.strip() if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        raise InvalidConfig(
            f'functions.isolate is "bubblewrap", and bwrap cannot make namespaces here: {problem[:500]}. A container '
            'needs user namespaces and an unmasked /proc; or set functions.isolate = "none"',
            code="no_isolation",
        )
    return isolation


def of_function(isolation: Isolation, python: str, places: Sequence[str], *, folder: str, gpus: int) -> list[str]:
    """What comes before the command of a function's process.

    Args:
        places: what it reads besides: its environment and the interpreter's own, the program.
        folder: its code, where it stands.
    """
    words = [*_namespaces(isolation), *_all_readable([*places, folder], isolation)]
    words += _links(python, [*places, folder])
    if gpus:
        nodes = sorted(str(node) for pattern in GPU_NODES for node in Path("/dev").glob(pattern))
        words += [word for node in nodes for word in ("--dev-bind", node, node)]
        words += ["--ro-bind-try", "/sys", "/sys"]
    return [*words, "--remount-ro", "/", "--chdir", folder, "--"]


def of_build(isolation: Isolation, places: Sequence[str], *, writes: str, python: str) -> list[str]:
    """As `of_function`, of pip: `writes` is the environment that it makes."""
    words = [*_namespaces(isolation), *_all_readable(places, isolation)]
    words += ["--bind", writes, writes, *_links(python, [*places, writes])]
    return [*words, "--remount-ro", "/", "--chdir", writes, "--"]


def environ(found: Mapping[str, str], own: Collection[str] = ()) -> dict[str, str]:
    """Variables without the places that are not there: home is /tmp. `own` are the function's, and stay."""
    kept = {name: value for name, value in found.items() if name in own or name not in DROPPED}
    return {"HOME": "/tmp", "TMPDIR": "/tmp"} | kept


def _namespaces(isolation: Isolation) -> list[str]:
    words = [isolation.program, "--unshare-user", "--disable-userns", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
    words += ["--unshare-cgroup-try", "--die-with-parent", "--cap-drop", "ALL", "--hostname", "function"]
    words += [] if isolation.network else ["--unshare-net"]
    for place in SYSTEM:
        if os.path.islink(place):
            words += ["--symlink", os.readlink(place), place]
        elif os.path.isdir(place):
            words += ["--ro-bind", place, place]
    for name in ETC:
        words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    words += ["--proc", "/proc", "--dev", "/dev", "--size", str(TMP_BYTES), "--perms", "1777", "--tmpfs", "/dev/shm"]
    words += ["--remount-ro", "/dev", "--size", str(TMP_BYTES), "--perms", "1777", "--tmpfs", "/tmp"]
    if _is_below(isolation.data_dir, SYSTEM):
        words += ["--tmpfs", isolation.data_dir]
    return words


def _all_readable(places: Sequence[str], isolation: Isolation) -> list[str]:
    """What lies in the data directory comes last: what was hidden of it stays so."""
    readable = sorted((*isolation.readable, *places), key=lambda place: _is_below(place, [isolation.data_dir]))
    return [word for place in dict.fromkeys(readable) for word in _readable(place, isolation)]


def _readable(place: str, isolation: Isolation) -> list[str]:
    """One folder or file of ours. What holds the data directory is shown without it."""
    if _is_below(place, SYSTEM) and not _is_below(place, [isolation.data_dir]):
        return []
    if place == "/" or _is_below(os.path.expanduser("~"), [place]):
        raise ModelFailed(
            f"{place} holds more than an interpreter or what functions may read: with functions.isolate each needs a "
            "folder of its own",
            code="unknown_python",
        )
    words = ["--ro-bind", place, place]
    return [*words, "--tmpfs", isolation.data_dir] if _is_below(isolation.data_dir, [place]) else words


def _links(python: str, places: Sequence[str]) -> list[str]:
    """The links that lead from an interpreter's path to the program itself, where they are not in those places."""
    words: list[str] = []
    path = python
    for _ in range(40):
        if not os.path.islink(path):
            break
        target = os.readlink(path)
        if not _is_below(path, (*SYSTEM, *places)):
            words += ["--symlink", target, path]
        path = os.path.normpath(os.path.join(os.path.dirname(path), target))
    return words


def _is_below(path: str, places: Sequence[str]) -> bool:
    """The path is one of the places or lies in it."""
    return any(path == place or path.startswith(place.rstrip("/") + "/") for place in places)


@lru_cache(INTERPRETERS_MAX)
def places_of(python: str) -> tuple[str, ...]:
    """Where an interpreter's own files lie. It is run, so it is one of the machine's, not of what was deployed. Blocks.

    Raises: ModelFailed for what is no interpreter.
    """
    if python == sys.executable:
        prefixes = [sys.prefix, sys.base_prefix]
    else:
        done = subprocess.run(
            [python, "-I", "-c", _ASK], stdin=subprocess.DEVNULL, capture_output=True, timeout=TRY_S, check=False,
            env={"PATH": os.environ.get("PATH", "")}, text=True,
        )  # fmt: skip
        prefixes = done.stdout.splitlines()[:2]
        if done.returncode or len(prefixes) < 2:
            raise ModelFailed(f"{python} is no Python interpreter: {done.stderr.strip()[:200]}", code="unknown_python")
    return tuple(dict.fromkeys(os.path.abspath(each) for each in prefixes))


def of_config(entry: FunctionsEntry, data_dir: Path) -> Isolation | None:
    """What the configuration asks for, once it was tried. Blocks.

    Raises: InvalidConfig where it cannot be had, or would show functions the data directory.
    """
    if not entry.is_isolated:
        return None
    for place in entry.readable:
        if _is_below(str(data_dir), [place]) or _is_below(place, [str(data_dir)]) or not os.path.exists(place):
            raise InvalidConfig(
                f"functions.readable: {place} does not exist, or holds or lies in the data directory {data_dir}"
            )
    return require(Isolation("", entry.network, str(data_dir), entry.readable))
