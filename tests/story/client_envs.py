"""The published clients, each in a Python environment of its own: their pins contradict each other."""

import os
from pathlib import Path

import pytest

ROOT = Path(os.environ.get("BATCHMILL_CLIENT_ENVS") or Path(__file__).parents[2] / ".venv-clients")


def client_python(name: str) -> str:
    """The interpreter of a client's environment, which `make clients` makes.

    Where it is missing the test is skipped, but not in `make test`, which has just tried to make it.
    """
    python = ROOT / name / "bin" / "python"
    if not python.exists():
        missing = pytest.fail if "BATCHMILL_CLIENT_ENVS" in os.environ else pytest.skip
        missing(f"there is no environment {ROOT / name}: `make clients` makes it")
    return str(python)
