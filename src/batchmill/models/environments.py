"""Virtual environments of deployed functions: one for each interpreter and lock, shared by versions.

Each is built in a folder with a random name, which no other process writes to: an installer may outlive its owner, or
go on beside a successor. An environment is complete once a link with its own name leads to such a folder, and has a
record, a file beside the folder: packages cannot write there. Folders that no link leads to are removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from batchmill.errors import InvalidInput, ModelFailed
from batchmill.models import installers, isolation, pip_settings
from batchmill.models.installers import Installer, Run
from batchmill.models.redaction import without_userinfo
from batchmill.owned_files import OwnedFiles, discard
from batchmill.owner_term import POLL_S
from batchmill.part_files import make_folder, sync_folder
from batchmill.types import Isolation

FOLDER = "environments"  # in the data directory
ORDER, LOCK = "deploy.json", "requirements.lock"  # in the folder of a version: what was requested, and its packages
RECORD = ".json"  # ending of the file beside the folder of an environment
UV_CACHE = ".uv-cache"  # of one isolated build
INSTALL_FAILED = "the requirements cannot be installed"
RESOLVE_FAILED = "the requirements cannot be resolved"
BUILD_S_MAX = 3600.0
RESOLVE_S_MAX = 600.0
RESOLVES_MAX = 4  # concurrent resolutions
VERSION_S_MAX = 30.0
VERSION_BYTES_MAX = 64 * 1024  # read from an interpreter that prints its version
KEPT_S = 30 * 86400.0  # how long an unused environment stays for a later version
SHOWN_CHARS = 6000  # of the installer's output, in a message
READ_BYTES_MAX = 64 * 1024  # of the installer's output, to find the end of it
VERSION_MIN = (3, 9)
_PATH = re.compile(r"^[.~]|[/\\]|\.(whl|zip|tar\.gz)$", re.IGNORECASE)
_URL = re.compile(r"(^|@\s*)[a-z+]+://", re.IGNORECASE)  # "https://host/name.whl", "name @ https://host/name.whl"
_FILE_URL = re.compile(r"(^|@\s*)([a-z]+\+)?file:", re.IGNORECASE)
_LOCKED_FOR = "# Python "  # begins a lock; its version follows
_VERSION = re.compile(r"3\.\d{1,2}")
_PRINT_VERSION = "import sys; print(*sys.version_info[:3], sys.implementation.name, sys.prefix)"
# Kills the installer when its owner is killed: nobody waits for it.
_DIE_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); os.execv(sys.argv[1], sys.argv[1:])"


class Environments:
    """
    Args:
        isolation: the sandbox for installing packages, which run their own code.
    """

    def __init__(self, folder: Path, isolation: Isolation | None = None, owned: OwnedFiles = OwnedFiles()) -> None:
        self._folder, self._isolation, self._owned = folder, isolation, owned
        self._building: dict[str, asyncio.Lock] = {}
        self._resolving = asyncio.Semaphore(RESOLVES_MAX)

    async def lock(self, interpreter: str | None, requirements: str | None, log: Path) -> str | None:
        """Resolve requirements to exact packages; None without requirements.

        Args:
            interpreter: as in `python`.
            requirements: the text of a requirements file.
            log: the file to which the installer's output is appended.

        Raises: InvalidInput for an interpreter that does not exist and for requirements that cannot be read;
        ModelFailed with the installer's output.
        """
        if requirements is None:
            return None
        check_requirements(requirements)
        base = find_python(interpreter) if interpreter is not None else sys.executable
        version = await _version_of(base)
        parsed = installers.parse(requirements)
        installer = await asyncio.to_thread(installers.installer_of, parsed, os.environ)
        async with self._resolving, self._temporary_folder() as folder:
            run = await self._runner(installer, folder, base, log, RESOLVE_S_MAX, RESOLVE_FAILED)
            return f"{_LOCKED_FOR}{_minor(version)}\n" + await installer.lock(parsed, base, folder, run)

    @contextlib.asynccontextmanager
    async def _temporary_folder(self) -> AsyncIterator[Path]:
        """A folder beside the environments, which `sweep` removes if this process dies."""
        await asyncio.to_thread(make_folder, self._folder)
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, dir=self._folder, prefix="resolve-"))
        try:
            yield folder
        finally:
            await asyncio.shield(asyncio.to_thread(discard, folder))

    async def python(self, interpreter: str | None, lock: str | None, log: Path) -> str | None:
        """The interpreter of a function; None: batchmill's own.

        Args:
            interpreter: a path, or "3.11" for the interpreter of that version on this machine's PATH.
            lock: from `lock`; the interpreter is then that of a virtual environment, which is built if it is missing.
            log: the file to which the installer's output is appended.

        Raises: InvalidInput for an interpreter that does not exist; ModelFailed with the installer's output;
        DatabaseUnavailable where another process may be the owner.
        """
        base = None if interpreter is None else find_python(interpreter)
        if lock is None:
            if base is not None:
                await _version_of(base)
            return base
        base = base or sys.executable
        version = await _version_of(base)
        _check_python(lock, version)
        key = hashlib.sha256(f"{version}\n{lock}".encode()).hexdigest()
        venv = self._folder / key
        async with self._building.setdefault(key, asyncio.Lock()):
            await self._complete(venv, base, lock, log)
        return str(venv / "bin" / "python")

    async def restore(self, python: str, interpreter: str | None, lock: str | None, log: Path) -> None:
        """Build the environment of the interpreter `python` again if it is missing; otherwise as `python`."""
        venv = Path(python).parent.parent
        if lock is None or venv.parent != self._folder:
            return
        base = sys.executable if interpreter is None else find_python(interpreter)
        _check_python(lock, await _version_of(base))
        async with self._building.setdefault(venv.name, asyncio.Lock()):
            await self._complete(venv, base, lock, log)

    async def _complete(self, venv: Path, base: str, lock: str, log: Path) -> None:
        """Build an environment unless it is complete, and note that it is used."""
        if not await asyncio.to_thread(_is_complete, venv):
            await asyncio.to_thread(self._clear, venv)
            await self._build(venv, base, lock, log)
        await asyncio.to_thread(_record_of(venv).touch)

    def _clear(self, venv: Path) -> None:
        """Remove what is left of an environment, and of attempts to build it. An owner that was stopped may be at one:
        it fails.
        """
        for path in _links_first(self._folder.glob(f"{venv.name}*")):
            self._remove(path)

    def _remove(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            self._owned.remove_tree(path)
        else:
            self._owned.remove(path)

    async def _build(self, venv: Path, base: str, lock: str, log: Path) -> None:
        folder = venv.with_name(f"{venv.name}-{secrets.token_hex(8)}")
        await asyncio.to_thread(self._owned.make_folder, folder, is_new=True)
        try:
            installer = await asyncio.to_thread(installers.installer_of, installers.parse(lock), os.environ)
            run = await self._runner(installer, folder, base, log, BUILD_S_MAX, INSTALL_FAILED)
            await installer.install(lock, base, folder, run)
            paths = await asyncio.to_thread(isolation.interpreter_folders, base)
            await asyncio.to_thread(discard, folder / UV_CACHE)
            await asyncio.to_thread(_sync_disk, folder)
            while self._owned.term.is_over():  # a successor, which ends this process, may be building it
                await asyncio.sleep(POLL_S)
            # Not in a thread: a cancelled build is not linked.
            self._owned.write(_record_of(folder), msgspec.json.encode(Base(base, [*paths])))
            self._owned.symlink_over(folder.name, venv)
            sync_folder(self._folder)
        except BaseException:
            discard(_record_of(folder))
            await asyncio.shield(asyncio.to_thread(discard, folder))
            raise

    async def _runner(
        self, installer: Installer, folder: Path, base: str, log: Path, timeout_s: float, failure: str
    ) -> Run:
        """A function that runs a command. If functions are isolated, the command can write only to `folder`."""
        if self._isolation is None:
            environ = {"UV_LINK_MODE": "copy"} | installer.environ  # a function cannot change uv's cache
            prefix = [sys.executable, "-I", "-c", _DIE_WITH_PARENT] if sys.platform == "linux" else []
        else:
            environ = installer.environ | {"UV_CACHE_DIR": str(folder / UV_CACHE), "UV_LINK_MODE": "hardlink"}
            if installer.uv is None and installer.files:
                environ[pip_settings.CONFIG] = installer.files[0]  # an isolated process has another home
            paths = [*await asyncio.to_thread(isolation.interpreter_folders, base), *installer.files]
            prefix = isolation.build_prefix(self._isolation, paths, writes=str(folder), python=base)
            environ = isolation.environ(environ)
        return lambda command: _run([*prefix, *command], folder, log, environ, timeout_s, failure)

    def sweep(self, used: Collection[str] = ()) -> None:
        """Remove incomplete environments, and those that were not used for long. No other process builds here.

        Args:
            used: interpreters of existing versions.

        Raises: TermOver where another process may be the owner, of other versions.
        """
        kept: set[Path] = set()
        for link in self._folder.glob("*"):
            if not link.is_symlink() or link.suffix:
                continue
            if str(link / "bin" / "python") in used or (link.is_dir() and _is_recently_used(_record_of(link))):
                kept |= {link, folder_of(link), _record_of(link)}
        for path in _links_first(self._folder.glob("*")):
            if path not in kept:
                self._remove(path)


class _Requested(Struct, frozen=True):
    """The part of a version's order that its environment follows from."""

    python: str | None = None
    requirements: str | None = None


