"""Inferless's schemas: INPUT_SCHEMA of input_schema.py, or the older input.json and output.json, or pydantic classes.

Source: Inferless's pages on input and output, and what its command line makes of them.
"""

from __future__ import annotations

import json
import math
import os

from . import hints
from .loading import LoadError
from .marks import DATATYPES

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
        raise LoadError(f"{datatype!r} is no datatype: {', '.join(sorted(DATATYPES))} --> {name}")
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
    told = {"name": name, "datatype": datatype, "shape": _shape(name, tensor["shape"])}
    if is_input:
        told["required"] = not tensor.get("optional", False)
        told["example"] = tensor.get("data")
    return told


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
