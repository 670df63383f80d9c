"""What the process says of the user's code before it is called: its interface, or why it cannot be used."""

# ruff: noqa: E501

import pytest


def inputs(interface):
    return [(each["name"], each["datatype"], each["shape"], each["required"]) for each in interface["inputs"]]


HINTS = [
    ("def f(foo: int): ...", [("foo", "INT64", [1], True)]),
    ("def f(a: float, b: str = 'x', c: bool = True): ...", [("a", "FP64", [1], True), ("b", "STRING", [1], False), ("c", "BOOL", [1], False)]),
    ("def f(a: bytes, b): ...", [("a", "BYTES", [1], True), ("b", None, [1], True)]),
    ("from typing import *\ndef f(a: Optional[int], b: List[str], c: List[List[float]]): ...", [("a", "INT64", [1], True), ("b", "STRING", [-1], True), ("c", "FP64", [-1, -1], True)]),
    ("def f(a: int | None = None, b: list[int] = [1], c: list = ()): ...", [("a", "INT64", [1], False), ("b", "INT64", [-1], False), ("c", None, [-1], False)]),
    ("from typing import *\ndef f(a: Literal['x', 'y'], b: Union[int, str], c: Dict[str, int], d: Tuple[int, ...]): ...", [("a", "STRING", [1], True), ("b", None, [1], True), ("c", None, [1], True), ("d", "INT64", [-1], True)]),
    ("import numpy as np\ndef f(a: np.ndarray, b: np.float32, c: np.int64): ...", [("a", None, [-1], True), ("b", "FP32", [1], True), ("c", "INT64", [1], True)]),
    ("import numpy as np, numpy.typing as npt\ndef f(a: npt.NDArray[np.float64]): ...", [("a", "FP64", [-1], True)]),
    ("from typing import Annotated\nimport numpy as np, batchmill\ndef f(a: Annotated[np.ndarray, batchmill.tensor('FP32', [64, -1])]): ...", [("a", "FP32", [64, -1], True)]),
    ("from typing import Annotated\nimport batchmill\ndef f(a: Annotated[list, batchmill.tensor('INT8', [2])]): ...", [("a", "INT8", [2], True)]),
    ("import batchmill\n@batchmill.batched(4)\ndef f(a: list[int], b: list[list[str]], c): ...", [("a", "INT64", [1], True), ("b", "STRING", [-1], True), ("c", None, [1], True)]),
    ("def f(a: 'NotThere', b: 'int'): ...", [("a", None, [1], True), ("b", None, [1], True)]),
    ("from __future__ import annotations\ndef f(a: int): ...", [("a", "INT64", [1], True)]),
]  # fmt: skip


@pytest.mark.parametrize(("code", "expected"), HINTS)
def test_inputs_are_read_from_type_hints(drive, code, expected):
    """A parameter's hint says datatype and shape, and a default that it may be absent."""
    assert inputs(drive(code).ready()) == expected


def test_an_interface_says_the_rest(drive):
    """Forms, defaults, results and the first line of the docstring stand in the interface."""
    received = drive('async def f(a: int = 3, **more) -> float:\n  """Says one.\n\n  And two."""\n  return a').ready()
    assert (received["calls"], received["takes"], received["takes_more"], received["is_async"]) == (
        "row",
        "arguments",
        True,
        True,
    )
    assert received["inputs"][0]["example"] == 3
    assert [(each["name"], each["datatype"]) for each in received["outputs"]] == [("output", "FP64")]
    assert (received["summary"], received["has_schema"], received["streams"]) == ("Says one.", False, False)


def test_marked_tensors_are_a_schema(drive):
    """Where every parameter is said with `tensor`, inputs are to be checked against it."""
    head = "from typing import Annotated\nfrom batchmill import tensor\n"
    assert drive(f"{head}def f(a: Annotated[int, tensor('INT8')]): ...").ready()["has_schema"]
    assert not drive(f"{head}def f(a: Annotated[int, tensor('INT8')], b: int): ...").ready()["has_schema"]


def test_the_interface_is_the_one_of_batchmill(drive):
    """Every field of every form is one that types.Interface has."""
    import msgspec

    from batchmill.types import Interface

    codes = [code for code, _ in HINTS]
    codes += ["def f(n):\n  yield n", "import batchmill\n@batchmill.batched(2)\ndef f(rows): return rows"]
    for code in codes:
        assert msgspec.convert(drive(code).ready(), Interface)


CLASSES = [
    ("class M:\n  def setup(self): self.k = 3\n  def predict(self, a): return a * self.k", "app.py:M"),
    ("class M:\n  async def setup(self): self.k = 3\n  async def predict(self, a): return a * self.k", "app.py:M"),
    ("class M:\n  async def setup(self): self.k = 3\n  def predict(self, a): return a * self.k", "app.py:M"),
    ("class M:\n  k = 3\n  def __call__(self, a): return a * self.k", "app.py:M"),
    ("class M:\n  def setup(self): self.k = 3\n  def other(self, a): return a * self.k", "app.py:M.other"),
    ("class M:\n  @staticmethod\n  def other(a): return a * 3", "app.py:M.other"),
    ("class M:\n  def __init__(self): self.k = 3\n  def predict(self, a): return a * self.k\nm = M()", "app.py:m.predict"),
    ("class M:\n  def predict(self, a): return a * 3\nm = M()", "app.py:m"),
    ("f = lambda a: 3 * a", "app.py:f"),
    ("from functools import partial\ndef g(k, a): return k * a\nf = partial(g, 3)", "app.py:f"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "source"), CLASSES)
def test_classes_and_objects(drive, code, source):
    """Any object with `predict` or a call can be a model; a class is constructed, and its `setup` run, once."""
    process = drive(code, source=source)
    process.ready()
    assert process.values([[2], [3]]) == [6, 9]


