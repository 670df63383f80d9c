"""What a function's source tells without being run."""

import pytest

from batchmill.models.functions import is_blocking


@pytest.mark.parametrize(
    ("text", "attribute", "expected"),
    [
        ("def f(): ...", "f", True),
        ("async def f(): ...", "f", False),
        ("import batchmill\n@batchmill.batched(4)\ndef f(a): ...", "f", True),
        ("@batched(4)\nasync def f(a): ...", "f", False),
        ("@anything\ndef f(): ...", "f", False),
        ("def f(): ...\nf = wrap(f)", "f", False),
        ("def f(): ...\nif x:\n    async def f(): ...", "f", False),
        ("def f(): ...\nfrom other import *", "f", False),
        ("def f(): ...\nfrom other import g as f", "f", False),
        ("from other import f", "f", False),
        ("class C:\n    def predict(self): ...", "C", True),
        ("class C:\n    async def predict(self): ...\n    def __call__(self): ...", "C", False),
        ("class C:\n    def __call__(self): ...", "C", True),
        ("class C:\n    def g(self): ...", "C.g", True),
        ("class C(Base): ...", "C", False),
        ("@anything\nclass C:\n    def predict(self): ...", "C", False),
        ("c = C()", "c.predict", False),
        ("def f(:", "f", False),
        ("x = 1", "f", False),
    ],
)
def test_only_what_is_sure_is_said(tmp_path, text, attribute, expected):
    """A plain `def` is called without await; wherever running the file could make it another, nothing is said."""
    (tmp_path / "app.py").write_text(text)
    assert is_blocking(f"{tmp_path}/app.py:{attribute}") is expected
