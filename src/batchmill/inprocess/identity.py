"""The digest of a function with all that it holds: its code, defaults, closure, and the globals that it reads.

A pickle cannot be the identity: it holds the path of a notebook's cell, which has the number of the process in it, and
sets in an order that differs from one process to the next.
"""

from __future__ import annotations

import copyreg
import hashlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

from batchmill.client.captured import is_installed
from batchmill.errors import InvalidInput

OBJECTS_MAX = 1_000_000
_PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), type(Ellipsis), type(NotImplemented))
_OWN = ("__dict__", "__weakref__", "__module__", "__doc__", "__qualname__", "__firstlineno__", "__static_attributes__")
# What makers of classes add to them: it follows from the rest.
_MADE = ("_abc_impl", "__signature__", "__match_args__", "__struct_config__", "__struct_encode_fields__")
_PYDANTIC, _PYDANTIC_FIELDS = "__pydantic_", "__pydantic_fields__"
PROTOCOL = 4


def digest_of(function: Callable[..., Any]) -> str:
    """Hexadecimal digits. The same in every process that defines the same. Raises: InvalidInput."""
    try:
        return _Digest().of(function).hex()
    except RecursionError:
        raise InvalidInput("the function holds a value that is nested too deep", code="uncapturable") from None


class _Digest:
    """Digests of one function's values. A value that holds itself counts by the order in which it was met."""

    def __init__(self) -> None:
        self._met: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no id is used twice

    def of(self, value: Any) -> bytes:
        if type(value) in _PLAIN:
            return _hash("plain", [f"{type(value).__name__} {value!r}".encode()])
        if isinstance(value, ModuleType):
            return _hash("module", [value.__name__.encode(), _own_file(value)])
        if (number := self._met.get(id(value))) is not None:
            return _hash("met", [b"%d" % number])
        if len(self._kept) >= OBJECTS_MAX:
            raise InvalidInput(
                f"the function holds more than {OBJECTS_MAX:,} objects: read them from a file", code="uncapturable"
            )
        self._met[id(value)] = len(self._kept)
        self._kept.append(value)
        kind, parts = self._parts(value)
        return _hash(kind, parts)

    def _parts(self, value: Any) -> tuple[str, Iterable[bytes]]:
        match value:
            case CodeType():
                return "code", self._of_code(value)
            case FunctionType() if not _is_imported(value):
                return "def", self._of_function(value)
            case MethodType():
                return "method", map(self.of, (value.__func__, value.__self__))
            case type() if not _is_imported(value):
                members = [(name, vars(value)[name]) for name in sorted(vars(value)) if _is_written(name)]
                return "class", map(self.of, (value.__qualname__, value.__bases__, members))
            case classmethod() | staticmethod():
                return type(value).__name__, [self.of(value.__func__)]
            case property():
                return "property", map(self.of, (value.fget, value.fset, value.fdel))
        if type(value) in (list, tuple):
            return type(value).__name__, map(self.of, value)
        if type(value) in (set, frozenset):
            return type(value).__name__, sorted(_Digest().of(each) for each in value)
        if type(value) in (dict, MappingProxyType):
            return "dict", (self.of(each) for pair in value.items() for each in pair)
        if isinstance(value, FunctionType | type) or _is_imported(value):
            return "named", [f"{value.__module__}:{value.__qualname__}".encode(), _file_of(value)]
        return "object", self._of_object(value)

    def _of_code(self, code: CodeType) -> Iterable[bytes]:
        return map(
            self.of,
            (code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_argcount,
             code.co_kwonlyargcount, code.co_posonlyargcount, code.co_flags, code.co_consts),
        )  # fmt: skip

    def _of_function(self, function: FunctionType) -> Iterable[bytes]:
        cells = [_content(cell) for cell in function.__closure__ or ()]
        names = sorted(_names_in(function.__code__) & function.__globals__.keys())
        read = [(name, function.__globals__[name]) for name in names]
        own = (function.__name__, function.__code__, function.__defaults__, function.__kwdefaults__, cells)
        return map(self.of, (*own, read, sorted(vars(function).items()), function.__annotations__))

    def _of_object(self, value: Any) -> Iterable[bytes]:
        """An object by what it is pickled as, without its bytes."""
        reducer: Any = copyreg.dispatch_table.get(type(value))
        try:
            reduced: Any = value.__reduce_ex__(PROTOCOL) if reducer is None else reducer(value)
        except Exception as error:  # user code
            raise _uncapturable(value, str(error)) from None
        if isinstance(reduced, str):  # the name of a global
            if getattr(value, "__module__", None) == "__main__" or "<locals>" in reduced:
                raise _uncapturable(value, f"other processes do not find {reduced}")
            return [reduced.encode()]
        return (self.of(list(part) if index > 2 and part is not None else part) for index, part in enumerate(reduced))


def _uncapturable(value: Any, why: str) -> InvalidInput:
    return InvalidInput(
        f"a {type(value).__name__} that the function holds cannot be captured: {why}", code="uncapturable"
    )


def _is_written(name: str) -> bool:
    """Whether a member of a class is there because a person wrote it."""
    is_made = name in _OWN or name in _MADE
    return not is_made and (not name.startswith(_PYDANTIC) or name == _PYDANTIC_FIELDS)


def _hash(kind: str, parts: Iterable[bytes]) -> bytes:
    digest = hashlib.sha256(kind.encode())
    for part in parts:
        digest.update(b"%d:" % len(part) + part)
    return digest.digest()


def _names_in(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is not filled yet
        return None


def _file_of(value: Any) -> bytes:
    """The contents of the file that defines it, if that is the user's own."""
    return _own_file(sys.modules.get(value.__module__))


def _own_file(module: ModuleType | None) -> bytes:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py") or is_installed(Path(file)):
        return b""
    try:
        return Path(file).read_bytes()
    except OSError:  # the module was loaded from a place that is gone: its name is all there is
        return b""


def _is_imported(value: Any) -> bool:
    """Whether another process finds it by its name."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__" or "<locals>" in name:
        return False
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is value
