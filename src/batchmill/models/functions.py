"""Python functions as models: addresses of source code, digests, and loading.

This module knows nothing of rows, engines or result files. Only `load` runs user code.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from msgspec import Struct

from batchmill.errors import InvalidInput, ModelFailed
from batchmill.function_runtime.hints import hints_of, read_hint
from batchmill.function_runtime.loading import FreshLoader
from batchmill.function_runtime.marks import ROWS_PARAMETER
from batchmill.types import Tensor


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


class Loaded(Struct, frozen=True):
    """User code that is ready to be called.

    `list_rows` is None for a function of one row. Otherwise it is the largest number of rows in a list. The function
    takes one list of rows as dicts if its only parameter is `rows`, else a list of values for each parameter.
    """

    name: str
    call: Callable[..., Any]
    parameters: dict[str, Any]  # name -> default, or inspect.Parameter.empty
    takes_kwargs: bool
    is_async: bool
    list_rows: int | None = None
    setup: Callable[[], Any] | None = None  # called or awaited once before the first row
    yields: bool = False  # a generator function, plain or async: for streaming calls, not for rows
    inputs: list[Tensor] = []  # its parameters with their type hints

    @property
    def required(self) -> frozenset[str]:
        """The parameters that every row must have a value for."""
        empty = inspect.Parameter.empty
        return frozenset(name for name, default in self.parameters.items() if default is empty)

    @property
    def takes_rows(self) -> bool:
        return self.list_rows is not None and list(self.parameters) == [ROWS_PARAMETER]


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
    parsed = parse(source)
    path = file_of(parsed)
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ModelFailed(f"the function {source} cannot be read: {error.strerror}: {path}") from None


def load(source: str) -> Loaded:
    """Import the function's file and prepare the function for calls. A class is constructed, but not set up.

    The file's folder is added to `sys.path`; a file in a package is imported as part of the package.
    Raises: ModelFailed, with the traceback if user code failed.
    """
    parsed = parse(source)
    target: Any = _import(parsed)
    for part in parsed.attribute.split("."):
        target = _attribute(target, part, source)
    if inspect.isclass(target):
        target = _run_user_code(target, f"constructing {source}")
    return _describe(target, source)


def user_traceback(error: BaseException) -> str:
    """The traceback of `error`, starting at the first frame of user code."""
    frames = error.__traceback__
    while frames is not None and _is_machinery(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()


def _is_machinery(filename: str) -> bool:
    return filename.startswith(("<frozen importlib", str(_OURS))) or filename == importlib.__file__


_OURS = Path(__file__).resolve().parent.parent


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


def _import(source: FunctionSource) -> ModuleType:
    if source.file is None:
        assert source.module is not None
        return _import_module(source.module, source.root, source)
    file = source.file.resolve()
    if not file.is_file():
        raise ModelFailed(f"there is no file {file} for the function {source}")
    if (file.parent / "__init__.py").is_file() and file.name != "__init__.py":
        root, parts = file.parent, [file.stem]
        while (root / "__init__.py").is_file():
            parts.insert(0, root.name)
            root = root.parent
        return _import_module(".".join(parts), root, source)
    return _import_file(file, source)


def _import_module(module: str, root: Path | None, source: FunctionSource) -> ModuleType:
    if root is not None:
        _put_on_path(root)
    return _run_user_code(lambda: importlib.import_module(module), f"importing {source}")


def _import_file(file: Path, source: FunctionSource) -> ModuleType:
    _put_on_path(file.parent)
    # The file's own name, so that its classes can be pickled, unless there is already a module of this name.
    is_taken = file.stem in sys.modules or file.stem in sys.stdlib_module_names
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}" if is_taken else file.stem
    spec = importlib.util.spec_from_file_location(name, file, loader=FreshLoader(name, str(file)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        _run_user_code(lambda: spec.loader.exec_module(module), f"importing {source}")
    except ModelFailed:
        del sys.modules[name]
        raise
    return module


def _put_on_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _run_user_code(call: Callable[[], Any], action: str) -> Any:
    try:
        return call()
    except (Exception, SystemExit) as error:
        raise ModelFailed(f"{action} failed:\n{user_traceback(error)}") from None


def _attribute(target: Any, name: str, source: str) -> Any:
    try:
        return getattr(target, name)
    except AttributeError:
        pass
    names = [attribute for attribute in dir(target) if not attribute.startswith("_")]
    close_names = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close_names[0]!r}?" if close_names else f"it has: {', '.join(names[:20]) or 'nothing'}"
    raise ModelFailed(f"there is no {name!r} in the function {source}: {hint}")


def _describe(target: Any, source: str) -> Loaded:
    setup = None
    call = target
    if not inspect.isroutine(target):
        setup = getattr(target, "setup", None)
        call = getattr(target, "predict", target)
    if not callable(call):
        raise ModelFailed(
            f"{source} is a {type(target).__name__} that cannot be called: "
            "name a function, or a class with a method `predict` or `__call__`"
        )
    try:
        signature_parameters = inspect.signature(call).parameters.values()
    except (ValueError, TypeError):
        raise ModelFailed(f"{source} has no signature: wrap it in a function of your own") from None
    positional = [each.name for each in signature_parameters if each.kind is each.POSITIONAL_ONLY]
    if positional:
        raise ModelFailed(f"{source} takes {positional[0]!r} by position only, and rows give arguments by name")
    is_column = hasattr(call, "batchmill_list_rows")
    loaded = Loaded(
        name=source,
        call=call,
        parameters={each.name: each.default for each in signature_parameters if each.kind in _NAMED},
        takes_kwargs=any(each.kind is each.VAR_KEYWORD for each in signature_parameters),
        is_async=_is_any(call, inspect.iscoroutinefunction),
        list_rows=getattr(call, "batchmill_list_rows", None),
        setup=setup if callable(setup) else None,
        yields=_is_any(call, inspect.isgeneratorfunction, inspect.isasyncgenfunction),
        inputs=_inputs(call, [each for each in signature_parameters if each.kind in _NAMED], is_column=is_column),
    )
    if loaded.list_rows is not None and (loaded.takes_kwargs or not loaded.parameters):
        raise ModelFailed(
            f"{source} is marked @batched: name its columns, or take whole rows with the parameter `rows`"
        )
    return loaded


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _inputs(call: Callable[..., Any], parameters: list[inspect.Parameter], *, is_column: bool) -> list[Tensor]:
    hints = hints_of(call)
    tensors = {each.name: read_hint(hints.get(each.name), is_column=is_column) for each in parameters}
    return [
        Tensor(each.name, tensors[each.name].datatype, tensors[each.name].shape, each.default is each.empty)
        for each in parameters
    ]


def _is_any(call: Any, *kinds: Callable[[Any], bool]) -> bool:
    """Whether the call, or the `__call__` of an object, is a function of one of these kinds."""
    body = call if inspect.isroutine(call) else getattr(call, "__call__", None)  # noqa: B004
    return any(kind(call) or kind(body) for kind in kinds)


OUR_DECORATORS = ("batched",)  # they return the function itself
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def is_blocking(source: str) -> bool:
    """Whether `source` is certainly called without `await`. False if only running the file would show it.

    Raises: ModelFailed if the module does not exist.
    """
    parsed = parse(source)
    try:
        scope: ast.AST | None = ast.parse(file_of(parsed).read_bytes())
    except (SyntaxError, ValueError, RecursionError, OSError):
        return False  # loading reports the error
    for name in parsed.attribute.split("."):
        scope = _definition(scope, name)
    if isinstance(scope, ast.ClassDef):
        scope = _definition(scope, "predict") or _definition(scope, "__call__")
    return isinstance(scope, ast.FunctionDef) and all(map(_is_ours, scope.decorator_list))


def _definition(scope: ast.AST | None, name: str) -> Definition | None:
    """The definition of `name` in a module or class, if it is the only statement that binds the name."""
    if not isinstance(scope, ast.Module | ast.ClassDef) or (isinstance(scope, ast.ClassDef) and scope.decorator_list):
        return None
    definitions = [node for node in scope.body if isinstance(node, Definition) and node.name == name]
    others = [node for node in scope.body if node not in definitions]
    return definitions[0] if len(definitions) == 1 and not any(_binds(node, name) for node in others) else None


def _binds(statement: ast.AST, name: str) -> bool:
    """Whether a statement may bind `name`, anywhere in it."""
    for node in ast.walk(statement):
        match node:
            case (
                ast.Name(id=bound_name, ctx=ast.Store())
                | ast.alias(name=bound_name, asname=None)
                | ast.alias(asname=bound_name)
            ):
                pass
            case (
                ast.FunctionDef(name=bound_name) | ast.AsyncFunctionDef(name=bound_name) | ast.ClassDef(name=bound_name)
            ):
                pass
            case _:
                continue
        if bound_name in (name, "*"):
            return True
    return False


def _is_ours(decorator: ast.expr) -> bool:
    match decorator:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in OUR_DECORATORS
    return False
