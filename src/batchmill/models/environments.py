"""Virtual environments of deployed functions: one for each interpreter and lock, shared by versions.

An environment is complete once it has its mark. What an interrupted build left has no mark and is removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from batchmill.errors import InvalidInput, ModelFailed
from batchmill.models import installers, isolation, pip_settings
from batchmill.models.installers import Installer, Run
from batchmill.models.redaction import without_userinfo
from batchmill.types import Isolation

FOLDER, MARK = "environments", "batchmill-complete"  # in the data directory; in an environment
UV_CACHE = ".uv-cache"  # of an isolated build: no other build writes there
INSTALL_FAILED = "the requirements cannot be installed"
RESOLVE_FAILED = "the requirements cannot be resolved"
BUILD_S_MAX = 3600.0
RESOLVE_S_MAX = 600.0
RESOLVES_MAX = 4  # at a time
ASK_S_MAX = 30.0
ANSWER_BYTES_MAX = 64 * 1024  # of what an interpreter says of itself
KEPT_S = 30 * 86400.0  # an environment that no version uses any more is kept so long, for the next one
SHOWN_CHARS = 6000  # of the installer's output, in a message
VERSION_MIN = (3, 9)
_ELSEWHERE = re.compile(r"^\s*(-r|--requirement|-c|--constraint|-e|--editable|\.|/|file:)", re.MULTILINE)
_VERSION = re.compile(r"3\.\d{1,2}")
_ASK = "import sys; print(*sys.version_info[:3], sys.implementation.name, sys.prefix)"
# An owner that is killed takes what it runs along: two at work in one folder would make neither.
_FOLLOW = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); os.execv(sys.argv[1], sys.argv[1:])"


class Environments:
    """
    Args:
        isolation: in which packages are installed: they run code of their own.
    """

    def __init__(self, folder: Path, isolation: Isolation | None = None) -> None:
        self._folder, self._isolation = folder, isolation
        self._building: dict[str, asyncio.Lock] = {}
        self._resolving = asyncio.Semaphore(RESOLVES_MAX)

    async def lock(self, wanted: str | None, requirements: str | None, log: Path) -> str | None:
        """The exact packages that requirements resolve to now; None without requirements.

        Args:
            wanted: as in `python`.
            requirements: the text of a requirements file.
            log: the file to which the installer's output is appended.

        Raises: InvalidInput for an interpreter that does not exist and for requirements that cannot be read;
        ModelFailed with the installer's output.
        """
        if requirements is None:
            return None
        check_requirements(requirements)
        base = find_python(wanted) if wanted is not None else sys.executable
        await _version_of(base)
        parsed = installers.parse(requirements)
        installer = await asyncio.to_thread(installers.installer_of, parsed, os.environ)
        async with self._resolving, self._temporary_folder() as folder:
            run = await self._runner(installer, folder, base, log, RESOLVE_S_MAX, RESOLVE_FAILED)
            return await installer.lock(parsed, base, folder, run)

    @contextlib.asynccontextmanager
    async def _temporary_folder(self) -> AsyncIterator[Path]:
        """A folder beside the environments, which `sweep` removes if this process dies."""
        await asyncio.to_thread(self._folder.mkdir, parents=True, exist_ok=True, mode=0o700)
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, dir=self._folder, prefix="resolve-"))
        try:
            yield folder
        finally:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))

    async def python(self, wanted: str | None, lock: str | None, log: Path) -> str | None:
        """The interpreter of a function; None: batchmill's own.

        Args:
            wanted: a path, or "3.11": the interpreter of that version on this machine's PATH.
            lock: from `lock`; the interpreter is then that of a virtual environment, which is built if it is missing.
            log: the file to which the installer's output is appended.

        Raises: InvalidInput for an interpreter that does not exist; ModelFailed with the installer's output.
        """
        base = None if wanted is None else find_python(wanted)
        if base is not None:
            await _version_of(base)
        if lock is None:
            return base
        base = base or sys.executable
        key = hashlib.sha256(f"{await _version_of(base)}\n{lock}".encode()).hexdigest()
        venv = self._folder / key
        async with self._building.setdefault(key, asyncio.Lock()):
            if not await asyncio.to_thread(_is_whole, venv):
                await asyncio.to_thread(shutil.rmtree, venv, ignore_errors=True)
                await self._build(venv, base, lock, log)
            await asyncio.to_thread((venv / MARK).touch)  # the time of its last use
        return str(venv / "bin" / "python")

    async def _build(self, venv: Path, base: str, lock: str, log: Path) -> None:
        await asyncio.to_thread(venv.mkdir, parents=True, mode=0o700)
        try:
            installer = await asyncio.to_thread(installers.installer_of, installers.parse(lock), os.environ)
            run = await self._runner(installer, venv, base, log, BUILD_S_MAX, INSTALL_FAILED)
            await installer.install(lock, base, venv, run)
            places = await asyncio.to_thread(isolation.places_of, base)
            await asyncio.to_thread(_finish, venv, Base(base, [*places]))
        except BaseException:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, venv, ignore_errors=True))
            raise

    async def _runner(
        self, installer: Installer, folder: Path, base: str, log: Path, timeout_s: float, failure: str
    ) -> Run:
        """A function that runs a command which may write to `folder` alone where functions are isolated."""
        if self._isolation is None:
            environ = {"UV_LINK_MODE": "copy"} | installer.environ  # a function cannot change uv's cache
            prefix = [base, "-I", "-c", _FOLLOW] if sys.platform == "linux" else []
        else:
            environ = installer.environ | {"UV_CACHE_DIR": str(folder / UV_CACHE), "UV_LINK_MODE": "hardlink"}
            if installer.uv is None and installer.files:
                environ[pip_settings.CONFIG] = installer.files[0]  # an isolated process has another home
            places = [*await asyncio.to_thread(isolation.places_of, base), *installer.files]
            prefix = isolation.of_build(self._isolation, places, writes=str(folder), python=base)
            environ = isolation.environ(environ)
        return lambda command: _run([*prefix, *command], log, environ, timeout_s, failure)

    def sweep(self, used: Collection[str] = ()) -> None:
        """Remove what was not finished, and what has long not been used. No other process builds here.

        Args:
            used: interpreters of versions that there are.
        """
        for place in self._folder.glob("*"):
            if str(place / "bin" / "python") not in used and not _is_fresh(place / MARK):
                shutil.rmtree(place, ignore_errors=True)


class Base(Struct, frozen=True):
    """The interpreter that an environment was made with, and where its files lie: what is in the environment itself may
    be anything that a package has put there."""

    python: str
    places: list[str]


def _finish(place: Path, base: Base) -> None:
    """Write the mark to a new file, whatever packages have put under that name."""
    shutil.rmtree(place / UV_CACHE, ignore_errors=True)
    mark = place / MARK
    if mark.is_dir() and not mark.is_symlink():
        shutil.rmtree(mark)
    mark.unlink(missing_ok=True)
    fd = os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(msgspec.json.encode(base))


def base_of(place: Path) -> Base:
    """Raises: ModelFailed for an environment that is not whole."""
    try:
        return msgspec.json.decode((place / MARK).read_bytes(), type=Base)
    except (OSError, msgspec.DecodeError):
        raise ModelFailed(
            f"the environment {place.name} is incomplete: `batchmill models restart` builds it again from its lock"
        ) from None


def _is_whole(place: Path) -> bool:
    try:
        return bool(base_of(place).python)
    except ModelFailed:
        return False


def _is_fresh(mark: Path) -> bool:
    try:
        return time.time() - mark.stat().st_mtime < KEPT_S
    except OSError:
        return False


def find_python(wanted: str) -> str:
    """The interpreter's path. Raises: InvalidInput."""
    if _VERSION.fullmatch(wanted):
        found = _unwrapped(shutil.which(f"python{wanted}"), wanted)
        if found is None and wanted == f"{sys.version_info.major}.{sys.version_info.minor}":
            found = sys.executable
        if found is None:
            raise InvalidInput(
                f"there is no python{wanted} on the PATH: install it, or give the path of an interpreter",
                code="unknown_python",
            )
        return found
    path = Path(wanted).expanduser()
    if not path.is_absolute() or not os.access(path, os.X_OK) or path.is_dir():
        raise InvalidInput(f"there is no Python interpreter at {wanted}", code="unknown_python")
    return str(path)


