"""Functions of a program as models: written down with what they name, or pickled with what they hold."""

from __future__ import annotations

import functools
import importlib
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from batchmill.datasets import spooled_inputs
from batchmill.errors import InvalidInput
from batchmill.inprocess.functions import FunctionFiles
from batchmill.inprocess.identity import digest_of
from batchmill.owned_files import OwnedFiles

NOTEBOOK = """
import sys
import threading
from batchmill.inprocess.functions import FunctionFiles
from pathlib import Path

scale, words = int(sys.argv[2]), {"a", "b", "c"}

def helper(x):
    return x * scale

def times(n):
    return helper(n) if n in {"x", "y", 3} else n

def make(factor):
    def held(n):
        return n * factor + len(words)
    return held

files = FunctionFiles(Path(sys.argv[1]))
print(files.source_of(times))
print(files.source_of(make(scale)))
"""


def sources(data_dir: Path, scale: int, seed: str) -> list[str]:
    """Where the functions of a notebook lie, as a kernel of its own says it."""
    done = subprocess.run(
        [sys.executable, str(data_dir / "notebook.py"), str(data_dir), str(scale)], env={"PYTHONHASHSEED": seed},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.split()


def test_a_function_counts_by_what_it_is(tmp_path: Path):
    """The same code with the same values is the same file in every kernel; another captured value is another."""
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    first, again, other = sources(tmp_path, 2, "1"), sources(tmp_path, 2, "2"), sources(tmp_path, 3, "1")
    assert first == again and not set(first) & set(other)
    written, held = first
    assert written.endswith("source.py:times") and "scale = 2" in Path(written.rpartition(":")[0]).read_text()
    assert held.endswith("source.py:held") and Path(held.rpartition(":")[0]).with_name("function.pickle").is_file()


def outer(value):
    def inner(n):
        return value, n

    return inner


class Holder:
    def __init__(self, value):
        self.value = value

    def call(self, n):
        return self.value, n


def test_the_digest_follows_captured_values():
    """Closures, partials, methods and objects differ where what they hold does, and not otherwise."""
    for make in (
        outer,
        lambda value: functools.partial(max, value),
        lambda value: Holder(value).call,
        lambda value: lambda n, given=value: given,
    ):
        for one, two in (([1], [2]), ({"a": {1, 2}}, {"a": {1, 3}}), ("x", b"x"), (1, True), (1.0, 1)):
            assert digest_of(make(one)) == digest_of(make(one)) != digest_of(make(two))
    word = re.compile("a")  # pickle knows it by another way than __reduce_ex__
    assert digest_of(outer(word)) == digest_of(outer(re.compile("a"))) != digest_of(outer(re.compile("b")))
    with pytest.raises(InvalidInput, match="other processes do not find outer.<locals>.inner"):
        digest_of(outer(functools.cache(outer(1))))  # its pickle is its name, whatever it holds
    endless: list = []
    endless.append(endless)
    assert digest_of(outer(endless)) == digest_of(outer(endless))


def test_a_function_of_a_module_runs_where_it_lies(tmp_path: Path):
    """Its file is named, so that it finds what lies beside it."""
    assert FunctionFiles(tmp_path).source_of(digest_of) == f"{sys.modules[digest_of.__module__].__file__}:digest_of"


def test_what_cannot_be_captured_is_refused(tmp_path: Path):
    """Both reasons are said: why it cannot be written down, and why not pickled."""
    with pytest.raises(InvalidInput, match="closure over value.*nor can it be pickled"):
        FunctionFiles(tmp_path).source_of(outer(threading.Lock()))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (math.sqrt, "math.sqrt takes 'x' by position only.*wrap it"),
        (max, "does not say what its parameters are: wrap it"),
        (lambda *rows: rows, "takes .rows, any number of arguments"),
    ],
)
def test_what_rows_cannot_call_is_refused(function: Callable[..., object], message: str, tmp_path: Path):
    with pytest.raises(InvalidInput, match=message) as caught:
        FunctionFiles(tmp_path).source_of(function)
    assert caught.value.code == "invalid_function"


def test_a_held_module_counts_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A module of the user's own that a pickled function names: other code in it is another function."""
    monkeypatch.syspath_prepend(tmp_path)
    digests = []
    for factor in (2, 2, 3):
        (tmp_path / "held_helpers.py").write_text(f"FACTOR = {factor}\n")
        sys.modules.pop("held_helpers", None)
        digests.append(digest_of(outer(importlib.import_module("held_helpers"))))
    sys.modules.pop("held_helpers")
    assert digests[0] == digests[1] != digests[2]


