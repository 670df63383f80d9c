"""Imports of many modules at once."""

import gc
import subprocess
import sys
import weakref

from batchmill.imports import import_large

HEAVY = {"pandas", "polars", "pyarrow", "cloudpickle", "sqlalchemy", "duckdb", "rich", "IPython", "batchmill.owner"}


class Circle:
    def __init__(self):
        self.itself = self


def test_a_module_that_is_there_keeps_no_garbage():
    """What a process has made since stays collectable: a child imports its work before each piece of it."""
    circle = weakref.ref(Circle())
    import_large("batchmill.imports")
    gc.collect()
    assert circle() is None


def test_the_package_imports_nothing_heavy():
    """`import batchmill` loads nothing but itself; `batchmill.run` no library of frames and not the owner."""
    for code, is_allowed in (
        ("import batchmill", lambda name: name == "batchmill"),
        ("import batchmill; batchmill.run", lambda name: name not in HEAVY),
    ):
        code = f"import sys; before = set(sys.modules); {code}; print(*(sys.modules.keys() - before))"
        names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        own = [name for name in names if name.partition(".")[0] not in sys.stdlib_module_names]
        assert [name for name in own if not is_allowed(name)] == []


def test_public_names_are_completed_before_they_are_imported():
    """`dir`, which notebooks complete from, names them all."""
    code = "import batchmill; print(*dir(batchmill))"
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"run", "arun", "Client", "AsyncClient", "Job", "batched", "tensor"} <= {*names}
