"""A function's process for a test, ended with it."""

import os
import sys

import pytest
from driver import Driver

# Another interpreter to run the function's process with, as a deployment's own environment has one.
PYTHON = os.environ.get("BATCHMILL_FUNCTION_PYTHON", sys.executable)


@pytest.fixture
def drive(tmp_path):
    """Start the process of the function `f` (or `source`) of this code."""
    drivers = []

    def start(code, **options):
        folder = tmp_path / f"code{len(drivers)}"
        folder.mkdir()
        drivers.append(Driver(folder, code, python=options.pop("python", PYTHON), **options))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.__exit__()
