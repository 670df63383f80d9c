"""Workers as local processes."""

from __future__ import annotations

import os

import pytest
from contract.executor_suite import ExecutorSuite

from batchmill.executors.local import LocalExecutor


class TestLocalExecutor(ExecutorSuite):
    @pytest.fixture
    def executor(self, tmp_path):
        return LocalExecutor(tmp_path / "workers")


def test_sweeping_an_empty_folder(tmp_path):
    """A data directory that never had a worker has nothing to sweep."""
    LocalExecutor(tmp_path / "none").sweep()


def test_a_process_id_that_was_used_again_is_left_alone(tmp_path):
    """A process that has a dead worker's id but began at another time is not ended."""
    folder = tmp_path / "workers"
    folder.mkdir()
    (folder / "w.pid").write_text(f"{os.getpid()} 1")
    LocalExecutor(folder).sweep()
    assert not (folder / "w.pid").exists()
