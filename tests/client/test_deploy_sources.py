"""What code a deployment takes along: files with their imports, folders, repositories, functions of a notebook."""

import importlib.util
import subprocess
import sys

import pytest

from batchmill.client import bundling
from batchmill.client.bundling import bundled, collect_git, frame_columns, hidden
from batchmill.client.captured import capture, collect
from batchmill.errors import InvalidInput
from batchmill.wire import bundles

FACTOR = 3


def lay(folder, **files):
    """Files by their places; `__` stands for `/`, and what has no dot is Python."""
    for name, text in files.items():
        path = folder / (name.replace("__", "/") if "." in name else f"{name.replace('__', '/')}.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_file_takes_what_it_imports(tmp_path):
    """A file goes with the modules beside it that it imports, and what these import; nothing else."""
    lay(tmp_path, app="import near, numpy\ndef f(): ...", near="from pack.deep import x", other="")
    lay(tmp_path, pack__init="", pack__deep="from . import sister\nx = 1", pack__sister="", pack__stranger="")
    (tmp_path / "pack" / "init.py").rename(tmp_path / "pack" / "__init__.py")
    found = collect("app.py:f", tmp_path)
    assert found.target == "app.py:f"
    assert sorted(found.files) == ["app.py", "near.py", "pack/__init__.py", "pack/deep.py", "pack/sister.py"]
    inner = collect("pack.deep:x", tmp_path)
    assert inner.target == "pack/deep.py:x" and "pack/__init__.py" in inner.files


def test_included_files_keep_their_places_beside_the_code(tmp_path):
    """A file that lies beside the code when it is included lies beside it where it is deployed, whatever is named."""
    lay(tmp_path, sub__m="import near", sub__near="", **{"sub/w.txt": "w", "top.txt": "t"})
    for source, expected in (
        ("sub/m.py:f", ["sub/m.py", "sub/near.py", "sub/w.txt", "top.txt"]),
        ("sub:m.py:f", ["m.py", "near.py", "top.txt", "w.txt"]),
        (f"{tmp_path}/sub/m.py:f", ["sub/m.py", "sub/near.py", "sub/w.txt", "top.txt"]),
    ):
        with bundled(source, {}, include=["sub/w.txt", "top.txt"], cwd=tmp_path) as (_, file):
            folder = tmp_path / "unpacked" / source.replace("/", "_")
            folder.mkdir(parents=True)
            bundles.read(file, folder)
        assert sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()) == expected


def test_an_inferless_class_takes_its_schema(tmp_path):
    """input_schema.py goes with an InferlessPythonModel, by file and by folder, and with nothing else."""
    lay(tmp_path, app="class InferlessPythonModel: ...\ndef f(): ...", input_schema="INPUT_SCHEMA = {}")
    assert "input_schema.py" in collect("app.py:InferlessPythonModel", tmp_path).files
    assert "input_schema.py" not in collect("app.py:f", tmp_path).files
    assert collect(".", tmp_path).target == "app.py:InferlessPythonModel"


