"""User code is found and imported as it stands, and what keeps it from loading is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from batchmill.function_runtime.loading import LoadError, find


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


@pytest.fixture(autouse=True)
def modules():
    """Paths and modules of a test are forgotten."""
    path, names = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - names:
        del sys.modules[name]


def load(source: str):
    return find(source, "").target


def test_load_imports_from_the_files_folder(tmp_path):
    """The file's neighbours can be imported, and two files of one name do not get in each other's way."""
    write(tmp_path, "one/neighbour.py", "VALUE = 1")
    first = write(tmp_path, "one/app.py", "import neighbour\ndef f(): return neighbour.VALUE")
    second = write(tmp_path, "two/app.py", "def f(): return 2")
    assert load(f"{first}:f")() == 1
    assert load(f"{second}:f")() == 2
    assert load(f"{first}:f")() == 1


def test_load_reads_the_file_as_it_is_now(tmp_path):
    """A file changed within the same second, at the same size, is loaded anew, and no bytecode is left beside it."""
    file = write(tmp_path, "app.py", "def f(): return 1")
    assert load(f"{file}:f")() == 1
    file.write_text("def f(): return 2")
    assert load(f"{file}:f")() == 2
    assert [path.name for path in tmp_path.iterdir()] == ["app.py"]


def test_load_never_shadows_the_standard_library(tmp_path):
    """A user's file with the name of a standard module does not take that module's place."""
    file = write(tmp_path, "colorsys.py", "def f(): return 'mine'")
    assert load(f"{file}:f")() == "mine"
    assert getattr(sys.modules.get("colorsys"), "__file__", "") != str(file)


def test_load_imports_a_file_as_part_of_its_package(tmp_path):
    """A file inside a package may use relative imports."""
    write(tmp_path, "packed/__init__.py", "")
    write(tmp_path, "packed/sibling.py", "VALUE = 3")
    file = write(tmp_path, "packed/app.py", "from .sibling import VALUE\ndef f(): return VALUE")
    assert load(f"{file}:f")() == 3
    assert load(f"{tmp_path}/packed.app:f")() == 3


def test_load_shows_the_users_traceback_only(tmp_path):
    """What user code raises while it is imported arrives with its own frames and none of ours, and leaves no module."""
    file = write(tmp_path, "breaks.py", "def g():\n    raise KeyError('no such key')\ng()")
    with pytest.raises(LoadError) as failed:
        load(f"{file}:f")
    result = str(failed.value)
    assert f'File "{file}", line 3' in result and "KeyError: 'no such key'" in result
    assert "loading.py" not in result and "importlib" not in result
    assert "breaks" not in sys.modules


@pytest.mark.parametrize(
    ("text", "attribute", "expected"),
    [
        ("def classify(): ...", "clasify", "did you mean 'classify'"),
        ("def f(:", "f", "SyntaxError"),
        ("import sys; sys.exit(3)", "f", "SystemExit"),
        (
            "class M:\n    def __init__(self): raise OSError('no weights')\n    def predict(self): ...",
            "M",
            "no weights",
        ),
    ],
)
def test_load_refuses_with_what_to_mend(tmp_path, text, attribute, expected):
    """Whatever keeps a function from loading is named in the error."""
    file = write(tmp_path, "app.py", text)
    with pytest.raises(LoadError, match=expected):
        load(f"{file}:{attribute}")


def test_load_of_a_missing_file_names_it(tmp_path):
    """A file that is not there is an error with its path."""
    with pytest.raises(LoadError, match="there is no file"):
        load(f"{tmp_path}/gone.py:f")
