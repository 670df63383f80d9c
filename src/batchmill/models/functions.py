"""Python functions as models: addresses of source code, and digests. Runs no user code."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import time
from importlib.machinery import PathFinder
from pathlib import Path

from msgspec import Struct

from batchmill.errors import InvalidInput, ModelFailed
from batchmill.wire.imported_files import reach, root_of

REMEMBERED_MAX = 256
SETTLED_NS = 2_000_000_000  # two changes of a file so close together may have one time


class FunctionSource(Struct, frozen=True):
    """The address of a function: `file`, or `module` with an optional `root`."""

    attribute: str
    file: Path | None = None
    module: str | None = None
    root: Path | None = None  # the folder in which `module` is searched; None: Python's own path

    def __str__(self) -> str:
        if self.file is not None:
            return f"{self.file}:{self.attribute}"
        module_path = self.module if self.root is None else f"{self.root}/{self.module}"
        return f"{module_path}:{self.attribute}"


@functools.lru_cache(maxsize=REMEMBERED_MAX)
def parse(source: str) -> FunctionSource:
    """Parse `app.py:classify`, `dir/app.py:model.predict`, `package.module:Class` or `dir/package.module:Class`.

    Raises: InvalidInput (`invalid_source`).
    """
    path, _, attribute = source.rpartition(":")
    if not path or not all(part.isidentifier() for part in attribute.split(".")):
        raise InvalidInput(
            f"{source!r} is not a function: write FILE.py:NAME or package.module:NAME", code="invalid_source"
        )
    if path.endswith(".py"):
        return FunctionSource(attribute, file=Path(path))
    folder, slash, module = path.rpartition("/")
    if not all(part.isidentifier() for part in module.split(".")):
        raise InvalidInput(
            f"{path!r} in {source!r} is neither a .py file nor a module: write FILE.py:NAME or package.module:NAME",
            code="invalid_source",
        )
    return FunctionSource(attribute, module=module, root=Path(folder or "/") if slash else None)


def absolute(source: str, base: Path) -> str:
    """Make `source` independent of the working directory.

    A module in `base` gets `base` as its root; an installed one keeps its name.
    """
    parsed = parse(source)
    if parsed.file is not None:
        return str(FunctionSource(parsed.attribute, file=(base / parsed.file.expanduser()).resolve()))
    if parsed.root is not None or _find(parsed.module or "", [str(base)]) is not None:
        root = (base / (parsed.root or ".")).resolve()
        return str(FunctionSource(parsed.attribute, module=parsed.module, root=root))
    return source


def digest(source: str) -> str:
    """The sha256 of the function's source file. Does not run it.

    Raises: ModelFailed if the file does not exist.
    """
    path = file_of(parse(source))
    try:
        seen = os.stat(path)
        is_settled = time.time_ns() - seen.st_mtime_ns > SETTLED_NS
        read = _digest_of if is_settled else _digest_of.__wrapped__
        return read(path, seen.st_mtime_ns, seen.st_size, seen.st_ino)
    except OSError as error:
        raise ModelFailed(f"the function {source} cannot be read: {error.strerror}: {path}") from None


@functools.lru_cache(maxsize=REMEMBERED_MAX)
def _digest_of(path: Path, modified_ns: int, size_bytes: int, inode: int) -> str:
    """The sha256 of a file as it was seen: each job asks for that of its function."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def digest_with_imports(source: str) -> str:
    """As `digest`, of the file and of those that it imports from beside it. An installed module is its file alone.

    Raises: ModelFailed.
    """
    path = file_of(parse(source)).resolve()
    files: dict[str, Path | bytes] = {}
    if "site-packages" not in path.parts and path.is_file():
        root = root_of(path)
        try:
            reach(root, root, path, files)
        except InvalidInput as error:
            raise ModelFailed(f"the code of {source} cannot be read: {error.message}") from None
    if len(files) < 2:
        return digest(source)
    total = hashlib.sha256()
    for place, found in sorted(files.items()):
        assert isinstance(found, Path)
        try:
            total.update(
                f"{place}\0{hashlib.sha256(found.read_bytes()).hexdigest()}\n".encode(errors="surrogateescape")
            )
        except OSError as error:
            raise ModelFailed(f"the code of {source} cannot be read: {error.strerror}: {found}") from None
    return total.hexdigest()


def file_of(source: FunctionSource) -> Path:
    """The function's file, which may not exist. Raises: ModelFailed for an unknown module."""
    if source.file is not None:
        return source.file
    assert source.module is not None
    path = _find(source.module, sys.path if source.root is None else [str(source.root)])
    if path is None:
        raise ModelFailed(f"there is no module {source.module!r} for the function {source}")
    return path


def _find(module: str, path: list[str]) -> Path | None:
    """Find the file of a module folder by folder, because `importlib.util.find_spec` would import its parents."""
    locations: list[str] | None = path
    name, spec = "", None
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        spec = None if locations is None else PathFinder.find_spec(name, locations)
        if spec is None:
            return None
        submodules = spec.submodule_search_locations
        locations = None if submodules is None else list(submodules)
    return Path(spec.origin) if spec is not None and spec.origin is not None and spec.has_location else None
