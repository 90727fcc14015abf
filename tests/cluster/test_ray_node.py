"""What is left of a Ray that was started here: nothing in its place, and the logs that matter in the run's."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.cluster.on_ray import ray_node
from headway.cluster.on_ray.ray_node import LATEST, keep_ends, remove_session


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
