#!/usr/bin/env python3
"""Measure the shape of the code: how many modules, statements and classes there are, and where they crowd.

    tools/measure_house.py [CHECKOUT]          print the figures
    tools/measure_house.py --list [CHECKOUT]   print what the figures count, too

Nothing is imported: the sources are parsed. A docstring is no statement. Two classes of one public name count when
neither is a struct of a dialect nor the protocol that the other implements.
"""

from __future__ import annotations

import argparse
import ast
import collections
from pathlib import Path

PACKAGE = "batchmill"
SMALL_LINES = 100


class Module:
    """One file: what it defines, and which modules of the package it imports."""

    def __init__(self, root: Path, path: Path) -> None:
        parts = path.relative_to(root).with_suffix("").parts
        self.is_package = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.is_package else parts)
        self.path, text = path, path.read_text()
        self.lines = text.count("\n")
        self.tree = ast.parse(text)
        self.statements = _count_statements(self.tree)
        self.classes = [node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)]

    def imports(self, known: set[str]) -> set[str]:
        """The modules that it imports, also inside functions; itself not."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.update(
                    full if (full := f"{node.module}.{alias.name}") in known else node.module for alias in node.names
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # a name table: "package.module:Class"
                found.add(node.value.partition(":")[0])
        return (found & known) - {self.name}


def _count_statements(tree: ast.Module) -> int:
    statements = sum(isinstance(node, ast.stmt) for node in ast.walk(tree))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return statements - sum(
        isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None for node in ast.walk(tree)
    )


def _is_protocol(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)


def _shared_names(modules: list[Module]) -> dict[str, list[str]]:
    """The public class names that stand for two things, each with the modules that define it."""
    places: dict[str, list[str]] = collections.defaultdict(list)
    for module in modules:
        for node in module.classes:
            is_struct = any(isinstance(base, ast.Name) and base.id == "Struct" for base in node.bases)
            in_dialect = module.name.startswith(f"{PACKAGE}.dialects.") and is_struct
            if not (node.name.startswith("_") or _is_protocol(node) or in_dialect):
                places[node.name].append(module.name)
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def _lonely(modules: list[Module]) -> list[str]:
    """The small modules that a single other one imports."""
    known = {module.name for module in modules}
    importers: collections.Counter[str] = collections.Counter()
    for module in modules:
        importers.update(module.imports(known))
    return [
        f"{module.name} ({module.lines})"
        for module in modules
        if not module.is_package and module.lines < SMALL_LINES and importers[module.name] == 1
    ]


def measure(checkout: Path) -> list[tuple[str, int, list[str]]]:
    """Each figure: its name, its value, and what it counts where that can be listed."""
    root = checkout / "src"
    modules = [Module(root, path) for path in sorted((root / PACKAGE).rglob("*.py"))]
    folders = collections.Counter(str(module.path.parent.relative_to(root)) for module in modules)
    fullest = folders.most_common(8)
    lonely, shared = _lonely(modules), _shared_names(modules)
    return [
        ("modules", len(modules), []),
        ("lines", sum(module.lines for module in modules), []),
        ("statements", sum(module.statements for module in modules), []),
        ("classes", sum(len(module.classes) for module in modules), []),
        (f"modules under {SMALL_LINES} lines with one importer", len(lonely), lonely),
        (
            "public class names that stand for two things",
            len(shared),
            [f"{name}: {', '.join(found)}" for name, found in shared.items()],
        ),
        ("files in the fullest folder", fullest[0][1], [f"{folder}: {count}" for folder, count in fullest]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--list", action="store_true", help="print what the figures count")
    asked = parser.parse_args()
    for name, value, listed in measure(asked.checkout):
        print(f"{value:8,}  {name}")
        if asked.list:
            for line in listed:
                print(f"{'':10}{line}")


if __name__ == "__main__":
    main()
