"""A function object made a file: that of its module, or, for one of a notebook or script, its source and all it names.

The object of a name is looked up, never run again: functions, classes, modules and plain constants travel; anything
else is refused by name.
"""

from __future__ import annotations

import ast
import builtins
import fnmatch
import inspect
import os
import re
import site
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from msgspec import Struct

from batchmill.errors import InvalidInput, TooLarge
from batchmill.wire.bundles import BYTES_MAX, FILES_MAX
from batchmill.wire.imported_files import reach, root_of

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
    root = root_of(path)
    base = cwd if root.is_relative_to(cwd) else root
    place = str(path.relative_to(base))
    files: dict[str, Path | bytes] = {}
    reach(base, root, path, files)
    if attribute.split(".")[0] == INFERLESS_CLASS:
        beside = (path.parent / name for name in COMPANIONS)
        for companion in beside:
            if companion.is_file():
                reach(base, root, companion, files)
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


def from_folder(folder: Path, target: str, source: str) -> Collected:
    """Everything in a folder. Without a target: an Inferless app.py, or Modelbit's source.py with metadata.yaml."""
    folder = folder.resolve()
    files: dict[str, Path | bytes] = dict(_walk(folder))
    requirements = python = None
    columns: list[str] = []
    if not target:
        if "metadata.yaml" in files and "source.py" in files:
            metadata = _text(folder / "metadata.yaml")
            main = _MAIN.search(metadata)
            if main is None:
                raise InvalidInput(f"{source}: metadata.yaml names no mainFunction", code="unknown_function")
            target = f"source.py:{main[1]}"
            python = found[1] if (found := _PYTHON.search(metadata)) else None
            columns = _COLUMN.findall(block[2]) if (block := _COLUMNS.search(metadata)) else []
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


LAMBDA = "predict"  # what a lambda is called that has no name
CONSTANT_CHARS_MAX = 100_000
FILE = "source.py"
_PLAIN = (str, bytes, int, float, complex, bool, type(None))


def capture(function: Callable[..., Any]) -> Collected:
    """Raises: InvalidInput (`uncapturable`) for what would not be the same elsewhere."""
    target = _unwrapped(function)
    if not isinstance(target, FunctionType | type):
        raise _no(f"{_named(target)} is neither a function nor a class: write def, or give FILE.py:NAME")
    module = sys.modules.get(target.__module__)
    file = getattr(module, "__file__", None)
    is_lambda = isinstance(target, FunctionType) and target.__name__ == "<lambda>"
    if target.__module__ != "__main__" and file is not None and not is_lambda and "<locals>" not in target.__qualname__:
        if _of_name(module, target.__qualname__) is not function:
            raise _no(f"{_named(target)} was wrapped or replaced after its definition in {file}")
        return collect(f"{file}:{target.__qualname__}", Path.cwd())
    return _Capture().made(target, function)


def _of_name(value: Any, name: str) -> Any:
    """What a module or class has under a dotted name; None: nothing."""
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