def read_requested(home: Path) -> tuple[str | None, str | None]:
    """The interpreter that a version was deployed with, and its lock, which is None without requirements."""
    order = msgspec.json.decode((home / ORDER).read_bytes(), type=_Requested)
    return order.python, (home / LOCK).read_text() if order.requirements is not None else None


class Base(Struct, frozen=True):
    """The interpreter that created an environment, and the folders of its files.

    It is stored because the files in the environment itself may come from packages.
    """

    python: str
    places: list[str]


def folder_of(venv: Path) -> Path:
    """Where the files of an environment are; the path itself for one that is not there."""
    try:
        return venv.with_name(os.path.basename(os.readlink(venv)))
    except OSError:
        return venv


def _record_of(venv: Path) -> Path:
    """Args: venv: an environment, or its folder."""
    folder = folder_of(venv)
    return folder.with_name(folder.name + RECORD)


def _links_first(paths: Iterable[Path]) -> list[Path]:
    """In the order of their removal: what is removed halfway is no environment."""
    return sorted(paths, key=lambda path: not path.is_symlink())


def base_of(venv: Path) -> Base:
    """The interpreter that created an environment. Raises: ModelFailed for an incomplete environment."""
    try:
        return msgspec.json.decode(_record_of(venv).read_bytes(), type=Base)
    except (OSError, msgspec.DecodeError):
        raise ModelFailed(
            f"the environment {venv.name} is incomplete: `batchmill models restart` builds it again from its lock"
        ) from None


