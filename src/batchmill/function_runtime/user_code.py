"""Loads a function and describes it: parameters, results, batch size.

`load` runs the user's import and `setup`; nothing here knows of sockets.
"""

from __future__ import annotations

import inspect
import os

from . import inferless_app
from .arguments import Parameters
from .hints import hints_of, is_frame, read_hint, series_kind, table_kind
from .installed import installed
from .loading import FINISHERS, LoadError, find
from .marks import BATCH_ROWS_MAX, ROWS_PARAMETER
from .values import Writer

ROW, LIST, FRAME = "row", "list", "frame"
OUTPUT = "output"  # the name of a result that has none

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

WINDOW_S = 0.01  # the longest that an idle function waits for a batch to fill, unless set; async calls run side by side


class UserCode:
    """The user's function, as the rest of this program sees it.

    `call` is called as `calls` says: for each row with its arguments, with a list for each parameter, with the list of
    rows as dicts (`takes_rows`), or with a data frame. `streams` is "", "generator" or "handler".
    """

    def __init__(self, call, parameters, interface):
        self.call, self.parameters, self.interface = call, parameters, interface
        self.calls = interface["calls"]
        self.is_async = interface["is_async"]
        self.streams = ""
        self.takes_rows = interface["takes"] == "rows"
        self.batch_size = 1
        self.batch_window_s = None  # until it is loaded, unless its own code sets it
        self.frame_columns = []
        self.result = None  # what checks and changes each result of a row, if anything does
        self.setup = self.finish = None


def load(start):
    """The function that a `start` frame names; its setup has yet to be run. Raises: LoadError."""
    folder = start["folder"]
    if folder:
        os.chdir(folder)
    found = find(start["source"], folder)
    if inferless_app.is_app(found):
        code = inferless_app.describe(found, folder, UserCode)
    else:
        code = _describe(found, start.get("frame_columns") or [])
    size = start.get("batch_size") or 0
    if size and code.calls != ROW:
        code.batch_size = min(size, BATCH_ROWS_MAX)
    code.batch_window_s = _window_of(code, start.get("batch_window_s"))
    return code


def _window_of(code, configured_s):
    """How long the function waits at most for a batch to fill."""
    if code.calls == ROW:
        return 0.0
    if configured_s is not None:
        return configured_s
    if code.batch_window_s is not None:
        return code.batch_window_s
    return 0.0 if code.is_async else WINDOW_S


def _describe(found, frame_columns):
    target, owner = found.target, found.owner
    call = target
    if target is owner:
        call = getattr(target, "predict", target)
    if not callable(call):
        raise LoadError(
            f"{found.source} is a {type(target).__name__} that cannot be called: "
            "name a function, or a class with a method `predict` or `__call__`"
        )
    given = parameters_of(call, found.source)
    hints = hints_of(call)
    size = getattr(call, "batchmill_list_rows", None)
    if frame_columns:
        code = _frame_function(call, given, frame_columns, found.source)
    elif size is not None:
        code = _list_function(call, given, hints, found.source)
        code.batch_size = size
    else:
        code = _row_function(call, given, hints)
    _finish_interface(code, call, hints)
    code.setup = _method(owner, ("setup",))
    code.finish = _method(owner, FINISHERS)
    if code.streams and code.calls != ROW:
        raise LoadError(f"{found.source} yields its results, and cannot take many rows at once: return a list")
    return code


def _method(owner, names):
    for name in names:
        method = getattr(owner, name, None) if owner is not None else None
        if callable(method):
            return method
    return None


def parameters_of(call, source):
    """The parameters of a function that rows can call. Raises: LoadError for one that they cannot."""
    try:
        given = list(inspect.signature(call).parameters.values())
    except (ValueError, TypeError):
        raise LoadError(f"{source} does not say what its parameters are: wrap it in a function of your own") from None
    for each in given:
        if each.kind is each.VAR_POSITIONAL:
            raise LoadError(f"{source} takes *{each.name}, any number of arguments: name its parameters")
        if each.kind is each.POSITIONAL_ONLY:
            raise LoadError(
                f"{source} takes {each.name!r} by position only, and rows give arguments by name too: wrap it in a "
                "function of your own"
            )
    return given


