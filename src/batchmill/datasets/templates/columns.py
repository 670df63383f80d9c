"""Which columns a template of Jinja2 names, found without running it."""

from __future__ import annotations

import difflib

from jinja2 import nodes
from jinja2.meta import find_undeclared_variables

from batchmill.errors import InvalidInput

NAMES_SHOWN = 20
ROW = "row"  # what a template calls all columns together


def check_columns(tree: nodes.Template, name: str, columns: list[str], *, may_be_constant: bool) -> None:
    """Refuse a template that names a column which is none, or no column at all.

    Args: name: of the template, in messages.
    Raises: InvalidInput (`missing_column`, `constant_prompt`).
    """
    named, takes_all = _named(tree, columns)
    shown = ", ".join(columns[:NAMES_SHOWN]) or "none"
    for column, line in sorted(named.items(), key=lambda item: item[1]):
        if column not in columns:
            near = difflib.get_close_matches(column, columns, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "name one of them, or set it in the template"
            raise InvalidInput(
                f"{name}, line {line}: the template needs a column {column!r}; the columns are {shown}; {hint}",
                code="missing_column",
            )
    if not named and not takes_all and not may_be_constant:
        first = columns[0] if columns else "column"
        raise InvalidInput(
            f"{name}, line 1: the template names no column, so every row would make the same request; the columns are "
            f"{shown}: write {{{{ {first} }}}} where a cell belongs, or allow it with --allow-constant-prompt "
            "(allow_constant_prompt)",
            code="constant_prompt",
        )


def _named(tree: nodes.Template, columns: list[str]) -> tuple[dict[str, int], bool]:
    """Returns: column -> the first line that names it; whether the template also takes the whole row."""
    own = {node.name for node in tree.find_all(nodes.Name) if node.ctx != "load"}  # perhaps set in one branch alone
    own |= {node.name for node in tree.find_all(nodes.Macro)}
    free = find_undeclared_variables(tree) - own
    lines: dict[str, int] = {}
    for node in tree.find_all(nodes.Name):
        if node.ctx == "load" and (node.name in free or node.name in columns):
            lines[node.name] = min(node.lineno, lines.get(node.name, node.lineno))
    takes_all = False
    if ROW in lines and ROW not in columns:
        del lines[ROW]
        single = list(_single(tree))
        takes_all = len(single) < sum(1 for node in tree.find_all(nodes.Name) if node.name == ROW)
        for column, line in single:
            lines[column] = min(line, lines.get(column, line))
    return lines, takes_all


def _single(tree: nodes.Template) -> list[tuple[str, int]]:
    """The columns that are named as `row.NAME` or `row["NAME"]`, with their lines."""
    found = []
    for node in tree.find_all((nodes.Getattr, nodes.Getitem)):
        match node:
            case nodes.Getattr(node=nodes.Name(name="row"), attr=attr) if not hasattr(dict, attr):
                found.append((attr, node.lineno))
            case nodes.Getitem(node=nodes.Name(name="row"), arg=nodes.Const(value=str(key))):
                found.append((key, node.lineno))
    return found
