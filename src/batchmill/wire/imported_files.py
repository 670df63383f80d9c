"""The files that a Python file imports from beside it, found without running any of them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, MutableMapping
from pathlib import Path

from batchmill.errors import InvalidInput


def root_of(path: Path) -> Path:
    """The folder that imports of a file begin at: that of the outermost package around it."""
    root = path.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    return root


def reach(base: Path, root: Path, path: Path, files: MutableMapping[str, Path | bytes]) -> None:
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
