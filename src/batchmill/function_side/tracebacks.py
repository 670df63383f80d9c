"""What user code raised, as text: cheap for an error that comes a thousand times, and never an error itself."""

from __future__ import annotations

import os
import traceback
import weakref

MESSAGE_CHARS_MAX = 2048
FRAMES_MAX = 40  # shown of a deep traceback
PLACES_MAX = 4096  # tracebacks kept, by the lines they lead through

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_UNUSUAL = (SyntaxError, NameError, AttributeError, ImportError)  # Python adds lines or hints to these
_places = {}  # the lines that a traceback leads through -> their text
_is_ours = {}  # code -> whether it is of this package
_usual_kinds = weakref.WeakKeyDictionary()  # exception class -> whether Python writes nothing more of it


def row_error(error, memory_bytes=None, *, with_trace=True):
    """[code, message, trace] of what user code raised; without one the trace is empty."""
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
