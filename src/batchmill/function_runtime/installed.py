"""Optional packages of the environment, imported when used; JSON by msgspec or the standard library."""

from __future__ import annotations

import importlib
import json
import math
import sys


def installed(name):
    """The package, or None if it is not installed."""
    module = sys.modules.get(name)
    if module is None and name not in _absent:
        try:
            module = importlib.import_module(name)
        except ImportError:
            _absent.add(name)
    return module


def loaded(name):
    """The package if it was imported already; otherwise no value has one of its types."""
    return sys.modules.get(name)


_absent = set()


try:
    import msgspec
except ImportError:
    msgspec = None


def _dump_slowly(value):
    """The standard library's JSON, with null for what JSON lacks."""
    try:
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(_without_nan(value), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def _without_nan(value):
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(each) for each in value]
    return value


def _load_slowly(data):
    return json.loads(bytes(data))


# dump(value) -> bytes; load(bytes or memoryview) -> value. Both raise ValueError or TypeError or RecursionError.
dump = _dump_slowly if msgspec is None else msgspec.json.Encoder().encode
load = _load_slowly if msgspec is None else msgspec.json.Decoder().decode
