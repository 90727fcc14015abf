"""What is left of a Ray that was started here: nothing in its place, and the logs that matter in the run's."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import ray._private.services as starting

from headway.cluster.on_ray import ray_node
from headway.cluster.on_ray.ray_node import (
    LATEST,
    Watched,
    keep_ends,
    remove_session,
    sessions_of_their_own,
)


@pytest.fixture
def sessions(tmp_path: Path) -> tuple[Path, Path]:
    """Two sessions of one temporary directory, as Ray leaves them; the second one is the latest."""
    paths = tmp_path / "session_1", tmp_path / "session_2"
    for path in paths:
        (path / "logs").mkdir(parents=True)
        (path / "logs" / "raylet.err").write_text("0123456789")
    (tmp_path / LATEST).symlink_to(paths[1])
    return paths


def test_the_latest_session_goes_with_the_link_to_it(sessions: tuple[Path, Path]) -> None:
    first, second = sessions
    remove_session(second)
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    remove_session(second)  # it is gone already


def test_another_session_and_the_link_to_it_are_left_alone(sessions: tuple[Path, Path]) -> None:
    first, second = sessions
    remove_session(first)
    assert sorted(path.name for path in second.parent.iterdir()) == [second.name, LATEST]
    assert (second.parent / LATEST / "logs" / "raylet.err").is_file()


def test_the_ends_of_the_logs_that_tell_something_are_kept(
    sessions: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_node, "MOST_BYTES", 4)
    logs, kept = sessions[0] / "logs", tmp_path / "kept"
    (logs / "raylet.out").touch()
    (logs / "worker-1.out").write_text("something else")
    keep_ends(logs, kept)
    assert {path.name: path.read_text() for path in kept.iterdir()} == {"raylet.err": "6789"}


def test_no_python_runs_in_a_copy_of_this_process_when_ray_starts_another() -> None:
    """It ends with the thread that started it nevertheless, and begins a session without Ctrl-C."""
    started: list[Any] = []
    shows = "import os, signal, time; print(os.getsid(0), *signal.pthread_sigmask(0, []), flush=True); time.sleep(60)"

    def start() -> None:
        with sessions_of_their_own():
            started.append(
                starting.ConsolePopen(
                    [sys.executable, "-c", shows], preexec_fn=lambda: os._exit(9), stdout=subprocess.PIPE
                )
            )
            assert started[0].stdout.readline().split() == [str(started[0].pid).encode(), b"2"]

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert started[0].wait(60) == -signal.SIGKILL


async def test_all_that_wait_for_a_process_see_its_end_also_when_one_stops_waiting() -> None:
    process = await asyncio.create_subprocess_exec("sleep", "60")
    watched = Watched(process.pid)
    first, second, third = (asyncio.create_task(watched.ended()) for _ in range(3))
    await asyncio.sleep(0)
    third.cancel()
    await asyncio.wait([third])
    process.kill()
    async with asyncio.timeout(60):
        await asyncio.gather(first, second)
    assert watched.has_ended
    await process.wait()


def test_a_watched_process_is_waited_for_and_one_that_was_gone_before_has_ended() -> None:
    with subprocess.Popen(["sleep", "0.2"]) as sleeping:
        watched = Watched(sleeping.pid)
        assert not watched.ends_within(0.0)
        assert watched.ends_within(60.0)
        assert sleeping.wait(60) == 0
    assert watched.has_ended and Watched(sleeping.pid).has_ended
