"""The limit of a test's time: one that takes longer says why in its docstring.

A report lists tests over the limit without a docstring. In CI one that took twice the limit fails the run: a machine
that is busy with other work for a moment fails nothing.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

LIMIT_S = 5.0
OVER = "over the limit"
IN_CI = 2.0
"""Times the limit that a test may take in CI."""


class Budget:
    """Collects, where reports arrive, which tests were over the limit and do not say why."""

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails
        self.unexplained: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        function = getattr(item, "function", None)
        if report.when == "call" and report.duration > LIMIT_S and not getattr(function, "__doc__", None):
            report.user_properties.append((OVER, report.duration))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if (OVER, report.duration) in report.user_properties:
            self.unexplained[report.nodeid] = report.duration

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._failing() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.unexplained:
            return
        terminalreporter.section(f"over {LIMIT_S:g} s, and no docstring says why (CONTRIBUTING.md)")
        for test, took in sorted(self.unexplained.items(), key=lambda of: -of[1]):
            terminalreporter.line(f"{took:6.1f} s  {test}{'  FAILED' if test in self._failing() else ''}")

    def _failing(self) -> list[str]:
        return [test for test, took in self.unexplained.items() if self.fails and took > IN_CI * LIMIT_S]
