"""Turn requirements into a lock, and a lock into installed packages, with uv or, if uv is missing, with pip.

A lock is a requirements file: the index options of the requirements, then one exact version a line with its hashes.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from batchmill.errors import ModelFailed
from batchmill.models import pip_settings
from batchmill.models.redaction import without_userinfo

LOCK_BYTES_MAX = 4 * 1024**2
Run = Callable[[list[str]], Awaitable[None]]  # raises ModelFailed with the end of what the command printed
_REQUIRE_HASHES = "--require-hashes"
_COMMENT = re.compile(r"(^|\s+)#.*$")
_HASH = re.compile(r"\s--hash[=\s]\s*\S+")
# Runs the pip that comes with an interpreter where it lies: installing it in each environment takes seconds.
_RUN_PIP = """
import pathlib, runpy, sys, sysconfig
try:
    import ensurepip
    bundled = pathlib.Path(ensurepip.__file__).parent / "_bundled"
    folder = pathlib.Path(sysconfig.get_config_var("WHEEL_PKG_DIR") or bundled)
    sys.path.insert(0, str(max(folder.glob("pip-*.whl"))))
except (ImportError, ValueError):
    sys.exit("this Python comes without pip: install uv, or what brings ensurepip (python3-venv on Debian)")
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
_PIP = ["-I", "-c", _RUN_PIP, "install", "--disable-pip-version-check", "--no-input", "--progress-bar", "off"]


class Requirements(Struct, frozen=True):
    """The text of a requirements file by kind of line. A lock is such a text."""

    options: list[str]  # lines: "--index-url https://host/simple"
    packages: list[str]  # lines: "numpy>=2", "numpy==2.1.0 --hash=sha256:…"

    @property
    def is_locked(self) -> bool:
        """Whether the author gave hashes: the list is then complete, and is installed unchanged."""
        return any(_HASH.search(each) for each in self.packages) or _REQUIRE_HASHES in self.options

    def text(self) -> str:
        return "".join(f"{line}\n" for line in (*self.options, *self.packages))


def parse(text: str) -> Requirements:
    lines = [_COMMENT.sub("", line).strip() for line in re.sub(r"\\\r?\n", " ", text).splitlines()]
    lines = [re.sub(r"\s+(?=--hash)", " ", line) for line in lines if line]
    options = [line for line in lines if line.startswith("-")]
    return Requirements(options, [line for line in lines if not line.startswith("-")])


def packages_of(lock: str) -> list[str]:
    """The packages of a lock for display: "numpy==2.1.0", without hashes and credentials."""
    return [without_userinfo(_HASH.sub("", each)) for each in parse(lock).packages]