@pytest.mark.parametrize("name", ["finalize", "teardown"])
@pytest.mark.parametrize("word", ["", "async "])
def test_a_class_is_told_of_its_end(drive, tmp_path, name, word):
    """`finalize` or `teardown` runs when the process is told to stop."""
    place = tmp_path / "ended"
    process = drive(
        f"class M:\n  {word}def predict(self, a): return a\n  {word}def {name}(self): open({str(place)!r}, 'w').close()",
        source="app.py:M",
    )
    process.ready()
    assert process.stop() == 0
    assert place.exists()


FILES = [
    ("json.py:f", {"json.py": "def f(a): return __name__ != 'json'"}),
    ("frames.py:f", {"frames.py": "def f(a): return __name__ == 'frames'"}),
    ("inner/app.py:f", {"inner/app.py": "import beside\ndef f(a): return beside.yes", "inner/beside.py": "yes = True"}),
    ("pkg/app.py:f", {"pkg/__init__.py": "", "pkg/app.py": "from . import beside\ndef f(a): return beside.yes", "pkg/beside.py": "yes = True"}),
    ("pkg.app:f", {"pkg/__init__.py": "", "pkg/app.py": "def f(a): return __name__ == 'pkg.app'"}),
    ("inner/app:f", {"inner/app.py": "def f(a): return True"}),
    ("app.py:f", {"app.py": "import loading, progress\ndef f(a): return loading.yes", "loading.py": "yes = True", "progress.py": ""}),
    ("app.py:f", {"app.py": "def f(a): return open('data.txt').read() == 'x'", "data.txt": "x"}),
]  # fmt: skip


@pytest.mark.parametrize(("source", "files"), FILES)
def test_files_and_modules(drive, source, files):
    """Code is found by file or module, imports what lies beside it, and nothing of ours hides the user's modules."""
    process = drive("", source=source, files=files)
    process.ready()
    assert process.values([[1]]) == [True]


def test_nothing_is_written_beside_the_code(drive, tmp_path):
    """Importing leaves no compiled files in a folder that never changes."""
    process = drive("import beside\ndef f(a): return a", files={"beside.py": ""})
    process.ready()
    assert sorted(path.name for path in (tmp_path / "code0").rglob("*")) == ["app.py", "beside.py"]


REFUSED = [
    ("raise ValueError('broken')\ndef f(a): ...", "app.py:f", "importing app.py:f failed:\nTraceback", "ValueError: broken"),
    ("def f(a) return", "app.py:f", "SyntaxError", ""),
    ("import nothing_like_it\ndef f(a): ...", "app.py:f", "ModuleNotFoundError: No module named 'nothing_like_it'", ""),
    ("raise SystemExit(3)", "app.py:f", "SystemExit: 3", ""),
    ("def ff(a): ...", "app.py:f", "there is no 'f' in the function app.py:f: did you mean 'ff'?", ""),
    ("", "other.py:f", "there is no file other.py", ""),
    ("", "app.py", "does not name a function", ""),
    ("f = 3", "app.py:f", "is a int that cannot be called", ""),
    ("def f(*a): ...", "app.py:f", "takes *a, any number of arguments", ""),
    ("def f(a, /): ...", "app.py:f", "takes 'a' by position only", ""),
    ("class f:\n  def setup(self): raise OSError('no disk')\n  def predict(self, a): ...", "app.py:f", "setting up app.py:f failed", "OSError: no disk"),
    ("class f:\n  def __init__(self, must): ...", "app.py:f", "constructing app.py:f failed", "TypeError"),
    ("import batchmill\n@batchmill.batched(2)\ndef f(**rest): ...", "app.py:f", "name its columns", ""),
    ("import batchmill\n@batchmill.batched(2)\ndef f(a): yield a", "app.py:f", "cannot take many rows at once", ""),
]  # fmt: skip


@pytest.mark.parametrize(("code", "source", "message", "more"), REFUSED)
def test_code_that_cannot_be_used_is_refused(drive, code, source, message, more):
    """Whoever deployed it reads why, with the traceback of their own code, and the process has ended."""
    received = drive(code, source=source).refused()
    assert message in received
    assert more in received
    assert "function_runtime" not in received


def test_the_process_needs_nothing_of_batchmill(drive):
    """Under another interpreter with nothing installed, the same code runs, and may import batchmill."""
    import os

    bare = next((path for path in ("/usr/bin/python3", "/usr/local/bin/python3") if os.path.exists(path)), None)
    if bare is None:
        pytest.skip("there is no other Python here")
    code = "import sys\nfrom batchmill import batched, tensor\n@batched(2)\ndef f(a): return [sys.modules['batchmill'].__file__ if False else x for x in a]"
    process = drive(code, python=bare, env={"PATH": "/usr/bin:/bin"})
    process.ready()
    assert process.values([[1.5], ["é"], [float(2)], [10**30]]) == [1.5, "é", 2.0, 10**30]
    streaming = drive("def f(a): return float('nan')", python=bare, env={"PATH": "/usr/bin:/bin"})
    streaming.ready()
    assert streaming.values([[1]]) == [None]


def test_the_source_is_for_python_3_9():
    """Nothing of the program needs a newer Python than 3.9 to be read."""
    import ast
    from pathlib import Path

    import batchmill.function_runtime

    for path in Path(batchmill.function_runtime.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text(), str(path), feature_version=(3, 9))
        assert path.name == "__init__.py" or "annotations" in ast.dump(tree.body[1])
        for node in ast.walk(tree):
            assert not (isinstance(node, ast.keyword) and node.arg in ("strict", "slots", "kw_only")), path