def _is_complete(venv: Path) -> bool:
    try:
        return bool(base_of(venv).python) and (venv / "bin" / "python").exists()
    except ModelFailed:
        return False


def _is_recently_used(record: Path) -> bool:
    try:
        return time.time() - record.stat().st_mtime < KEPT_S
    except OSError:
        return False


def find_python(interpreter: str) -> str:
    """Find an interpreter by version or path, and return its path. Raises: InvalidInput."""
    if _VERSION.fullmatch(interpreter):
        program = _resolve_shim(shutil.which(f"python{interpreter}"), interpreter)
        if program is None and interpreter == f"{sys.version_info.major}.{sys.version_info.minor}":
            program = sys.executable
        if program is None:
            raise InvalidInput(
                f"there is no python{interpreter} on the PATH: install it, or give the path of an interpreter",
                code="unknown_python",
            )
        return program
    path = Path(interpreter).expanduser()
    if not path.is_absolute() or not os.access(path, os.X_OK) or path.is_dir():
        raise InvalidInput(f"there is no Python interpreter at {interpreter}", code="unknown_python")
    return str(path)


def _resolve_shim(path: str | None, version: str) -> str | None:
    """The newest interpreter of the version behind a pyenv shim, which itself runs what pyenv's settings choose."""
    if path is None or Path(path).parent.name != "shims":
        return path
    candidates = Path(path).parents[1].glob(f"versions/{version}.*/bin/python{version}")
    return max(map(str, candidates), key=_patch_number, default=path)


