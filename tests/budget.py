"""The limit of a test's time: one that takes longer says why in its docstring.

A report lists tests over the limit without a docstring. In CI one that took twice the limit fails the run. Where other
work has a part of the machine, the limit there is as many times as long as computing takes, twice at most.
"""

from __future__ import annotations

import time
from collections.abc import Generator

import pytest

LIMIT_S = 5.0
OVER = "over the limit"
IN_CI = 2.0
"""Times the limit that a test may take in CI."""
MOST = 2.0
"""Times at most that a busy machine makes the limit longer: the suite's own workers are part of what it does."""
SAMPLE_S = 0.1
"""Seconds of computing that tell how busy the machine is."""


def slowdown() -> float:
    """Seconds that a second of computing takes now, 1 to `MOST`."""
    began, until = time.perf_counter(), time.thread_time() + SAMPLE_S
    while time.thread_time() < until:
        pass
    return min(MOST, max(1.0, (time.perf_counter() - began) / SAMPLE_S))


class Budget:
    """Collects, where reports arrive, which tests were over the limit and do not say why."""

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails
        self.unexplained: dict[str, tuple[float, float]] = {}
        """Seconds that each took, and the machine's slowdown at its end."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        function = getattr(item, "function", None)
        if report.when == "call" and report.duration > LIMIT_S and not getattr(function, "__doc__", None):
            report.user_properties.append((OVER, slowdown()))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, times in report.user_properties:
            if name == OVER and report.when == "call":
                self.unexplained[report.nodeid] = report.duration, float(times)  # type: ignore[arg-type]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._failing() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.unexplained:
            return
        terminalreporter.section(f"over {LIMIT_S:g} s, and no docstring says why (CONTRIBUTING.md)")
        for test, (took, times) in sorted(self.unexplained.items(), key=lambda of: -of[1][0]):
            busy = f", while computing took {times:.1f} times as long" if times > 1.2 else ""
            terminalreporter.line(f"{took:6.1f} s  {test}{busy}{'  FAILED' if test in self._failing() else ''}")

    def _failing(self) -> list[str]:
        limit_s = IN_CI * LIMIT_S
        return [test for test, (took, times) in self.unexplained.items() if self.fails and took > limit_s * times]
