"""What all tests share: which of them can run here."""

from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of the real vLLM run where BATCHMILL_VLLM_PYTHON names its interpreter; `make test` always names one."""
    if os.environ.get("BATCHMILL_VLLM_PYTHON"):
        return
    wanted = [item for item in items if item.get_closest_marker("vllm") is None]
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = wanted
