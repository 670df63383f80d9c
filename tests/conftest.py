"""What all tests share: which of them can run here."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

# How fast a machine is that does other work too is no promise of ours.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")
# A shell ignores SIGINT for what it starts in the background, nohup SIGHUP, and what tests start would inherit it.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of the real vLLM run where BATCHMILL_VLLM_PYTHON names its interpreter; `make test` always names one."""
    if os.environ.get("BATCHMILL_VLLM_PYTHON"):
        return
    wanted = [item for item in items if item.get_closest_marker("vllm") is None]
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = wanted


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """A packed value holds the second in which it was packed: in a test's name, two processes would tell two names."""
    return f"gzip-{len(val)}" if isinstance(val, bytes) and val.startswith(b"\x1f\x8b") else None