def _unwrapped(found: str | None, wanted: str) -> str | None:
    """The interpreter behind a shim of pyenv's, which runs what its own settings say and not what its name does."""
    if found is None or Path(found).parent.name != "shims":
        return found
    there = Path(found).parents[1].glob(f"versions/{wanted}.*/bin/python{wanted}")
    return max(map(str, there), key=_patch, default=found)


def _patch(path: str) -> int:
    """3.9.18 is newer than 3.9.2."""
    number = Path(path).parents[1].name.rpartition(".")[2]
    return int(number) if number.isdecimal() else -1


def check_requirements(text: str) -> None:
    """Only the text itself is kept: what it refers to elsewhere would not be. Raises: InvalidInput."""
    if match := _ELSEWHERE.search(text):
        line = text[match.start() :].strip().splitlines()[0][:80]
        raise InvalidInput(
            f"the requirement {line!r} refers to another file: write it out, or publish it as a package",
            code="invalid_requirements",
        )


async def _version_of(python: str) -> str:
    """What tells one interpreter from another. Raises: InvalidInput for one that is too old or none."""
    with tempfile.TemporaryFile() as out:  # not a pipe: what the program starts may hold that open without an end
        try:
            process = await asyncio.create_subprocess_exec(
                python, "-I", "-c", _ASK, stdin=asyncio.subprocess.DEVNULL, stdout=out,
                stderr=asyncio.subprocess.DEVNULL, env=pip_settings.environ_of(os.environ), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            message = f"{python} is no Python interpreter: {error.strerror}"
            raise InvalidInput(message, code="unknown_python") from None
        try:
            async with asyncio.timeout(ASK_S_MAX):
                await process.wait()
        except TimeoutError:
            message = f"{python} is no Python interpreter: it does not answer"
            raise InvalidInput(message, code="unknown_python") from None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        out.seek(0)
        words = out.read(ANSWER_BYTES_MAX).decode(errors="replace").split()
    if process.returncode or len(words) < 5 or not words[0].isdigit():
        raise InvalidInput(f"{python} is no Python interpreter", code="unknown_python")
    if (int(words[0]), int(words[1])) < VERSION_MIN:
        raise InvalidInput(f"{python} is Python {words[0]}.{words[1]}: 3.9 or newer is needed", code="unknown_python")
    return " ".join(words)


async def _run(command: list[str], log: Path, environ: Mapping[str, str], timeout_s: float, failure: str) -> None:
    """Run a command whose output goes to `log`. Raises: ModelFailed with the end of it."""
    with log.open("ab") as out:
        begin = out.tell()
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out, env=environ, start_new_session=True
        )
        try:
            async with asyncio.timeout(timeout_s):
                code = await process.wait()
        except TimeoutError:
            raise ModelFailed(f"{failure}: it took longer than {timeout_s:.0f} s") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
    if code:
        raise ModelFailed(f"{failure}:\n{_end_of(log, begin)}")


def _end_of(log: Path, begin: int) -> str:
    with log.open("rb") as file:
        file.seek(begin)
        text = file.read().decode(errors="replace")
    return without_userinfo(text.strip()[-SHOWN_CHARS:])
