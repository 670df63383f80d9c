"""Environments of deployed functions: a virtual environment for each interpreter and list of requirements, shared.

One is whole once it has its mark; what an interrupted build left has none, and goes when it is met.
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
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from batchmill.errors import InvalidInput, ModelFailed
from batchmill.models import isolation
from batchmill.models.worker_environment import KEPT
from batchmill.types import Isolation

FOLDER, MARK = "environments", "batchmill-complete"  # in the data directory; in an environment
PIP_SETTINGS = "PIP_CONFIG_FILE"
BUILD_S_MAX = 3600.0
ASK_S_MAX = 30.0
ANSWER_BYTES_MAX = 64 * 1024  # of what an interpreter says of itself
KEPT_S = 30 * 86400.0  # an environment that no version uses any more is kept so long, for the next one
SHOWN_CHARS = 6000  # of what pip said, in a message
VERSION_MIN = (3, 9)
_ELSEWHERE = re.compile(r"^\s*(-r|--requirement|-c|--constraint|-e|--editable|\.|/|file:)", re.MULTILINE)
_VERSION = re.compile(r"3\.\d{1,2}")
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_ASK = "import sys; print(*sys.version_info[:3], sys.implementation.name, sys.prefix)"
# Packages run code of their own while they are built: like the function itself, it sees no keys of ours.
_BUILDS = KEPT | {
    "CC",
    "CXX",
    "CFLAGS",
    "CXXFLAGS",
    "LDFLAGS",
    "PKG_CONFIG_PATH",
    "REQUESTS_CA_BUNDLE",
    "SSH_AUTH_SOCK",
}
_BUILDERS = ("PIP_", "GIT_", "LC_", "CMAKE_", "CARGO_", "RUSTUP_")
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

    async def python(self, wanted: str | None, requirements: str | None, log: Path) -> str | None:
        """The interpreter in which a function is to run; None: batchmill's own.

        Args:
            wanted: a path, or "3.11": the interpreter of that version on this machine's PATH.
            requirements: the text of a requirements file; with it, a virtual environment is made, or found.
            log: where pip's output goes.

        Raises: InvalidInput for an interpreter that is not there; ModelFailed with what pip said.
        """
        base = None if wanted is None else find_python(wanted)
        if base is not None:
            await _version_of(base)
        if requirements is None:
            return base
        check_requirements(requirements)
        base = base or sys.executable
        key = hashlib.sha256(f"{await _version_of(base)}\n{requirements}".encode()).hexdigest()
        place = self._folder / key
        async with self._building.setdefault(key, asyncio.Lock()):
            if not _is_whole(place):
                await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)
                await self._build(place, base, requirements, log)
            (place / MARK).touch()  # when it was last wanted
        return str(place / "bin" / "python")

    async def _build(self, place: Path, base: str, requirements: str, log: Path) -> None:
        place.mkdir(parents=True, mode=0o700)
        try:
            (place / "requirements.txt").write_text(requirements)
            places = await asyncio.to_thread(isolation.places_of, base)
            run = self._runner(place, [*places], base)
            await run([base, "-m", "venv", str(place)], log, "the environment cannot be made")
            install = [str(place / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
            install += ["--no-input", "--progress-bar", "off", "-r", str(place / "requirements.txt")]
            await run(install, log, "the requirements cannot be installed")
            await asyncio.to_thread(_finish, place, Base(base, [*places]))
        except BaseException:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, place, ignore_errors=True))
            raise

    def _runner(self, place: Path, places: list[str], base: str) -> Callable[[list[str], Path, str], Awaitable[None]]:
        """What runs a command that makes an environment."""
        environ, files = _environ(), []
        if self._isolation is None:
            follow = [base, "-I", "-c", _FOLLOW] if sys.platform == "linux" else []
            return lambda command, log, output: _run([*follow, *command], log, output, environ)
        if settings := _pip_settings(environ):
            environ[PIP_SETTINGS], files = settings, [settings]
        before = isolation.of_build(self._isolation, [*places, *files], writes=str(place), python=base)
        environ = isolation.environ(environ)
        return lambda command, log, output: _run([*before, *command], log, output, environ)

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
    """Say that it is whole, in a file of ours, whatever packages have put under that name."""
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
        raise ModelFailed(f"the environment {place.name} is not whole: deploy the function again") from None


def _is_whole(place: Path) -> bool:
    try:
        return bool(base_of(place).python)
    except ModelFailed:
        return False


def _pip_settings(environ: Mapping[str, str]) -> str | None:
    """The file with the settings of pip for this user, who has no home where it runs isolated; None: none."""
    settings = [environ[PIP_SETTINGS]] if PIP_SETTINGS in environ else ["~/.config/pip/pip.conf", "~/.pip/pip.conf"]
    return next((path for path in map(os.path.expanduser, settings) if os.path.isfile(path)), None)


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
                stderr=asyncio.subprocess.DEVNULL, env=_environ(), start_new_session=True,
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


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name in _BUILDS or name.startswith(_BUILDERS)}


async def _run(command: list[str], log: Path, message: str, environ: Mapping[str, str]) -> None:
    """Run a command whose output goes to `log`. Raises: ModelFailed with the end of it."""
    with log.open("ab") as out:
        begin = out.tell()
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out, env=environ, start_new_session=True
        )
        try:
            async with asyncio.timeout(BUILD_S_MAX):
                code = await process.wait()
        except TimeoutError:
            raise ModelFailed(f"{message}: it took longer than {BUILD_S_MAX:.0f} s") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
    if code:
        raise ModelFailed(f"{message}:\n{_end_of(log, begin)}")


def _end_of(log: Path, begin: int) -> str:
    with log.open("rb") as file:
        file.seek(begin)
        text = file.read().decode(errors="replace")
    return _CREDENTIALS.sub("***", text.strip()[-SHOWN_CHARS:])