class Installer(Struct, frozen=True):
    """Runs uv or pip with its settings."""

    uv: str | None  # path of the program; None: pip
    environ: dict[str, str]
    flags: list[str] = []  # of uv
    files: list[str] = []  # that it reads, besides those of the interpreter

    async def lock(self, requirements: Requirements, base: str, folder: Path, run: Run) -> str:
        """Resolve requirements for the interpreter `base`. Raises: ModelFailed.

        Args:
            folder: an empty folder in which `run` can write.
        """
        if requirements.is_locked:
            return Requirements([*requirements.options, _REQUIRE_HASHES], requirements.packages).text()
        if not requirements.packages:
            return requirements.text()
        source, output = folder / "requirements.txt", folder / "resolved"
        if self.uv is not None:
            source.write_text(Requirements([], requirements.packages).text())
            await run([
                self.uv, "pip", "compile", *self._uv_flags(), "--generate-hashes", "--no-header", "--no-annotate",
                "--python", base, "--output-file", str(output), str(source),
            ])  # fmt: skip
            pins = parse(_read(output).decode()).packages
        else:
            source.write_text(requirements.text())
            await run([base, "-I", "-m", "venv", "--without-pip", str(folder / "venv")])
            pip = [str(folder / "venv" / "bin" / "python"), *_PIP]
            await run([*pip, "--dry-run", "--ignore-installed", "--report", str(output), "-r", str(source)])
            try:
                report = msgspec.json.decode(_read(output), type=_PipReport)
            except (OSError, msgspec.DecodeError) as error:
                raise ModelFailed(f"the report of pip cannot be read: {error}") from None
            pins = sorted(map(_pin, report.install), key=str.lower)
        return Requirements(requirements.options, pins).text()

    async def install(self, lock: str, base: str, venv: Path, run: Run) -> None:
        """Create a virtual environment of the interpreter `base` with exactly the packages of a lock.

        Raises: ModelFailed.
        """
        await run([base, "-I", "-m", "venv", "--without-pip", str(venv)])
        requirements, python, source = parse(lock), str(venv / "bin" / "python"), venv / "requirements.txt"
        if not requirements.packages:
            return
        checks = (
            _REQUIRE_HASHES if _REQUIRE_HASHES in requirements.options else "--no-deps"
        )  # a resolved list is complete
        if self.uv is not None:
            source.write_text(Requirements([], requirements.packages).text())
            await run([self.uv, "pip", "install", *self._uv_flags(), checks, "--python", python, "-r", str(source)])
        else:
            source.write_text(_for_pip(requirements).text())
            # The pip that runs is on its own path, and would count as installed.
            await run([python, *_PIP, checks, "--ignore-installed", "-r", str(source)])

    def _uv_flags(self) -> list[str]:
        return ["--no-progress", "--color", "never", "--no-python-downloads", *self.flags]


def installer_of(requirements: Requirements, ours: Mapping[str, str]) -> Installer:
    """uv if it is installed and can follow every setting of pip on this machine, otherwise pip.

    Raises: InvalidInput for options that cannot be read.
    """
    environ = pip_settings.environ_of(ours)
    uv = pip_settings.find_uv()
    settings = None if uv is None else pip_settings.for_uv(requirements.options, environ)
    if uv is not None and settings is not None:
        return Installer(uv, settings.environ, settings.flags, [uv, *settings.files])
    config = pip_settings.config_file(environ)
    return Installer(None, environ, files=[] if config is None else [config])


class _Archive(Struct):
    hashes: dict[str, str] = {}
    hash: str = ""  # "sha256=…", of older reports


class _Commit(Struct):
    vcs: str
    commit_id: str


class _Download(Struct):
    url: str
    archive_info: _Archive | None = None
    vcs_info: _Commit | None = None
    subdirectory: str = ""


class _Metadata(Struct):
    name: str
    version: str


class _Resolved(Struct):
    metadata: _Metadata
    download_info: _Download
    is_direct: bool = False


class _PipReport(Struct):
    """The report of `pip install --report`. Source: pip.pypa.io/en/stable/reference/installation-report."""

    install: list[_Resolved]


def _pin(resolved: _Resolved) -> str:
    metadata, download = resolved.metadata, resolved.download_info
    hashes = [] if download.archive_info is None else sorted(download.archive_info.hashes.items())
    if not hashes and download.archive_info is not None and download.archive_info.hash:
        hashes = [tuple(download.archive_info.hash.split("=", 1))]
    pin = f"{metadata.name}=={metadata.version}"
    if resolved.is_direct:
        vcs = download.vcs_info
        pin = f"{metadata.name} @ " + (download.url if vcs is None else f"{vcs.vcs}+{download.url}@{vcs.commit_id}")
        pin += f"#subdirectory={download.subdirectory}" if download.subdirectory else ""
    return pin + "".join(f" --hash={name}:{value}" for name, value in hashes)


def _for_pip(requirements: Requirements) -> Requirements:
    """pip takes hashes for all packages or for none, and a commit of a repository has no hash."""
    if all(_HASH.search(each) for each in requirements.packages):
        return requirements
    return Requirements(requirements.options, [_HASH.sub("", each) for each in requirements.packages])


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(LOCK_BYTES_MAX + 1)
    if len(data) > LOCK_BYTES_MAX:
        raise ModelFailed(f"the lock of the requirements has more than {LOCK_BYTES_MAX // 1024**2} MiB")
    return data
