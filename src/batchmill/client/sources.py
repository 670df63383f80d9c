"""What code a deployment takes along: from a file, a module, a folder or a repository to places and bytes.

A file takes the modules beside it that it imports, and what these import; a folder takes everything in it but what is
plainly no code of its own. Nothing is imported or run here.
"""

from __future__ import annotations

import ast
import fnmatch
import os
import re
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from batchmill.errors import InvalidInput, TooLarge
from batchmill.wire.bundles import BYTES_MAX, FILES_MAX

INFERLESS_CLASS = "InferlessPythonModel"
COMPANIONS = ("input_schema.py", "input.json", "output.json")  # of an Inferless class, beside its file
LEFT_OUT_FOLDERS = frozenset(
    {"__pycache__", "node_modules", "venv", "env", "site-packages", "build", "dist", "htmlcov"}
)
LEFT_OUT_FILES = ("*.pyc", "*.pyo", "*.pem", "*.key", "*.p12", "*.pfx", "id_rsa*", "id_ed25519*", "credentials*.json")
_FILE = re.compile(r"(.+\.py):([\w.]+)")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[\w.]+")
_MAIN = re.compile(r"^\s*mainFunction:\s*['\"]?([\w.]+)['\"]?\s*$", re.MULTILINE)
_PYTHON = re.compile(r"^\s*pythonVersion:\s*['\"]?([\d.]+)['\"]?\s*$", re.MULTILINE)
_COLUMNS = re.compile(r"^(\s*)dataframeModeColumns:\s*\n((?:\1[ \t-].*\n?)*)", re.MULTILINE)
_COLUMN = re.compile(r"\bname:\s*['\"]?([^'\"\n,}]+?)['\"]?\s*(?:[,}\n]|$)")


class Collected(Struct, frozen=True):
    """Code to be deployed, and what it says of itself."""

    target: str  # "app.py:fn"; its file is one of `files`
    source: str  # for people
    files: dict[str, Path | bytes]
    requirements: str | None = None
    python: str | None = None
    frame_columns: list[str] = []
    base: Path | None = None  # the folder that places of `files` begin at; None: they have no folder

    @property
    def attribute(self) -> str:
        return self.target.partition(":")[2]


def collect(source: str, cwd: Path) -> Collected:
    """FILE.py:NAME, package.module:NAME, FOLDER or FOLDER:FILE.py:NAME, from `cwd` on.

    Raises: InvalidInput (`unknown_function`) for what is not there.
    """
    if match := _FILE.fullmatch(source):
        path = cwd / Path(match[1]).expanduser()
        if path.is_file():
            return _from_file(path, match[2], source, cwd)
    folder, colon, target = source.partition(":")
    if (cwd / Path(folder).expanduser()).is_dir() and (not colon or _FILE.fullmatch(target)):
        return from_folder(cwd / Path(folder).expanduser(), target, source)
    if match and ":" not in match[1]:
        raise InvalidInput(f"there is no file {match[1]} (in {cwd})", code="unknown_function")
    if _MODULE.fullmatch(source):
        return _from_module(source, cwd)
    raise InvalidInput(
        f"there is no code at {source!r}: give FILE.py:NAME, package.module:NAME, FOLDER, FOLDER:FILE.py:NAME or "
        "git+URL",
        code="unknown_function",
    )


def _from_file(path: Path, attribute: str, source: str, cwd: Path) -> Collected:
    """The file, and of the folder that its imports begin at whatever they reach. Places are kept below `cwd`."""
    path, cwd = path.resolve(), cwd.resolve()
    root = path.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    base = cwd if root.is_relative_to(cwd) else root
    place = str(path.relative_to(base))
    files: dict[str, Path | bytes] = {}
    _reach(base, root, path, files)
    if attribute.split(".")[0] == INFERLESS_CLASS:
        beside = (path.parent / name for name in COMPANIONS)
        for companion in beside:
            if companion.is_file():
                _reach(base, root, companion, files)
    return Collected(f"{place}:{attribute}", source, files, base=base)


