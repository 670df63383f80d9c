"""A process that has imported the runtime of functions and forks itself: the program that `forked_runtimes.py` starts.

    python runtime_forker.py PROGRAM

PROGRAM is `function_runtime/main.py`; standard input is the socket of `forked_modules.serve`.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(1, str(Path(__file__).parent.parent))
from fakes import forked_modules as forked  # noqa: E402

del sys.path[1]


def main(program: str) -> None:
    """Serve until the other end closes."""
    folder = os.path.dirname(program)
    sys.path[0], sys.dont_write_bytecode = folder, True
    package = runpy.run_path(program)["PACKAGE"]
    spec = importlib.util.spec_from_file_location(
        package, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec is not None and spec.loader is not None
    sys.modules[package] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    importlib.import_module(f"{package}.process")
    for name in [name for name in sys.modules if name.partition(".")[0] == "fakes"]:
        del sys.modules[name]  # user code may bring its own
    assert len(os.listdir("/proc/self/task")) == 1, "a fork keeps no thread but the one that forks"
    forked.freeze()
    connection = socket.socket(fileno=os.dup(0))

    def become(request: dict[str, Any], fds: list[int]) -> NoReturn:
        """Be `python PROGRAM …` from here on."""
        status = 70
        try:
            forked.take_limits(request)
            forked.become(request, fds)
            sys.argv = [program, *request["argv"]]
            forked.show([sys.executable, *sys.argv])
            status = forked.exit_code(lambda: runpy.run_path(program, run_name="__main__"))
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)

    forked.serve(connection, become)


if __name__ == "__main__":
    main(sys.argv[1])
