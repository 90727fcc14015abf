"""Families of real processes, which say what they are on a pipe."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.cluster.on_ray.ray_node import ChildProcesses, Watched
from headway.config.sizing.timeouts import ORDERLY_S, TERMINATED_S

TITLE = "headway-test-family"
PARENT = (
    "import subprocess, sys; "
    "child = subprocess.Popen([sys.executable, '-c', sys.argv[2]], stdout=sys.stdout); "
    "child.wait(); sys.stdin.read()"
)
STUBBORN = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid(), flush=True); {}"


def start(child: str) -> tuple[subprocess.Popen[str], int]:
    """A process with `TITLE` in its command line and a child without; the child's id, once it ignores SIGTERM."""
    command = [sys.executable, "-c", PARENT, TITLE, STUBBORN.format(child)]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


@pytest.fixture
def stubborn() -> Iterator[tuple[subprocess.Popen[str], int]]:
    parent, child = start("time.sleep(600)")
    yield parent, child
    with parent:
        parent.kill()


def test_a_child_that_outlives_its_parent_and_ignores_sigterm_is_ended(
    stubborn: tuple[subprocess.Popen[str], int],
) -> None:
    parent, child = stubborn
    family = ChildProcesses(TITLE)
    assert len(family) == 2
    parent.kill()
    parent.wait()
    family.update()  # the orphan is nobody's descendant any more
    assert family.left_after(0.05) == [child]
    assert family.end(orderly_s=0, terminated_s=0.1) == []
    assert parent.stdout is not None
    assert parent.stdout.read() == "", "nobody holds the pipe's other end any more"


@pytest.fixture
def obedient() -> Iterator[None]:
    """A parent and a child that SIGTERM ends."""
    parent, _ = start("signal.signal(signal.SIGTERM, signal.SIG_DFL); time.sleep(600)")
    yield
    with parent:
        parent.kill()


@pytest.mark.usefixtures("obedient")
def test_only_what_has_the_title_and_what_is_below_it_belongs_to_a_family() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        assert len(ChildProcesses(TITLE)) == 2
        assert ChildProcesses(TITLE).end(orderly_s=0, terminated_s=60) == []
        assert stranger.poll() is None
        stranger.kill()


def test_a_killed_process_is_waited_for_as_long_as_its_memory_takes_to_be_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    family = ChildProcesses(TITLE)

    def left_after(seconds: float) -> list[int]:
        waits.append(seconds)
        return [1]

    monkeypatch.setattr(family, "left_after", left_after)
    assert family.end(killed_s=2048.0) == [1]
    assert waits == [ORDERLY_S, TERMINATED_S, 2048.0]


def test_processes_that_end_by_themselves_are_left_to_it() -> None:
    parent, _ = start("")
    family = ChildProcesses(TITLE)
    parent.communicate()
    assert family.end(orderly_s=60) == []
    assert parent.returncode == 0


@pytest.fixture
def until_told() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends when its input does."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        yield process


async def test_a_watched_process_has_ended_when_it_has(until_told: subprocess.Popen[bytes]) -> None:
    process = until_told
    watched = Watched(process.pid)
    end = asyncio.create_task(watched.ended())
    await asyncio.sleep(0)
    assert not end.done()
    end.cancel()
    await asyncio.wait([end])
    assert not watched.has_ended, "who waits no longer does not end the watch"
    end = asyncio.create_task(watched.ended())
    assert process.stdin is not None
    process.stdin.close()
    await end
    assert watched.has_ended
    assert process.poll() == 0, "it had ended already"
    await watched.ended()  # at once
    await Watched(process.pid).ended()


def test_a_process_that_has_ended_is_forgotten_when_others_are_looked_for(
    until_told: subprocess.Popen[bytes],
) -> None:
    """Else one that got its number later would not be found."""
    family = ChildProcesses("sys.stdin.read()")
    assert len(family) == 1
    until_told.communicate()
    family.update()
    assert len(family) == 0


def test_nothing_is_watched_any_more_where_a_process_is_left(
    until_told: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watched, "signal", lambda *_: None)
    family = ChildProcesses("sys.stdin.read()")
    (watched,) = family.named([Path(sys.executable).resolve().name]).values()
    assert family.end(orderly_s=0, terminated_s=0, killed_s=0) == [until_told.pid]
    until_told.communicate()
    assert not watched.has_ended, "it is not known"