class _Capture:
    """A source file in the making."""

    def __init__(self) -> None:
        self._imports: dict[str, None] = {}  # in the order in which they were met
        self._constants: list[str] = []
        self._definitions: list[str] = []
        self._known: dict[str, Any] = {}
        self._files: dict[str, Path | bytes] = {}
        self._defers = False  # annotations are not evaluated when the file runs

    def made(self, target: FunctionType | type, function: Callable[..., Any]) -> Collected:
        """Args: function: what the decorators of the definition have made of `target`."""
        if function is not target:
            _refuse_rewrapped(target, function)
        name = self._define(target, "")
        future = ["from __future__ import annotations"] if self._defers else []
        parts = ["\n".join([*future, *self._imports]), "\n".join(self._constants), *self._definitions]
        text = "\n\n\n".join(part for part in parts if part) + "\n"
        self._files[FILE] = text.encode()
        return Collected(f"{FILE}:{name}", f"{name} of {target.__module__}", self._files)

    def _define(self, target: FunctionType | type, alias: str) -> str:
        """Add a definition after those that it needs; returns its name."""
        if isinstance(target, FunctionType) and target.__code__.co_freevars:
            names = ", ".join(target.__code__.co_freevars)
            raise _no(f"{_named(target)} is a closure over {names}: make them arguments or names of the module")
        tree = _tree(target)
        scope = target.__globals__ if isinstance(target, FunctionType) else vars(sys.modules[target.__module__])
        _hold_values(tree, target, scope)
        name = alias or target.__name__
        if isinstance(tree, ast.Lambda):
            name = alias or LAMBDA
            tree = _as_def(tree, name)
        elif alias and alias != target.__name__:
            tree.name = alias
        self._known[name] = target
        self._defers = self._defers or _defers(target, tree)
        own = {name, *_globals_in(tree)}
        for used in _names_in(tree):
            if used in scope and used != name:
                self._bring(used, scope[used])
            elif used not in own and not hasattr(builtins, used):
                raise _no(f"{_named(target)} uses {used!r}, which is not defined there")
        self._definitions.append(ast.unparse(tree))
        return name

    def _bring(self, name: str, value: Any) -> None:
        """Define `name` as `value` in the file."""
        if name in self._known:
            if self._known[name] is not value:
                raise _no(f"{name!r} names two things: rename one")
            return
        self._known[name] = value
        if isinstance(value, ModuleType):
            self._imports[f"import {value.__name__} as {name}"] = None
            self._take_file(value)
        elif isinstance(target := _unwrapped(value), FunctionType | type) and value.__module__ == "__main__":
            if target is not value:
                _refuse_rewrapped(target, value)
            self._define(target, name)
        elif _is_constant(value):
            self._constants.append(f"{name} = {_text_of(name, value)}")
        elif (module := getattr(value, "__module__", None)) and _is_found(value, module):
            self._imports[f"from {module} import {value.__qualname__} as {name}"] = None
            self._take_file(sys.modules[module])
        elif module == "typing":
            self._constants.append(f"{name} = {value!r}")
            self._imports["import typing"] = None
        else:
            raise _no(
                f"{name!r} is a {type(value).__name__}, which cannot be written down: make it in the function, in a "
                "class's setup, or read it from a file"
            )

    def _take_file(self, module: ModuleType) -> None:
        """A module of the user's own goes along; one that is installed is for the requirements to name."""
        file = getattr(module, "__file__", None)
        if file is None or not file.endswith(".py") or module.__name__ == "__main__" or is_installed(Path(file)):
            return
        found = collect(f"{file}:{'_'}", Path.cwd())
        self._files |= {place: content for place, content in found.files.items() if place != FILE}


def _is_found(value: Any, module: str) -> bool:
    """Whether an import finds this very value by its name."""
    name = getattr(value, "__qualname__", "")
    return module != "__main__" and name.isidentifier() and _of_name(sys.modules.get(module), name) is value


def _unwrapped(value: Any) -> Any:
    """The function that decorators have wrapped, such as `functools.cache`; a value that is no wrapper, as it is."""
    try:
        inner = value if isinstance(value, type) else inspect.unwrap(value)
    except ValueError:  # it has every attribute
        return value
    return inner if isinstance(inner, FunctionType) else value


def _refuse_rewrapped(target: FunctionType | type, function: Callable[..., Any]) -> None:
    """Refuse a wrapper that the decorators above a definition have not made: its source says nothing of it."""
    scope = getattr(target, "__globals__", {})
    is_own = scope.get(target.__name__) is function or "<locals>" in target.__qualname__
    if not getattr(_tree(target), "decorator_list", []) or not is_own:
        raise _no(
            f"{_named(target)} was wrapped after its definition: decorate it with @, or write a def that calls it"
        )


def _hold_values(tree: Any, target: FunctionType | type, scope: Mapping[str, Any]) -> None:
    """Have a definition say the values that it holds: names in defaults and class attributes may mean others by now.

    Raises: InvalidInput for a default that is no constant, and not what its name stands for now.
    """
    if isinstance(target, FunctionType):
        _hold_defaults(tree.args, target, scope)
        return
    members = vars(target)
    for part in tree.body:
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            member = members.get(part.name)
            function = inspect.unwrap(getattr(member, "__func__", member)) if member is not None else None
            if isinstance(function, FunctionType):
                _hold_defaults(part.args, function, scope | members)
        elif isinstance(part, ast.Assign | ast.AnnAssign) and part.value is not None:
            name = part.targets[0] if isinstance(part, ast.Assign) else part.target
            if isinstance(name, ast.Name) and name.id in members and not _calls(part.value):
                part.value = _as_held(part.value, members[name.id])


def _hold_defaults(args: ast.arguments, function: FunctionType, scope: Mapping[str, Any]) -> None:
    values = function.__defaults__ or ()
    if len(values) == len(args.defaults):
        args.defaults = [_default(node, value, scope) for node, value in zip(args.defaults, values, strict=True)]
    named = function.__kwdefaults__ or {}
    for at, (arg, node) in enumerate(zip(args.kwonlyargs, args.kw_defaults, strict=True)):
        if node is not None and arg.arg in named:
            args.kw_defaults[at] = _default(node, named[arg.arg], scope)