def _row_function(call, given, hints):
    named = [each for each in given if each.kind is not each.VAR_KEYWORD]
    read = {each.name: read_hint(hints.get(each.name)) for each in named}
    parameters = Parameters(
        [each.name for each in named if each.kind in _POSITIONAL],
        [each.name for each in named if each.default is each.empty],
        None if len(named) < len(given) else [each.name for each in named],
        array_names={name: hint.datatype for name, hint in read.items() if hint.is_array},
        models={name: _maker(hint.model) for name, hint in read.items() if hint.model is not None},
    )
    return UserCode(call, parameters, _interface(named, read, ROW, takes_more=len(named) < len(given)))


def _list_function(call, given, hints, source):
    names = [each.name for each in given]
    if not names or any(each.kind is each.VAR_KEYWORD for each in given):
        raise LoadError(f"{source} is marked @batched: name its columns, or take whole rows with `{ROWS_PARAMETER}`")
    if names == [ROWS_PARAMETER]:
        parameters = Parameters([], [], None, is_dict=True)
        interface = _interface([], {}, LIST, takes_more=True)
        interface["takes"] = "rows"
        return UserCode(call, parameters, interface)
    if len(names) == 1 and (kind := table_kind(hints.get(names[0]))):
        parameters = Parameters([], [], None, is_dict=True)
        parameters.takes_frame = kind
        interface = _interface([], {}, LIST, takes_more=True)
        interface["takes"] = "rows"
        return UserCode(call, parameters, interface)
    read = {each.name: read_hint(hints.get(each.name), is_column=True) for each in given}
    parameters = Parameters(
        [each.name for each in given if each.kind in _POSITIONAL],
        [each.name for each in given if each.default is each.empty],
        names,
        array_names={name: hint.datatype for name, hint in read.items() if hint.is_array},
        models={name: _maker(hint.model) for name, hint in read.items() if hint.model is not None},
        defaults={each.name: each.default for each in given if each.default is not each.empty},
    )
    kinds = {name: series_kind(hints.get(name)) for name in names}
    parameters.series = {name: kind for name, kind in kinds.items() if kind}
    return UserCode(call, parameters, _interface(given, read, LIST))


def _frame_function(call, given, columns, source):
    if len(given) != 1:
        raise LoadError(f"{source}: Deployments using DataFrame Mode can only have one argument.")
    if installed("pandas") is None:
        raise LoadError(f"{source} takes a data frame, and its environment has no pandas: add it to the requirements")
    interface = _interface([], {}, FRAME)
    interface["inputs"] = [{"name": name, "datatype": None, "shape": [1], "required": True} for name in columns]
    code = UserCode(call, Parameters(columns, [], columns, is_dict=True), interface)
    code.parameters.keeps_ids = True
    code.batch_size, code.frame_columns = BATCH_ROWS_MAX, list(columns)
    return code


def _maker(model):
    return getattr(model, "model_validate", None) or model.parse_obj


def _interface(given, read, calls, *, takes_more=False):
    return {
        "inputs": [_input(each, read[each.name]) for each in given],
        "outputs": None,
        "calls": calls,
        "takes": "arguments",
        "has_schema": bool(given) and all(read[each.name].is_marked for each in given),
        "takes_more": takes_more,
        "is_async": False,
        "streams": False,
        "summary": "",
    }


def _input(parameter, hint):
    example = None if parameter.default is parameter.empty else _example(parameter.default)
    return dict(_tensor(parameter.name, hint), required=parameter.default is parameter.empty, example=example)


def _tensor(name, hint):
    return {"name": name, "datatype": hint.datatype, "shape": hint.shape, "is_array": hint.is_array}


def _example(default):
    """A default as JSON holds it, if it does."""
    try:
        plain = Writer().value(default)
    except Exception:  # user code: what a default's own methods may raise
        return None
    return plain if isinstance(plain, (int, float, str, bool, list, dict)) else None


def _finish_interface(code, call, hints):
    interface = code.interface
    interface["summary"] = (inspect.getdoc(call) or "").strip().partition("\n")[0][:500]
    code.is_async = interface["is_async"] = _is_any(call, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    if _is_any(call, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
        code.streams, interface["streams"] = "generator", True
    elif "return" in hints and not is_frame(hints["return"]):
        given = read_hint(hints["return"], is_column=code.calls != ROW)
        if given.datatype is not None or given.is_array:
            interface["outputs"] = [_tensor(OUTPUT, given)]


def _is_any(call, *kinds):
    """Whether the call, or the `__call__` of an object, is a function of one of these kinds."""
    body = call if inspect.isroutine(call) else getattr(call, "__call__", None)  # noqa: B004
    return any(kind(call) or kind(body) for kind in kinds)
