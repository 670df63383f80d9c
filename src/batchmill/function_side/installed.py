"""What the environment has installed beside Python, imported only when it is needed."""

from __future__ import annotations

import importlib
import sys


def installed(name):
    """The package, or None where there is none."""
    module = sys.modules.get(name)
    if module is None and name not in _absent:
        try:
            module = importlib.import_module(name)
        except ImportError:
            _absent.add(name)
    return module


def loaded(name):
    """The package if something has imported it already: without that, no value of its types is about."""
    return sys.modules.get(name)


_absent = set()
