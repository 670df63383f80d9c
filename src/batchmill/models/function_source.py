"""What can be seen of a function in its source, without running any of it."""

from __future__ import annotations

import ast

from batchmill.models import functions

OUR_DECORATORS = ("batched",)  # they leave a function what it is
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def is_blocking(source: str) -> bool:
    """Whether `source` is for sure called without `await`. False also where only running the file would tell.

    Raises: ModelFailed where there is no such file.
    """
    parsed = functions.parse(source)
    try:
        scope: ast.AST | None = ast.parse(functions.file_of(parsed).read_bytes())
    except (SyntaxError, ValueError, RecursionError, OSError):
        return False  # loading it says what is wrong
    for name in parsed.attribute.split("."):
        scope = _definition(scope, name)
    if isinstance(scope, ast.ClassDef):
        scope = _definition(scope, "predict") or _definition(scope, "__call__")
    return isinstance(scope, ast.FunctionDef) and all(map(_is_ours, scope.decorator_list))


def _definition(scope: ast.AST | None, name: str) -> Definition | None:
    """What `name` is in a module or class, if one plain statement of it says so and nothing else binds the name."""
    if not isinstance(scope, ast.Module | ast.ClassDef) or (isinstance(scope, ast.ClassDef) and scope.decorator_list):
        return None
    found = [node for node in scope.body if isinstance(node, Definition) and node.name == name]
    others = [node for node in scope.body if node not in found]
    return found[0] if len(found) == 1 and not any(_binds(node, name) for node in others) else None


def _binds(statement: ast.AST, name: str) -> bool:
    """Whether a statement may give `name` another meaning, somewhere in it."""
    for node in ast.walk(statement):
        match node:
            case ast.Name(id=bound, ctx=ast.Store()) | ast.alias(name=bound, asname=None) | ast.alias(asname=bound):
                pass
            case ast.FunctionDef(name=bound) | ast.AsyncFunctionDef(name=bound) | ast.ClassDef(name=bound):
                pass
            case _:
                continue
        if bound in (name, "*"):
            return True
    return False


def _is_ours(decorator: ast.expr) -> bool:
    match decorator:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in OUR_DECORATORS
    return False
