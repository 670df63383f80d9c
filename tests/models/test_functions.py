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


def test_load_describes_a_function(tmp_path):
    """Parameters, defaults, keyword catching and asynchrony are seen as they are written."""
    file = write(tmp_path, "app.py", "async def f(text, lang='en', *, k, **rest): ...")
    loaded = functions.load(f"{file}:f")
    assert loaded.required == {"text", "k"}
    assert list(loaded.parameters) == ["text", "lang", "k"]
    assert loaded.parameters["lang"] == "en"
    assert loaded.takes_kwargs and loaded.is_async and loaded.list_rows is None and loaded.setup is None


def test_load_constructs_a_class(tmp_path):
    """A class is constructed once, its `predict` is what is called, and its `setup` is left to the caller."""
    file = write(
        tmp_path,
        "app.py",
        "class M:\n    def setup(self): self.n = 1\n    def predict(self, x): return x + self.n\n"
        "class C:\n    async def __call__(self, x): return x\n",
    )
    loaded = functions.load(f"{file}:M")
    assert loaded.setup is not None
    loaded.setup()
    assert loaded.call(x=1) == 2
    assert list(loaded.parameters) == ["x"]
    called = functions.load(f"{file}:C")
    assert called.is_async and called.setup is None


def test_load_sees_the_batched_mark(tmp_path):
    """`batched` marks functions and methods as list-taking; a lone parameter `rows` takes whole rows."""
    file = write(
        tmp_path,
        "app.py",
        "from batchmill import batched\n@batched(8)\ndef a(rows): ...\n"
        "class M:\n    @batched(4)\n    def predict(self, x, y=1): ...\n"
        "@batched(2)\ndef bad(**rest): ...\n",
    )
    assert functions.load(f"{file}:a").list_rows == 8
    assert functions.load(f"{file}:a").takes_rows
    method = functions.load(f"{file}:M")
    assert method.list_rows == 4 and not method.takes_rows and method.required == {"x"}
    with pytest.raises(ModelFailed, match="name its columns"):
        functions.load(f"{file}:bad")


def test_load_imports_from_the_files_folder(tmp_path):
    """The file's neighbours can be imported, and two files of one name do not get in each other's way."""
    write(tmp_path, "one/neighbour.py", "VALUE = 1")
    first = write(tmp_path, "one/app.py", "import neighbour\ndef f(): return neighbour.VALUE")
    second = write(tmp_path, "two/app.py", "def f(): return 2")
    assert functions.load(f"{first}:f").call() == 1
    assert functions.load(f"{second}:f").call() == 2
    assert functions.load(f"{first}:f").call() == 1


def test_load_reads_the_file_as_it_is_now(tmp_path):
    """A file changed within the same second, at the same size, is loaded anew, and no bytecode is left beside it."""
    file = write(tmp_path, "app.py", "def f(): return 1")
    assert functions.load(f"{file}:f").call() == 1
    file.write_text("def f(): return 2")
    assert functions.load(f"{file}:f").call() == 2
    assert [path.name for path in tmp_path.iterdir()] == ["app.py"]


def test_load_never_shadows_the_standard_library(tmp_path):
    """A user's file with the name of a standard module does not take that module's place."""
    file = write(tmp_path, "colorsys.py", "def f(): return 'mine'")
    assert functions.load(f"{file}:f").call() == "mine"
    assert getattr(sys.modules.get("colorsys"), "__file__", "") != str(file)


def test_load_imports_a_file_as_part_of_its_package(tmp_path):
    """A file inside a package may use relative imports."""
    write(tmp_path, "packed/__init__.py", "")
    write(tmp_path, "packed/sibling.py", "VALUE = 3")
    file = write(tmp_path, "packed/app.py", "from .sibling import VALUE\ndef f(): return VALUE")
    assert functions.load(f"{file}:f").call() == 3
    assert functions.load(f"{tmp_path}/packed.app:f").call() == 3


def test_load_shows_the_users_traceback_only(tmp_path):
    """What user code raises while it is imported arrives with its own frames and none of ours, and leaves no module."""
    file = write(tmp_path, "breaks.py", "def g():\n    raise KeyError('no such key')\ng()")
    with pytest.raises(ModelFailed) as failed:
        functions.load(f"{file}:f")
    result = failed.value.message
    assert f'File "{file}", line 3' in result and "KeyError: 'no such key'" in result
    assert "functions.py" not in result and "importlib" not in result
    assert "breaks" not in sys.modules


@pytest.mark.parametrize(
    ("text", "attribute", "expected"),
    [
        ("def classify(): ...", "clasify", "did you mean 'classify'"),
        ("x = 1", "x", "cannot be called"),
        ("def f(x, /): ...", "f", "by position only"),
        ("def f(:", "f", "SyntaxError"),
        ("import sys; sys.exit(3)", "f", "SystemExit"),
        (
            "class M:\n    def __init__(self): raise OSError('no weights')\n    def predict(self): ...",
            "M",
            "no weights",
        ),
        ("class M: ...", "M", "predict"),
    ],
)
def test_load_refuses_with_what_to_mend(tmp_path, text, attribute, expected):
    """Whatever keeps a function from loading is named in the error."""
    file = write(tmp_path, "app.py", text)
    with pytest.raises(ModelFailed, match=expected):
        functions.load(f"{file}:{attribute}")


def test_load_of_a_missing_file_names_it(tmp_path):
    """A file that is not there is an error with its path."""
    with pytest.raises(ModelFailed, match="there is no file"):
        functions.load(f"{tmp_path}/gone.py:f")


def test_the_pages_examples_run(tmp_path):
    """The functions that docs/configuration.md shows load and answer."""
    page = (Path(__file__).parents[2] / "docs/configuration.md").read_text()
    plain, batched = [block.partition("```")[0] for block in page.split("```python\n")[1:]]
    loaded = functions.load(f"{write(tmp_path, 'plain.py', plain)}:classify")
    assert loaded.call(text="good") == {"label": "positive"}
    loaded = functions.load(f"{write(tmp_path, 'listed.py', batched)}:Classify")
    assert loaded.setup is not None
    loaded.setup()
    assert loaded.call(text=["ab", "abcd"]) == [{"long": False}, {"long": True}]
