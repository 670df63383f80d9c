"""Functions as models: addresses, digests, loading."""

import sys
from pathlib import Path

import pytest

from batchmill.errors import InvalidInput, ModelFailed
from batchmill.models import functions


@pytest.fixture(autouse=True)
def clean_imports(tmp_path):
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("source", "file", "module", "root", "attribute"),
    [
        ("app.py:classify", "app.py", None, None, "classify"),
        ("dir/app.py:model.predict", "dir/app.py", None, None, "model.predict"),
        ("package.module:Class", None, "package.module", None, "Class"),
        ("dir/package.module:f", None, "package.module", "dir", "f"),
        ("/x:y/app.py:f", "/x:y/app.py", None, None, "f"),
    ],
)
def test_parse_reads_every_form(source, file, module, root, attribute):
    """A file, a module and a module looked up from a folder are told apart, and written back as they came."""
    parsed = functions.parse(source)
    assert parsed.attribute == attribute
    assert parsed.file == (Path(file) if file else None)
    assert parsed.module == module
    assert parsed.root == (Path(root) if root else None)
    assert str(parsed) == source


@pytest.mark.parametrize("source", ["app.py", "app.py:", ":f", "app.py:a b", "app.txt/x y:f", "a..b:f", "app.py:a..b"])
def test_parse_refuses_what_names_no_function(source):
    """An address without a function, or with one that is not a name, is refused with the form to write."""
    with pytest.raises(InvalidInput, match=r"FILE\.py:NAME") as refused:
        functions.parse(source)
    assert refused.value.code == "invalid_source"


def test_absolute_binds_files_and_local_modules(tmp_path):
    """A source means the same function from any folder; an installed module keeps its name."""
    write(tmp_path, "jobs/label.py", "def f(): ...")
    assert functions.absolute("app.py:f", tmp_path) == f"{tmp_path}/app.py:f"
    assert functions.absolute("jobs.label:f", tmp_path) == f"{tmp_path}/jobs.label:f"
    assert functions.absolute("json:dumps", tmp_path) == "json:dumps"


def test_digest_reads_without_running(tmp_path):
    """The digest is the file's sha256, follows packages without importing them, and changes with the file."""
    write(tmp_path, "pack/__init__.py", "raise RuntimeError('imported')")
    module = write(tmp_path, "pack/part.py", "raise RuntimeError('imported')")
    before = functions.digest(f"{tmp_path}/pack.part:f")
    assert before == functions.digest(f"{module}:f")
    module.write_text("changed")
    assert functions.digest(f"{module}:f") != before


@pytest.mark.parametrize("source", ["gone.py:f", "gone.module:f", "sys:exit"])
def test_digest_of_no_file_fails(source):
    """A function whose source file is not there has no digest, and the error says so."""
    with pytest.raises(ModelFailed):
        functions.digest(source)
