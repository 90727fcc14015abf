"""What a worker says of its work, and what counts as progress."""

from __future__ import annotations

import itertools
import math
import threading
import time
from pathlib import Path

import pytest

from headway.runtime import progress
from headway.runtime.progress import Heartbeat, Progress, advance, count_for, progress_here


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_worker_without_work_is_idle_and_never_moved():
    assert Progress().heartbeat() == Heartbeat("", math.inf, None)


def test_work_says_what_it_is_since_when_where_and_for_how_long_it_did_not_move():
    clock = Clock()
    made = Progress(clock)
    with made.working("train_step"):
        clock.now += 107
        made.advance("3 of 8 micro-batches done")
        clock.now += 305
        beat = made.heartbeat()
    assert beat.quiet_s == 305
    assert beat.doing == "train_step for 412 s (3 of 8 micro-batches done), no progress for 305 s"
    assert made.heartbeat().doing == ""


def test_work_that_has_just_begun_is_not_quiet_since_the_work_before():
    clock = Clock()
    made = Progress(clock)
    with made.working("load"):
        made.advance("half")
    clock.now += 5000
    with made.working("save"):
        clock.now += 1
        assert made.heartbeat().doing == "save for 1 s, no progress for 1 s"


def test_a_place_without_words_leaves_those_of_the_last_one():
    made = Progress(Clock())
    with made.working("train_step"):
        made.advance("1 of 8 micro-batches done")
        made.advance()
        assert "(1 of 8 micro-batches done)" in made.heartbeat().doing


def test_a_threads_work_counts_for_its_worker_and_for_no_other():
    """As with several workers in one process."""
    clock = Clock()
    mine, other = Progress(clock), Progress(clock)

    def work() -> None:
        count_for(mine)
        with mine.working("train_step"):
            clock.now += 10
            advance("step 1")
            found.append(mine.heartbeat().quiet_s)

    found: list[float] = []
    with other.working("generate"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert found == [0]
        assert other.heartbeat().quiet_s == 10
    assert progress_here() is not mine


def test_files_that_are_read_have_the_patience_of_all_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "shard").write_bytes(b"x" * 4000)
    made = Progress()
    with made.working("load"):
        with made.reading(tmp_path):
            assert made.heartbeat().file_nbytes == 4000
        assert made.heartbeat().file_nbytes is None


def test_a_file_that_grows_is_progress_and_its_bytes_are_patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress, "LOOK_S", 0.005)
    clock = Clock()
    made = Progress(clock)
    with made.working("export"), made.writing(tmp_path / "model"):
        clock.now += 100
        time.sleep(0.05)
        assert made.heartbeat().quiet_s == 100, "a folder that is not there yet is no progress"
        assert made.heartbeat().file_nbytes == 0
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "shard").write_bytes(b"x" * 4000)
        until = time.monotonic() + 60
        while made.heartbeat().quiet_s and time.monotonic() < until:
            time.sleep(0.005)
        assert made.heartbeat().quiet_s == 0
        assert made.heartbeat().file_nbytes == 4000
        clock.now += 50
        time.sleep(0.05)
        assert made.heartbeat().quiet_s == 50, "bytes that stay what they are do not count"
    assert made.heartbeat() == Heartbeat("")


def test_a_look_that_outlives_the_writing_leaves_no_bytes_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The look finds the writing still open, and stores the bytes once it has ended."""
    checked, ended = threading.Event(), threading.Event()

    class EndsAfterTheCheck(threading.Event):
        def is_set(self) -> bool:
            was_set = super().is_set()
            checked.set()
            assert ended.wait(60)
            return was_set

    monkeypatch.setattr(progress, "LOOK_S", 0.001)
    monkeypatch.setattr(progress, "Event", EndsAfterTheCheck)
    grows = itertools.count(1000)
    monkeypatch.setattr(progress, "_sizes", lambda folder: (next(grows), 0))
    made = Progress()
    with made.working("export"):
        with made.writing(tmp_path):
            assert checked.wait(60)
            (looking,) = (thread for thread in threading.enumerate() if thread.name == "headway-file-growth")
        ended.set()
        looking.join(60)
        assert made.heartbeat().file_nbytes is None
