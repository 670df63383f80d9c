"""The program of a function's process: `python main.py SOCKET_FD PROGRESS_FD [REQUESTS_FD RESULTS_FD]`; of one that
validates answers: `python main.py validate PARENT`.

Its package is loaded by path under a private name, and its folder leaves sys.path: nothing of it hides
the user's modules.
"""

from __future__ import annotations

import importlib.util
import os
import sys

PACKAGE = "_batchmill_function_runtime"

if __name__ == "__main__":
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [place for place in sys.path if place != folder]
    sys.dont_write_bytecode = True
    spec = importlib.util.spec_from_file_location(
        PACKAGE, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    sys.modules[PACKAGE] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    if sys.argv[1] == "validate":
        importlib.import_module(f"{PACKAGE}.answers").main(int(sys.argv[2]))
    else:
        importlib.import_module(f"{PACKAGE}.process").main(*map(int, sys.argv[1:]))
