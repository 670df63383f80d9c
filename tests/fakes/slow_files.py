"""Which files of tests take the most processor time, with the processes that their tests start: told after a run.

What nobody waited for, such as the rest of a killed process's children, is not counted.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.preloaded import PRELOADED

SHOWN = 10
PROPERTY = "processor_s"
TICKS = os.sysconf("SC_CLK_TCK")


def processor_s() -> float:
    """What this process and those that it and its server of forks have waited for have taken so far."""
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    return own + (_of_process(PRELOADED.pid) if PRELOADED.pid else 0.0)


def _of_process(pid: int) -> float:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    return sum(map(int, stat.rpartition(")")[2].split()[11:15])) / TICKS


class SlowFiles:
    """A plugin of pytest: processes of tests measure, the one that they report to sums up."""

    def __init__(self) -> None:
        self._began = 0.0
        self._by_file: Counter[str] = Counter()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self._began = processor_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        report = yield
        if call.when == "teardown":
            report.user_properties = [*report.user_properties, (PROPERTY, processor_s() - self._began)]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._by_file[report.nodeid.split("::", 1)[0]] += dict(report.user_properties).get(PROPERTY, 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self._by_file) <= SHOWN:
            return
        terminalreporter.section(f"{self._by_file.total():.0f} s of processor time in tests; most in")
        for file, seconds in self._by_file.most_common(SHOWN):
            terminalreporter.line(f"{seconds:7.1f} s  {file}")