def _default(node: ast.expr, value: Any, scope: Mapping[str, Any]) -> ast.expr:
    if isinstance(node, ast.Name) and not _is_constant(value):
        if scope.get(node.id, getattr(builtins, node.id, None)) is not value:
            raise _no(f"a default is what {node.id!r} stood for when the function was defined, and no constant")
        return node
    return _as_held(node, value)


def _as_held(node: ast.expr, value: Any) -> ast.expr:
    """A constant as an expression; anything else as it was written."""
    return ast.parse(_text_of("a value", value), mode="eval").body if _is_constant(value) else node


def _calls(node: ast.expr) -> bool:
    return any(isinstance(each, ast.Call) for each in ast.walk(node))


def _text_of(name: str, value: Any) -> str:
    text = repr(value)
    if len(text) > CONSTANT_CHARS_MAX:
        raise _no(f"{name!r} is {len(text):,} characters long: write it to a file, and read it in the function")
    return text


def _tree(target: FunctionType | type) -> Any:
    """The definition of a function or class, its decorators included; or a lambda."""
    try:
        lines, first = inspect.getsourcelines(target)
    except (OSError, TypeError):
        raise _no(f"the source of {_named(target)} is not known: give FILE.py:NAME") from None
    text = textwrap.dedent("".join(lines))
    if isinstance(target, FunctionType) and target.__name__ == "<lambda>":
        return _lambda_of(target, text)
    try:
        return ast.parse(text).body[0]
    except SyntaxError:
        raise _no(f"the source of {_named(target)} cannot be read by itself: give FILE.py:NAME") from None


def _lambda_of(target: FunctionType, text: str) -> ast.Lambda:
    """The lambda in a statement that may hold more: the one that compiles to the same code."""
    source = inspect.getsource(sys.modules[target.__module__]) if target.__module__ != "__main__" else text
    for candidate in (text, text.strip().rstrip(",)"), source):
        try:
            tree = ast.parse(candidate)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Lambda):
                made = compile(ast.Expression(node), "<lambda>", "eval").co_consts
                if any(isinstance(each, CodeType) and _shape(each) == _shape(target.__code__) for each in made):
                    return node
    raise _no("the source of the lambda is not known: write def")


def _shape(code: CodeType) -> tuple[object, ...]:
    """What two lambdas with the same arguments and the same body share."""
    kinds = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount
    return code.co_code, code.co_consts, code.co_names, code.co_varnames, counts, kinds


def _as_def(node: ast.Lambda, name: str) -> ast.FunctionDef:
    made = ast.FunctionDef(name=name, args=node.args, body=[ast.Return(node.body)], decorator_list=[])
    made.type_params = []  # type: ignore[attr-defined]  # a field since Python 3.12
    return ast.fix_missing_locations(made)


def _names_in(tree: ast.AST) -> list[str]:
    """Names that a definition reads and does not bind itself, in order."""
    bound = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    bound |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    bound |= {node.name for node in ast.walk(tree) if isinstance(node, kinds) and node is not tree}
    bound |= {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.name}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    declared = _globals_in(tree)
    bound -= declared.keys()
    read = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    return [name for name in dict.fromkeys([*read, *declared]) if name not in bound]


def _globals_in(tree: ast.AST) -> dict[str, None]:
    """Names that a definition declares global, in order: it may change them, or make them."""
    return {name: None for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}


def _is_constant(value: Any) -> bool:
    """It is what its repr says, wherever that is read."""
    if isinstance(value, float):
        return value == value and value not in (float("inf"), float("-inf"))
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_is_constant, value)) and (len(value) > 0 or type(value) in (list, tuple))
    if type(value) is dict:
        return all(_is_constant(each) for pair in value.items() for each in pair)
    return type(value) in _PLAIN


def is_installed(path: Path) -> bool:
    places = [*site.getsitepackages(), site.getusersitepackages(), *sysconfig.get_paths().values()]
    return "site-packages" in path.parts or any(path.is_relative_to(place) for place in places)


def _defers(target: FunctionType | type, tree: ast.AST) -> bool:
    """Whether a class was defined where annotations are text: then it may name itself, or what comes later."""
    if not isinstance(target, type) or not isinstance(tree, ast.ClassDef):
        return False
    kept = target.__dict__.get("__annotations__", {})
    return any(
        isinstance(kept.get(node.target.id), str) and not isinstance(node.annotation, ast.Constant)
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    )


def _named(target: Any) -> str:
    return repr(getattr(target, "__qualname__", type(target).__name__))


def _no(message: str) -> InvalidInput:
    return InvalidInput(message, code="uncapturable")
