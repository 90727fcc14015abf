"""Tests in several processes, forked when all tests are collected: what they import is imported once, and not by each.

    pytest --forks 3:  collect ─▶ fork ─▶ each process takes a group of tests after the other ─▶ reports ─▶ this process

A group is a file, or a folder whose tests share what lives as long as a process. A process asks for its next group
before the last test of the one that it has: what outlives a test is taken down where nothing follows that needs it.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from tempfile import TemporaryFile
from typing import Any

import pytest

Group = list[int]
"""Places of its tests in the list of all."""


@dataclass(slots=True)
class Fork:
    """A process with tests, seen from the one that has forked it."""

    pid: int
    connection: Connection
    left: Group
    """Tests of its groups that have not begun."""
    running: int | None = None


class SideBySide:
    """Runs the tests of a session in ``count`` processes."""

    def __init__(self, count: int, group_of: Callable[[pytest.Item], str]) -> None:
        self._count, self._group_of = count, group_of

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.config.option.collectonly or session.testsfailed:
            return None  # pytest's own loop says so
        by_group: dict[str, Group] = {}
        for place, item in enumerate(session.items):
            by_group.setdefault(self._group_of(item), []).append(place)
        groups = sorted(by_group.values(), key=len)  # the largest are taken first
        forks = [self._fork(session, []) for _ in range(min(self._count, len(groups)))]
        try:
            while forks:
                for connection in wait([fork.connection for fork in forks]):
                    fork = next(fork for fork in forks if fork.connection is connection)
                    if not self._hear(session, fork, groups):
                        forks.remove(fork)
                        os.waitpid(fork.pid, 0)
                        if fork.left:  # it has crashed
                            groups.append(fork.left)
                            forks.append(self._fork(session, forks))
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
        finally:
            for fork in forks:
                fork.connection.close()  # it ends after its test
                os.waitpid(fork.pid, 0)
        return True

    def _hear(self, session: pytest.Session, fork: Fork, groups: list[Group]) -> bool:
        """Take a message of a process; False where it has ended."""
        hook = session.config.hook
        try:
            what, value = fork.connection.recv()
        except (EOFError, ConnectionResetError):
            if fork.running is not None:
                item = session.items[fork.running]
                said = "the process of this test has ended while it ran"
                report = pytest.TestReport(item.nodeid, item.location, {}, "failed", said, "call")
                hook.pytest_runtest_logreport(report=report)
            return False
        if what == "take":
            taken = groups.pop() if groups else []
            fork.left += taken
            fork.connection.send(taken)
        elif what == "start":
            fork.left.remove(value)
            fork.running = value
        elif what == "report":
            hook.pytest_runtest_logreport(
                report=hook.pytest_report_from_serializable(config=session.config, data=value)
            )
        else:
            fork.running = None
        return True

    def _fork(self, session: pytest.Session, others: Sequence[Fork]) -> Fork:
        here, there = Pipe()
        folder = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        sys.stdout.flush()
        if pid := os.fork():
            there.close()
            return Fork(pid, here, [])
        code = 1
        try:
            for one in (here, *(fork.connection for fork in others)):
                one.close()
            session.config._tmp_path_factory._basetemp = folder / f"pytest-fork-{os.getpid()}"  # type: ignore[attr-defined]
            session.config._tmp_path_factory._basetemp.mkdir(mode=0o700)  # type: ignore[attr-defined]
            _be_forked(session, there)
            code = 0
        except (KeyboardInterrupt, OSError):  # OSError: the parent is gone
            session._setupstate.teardown_exact(None)
        finally:
            atexit._run_exitfuncs()
            os._exit(code)


def _be_forked(session: pytest.Session, parent: Connection) -> None:
    """Run the tests that the parent hands out, and tell it what became of them."""
    plugins = session.config.pluginmanager
    terminal: Any = plugins.getplugin("terminalreporter")
    terminal._tw._file = StringIO()  # for what writes to it beside reports, as time-outs do
    _own_captured_files(plugins.getplugin("capturemanager"))
    plugins.register(_Tells(session.config, parent))

    def places() -> Iterator[int]:
        while True:
            parent.send(("take", None))
            group = parent.recv()
            if not group:
                return
            yield from group

    tests = places()
    place = next(tests, None)
    while place is not None:
        parent.send(("start", place))
        following = next(tests, None)
        session.config.hook.pytest_runtest_protocol(
            item=session.items[place], nextitem=None if following is None else session.items[following]
        )
        parent.send(("end", place))
        place = following


def _own_captured_files(capture: Any) -> None:
    """Put files of this process's own below the objects that capture output: libraries that log hold them."""
    for captured in (capture._global_capturing.out, capture._global_capturing.err):
        if hasattr(captured, "tmpfile") and hasattr(captured, "targetfd"):
            with TemporaryFile(buffering=0) as own:
                os.dup2(own.fileno(), captured.tmpfile.fileno())
            if captured._state == "started":
                os.dup2(captured.tmpfile.fileno(), captured.targetfd)


class _Tells:
    """Sends reports to the parent."""

    def __init__(self, config: pytest.Config, parent: Connection) -> None:
        self._config, self._parent = config, parent

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._parent.send(("report", data))