def test_a_folder_leaves_out_what_is_no_code(tmp_path):
    """Environments, caches, version control and what looks like a key stay where they are; so do links to elsewhere."""
    (tmp_path / "outside.txt").write_text("secret")
    place = tmp_path / "place"
    lay(place, app="def f(): ...", data__words="")
    for name in (".git/config", "venv/x.py", "mine/pyvenv.cfg", "__pycache__/a.pyc", ".env", "server.pem", "id_rsa"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("x")
    (place / "link.txt").symlink_to(tmp_path / "outside.txt")
    assert sorted(collect("place:app.py:f", tmp_path).files) == ["app.py", "data/words.py"]


def test_modelbits_layout_says_what_it_is(tmp_path):
    """source.py with metadata.yaml: its main function, its Python, its requirements and its data frame's columns."""
    yaml = (
        "owner: me\nruntimeInfo:\n  mainFunction: score\n  pythonVersion: '3.11'\n  dataframeModeColumns:\n"
        "    - name: a\n      dtype: int64\n    - {name: b, dtype: object}\n  capabilities: []\nschemaVersion: 2\n"
    )
    lay(tmp_path, source="def score(df): ...", **{"metadata.yaml": yaml, "requirements.txt": "pandas==2.0\n"})
    found = collect(".", tmp_path)
    assert (found.target, found.python, found.requirements) == ("source.py:score", "3.11", "pandas==2.0\n")
    assert found.frame_columns == ["a", "b"]


@pytest.mark.parametrize("source", ["app.py:f", "nothing.py", "pack.mod:f", ".", "no such thing", "app.py"])
def test_what_is_not_there_is_refused(tmp_path, source):
    """A source that names no code is refused in words that say what can be named."""
    with pytest.raises(InvalidInput):
        collect(source, tmp_path)


def test_a_repository_at_a_revision(tmp_path):
    """Code comes out of a repository at a revision, which is written down as its commit."""
    place = tmp_path / "repo"
    git = ["git", "-C", str(place), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    lay(place, sub__app="def f(): return 1")
    subprocess.run(["git", "init", "-q", str(place)], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    first = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    lay(place, sub__app="def f(): return 2")
    subprocess.run([*git, "commit", "-qam", "two"], check=True)
    for revision in (first, first[:12]):
        with collect_git(f"git+file://{place}@{revision}#subdirectory=sub:app.py:f") as found:
            assert found.files["app.py"].read_text() == "def f(): return 1"
            assert found.source == f"git+file://{place}@{first}#subdirectory=sub:app.py:f"
    with pytest.raises(InvalidInput), collect_git(f"git+file://{place}@nowhere#subdirectory=sub:app.py:f"):
        pass
    with pytest.raises(InvalidInput, match="no folder"), collect_git(f"git+file://{place}#subdirectory=../..:a.py:f"):
        pass


def test_credentials_are_shown_to_nobody():
    """What stands before the @ of an address is in no message and no record."""
    assert hidden("https://user:hunter2@host/x and ssh://git@host") == "https://***@host/x and ssh://***@host"


def helper(x: "int") -> "int":
    return x * FACTOR


def made_here(monkeypatch, function):
    """The function as if this module were a script's."""
    for each in (function, helper):
        monkeypatch.setattr(each, "__module__", "__main__")
    return capture(function)


def test_a_scripts_function_travels_with_what_it_names(monkeypatch):
    """Helpers, constants and imports of a script's function are written down before it, and no more than these."""

    def main(foo, mode="r"):
        return helper(foo)

    monkeypatch.setattr(main, "__qualname__", "main")
    found = made_here(monkeypatch, main)
    assert found.target == "source.py:main"
    scope = {}
    exec(found.files["source.py"].decode(), scope)
    assert scope["main"](2) == 6 and "pytest" not in scope


NOTEBOOK = """
{head}
import msgspec
from batchmill.client.captured import capture

class Node(msgspec.Struct):
    label: str
    child: {child} = None

print(capture(Node).files["source.py"].decode())
"""


@pytest.mark.parametrize(
    ("head", "child"), [("from __future__ import annotations", "Node | None"), ("", '"Node | None"')]
)
def test_a_class_that_names_itself(head, child, tmp_path):
    """It is written down as it was defined: with annotations that are text, or are evaluated as it is made."""
    (tmp_path / "notebook.py").write_text(NOTEBOOK.format(head=head, child=child))
    done = subprocess.run([sys.executable, "notebook.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("from __future__") == bool(head)
    (tmp_path / "source.py").write_text(done.stdout)
    check = (
        'import msgspec, source\nprint(msgspec.json.decode(b\'{"label":"a","child":{"label":"b"}}\', type=source.Node))'
    )
    done = subprocess.run([sys.executable, "-c", check], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "child=Node(label='b'" in done.stdout


def test_a_lambda_becomes_a_def():
    """A lambda is called `predict`, and has no name of its own to travel under."""
    found = capture(lambda foo: foo + 1)
    scope = {}
    exec(found.files["source.py"].decode(), scope)
    assert found.target == "source.py:predict" and scope["predict"](1) == 2


CHANGED = """
import functools, json
FACTOR, COUNT, PLACE = 1, None, object()

def by_default(n, factor=FACTOR, *, more=FACTOR + 1):
    return n * factor + more

class ByAttribute:
    factor = FACTOR
    def predict(self, n, more=FACTOR):
        return n * self.factor + more

by_loop = [lambda n, factor=factor: n * factor for factor in (3, 4)]
twins = [lambda a: a * 2, lambda b: b * 2]

def counted(n):
    global COUNT, SEEN
    COUNT = SEEN = (COUNT or 6) + n
    return COUNT

def plus(function):
    @functools.wraps(function)
    def inner(n):
        return function(n) + 1000
    return inner

@plus
def decorated(n):
    return n

@functools.cache
def cached(n):
    return n + 1

def beside(n):
    return cached(n) + decorated(n)

def plain(n):
    return n

wrapped, twice = plus(plain), plus(decorated)
named = functools.wraps(plain)(lambda n: -n)
dumps = functools.wraps(json.dumps)(lambda n: -n)

def through(n):
    return named(n)

def imported(n):
    return dumps(n)

def placed(n, place=PLACE):
    return n

FACTOR, PLACE = 7, object()
"""


def test_a_function_keeps_the_values_that_it_was_defined_with(tmp_path, monkeypatch):
    """What its names stand for by now, and a wrapper that its source does not show, is never run in its place."""
    (tmp_path / "notebook.py").write_text(CHANGED)
    spec = importlib.util.spec_from_file_location("__main__", tmp_path / "notebook.py")
    notebook = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    spec.loader.exec_module(notebook)

    def made(function):
        found, scope = capture(function), {}
        exec(found.files["source.py"].decode(), scope)
        return scope[found.attribute]

    assert made(notebook.by_default)(10) == 12
    assert made(notebook.ByAttribute)().predict(10) == 11
    assert [made(each)(10) for each in notebook.by_loop] == [30, 40]
    assert made(notebook.twins[1])(b=3) == 6
    assert made(notebook.counted)(1) == 7
    assert made(notebook.decorated)(1) == 1001
    assert made(notebook.cached)(1) == 2 and made(notebook.beside)(1) == 1003
    for function in (notebook.wrapped, notebook.twice, notebook.named, notebook.through):
        with pytest.raises(InvalidInput, match="was wrapped after its definition"):
            capture(function)
    with pytest.raises(InvalidInput, match="'dumps' is a function"):
        capture(notebook.imported)
    with pytest.raises(InvalidInput, match="'PLACE' stood for"):
        capture(notebook.placed)
    monkeypatch.setattr(bundling, "bundled", notebook.plus(bundled))
    with pytest.raises(InvalidInput, match="was wrapped or replaced"):
        capture(bundled)


def test_what_cannot_be_written_down_is_refused(monkeypatch):
    """A closure, and a name that stands for a thing in memory, are refused by that name."""
    inner = object()
    with pytest.raises(InvalidInput, match="closure over inner"):
        capture(lambda: inner)
    monkeypatch.setitem(globals(), "handle", open)
    monkeypatch.setitem(globals(), "thing", object())
    with pytest.raises(InvalidInput, match="'thing' is a object"):
        capture(lambda foo: thing)  # noqa: F821


def test_a_data_frames_example_is_required_in_modelbits_words():
    """Data-frame mode without an example, and an example without the mode, are refused in Modelbit's words."""
    with pytest.raises(InvalidInput, match=bundling.NEEDS_EXAMPLE):
        frame_columns(True, None)
    with pytest.raises(InvalidInput, match=bundling.NEEDS_MODE):
        frame_columns(False, ["a"])
    assert frame_columns(True, ["a", "b"]) == ["a", "b"]


def test_an_archive_is_read_as_it_was_written(tmp_path):
    """What was collected is in the archive, with further files at their places, and makes the same digest each time."""
    lay(tmp_path, app="def f(): ...", **{"data__words.txt": "a"})
    digests = set()
    for number in range(2):
        with bundled("app.py:f", {"workers": 2}, include=["data"], cwd=tmp_path) as (order, file):
            (tmp_path / f"out{number}").mkdir()
            assert bundles.read(file, tmp_path / f"out{number}") == order
        digests.add(bundles.digest(tmp_path / f"out{number}"))
    assert (order.name, order.workers, order.target) == ("f", 2, "app.py:f") and len(digests) == 1
    assert (tmp_path / "out0" / "data" / "words.txt").read_text() == "a"
    with pytest.raises(InvalidInput, match="did you mean 'workers'"), bundled("app.py:f", {"worker": 2}, cwd=tmp_path):
        pass


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("nothere.py:f", "there is no file nothere.py"),
        ("app.py", "there is no code at 'app.py'"),
        ("nothere:f", "there is no module nothere"),
        ("place:nothere.py:f", "there is no nothere.py in place"),
    ],
)
def test_what_is_not_there_is_named(tmp_path, source, told):
    """A source that leads nowhere is refused with what is missing, as whoever wrote it would call it."""
    lay(tmp_path, app="def f(): ...", place__app="def f(): ...")
    with pytest.raises(InvalidInput) as caught:
        collect(source, tmp_path)
    assert caught.value.code == "unknown_function" and told in caught.value.message
