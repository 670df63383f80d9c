"""Optional modules: an extra is named if its package is missing, and only then."""

from __future__ import annotations

import sys

import pytest

from batchmill.errors import InvalidConfig
from batchmill.optional import require


@pytest.mark.parametrize(
    ("package", "module", "extra"),
    [("fastavro", "fastavro.schema", "cohere"), ("opentelemetry", "opentelemetry.exporter.nothing", "otel")],
)
def test_the_extra_of_a_missing_package_is_named(monkeypatch, package, module, extra):
    """The message says what needs the package and which extra installs it; the import error is its cause."""
    if package == "fastavro":
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(InvalidConfig, match=rf"^this needs {package}: pip install 'batchmill\[{extra}\]'$") as caught:
        require(module, "this")
    assert caught.value.code == "missing_dependency"
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_module_that_an_installed_package_lacks_is_no_missing_package():
    """Installing the extra again would change nothing: the import error says what is wrong."""
    pytest.importorskip("pyarrow")
    with pytest.raises(ModuleNotFoundError, match="pyarrow.nothing"):
        require("pyarrow.nothing", "this")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        require("no_such_package", "this")
