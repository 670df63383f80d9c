"""Where a deployed function's code lies, and how the file becomes something to call. Only `load` runs user code."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from importlib.machinery import SourceFileLoader

from .tracebacks import trace_of

FINISHERS = ("finalize", "teardown")


class LoadError(Exception):
    """The function cannot be used; its text is what whoever deployed it reads."""


class Found:
    """What a source names: `target` is the function, method or object; `owner` the object it belongs to, or None."""

    def __init__(self, source, target, owner, module):
        self.source, self.target, self.owner, self.module = source, target, owner, module


def find(source, folder):
    """Import what `source` (FILE.py:NAME or module:NAME, from `folder` on) names; a class is constructed.

    Raises: LoadError, with the traceback of the user's code where that is what failed.
    """
    place, _, attribute = source.rpartition(":")
    parts = attribute.split(".")
    if not place or not all(part.isidentifier() for part in parts):
        raise LoadError(f"{source!r} does not name a function: write FILE.py:NAME or package.module:NAME")
    _put_on_path(folder)
    module = _import_place(place, folder, source)
    target, owner = module, None
    for part in parts:
        target = _attribute(target, part, source)
        if inspect.isclass(target):
            target = owner = run_user_code(target, f"constructing {source}")
    if owner is None and not inspect.isroutine(target):
        owner = target
    return Found(source, target, owner, module)


def run_user_code(call, doing):
    """What `call` returns. Raises: LoadError with the traceback."""
    try:
        return call()
    except BaseException as error:  # SystemExit too
        raise LoadError(f"{doing} failed:\n{trace_of(error)}") from None


def _import_place(place, folder, source):
    if not place.endswith(".py"):
        root, slash, module = place.rpartition("/")
        if slash:
            folder = os.path.join(folder, root)
            _put_on_path(folder)
        return run_user_code(lambda: _import_module(module), f"importing {source}")
    file = os.path.realpath(os.path.join(folder, place))
    if not os.path.isfile(file):
        raise LoadError(f"there is no file {place} for the function {source}")
    stem = os.path.basename(file)[: -len(".py")]
    root = os.path.dirname(file)
    if os.path.isfile(os.path.join(root, "__init__.py")) and stem != "__init__":
        parts = [stem]
        while os.path.isfile(os.path.join(root, "__init__.py")):
            root, name = os.path.split(root)
            parts.insert(0, name)
        _put_on_path(root)
        return run_user_code(lambda: _import_module(".".join(parts)), f"importing {source}")
    _put_on_path(root)
    return _import_file(file, stem, source)


def _import_module(name):
    importlib.invalidate_caches()
    return importlib.import_module(name)


def _import_file(file, stem, source):
    # The file's own name, so that what it defines can be pickled; never that of a module that is there already.
    is_taken = stem in sys.modules or stem in getattr(sys, "stdlib_module_names", sys.builtin_module_names)
    name = f"{stem}_{hashlib.sha256(file.encode()).hexdigest()[:8]}" if is_taken else stem
    spec = importlib.util.spec_from_file_location(name, file, loader=FreshLoader(name, file))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        run_user_code(lambda: spec.loader.exec_module(module), f"importing {source}")
    except LoadError:
        sys.modules.pop(name, None)
        raise
    return module


class FreshLoader(SourceFileLoader):
    """Compiles the file as it is now: cached bytecode is told apart by size and second only."""

    def get_code(self, fullname):
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _put_on_path(folder):
    folder = os.path.abspath(folder)
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _attribute(target, name, source):
    try:
        return getattr(target, name)
    except AttributeError:
        names = [known for known in dir(target) if not known.startswith("_")]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it has: {', '.join(names[:20]) or 'nothing'}"
    raise LoadError(f"there is no {name!r} in the function {source}: {hint}")
