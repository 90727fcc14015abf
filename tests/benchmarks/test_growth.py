"""What is said of how a run's memory and files grow."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import growth
from benchmarks.growth import FEWEST, Growth, kind_of


def test_a_growing_file_has_its_slope_and_a_process_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "SETTLED_S", 0.0)
    monkeypatch.setattr(growth, "kind_of", lambda _: "driver")
    watched = Growth(lambda: [os.getpid(), 2**22 + 1], tmp_path)  # one of them is no process
    times = iter(range(0, 10_000, 60))
    clock = SimpleNamespace(monotonic=lambda: watched._began + next(times))
    monkeypatch.setattr(growth, "time", clock)  # not `time.monotonic`, which other threads of the process call, too
    for look in range(FEWEST):
        (tmp_path / "events.jsonl").write_bytes(bytes(look * 2**20))
        watched.look()
    watched.close()
    table = {row["what"]: row for row in watched.table()}
    assert table["files"]["MiB an hour"] == table["files of the record"]["MiB an hour"] == pytest.approx(60.0)
    assert table["driver"]["looks"] == FEWEST and table["driver"]["last MiB"] > 10
    assert "/dev/shm" in table


@pytest.mark.parametrize(
    ("title", "kind"),
    [
        ("ray::episode-worker-0+1 first", "episode-worker"),
        ("ray::actor-0 first.call()", "actor"),
        ("/venv/bin/python -m headway train recipes/demo.yaml run.dir=x", "driver"),
        ("python -u -c import sys;exec(eval(sys.stdin.readline()))", "user-code worker"),
        ("/ray/core/src/ray/raylet/raylet --raylet_socket_name=x", "Ray: raylet"),
        ("sleep 5", "other"),
    ],
)
def test_processes_are_told_apart_by_their_command_lines(title: str, kind: str) -> None:
    assert kind_of(title) == kind
