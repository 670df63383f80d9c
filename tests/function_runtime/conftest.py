"""A function's process for a test, ended with it."""

import pytest
from function_driver import Driver


@pytest.fixture
def drive(tmp_path):
    """Start the process of the function `f` (or `source`) of this code."""
    drivers = []

    def start(code, **options):
        folder = tmp_path / f"code{len(drivers)}"
        folder.mkdir()
        drivers.append(Driver(folder, code, **options))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.__exit__()