def _from_module(source: str, cwd: Path) -> Collected:
    module, _, attribute = source.partition(":")
    for root in (cwd, cwd / "src"):
        base = root.joinpath(*module.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return _from_file(path, attribute, source, cwd)
    raise InvalidInput(
        f"there is no module {module} below {cwd} (nor in src there): go to the folder that its name begins at",
        code="unknown_function",
    )


def _reach(base: Path, root: Path, path: Path, files: dict[str, Path | bytes]) -> None:
    """Take a file along, and every module below `root` that it imports, at their places below `base`."""
    waiting = [path]
    while waiting:
        found = waiting.pop()
        place = str(found.relative_to(base))
        if place in files:
            continue
        files[place] = found
        if found.suffix == ".py":
            waiting += _imported(root, found)
        package = found.parent
        while package != root and package.is_relative_to(root):
            if (package / "__init__.py").is_file():
                waiting.append(package / "__init__.py")
            package = package.parent


def _imported(root: Path, path: Path) -> list[Path]:
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError, RecursionError):
        return []  # loading it says what is wrong
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}", code="unreadable_file") from None
    found: list[Path] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found += _modules((root, path.parent), alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            bases: Iterable[Path] = (root, path.parent)
            if node.level:
                bases = (path.parents[node.level - 1],)
            parts = node.module.split(".") if node.module else []
            found += _modules(bases, parts)
            for alias in node.names:
                found += _modules(bases, [*parts, alias.name])
    return [each for each in found if each.is_relative_to(root)]


def _modules(bases: Iterable[Path], parts: list[str]) -> list[Path]:
    """The files of a module and of the packages around it, in the first folder that has it."""
    for base in bases:
        found = []
        for upto in range(1, len(parts) + 1):
            place = base.joinpath(*parts[:upto])
            found += [each for each in (place.with_suffix(".py"), place / "__init__.py") if each.is_file()]
        if found:
            return found
    return []


def from_folder(folder: Path, target: str, source: str) -> Collected:
    """Everything in a folder. Without a target: an Inferless app.py, or Modelbit's source.py with metadata.yaml."""
    folder = folder.resolve()
    files: dict[str, Path | bytes] = dict(_walk(folder))
    requirements = python = None
    columns: list[str] = []
    if not target:
        if "metadata.yaml" in files and "source.py" in files:
            told = _text(folder / "metadata.yaml")
            main = _MAIN.search(told)
            if main is None:
                raise InvalidInput(f"{source}: metadata.yaml names no mainFunction", code="unknown_function")
            target = f"source.py:{main[1]}"
            python = found[1] if (found := _PYTHON.search(told)) else None
            columns = _COLUMN.findall(block[2]) if (block := _COLUMNS.search(told)) else []
            requirements = _text(folder / "requirements.txt") if "requirements.txt" in files else None
        elif "app.py" in files and re.search(rf"^class {INFERLESS_CLASS}\b", _text(folder / "app.py"), re.MULTILINE):
            target = f"app.py:{INFERLESS_CLASS}"
        else:
            raise InvalidInput(
                f"the folder {source} has neither an app.py with a class {INFERLESS_CLASS} nor a source.py with "
                f"metadata.yaml: say which function, as {source}:FILE.py:NAME",
                code="unknown_function",
            )
    if target.partition(":")[0] not in files:
        raise InvalidInput(f"there is no {target.partition(':')[0]} in {source}", code="unknown_function")
    return Collected(target, source, files, requirements, python, columns, base=folder)


def _walk(folder: Path) -> Iterable[tuple[str, Path]]:
    count, size = 0, 0
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(
            name for name in folders
            if not name.startswith(".") and name not in LEFT_OUT_FOLDERS
            and not os.path.exists(os.path.join(parent, name, "pyvenv.cfg"))
        )  # fmt: skip
        for name in sorted(names):
            path = Path(parent, name)
            if name.startswith(".") or any(fnmatch.fnmatch(name, each) for each in LEFT_OUT_FILES):
                continue
            if not path.is_file() or not path.resolve().is_relative_to(folder):
                continue  # a link to somewhere else
            count, size = count + 1, size + path.stat().st_size
            if count > FILES_MAX or size > BYTES_MAX:
                raise TooLarge(
                    f"{folder} is more than {FILES_MAX:,} files or {BYTES_MAX:,} bytes: deploy FILE.py:NAME, which "
                    "takes only what it imports, with --include for further files"
                )
            yield str(path.relative_to(folder)), path


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}", code="unreadable_file") from None
