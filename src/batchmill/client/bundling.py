"""A deployment made ready to be sent: code and settings become one archive, with every setting checked first."""

from __future__ import annotations

import contextlib
import difflib
import glob
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit, urlunsplit

import msgspec
from msgspec.structs import fields, replace

from batchmill.client.captured import INFERLESS_CLASS, Collected, capture, collect, from_folder
from batchmill.errors import InvalidInput, Unavailable
from batchmill.wire import bundles
from batchmill.wire.bundles import DeployOrder

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
        shown_source = f"{shown}#{_SUBDIRECTORY}{folder}" if folder else shown
        found = from_folder(inside, target, shown_source)
        yield replace(found, source=f"{shown_source}:{found.target}")


def _read(source: str) -> tuple[str, str, str, str]:
    """Address, revision, folder and target."""
    url, _, fragment = source.removeprefix(PREFIX).partition("#")
    folder = target = ""
    if fragment:
        if not fragment.startswith(_SUBDIRECTORY):
            raise InvalidInput(f"after # write {_SUBDIRECTORY}FOLDER, not {fragment[:80]!r}", code="invalid_source")
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
        raise InvalidInput(f"{revision[:80]!r} is not a revision", code="invalid_source")
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


SPOOL_BYTES = 16 * 1024 * 1024  # of an archive that is kept in memory
OWN = {"target", "source", "has_samples"}  # fields of an order that the code says, not its deployer

NEEDS_EXAMPLE = "The example_dataframe parameter is required when passing dataframe_mode=True"
NEEDS_MODE = "Setting dataframe_mode=True is required when passing the example_dataframe parameter"


@contextlib.contextmanager
def bundled(
    source: Any, settings: Mapping[str, Any], *, include: Sequence[str] = (), samples: Mapping[str, Path] = {},
    cwd: Path | None = None,
) -> Iterator[tuple[DeployOrder, BinaryIO]]:  # fmt: skip
    """What a deployment is, and its archive, open at its beginning.

    Args:
        source: as `collect`, a git address, or a function.
        settings: fields of DeployOrder.
        include: further files and folders, globs too; they keep their places beside the code,
            and those elsewhere below `cwd` the places that they have there.
        samples: input.json and output.json, by these names: they go beside the code's file.
    """
    cwd = cwd or Path.cwd()
    with _collected(source, cwd) as found:
        order = order_of(found, settings)
        files = dict(found.files) | _included(include, cwd, found.base)
        beside = Path(order.target.partition(":")[0]).parent
        for name, path in samples.items():
            files[str(beside / name)] = path
        order = replace(order, has_samples=bool(samples))
        with tempfile.SpooledTemporaryFile(SPOOL_BYTES) as out:
            bundles.write(out, order, files)  # type: ignore[arg-type]
            out.seek(0)
            yield order, out  # type: ignore[misc]


@contextlib.contextmanager
def _collected(source: Any, cwd: Path) -> Iterator[Collected]:
    if callable(source):
        yield capture(source)
    elif str(source).startswith(PREFIX):
        with collect_git(str(source)) as found:
            yield found
    else:
        yield collect(str(source), cwd)


def order_of(found: Collected, settings: Mapping[str, Any]) -> DeployOrder:
    """The order with these settings over what the code says of itself. Raises: InvalidInput."""
    known = [each.name for each in fields(DeployOrder) if each.name not in OWN]
    values = {name: value for name, value in settings.items() if value is not None}
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise InvalidInput(f"there is no setting {name!r}; {hint}", code="unknown_field")
    if "name" not in values:
        values["name"] = _name_of(found)
    said = {"requirements": found.requirements, "python": found.python, "frame_columns": found.frame_columns}
    said = {name: value for name, value in said.items() if value}
    try:
        return msgspec.convert(said | values | {"target": found.target, "source": found.source}, DeployOrder)
    except msgspec.ValidationError as error:
        raise InvalidInput(str(error), code="invalid_field") from None


def _name_of(found: Collected) -> str:
    if found.attribute == INFERLESS_CLASS:
        raise InvalidInput(f"say a name: {INFERLESS_CLASS} is what every such class is called", code="missing_name")
    return found.attribute.rpartition(".")[2]


def _included(patterns: Sequence[str], cwd: Path, base: Path | None) -> dict[str, Path | bytes]:
    found: dict[str, Path | bytes] = {}
    for pattern in patterns:
        paths = [cwd / each for each in sorted(glob.glob(pattern, root_dir=cwd, recursive=True))]
        files = [each for path in paths for each in (sorted(path.rglob("*")) if path.is_dir() else [path])]
        files = [each for each in files if each.is_file()]
        if not files:
            raise InvalidInput(f"there is no file {pattern!r} to include", code="unreadable_file")
        for path in files:
            if not path.is_relative_to(cwd) or ".." in path.parts:
                raise InvalidInput(f"{path} lies outside {cwd}: include what lies below it", code="unreadable_file")
            found[_place_of(path, cwd, base)] = path
    return found


def _place_of(path: Path, cwd: Path, base: Path | None) -> str:
    """Where a file goes: beside the code as it lies beside it, else as it lies below `cwd`."""
    real = path.parent.resolve() / path.name
    return str(real.relative_to(base) if base is not None and real.is_relative_to(base) else path.relative_to(cwd))


def frame_columns(dataframe_mode: bool, example: Any) -> list[str]:
    """The columns of a data-frame function, in Modelbit's words. Raises: InvalidInput."""
    if dataframe_mode and example is None:
        raise InvalidInput(NEEDS_EXAMPLE, code="missing_example")
    if example is not None and not dataframe_mode:
        raise InvalidInput(NEEDS_MODE, code="missing_example")
    return [] if example is None else [str(name) for name in getattr(example, "columns", example)]
