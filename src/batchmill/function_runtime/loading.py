"""Finds and loads a function's code. Only `load` runs user code."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
import weakref
from importlib.machinery import SourceFileLoader

MESSAGE_CHARS_MAX = 2048
FRAMES_MAX = 40  # shown of a deep traceback
PLACES_MAX = 4096  # tracebacks kept, by the lines they lead through

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_UNUSUAL = (SyntaxError, NameError, AttributeError, ImportError)  # Python adds lines or hints to these
_places = {}  # the lines that a traceback leads through -> their text
_is_ours = {}  # code -> whether it is of this package
_usual_kinds = weakref.WeakKeyDictionary()  # exception class -> whether Python writes nothing more of it


def row_error(error, memory_bytes=None, *, with_trace=True):
    """[code, message, traceback] of an exception of user code; the traceback may be empty."""
    if memory_bytes is not None and isinstance(error, MemoryError):
        text = f"the function was refused more memory: its process may have {memory_bytes} bytes"
        return ["memory_limit", text, trace_of(error) if with_trace else ""]
    name, text = type(error).__name__, text_of(error)
    if not with_trace:
        return [name, text, ""]
    return [name, text, trace_of(error, text)]


def trace_of(error, text=None):
    """The traceback from the first frame of user code on; its last line is `Type: message`."""
    try:
        if not _is_usual(error):
            return _cut(_trace(error))
        text, name = text_of(error) if text is None else text, type(error).__name__
        return f"{_through(_of_user(error))}{name}: {text}" if text else _through(_of_user(error)) + name
    except Exception as broken:  # user code: its __str__, its __notes__
        return f"{type(error).__name__}: (its traceback cannot be written: {type(broken).__name__})"


def text_of(error):
    """An exception's message, capped and fit for UTF-8."""
    try:
        text = str(error)
    except Exception as broken:  # user code: its __str__
        text = f"(its message cannot be read: {type(broken).__name__})"
    return _cut(text[:MESSAGE_CHARS_MAX])


def _cut(text):
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _trace(error):
    lines = traceback.format_exception(type(error), error, _of_user(error), limit=-FRAMES_MAX)
    return "".join([line[: 4 * MESSAGE_CHARS_MAX] for line in lines]).rstrip()


def _is_usual(error):
    """Whether its traceback is nothing but the lines it leads through, and `Type: message`."""
    if error.__cause__ is not None or (error.__context__ is not None and not error.__suppress_context__):
        return False
    kind = type(error)
    is_usual = _usual_kinds.get(kind)
    if is_usual is None:
        is_usual = _usual_kinds[kind] = not issubclass(kind, _UNUSUAL) and not hasattr(kind, "exceptions")
    return is_usual and "__notes__" not in getattr(error, "__dict__", ())


def _of_user(error):
    """The traceback from the first frame of user code on."""
    frames = error.__traceback__
    while frames is not None and _belongs_to_us(frames.tb_frame.f_code):
        frames = frames.tb_next
    return frames


def _through(frames):
    """The text of the lines that a traceback leads through, kept for the next error that takes the same way."""
    way, each = [], frames
    while each is not None:
        way += (each.tb_frame.f_code, each.tb_lasti)
        each = each.tb_next
    key = tuple(way)
    text = _places.get(key)
    if text is None:
        lines = traceback.format_tb(frames, limit=-FRAMES_MAX)
        text = "".join(["Traceback (most recent call last):\n", *lines]) if lines else ""
        if len(_places) >= PLACES_MAX:
            _places.clear()
        _places[key] = text
    return text


def _belongs_to_us(code):
    known = _is_ours.get(code)
    if known is None:
        name = code.co_filename
        known = name.startswith((_OURS, "<frozen importlib", "<frozen runpy")) or name.endswith("importlib/__init__.py")
        if len(_is_ours) >= PLACES_MAX:
            _is_ours.clear()
        _is_ours[code] = known
    return known


FINISHERS = ("finalize", "teardown")


class LoadError(Exception):
    """The function cannot be used; the text is for its author."""


class LoadedSource:
    """The loaded source: `target` is the function, method or object; `owner` its object, or None."""

    def __init__(self, source, target, owner, module):
        self.source, self.target, self.owner, self.module = source, target, owner, module


def find(source, folder):
    """Import what `source` (FILE.py:NAME or module:NAME, from `folder` on) names; a class is constructed.

    Without a folder, a file is named by its absolute path, and a module is found on Python's own path.
    Raises: LoadError, with the traceback of the user's code where that is what failed.
    """
    place, _, attribute = source.rpartition(":")
    parts = attribute.split(".")
    if not place or not all(part.isidentifier() for part in parts):
        raise LoadError(f"{source!r} does not name a function: write FILE.py:NAME or package.module:NAME")
    if folder:
        _put_on_path(folder)
    module = _import_place(place, folder, source)
    target, owner = module, None
    for part in parts:
        target = _attribute(target, part, source)
        if inspect.isclass(target):
            target = owner = run_user_code(target, f"constructing {source}")
    if owner is None and not inspect.isroutine(target):
        owner = target
    return LoadedSource(source, target, owner, module)


def find_attribute(source, folder):
    """As `find`, but what `source` names is returned as it is: a class is not constructed."""
    place, _, attribute = source.rpartition(":")
    if folder:
        _put_on_path(folder)
    target = _import_place(place, folder, source)
    for part in attribute.split("."):
        target = _attribute(target, part, source)
    return target


def run_user_code(call, doing):
    """Run user code and return its result. Raises: LoadError with the traceback."""
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
    # The file's own name, so that what it defines can be pickled; never that of a module that exists already.
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
    """Compiles the file as it is now: cached bytecode is compared by size and second only."""

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
