"""The guard of a process: nothing of its tree is left, whatever ends it, and whatever its processes did to get away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headway.runtime.process_tree import GUARDED, children, descendants, python_command

TREE = """
import os, subprocess, sys, time
def away():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in range(1, 20):
                __import__("signal").signal(number, 1) if number not in (9, 19) else None
            time.sleep(600)
        os._exit(0)
def child(session):
    return subprocess.Popen(["sleep", "600"], start_new_session=session)
children = [child(bool(k % 2)) for k in range(8)]
for _ in range(4):
    away()
subprocess.Popen(["sh", "-c", "setsid sh -c 'sleep 600 & sleep 600' & sleep 600"])
"""
IN_TREE = 2 + 8 + 4 + 5
"""The guard and its process among them."""
OWNER = """
import subprocess, sys
from headway.runtime.process_tree import GUARDED, python_command
from headway.runtime.process_tree import children, descendants
subprocess.Popen(python_command(GUARDED + sys.argv[1]), start_new_session=True)
sys.stdin.read()
"""


def marked(mark: str) -> list[int]:
    """Processes with ``mark`` in their environment, zombies aside."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if f"HEADWAY_MARK={mark}".encode() in (place / "environ").read_bytes().split(b"\0"):
                found.append(int(place.name))
        except OSError:
            continue
    return found


def wait_until(number: int, mark: str, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while len(found := marked(mark)) != number:
        assert time.monotonic() < deadline, f"{len(found)} processes, expected {number}"
        time.sleep(0.02)


def environment(mark: str) -> dict[str, str]:
    return {**os.environ, "HEADWAY_MARK": mark, "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.parametrize(
    "end",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_left_of_a_tree_whose_owner_ends(end: signal.Signals, tmp_path: Path) -> None:
    mark = f"owner-{os.getpid()}-{end}"
    command = [sys.executable, "-c", OWNER, f"{TREE}\ntime.sleep(600)"]
    with subprocess.Popen(command, env=environment(mark), stdin=subprocess.PIPE) as owner:
        wait_until(1 + IN_TREE, mark)
        owner.send_signal(end)
    wait_until(0, mark)


@pytest.mark.parametrize(
    ("way", "code"),
    [
        ("sys.exit(7)", 7),
        pytest.param("os.kill(os.getpid(), 11)", -signal.SIGSEGV, marks=pytest.mark.slow),
        ("time.sleep(600)", -9),
    ],
)
def test_a_guard_ends_as_its_process_does_once_nothing_is_left_of_it(way: str, code: int) -> None:
    mark = f"guard-{os.getpid()}{code}"
    said = "print('made', flush=True); sys.stdin.read(1); "
    command = python_command(f"{GUARDED}\n{TREE}\n{said}{way}")
    with subprocess.Popen(command, env=environment(mark), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as guard:
        assert guard.stdin is not None and guard.stdout is not None
        assert guard.stdout.readline() == b"made\n"
        wait_until(IN_TREE, mark)
        if "sleep" in way:
            guard.terminate()
        else:
            guard.stdin.write(b"\n")
            guard.stdin.flush()
        assert guard.wait(60) == code
        assert marked(mark) == []


def test_children_are_those_that_a_search_of_all_processes_finds() -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        assert child.pid in children()
        assert set(children()) <= set(descendants(os.getpid()))
    finally:
        child.kill()
        child.wait()
    assert child.pid not in children()


MISSED_ONCE = """
import subprocess
from headway.runtime import process_tree
child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
look, looks = process_tree._children, [{}]
process_tree._children = lambda: looks.pop() if looks else look()
process_tree.end_children()
print(process_tree.children())
"""


def test_a_child_that_one_look_has_missed_is_ended() -> None:
    """A bwrap that forked and ended during a look left its child, which nobody ended."""
    command = [sys.executable, "-c", MISSED_ONCE]
    assert subprocess.check_output(command, env=environment("missed"), timeout=240) == b"[]\n"
