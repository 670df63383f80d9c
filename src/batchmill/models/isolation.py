"""Isolates deployed functions with bubblewrap: builds the command prefix of a sandboxed process.

The sandbox contains only what is listed here: the system's programs and libraries, the interpreter, the function's
environment and code, all read-only, and an empty `/tmp`. All other files of the machine are absent.
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
TMP_BYTES = 1024**3  # the size of /tmp and of /dev/shm, which are in memory
TRY_S = 30.0
INTERPRETERS_MAX = 64  # whose folders are cached
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
# Files of /etc that programs need: names, certificates, library paths. No keys, no password hashes.
ETC = (
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "timezone", "mime.types", "passwd"),
    *("group", "nsswitch.conf", "resolv.conf", "hosts", "host.conf", "gai.conf", "services", "protocols"),
    *("ssl/certs", "ssl/openssl.cnf", "ca-certificates", "pki/tls/certs", "pki/ca-trust", "crypto-policies", "fonts"),
)
GPU_NODES = ("nvidia*", "nvidia-caps", "dri", "kfd")
# Variables that name folders outside the sandbox.
UNAVAILABLE = frozenset({"HOME", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "HF_HOME"})
_PRINT_PREFIXES = "import sys; print(sys.prefix); print(sys.base_prefix)"


def require(isolation: Isolation) -> Isolation:
    """Test bubblewrap, and return the isolation with the program's path. Blocks.

    Raises: InvalidConfig if bubblewrap is missing or cannot create namespaces here.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        raise InvalidConfig(
            'functions.isolate is "bubblewrap", and there is no bwrap on the PATH: install the package '
            'bubblewrap, or set functions.isolate = "none"',
            code="no_isolation",
        )
    isolation = replace(isolation, program=program)
    command = [*_namespaces(isolation), "--", "/bin/true" if os.path.exists("/bin/true") else "/usr/bin/true"]
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TRY_S, check=False, env={}, text=True
        )
        problem = result.stderr.strip() if result.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        raise InvalidConfig(
            f'functions.isolate is "bubblewrap", and bwrap cannot create namespaces here: {problem[:500]}. A container '
            'needs user namespaces and an unmasked /proc; or set functions.isolate = "none"',
            code="no_isolation",
        )
    return isolation


def function_prefix(isolation: Isolation, python: str, paths: Sequence[str], *, folder: str, gpus: int) -> list[str]:
    """The command prefix for a function's process.

    Args:
        paths: what else it reads: its environment, the folders of its interpreter, the program.
        folder: its code, and its working directory.
    """
    words = [*_namespaces(isolation), *_all_readable([*paths, folder], isolation)]
    words += _links(python, [*paths, folder])
    if gpus:
        nodes = sorted(str(node) for pattern in GPU_NODES for node in Path("/dev").glob(pattern))
        words += [word for node in nodes for word in ("--dev-bind", node, node)]
        words += ["--ro-bind-try", "/sys", "/sys"]
    return [*words, "--remount-ro", "/", "--chdir", folder, "--"]


def build_prefix(isolation: Isolation, paths: Sequence[str], *, writes: str, python: str) -> list[str]:
    """The command prefix for an installer. `writes` is the folder that it can write to."""
    words = [*_namespaces(isolation), *_all_readable(paths, isolation)]
    words += ["--bind", writes, writes, *_links(python, [*paths, writes])]
    return [*words, "--remount-ro", "/", "--chdir", writes, "--"]


def environ(variables: Mapping[str, str], kept_names: Collection[str] = ()) -> dict[str, str]:
    """Variables without those that name folders outside the sandbox. The home is /tmp.

    Args:
        kept_names: variables of the function itself, which stay.
    """
    available = {name: value for name, value in variables.items() if name in kept_names or name not in UNAVAILABLE}
    return {"HOME": "/tmp", "TMPDIR": "/tmp"} | available