def test_an_unused_function_goes_by_age(tmp_path: Path):
    """A folder that no job reads is swept once it is old; one that a call found again, or a job reads, stays."""
    files = FunctionFiles(tmp_path)
    sources = [files.source_of(outer(value)) for value in range(3)]
    folders = [Path(source.rpartition(":")[0]).parent for source in sources]
    spooled_inputs.keep(tmp_path, [sources[0], "a-model", "org/a-model"], "job_1")
    for folder in folders:
        os.utime(folder, (0, 0))
    files.source_of(outer(1))
    spooled_inputs.sweep(tmp_path, OwnedFiles())
    assert [folder.is_dir() for folder in folders] == [True, True, False]
    spooled_inputs.release(tmp_path, "job_1", OwnedFiles())
    spooled_inputs.sweep(tmp_path, OwnedFiles())
    assert sorted((tmp_path / spooled_inputs.FUNCTIONS).iterdir()) == [folders[1]]


KERNEL = """
import sys
from pathlib import Path

import batchmill

data_dir, factor = sys.argv[1], int(sys.argv[2])
calls = data_dir + "-calls"

def note(n):
    with open(calls, "a") as file:
        file.write(f"{n} ")

def written(n):
    note(n)
    return n * factor

def make(held):
    def closure(n):
        note(n)
        return n * held
    return closure

class Adder:
    def __init__(self, held):
        self.held = held

    def add(self, n):
        note(n)
        return n + self.held

if __name__ == "__main__":
    for model in (written, make(factor), Adder(factor).add, lambda n: note(n) or n - factor):
        job = batchmill.run({"n": [5, 6]}, model=model, data_dir=data_dir)
        called = Path(calls).read_text().split() if Path(calls).exists() else []
        Path(calls).unlink(missing_ok=True)
        print(job.how, job.to_arrow().column("output").to_pylist(), len(called))
"""


def test_functions_of_a_program_run(tmp_path: Path):
    """Written down or pickled; the same program again calls none, one with another value calls all."""
    (tmp_path / "kernel.py").write_text(KERNEL)

    def said(factor: int) -> list[str]:
        done = subprocess.run(
            [sys.executable, tmp_path / "kernel.py", str(tmp_path / "data"), str(factor)], cwd=tmp_path,
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout.splitlines()

    answers = ["[10, 12]", "[10, 12]", "[7, 8]", "[3, 4]"]
    assert said(2) == [f"started {each} 2" for each in answers]
    assert said(2) == [f"finished {each} 0" for each in answers]
    folder = tmp_path / "data" / spooled_inputs.FUNCTIONS
    assert len(list(folder.glob("*.job_*"))) == 4  # each is kept for its job
    assert said(3) == [f"started {each} 2" for each in ("[15, 18]", "[15, 18]", "[8, 9]", "[2, 3]")]


CLASSES = """
import dataclasses
import sys
from typing import Annotated
import msgspec
import pydantic
from batchmill.inprocess.identity import digest_of

def make(limit, default):
    def checked(value):
        assert value <= limit
        return value

    @dataclasses.dataclass
    class Data:
        n: int = default
        def __post_init__(self):
            checked(self.n)

    class Struct(msgspec.Struct):
        n: int
        def __post_init__(self):
            checked(self.n)

    class Model(pydantic.BaseModel):
        n: Annotated[int, pydantic.AfterValidator(checked)] = pydantic.Field(default, ge=0)
        @pydantic.field_validator("n")
        @classmethod
        def of_n(cls, value):
            return checked(value)
        @property
        def twice(self):
            return 2 * self.n

    return Data, Struct, Model

for limit in (1, 1, 2):
    print(*map(digest_of, make(limit, 1)))
"""


def test_classes_that_hold_values_count_by_them() -> None:
    """Dataclasses, Structs and models of pydantic that a function has made, in every process alike."""
    pytest.importorskip("pydantic")
    runs = [
        subprocess.run(
            [sys.executable, "-c", CLASSES], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True
        )
        for seed in ("1", "2")
    ]  # fmt: skip
    assert runs[0].stdout == runs[1].stdout != "", runs[0].stderr
    first, again, other = (line.split() for line in runs[0].stdout.splitlines())
    assert first == again and all(a != b for a, b in zip(first, other, strict=True))
