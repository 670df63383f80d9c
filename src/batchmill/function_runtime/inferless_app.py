"""Apps of Inferless: a class with initialize, infer and finalize beside a schema of its inputs.

Source: Inferless's pages on app.py, input and output, dynamic batching and streaming.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import math
import os
import sys
import types

from . import hints
from .arguments import Parameters
from .loading import LoadError, run_user_code
from .marks import BATCH_ROWS_MAX, DATATYPES
from .values import Unserializable

# What Inferless calls Python's types, where a class of pydantic is the schema.
_MODEL_TYPES = {"INT64": "INT32"}


def read_input_schema(schema):
    """The inputs that INPUT_SCHEMA declares, as the Interface has them. Raises: LoadError."""
    if not isinstance(schema, dict):
        raise LoadError(f"INPUT_SCHEMA must be a dict of inputs by name, not {type(schema).__name__}")
    return [_read_input(name, entry) for name, entry in schema.items()]


def _read_input(name, entry):
    if not isinstance(name, str) or not isinstance(entry, dict):
        raise LoadError(f"INPUT_SCHEMA: the entry of {name!r} must be a dict")
    if "datatype" not in entry:
        raise LoadError(f"Data type not specified for input --> {name}")
    is_required = bool(entry.get("required", True))
    shape = entry.get("shape", [-1] if not is_required else None)
    if shape is None:
        raise LoadError(f"shape not specified for input --> {name}")
    return {
        "name": name,
        "datatype": _datatype(name, entry["datatype"]),
        "shape": _shape(name, shape),
        "required": is_required,
        "example": _example(name, entry.get("example")),
    }


def _datatype(name, datatype):
    if datatype not in DATATYPES:
        raise LoadError(f"{datatype!r} is not a datatype: {', '.join(sorted(DATATYPES))} --> {name}")
    return datatype


def _shape(name, shape):
    if not isinstance(shape, (list, tuple)) or not shape:
        raise LoadError(f"shape not specified as a python list for input --> {name}")
    if not all(type(length) is int and length >= -1 for length in shape):
        raise LoadError(f"shape must be a list of lengths, -1 for any, not {shape!r} --> {name}")
    return list(shape)


def _example(name, example):
    try:
        json.dumps(example, allow_nan=False)
    except (TypeError, ValueError):
        raise LoadError(f"the example is not JSON: {example!r} --> {name}") from None
    return example


def read_sample(folder, file, key):
    """The tensors of input.json (or output.json), or None where there is no such file. Raises: LoadError."""
    path = os.path.join(folder, file)
    if not os.path.isfile(path):
        return None
    try:
        with open(path, encoding="utf-8") as source:
            tensors = json.load(source)[key]
        return [_read_sample(tensor, is_input=key == "inputs") for tensor in tensors]
    except (ValueError, KeyError, TypeError) as error:
        raise LoadError(f"{file} is not {{{key!r}: [{{name, shape, datatype, data}}, …]}}: {error!r}") from None


def _read_sample(tensor, *, is_input):
    name = tensor["name"]
    datatype = _datatype(name, tensor["datatype"])
    datatype = "STRING" if datatype == "BYTES" else datatype  # the only texts of the older form
    fields = {"name": name, "datatype": datatype, "shape": _shape(name, tensor["shape"])}
    if is_input:
        fields["required"] = not tensor.get("optional", False)
        fields["example"] = tensor.get("data")
    return fields


def read_model(model):
    """The inputs (or outputs) that the fields of a pydantic class are, and the names of those that may be absent."""
    tensors = []
    for name, hint, default, _ in hints.model_fields(model):
        read = hints.read_hint(hint)
        tensors.append(
            {
                "name": name,
                "datatype": _MODEL_TYPES.get(read.datatype, read.datatype),
                "shape": read.shape,
                "required": not read.is_optional,
                "example": default if _is_json(default) else None,
            }
        )
    return tensors


def object_classes(module, infer):
    """The class that `infer` takes instead of a dict, and the one it returns instead; None where there is none."""
    found = {name: hints.resolve_alias(each) for name, each in hints.hints_of(infer).items()}
    takes = [each for name, each in found.items() if name != "return" and hints.is_model(each)]
    named = [getattr(module, name, None) for name in ("RequestObjects", "ResponseObjects")]
    request = takes[0] if takes else named[0] if "_json_schema" in getattr(named[0], "__dict__", ()) else None
    response = found.get("return") or named[1]
    return request, (response if hints.is_model(response) else None)


def _is_json(value):
    if isinstance(value, float):
        return math.isfinite(value)
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


CLASS = "InferlessPythonModel"
SCHEMA = "input_schema"
SETTINGS = ("BATCH_SIZE", "BATCH_WINDOW", "IS_STREAMING_OUTPUT")
WINDOW_MS = 500  # if only BATCH_SIZE is set
NESTED = "Output {} is of type dictionary or tuple which is currently not supported. You can try json.dumps({})"


def is_app(found):
    """Whether an object is such a class, by its name or its methods."""
    owner = found.owner
    if owner is None or found.target is not owner or hasattr(owner, "predict"):
        return False
    return callable(getattr(owner, "infer", None)) and (type(owner).__name__ == CLASS or hasattr(owner, "initialize"))


def stand_in():
    """Let user code import `inferless` where it is not installed: its decorators mark classes and nothing else."""
    if "inferless" in sys.modules or importlib.util.find_spec("inferless") is not None:
        return
    module = types.ModuleType("inferless", "What apps use of inferless, which is not installed here.")
    module.request = module.response = _mark
    module.config = _config
    sys.modules["inferless"] = module


def _mark(cls):
    cls._json_schema = {}
    return cls


def _config(cls=None):
    """Set the environment variables that the fields of a class of pydantic name."""
    if cls is None:
        return _config
    for name, default in ((name, getattr(field, "default", None)) for name, field in cls.model_fields.items()):
        if default is not None:
            os.environ[name.upper()] = str(default)
    return cls


def describe(found, folder, make):
    """The app as a `UserCode`, which `make` is. Raises: LoadError."""
    app = found.owner
    place = os.path.dirname(os.path.abspath(getattr(found.module, "__file__", "") or os.path.join(folder, "app.py")))
    settings, inputs = _read_schema(place, folder)
    request, response = object_classes(found.module, app.infer)
    if inputs is None and request is not None:
        inputs = read_model(request)
    outputs = _read_once(read_sample, place, folder, "output.json", "outputs")
    if outputs is None and response is not None:
        outputs = read_model(response)
    interface = _interface(app, inputs, outputs)
    names = None if inputs is None else [each["name"] for each in inputs]
    required = [each["name"] for each in inputs or () if each["required"]]
    models = {"": getattr(request, "model_validate", None) or request.parse_obj} if request is not None else {}
    parameters = Parameters(names or [], required, names, models=models, is_dict=True)
    code = make(app.infer, parameters, interface)
    _apply(code, settings, takes_handler=_positions(app.infer) > 1)
    code.setup, code.finish = getattr(app, "initialize", None), _finalizer(app)
    declared = {each["name"]: each.get("required", True) for each in outputs or ()}
    code.result = lambda value: _checked(value, declared)
    return code


def _interface(app, inputs, outputs):
    return {
        "inputs": inputs or [],
        "outputs": outputs,
        "calls": "row",
        "takes": "dict",
        "has_schema": inputs is not None,
        "takes_more": inputs is None,
        "is_async": inspect.iscoroutinefunction(app.infer) or inspect.isasyncgenfunction(app.infer),
        "streams": False,
        "summary": (inspect.getdoc(app.infer) or "").strip().partition("\n")[0][:500],
    }


def _apply(code, settings, *, takes_handler):
    size, window_ms = settings["BATCH_SIZE"], settings["BATCH_WINDOW"]
    if size > BATCH_ROWS_MAX:
        raise LoadError(f"BATCH_SIZE is {size:,}, and {BATCH_ROWS_MAX:,} is the most")
    call = code.call
    if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
        code.streams = "generator"
    elif takes_handler:
        code.streams = "handler"
    elif settings["IS_STREAMING_OUTPUT"]:
        raise LoadError("IS_STREAMING_OUTPUT is set, and infer takes no stream_output_handler and does not yield")
    code.interface["streams"] = bool(code.streams)
    if code.streams == "handler" and code.is_async:
        raise LoadError("an infer that takes a stream_output_handler cannot be `async def`: yield its events instead")
    if size > 0 and not code.streams:
        code.calls = code.interface["calls"] = "list"
        code.interface["takes"], code.takes_rows = "rows", True
        code.batch_size = size
        code.batch_window_s = (window_ms or WINDOW_MS) / 1000


def _positions(call):
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.kind in kinds for each in inspect.signature(call).parameters.values())


def _finalizer(app):
    """finalize(), which some write with a parameter."""
    finalize = getattr(app, "finalize", None)
    if finalize is None:
        return None
    return (lambda: finalize(None)) if _positions(finalize) else finalize


def _read_schema(place, folder):
    """The settings, and the inputs or None, from the files beside the app."""
    settings = {name: _setting(name, os.environ.get(name, 0)) for name in SETTINGS}
    for each in dict.fromkeys((place, folder)):
        path = os.path.join(each, f"{SCHEMA}.py")
        if os.path.isfile(path):
            module = run_user_code(functools.partial(_run_file, path), f"importing {SCHEMA}.py")
            for name in SETTINGS:
                settings[name] = _setting(name, getattr(module, name, settings[name]))
            schema = getattr(module, "INPUT_SCHEMA", None)
            return settings, None if schema is None else read_input_schema(schema)
    return settings, _read_once(read_sample, place, folder, "input.json", "inputs")


def _run_file(path):
    spec = importlib.util.spec_from_file_location(SCHEMA, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _setting(name, value):
    if isinstance(value, str):
        value = {"true": True, "false": False, "": 0}.get(value.strip().lower(), value)
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = -1
    if number < 0:
        raise LoadError(f"{name} must be a number from 0 on, not {value!r}")
    return number


def _read_once(read, place, folder, *args):
    found = read(place, *args)
    return found if found is not None or place == folder else read(folder, *args)


def _checked(value, declared):
    """A result of infer as a dict; `declared` are output names -> whether they must be there.

    Raises: Unserializable, in the words that Inferless has for it.
    """
    if not isinstance(value, dict):
        dump = getattr(value, "model_dump", None) or getattr(value, "dict", None)
        if dump is None:
            raise Unserializable(f"TypeError: infer must return a dict of outputs, not {type(value).__name__}")
        value = dump()
    for name, output in value.items():
        items = output if isinstance(output, list) else [output]
        if any(isinstance(each, (dict, tuple)) for each in items):
            raise Unserializable(NESTED.format(name, name))
    for name, is_required in declared.items():
        if value.get(name) is None:
            if is_required:
                raise Unserializable(f"Output {name} not found in the inference response")
            value = {key: output for key, output in value.items() if key != name}
    return value
