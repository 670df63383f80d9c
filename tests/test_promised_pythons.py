"""The Pythons that are promised are those that are tested."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_promised_python_is_tested():
    """Classifiers name the versions of the CI matrix, the oldest of which is the least that pip takes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [each.rpartition(" ")[2] for each in project["classifiers"] if re.search(r":: 3\.\d+$", each)]
    matrix = re.search(r"^ +python: \[(.*)\]$", (ROOT / ".github/workflows/test.yml").read_text(), re.MULTILINE)
    assert matrix is not None
    assert re.findall(r"\d+\.\d+", matrix[1]) == named
    assert project["requires-python"] == f">={named[0]}"
