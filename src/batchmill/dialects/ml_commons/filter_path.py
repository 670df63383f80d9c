"""`filter_path`: which members of a reply are sent. Pure. Source: OpenSearch's common REST parameters."""

from __future__ import annotations

from typing import Any

PATHS_MAX = 100
ANY_DEPTH = "**"
_Path = tuple[str, ...]


def filtered(reply: Any, expression: str) -> Any:
    """`reply` with what the paths name, or without what those that begin with `-` name.

    `*` stands for any part of a name, `**` for any number of names; lists are looked into. Nothing left is `{}`.
    """
    paths = [path.strip() for path in expression.split(",") if path.strip()][:PATHS_MAX]
    kept = [tuple(path.split(".")) for path in paths if not path.startswith("-")]
    dropped = [tuple(path[1:].split(".")) for path in paths if path.startswith("-")]
    if kept:
        reply = _keep(reply, kept)
    if dropped and reply is not None:
        reply = _drop(reply, dropped)
    return {} if reply is None else reply


def _steps(name: str, paths: list[_Path]) -> tuple[bool, list[_Path]]:
    """Whether some path ends at this member, and what is left of the others within it."""
    ends, rest = False, []
    for path in paths:
        if path[0] == ANY_DEPTH:
            rest.append(path)
            path = path[1:]
            if not path:
                ends = True
                continue
        if _fits(path[0], name):
            if len(path) == 1:
                ends = True
            else:
                rest.append(path[1:])
    return ends, list(dict.fromkeys(rest))  # several `**` come to the same in many ways


def _fits(pattern: str, name: str) -> bool:
    """In one pass: an expression with many stars costs no more than its length times the name's."""
    first, *rest = pattern.split("*")
    if not rest:
        return pattern == name
    *middle, last = rest
    if not name.startswith(first):
        return False
    at = len(first)
    for part in middle:
        found = name.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return len(name) - at >= len(last) and name.endswith(last)


def _keep(value: Any, paths: list[_Path]) -> Any:
    """What the paths name of `value`; None: nothing."""
    if isinstance(value, list):
        found = [kept for each in value if (kept := _keep(each, paths)) is not None]
        return found or None
    if not isinstance(value, dict):
        return None
    members = {}
    for name, each in value.items():
        ends, rest = _steps(name, paths)
        kept = each if ends else _keep(each, rest) if rest else None
        if ends or kept is not None:
            members[name] = kept
    return members or None


def _drop(value: Any, paths: list[_Path]) -> Any:
    if isinstance(value, list):
        return [_drop(each, paths) for each in value]
    if not isinstance(value, dict):
        return value
    members = {}
    for name, each in value.items():
        ends, rest = _steps(name, paths)
        if not ends:
            members[name] = _drop(each, rest) if rest else each
    return members