def _patch_number(path: str) -> int:
    """The patch number of an interpreter's path, for sorting: 3.9.18 is newer than 3.9.2."""
    number = Path(path).parents[1].name.rpartition(".")[2]
    return int(number) if number.isdecimal() else -1


def check_requirements(text: str) -> None:
    """Refuse references to other files, because only the text itself is stored, and unknown options.

    Raises: InvalidInput.
    """
    requirements = installers.parse(text)
    pip_settings.check_options(requirements.options)
    for line in requirements.packages:
        target = line.partition(";")[0].split(" --", 1)[0].strip()
        if _FILE_URL.search(target) or (_PATH.search(target) and not _URL.search(target)):
            raise pip_settings.other_file(line)


async def _version_of(python: str) -> str:
    """The version, implementation and prefix of an interpreter. Raises: InvalidInput if it is too old or invalid."""
    with tempfile.TemporaryFile() as out:  # not a pipe, which a child of the program could keep open
        try:
            process = await asyncio.create_subprocess_exec(
                python, "-I", "-c", _PRINT_VERSION, stdin=asyncio.subprocess.DEVNULL, stdout=out,
                stderr=asyncio.subprocess.DEVNULL, env=pip_settings.environ_of(os.environ), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            message = f"{python} is not a Python interpreter: {error.strerror}"
            raise InvalidInput(message, code="unknown_python") from None
        try:
            async with asyncio.timeout(VERSION_S_MAX):
                await process.wait()
        except TimeoutError:
            message = f"{python} is not a Python interpreter: it does not respond"
            raise InvalidInput(message, code="unknown_python") from None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        out.seek(0)
        words = out.read(VERSION_BYTES_MAX).decode(errors="replace").split()
    if process.returncode or len(words) < 5 or not words[0].isdigit():
        raise InvalidInput(f"{python} is not a Python interpreter", code="unknown_python")
    if (int(words[0]), int(words[1])) < VERSION_MIN:
        raise InvalidInput(f"{python} is Python {words[0]}.{words[1]}: 3.9 or newer is needed", code="unknown_python")
    return " ".join(words)


def _minor(version: str) -> str:
    return ".".join(version.split()[:2])


def _check_python(lock: str, version: str) -> None:
    """Raises: ModelFailed for a lock of another Python, whose packages may be others."""
    first = lock.partition("\n")[0]
    if first.startswith(_LOCKED_FOR) and first != _LOCKED_FOR + _minor(version):
        raise ModelFailed(
            f"the packages are locked for Python {first.removeprefix(_LOCKED_FOR)}, and the interpreter is Python "
            f"{_minor(version)}: deploy the function again, or install that Python"
        )


async def _run(
    command: list[str], folder: Path, log: Path, environ: Mapping[str, str], timeout_s: float, failure: str
) -> None:
    """Run a command in `folder`; its output goes to `log`. Raises: ModelFailed with the end of it."""
    with log.open("ab") as out:
        start = out.tell()
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out, env=environ, cwd=folder,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise ModelFailed(f"{failure}: {command[0]}: {error.strerror}") from None
        try:
            async with asyncio.timeout(timeout_s):
                code = await process.wait()
        except TimeoutError:
            raise ModelFailed(f"{failure}: it took longer than {timeout_s:.0f} s\n{_end_of(log, start)}") from None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # also what a build has left running
            await process.wait()
    if code:
        raise ModelFailed(f"{failure}:\n{_end_of(log, start)}")


def _end_of(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - READ_BYTES_MAX))
        text = file.read().decode(errors="replace")
    return without_userinfo(text.strip())[-SHOWN_CHARS:]


def _sync_disk(folder: Path) -> None:
    """Make durable all that was written to the file system of a folder: thousands of files take minutes one by one."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "syncfs"):  # Linux alone has it
        os.sync()
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if libc.syncfs(fd):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
    finally:
        os.close(fd)