def _namespaces(isolation: Isolation) -> list[str]:
    words = [isolation.program, "--unshare-user", "--disable-userns", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
    words += ["--unshare-cgroup-try", "--die-with-parent", "--cap-drop", "ALL", "--hostname", "function"]
    words += [] if isolation.network else ["--unshare-net"]
    for folder in SYSTEM:
        if os.path.islink(folder):
            words += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            words += ["--ro-bind", folder, folder]
    for name in ETC:
        words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    words += ["--proc", "/proc", "--dev", "/dev", "--size", str(TMP_BYTES), "--perms", "1777", "--tmpfs", "/dev/shm"]
    words += ["--remount-ro", "/dev", "--size", str(TMP_BYTES), "--perms", "1777", "--tmpfs", "/tmp"]
    if _is_below(isolation.data_dir, SYSTEM):
        words += ["--tmpfs", isolation.data_dir]
    return words


def _all_readable(paths: Sequence[str], isolation: Isolation) -> list[str]:
    """Arguments for all readable paths. Those in the data directory come last, after it was hidden."""
    readable = sorted((*isolation.readable, *paths), key=lambda path: _is_below(path, [isolation.data_dir]))
    return [word for path in dict.fromkeys(readable) for word in _readable(path, isolation)]


def _readable(path: str, isolation: Isolation) -> list[str]:
    """Arguments for one folder or file. A folder that contains the data directory is shown without it."""
    if _is_below(path, SYSTEM) and not _is_below(path, [isolation.data_dir]):
        return []
    if path == "/" or _is_below(os.path.expanduser("~"), [path]):
        raise ModelFailed(
            f"{path} contains more than an interpreter or files for functions: with functions.isolate each needs its "
            "own folder",
            code="unknown_python",
        )
    words = ["--ro-bind", path, path]
    return [*words, "--tmpfs", isolation.data_dir] if _is_below(isolation.data_dir, [path]) else words


def _links(python: str, paths: Sequence[str]) -> list[str]:
    """Arguments for the symbolic links from an interpreter's path to the program, if they are outside of `paths`."""
    words: list[str] = []
    path = python
    for _ in range(40):
        if not os.path.islink(path):
            break
        target = os.readlink(path)
        if not _is_below(path, (*SYSTEM, *paths)):
            words += ["--symlink", target, path]
        path = os.path.normpath(os.path.join(os.path.dirname(path), target))
    return words


def _is_below(path: str, folders: Sequence[str]) -> bool:
    """Whether the path is one of the folders or is in one of them."""
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


@lru_cache(INTERPRETERS_MAX)
def interpreter_folders(python: str) -> tuple[str, ...]:
    """The folders of an interpreter's files. Blocks.

    It runs the interpreter, which therefore must be one of the machine, not one of a deployed environment.

    Raises: ModelFailed if it is not an interpreter.
    """
    if python == sys.executable:
        prefixes = [sys.prefix, sys.base_prefix]
    else:
        result = subprocess.run(
            [python, "-I", "-c", _PRINT_PREFIXES], stdin=subprocess.DEVNULL, capture_output=True, timeout=TRY_S,
            check=False, env={"PATH": os.environ.get("PATH", "")}, text=True,
        )  # fmt: skip
        prefixes = result.stdout.splitlines()[:2]
        if result.returncode or len(prefixes) < 2:
            message = f"{python} is not a Python interpreter: {result.stderr.strip()[:200]}"
            raise ModelFailed(message, code="unknown_python")
    return tuple(dict.fromkeys(os.path.abspath(each) for each in prefixes))


def isolation_of_config(entry: FunctionsEntry, data_dir: Path) -> Isolation | None:
    """The isolation that the configuration asks for, after a test of it. Blocks.

    Raises: InvalidConfig if it does not work, or if functions could read the data directory.
    """
    if not entry.is_isolated:
        return None
    for path in entry.readable:
        if _is_below(str(data_dir), [path]) or _is_below(path, [str(data_dir)]) or not os.path.exists(path):
            raise InvalidConfig(
                f"functions.readable: {path} does not exist, or contains or is in the data directory {data_dir}"
            )
    return require(Isolation("", entry.network, str(data_dir), entry.readable))
