from __future__ import annotations

import os
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import headway
from headway.reports.trackers import tensorboard
from headway.reports.trackers.tensorboard import TensorBoardTracker
from headway.reports.trackers.tracker import TrackerSetting, table
from tests.full_disk import files_of_at_most


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    reader = EventAccumulator(str(directory), size_guidance={"tensors": 0, "scalars": 0})
    reader.Reload()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def board(run: Path, config: dict[str, Any] | None = None, undone_from: int | None = None) -> TensorBoardTracker:
    return TensorBoardTracker(TrackerSetting("p", "n", run / "trackers", config or {}, "tensorboard", undone_from))


def test_each_versions_numbers_are_scalars_at_that_step(tmp_path: Path) -> None:
    tracker = board(tmp_path)
    row: dict[str, Any] = {"version": 0, "reward/mean": 0.5, "lag/histogram": {"0": 3}, "lag/max": 1, "x": float("nan")}
    tracker.on_row(row)
    tracker.on_row({"version": 1, "reward/mean": 0.75})
    tracker.close("completed")
    assert scalars(tmp_path / "tensorboard") == {"reward/mean": [(0, 0.5), (1, 0.75)], "lag/max": [(0, 1.0)]}


def texts(directory: Path) -> dict[str, list[tuple[int, str]]]:
    reader = EventAccumulator(str(directory), size_guidance={"tensors": 0})
    reader.Reload()
    return {
        tag: [(e.step, e.tensor_proto.string_val[0].decode()) for e in reader.Tensors(tag)]
        for tag in reader.Tags()["tensors"]
        if reader.SummaryMetadata(tag).plugin_data.plugin_name == "text"
    }


def test_settings_samples_and_the_summary_are_texts(tmp_path: Path) -> None:
    tracker = board(tmp_path)
    tracker.on_settings({"run.seed": 7})
    episode = {"k": 0, "reward": 1.0, "parts": {}, "turns": 1, "length": 3, "finish": "stop", "text": "it is\nfour"}
    sample = {"validation": 2, "problem": 5, "source": "sums", "prompt": "2+2", "answer": 4, "episodes": [episode]}
    tracker.on_sample(table(sample))
    tracker.on_row({"version": 3, "reward/mean": 0.5})
    tracker.on_summary({"status": "completed"})
    tracker.close("completed")
    told = texts(tmp_path / "tensorboard")
    assert told["settings"] == [(0, '```json\n{\n "run.seed": 7\n}\n```')]
    assert told["summary"] == [(3, '```json\n{\n "status": "completed"\n}\n```')]
    ((step, text),) = told["samples/validation"]
    assert step == 2
    assert "**prompt** 2+2" in text
    assert "**text** \n\n```\nit is\nfour\n```" in text


def test_a_sample_that_cannot_be_encoded_is_spelled(tmp_path: Path) -> None:
    tracker = board(tmp_path)
    broken = {"k": 0, "text": "half an emoji: \ud83d"}
    tracker.on_sample(table({"version": 0, "group": 1, "prompt": "?", "answer": None, "episodes": [broken]}))
    tracker.on_row({"version": 0, "reward/mean": 0.5})
    tracker.close("completed")
    assert "half an emoji: \\ud83d" in texts(tmp_path / "tensorboard")["samples/training"][0][1]
    assert scalars(tmp_path / "tensorboard")["reward/mean"] == [(0, 0.5)]


@pytest.mark.parametrize("opened_before", [0, 8, 9, 98])
def test_what_is_undone_is_forgotten_and_the_rest_stays_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened_before: int
) -> None:
    monkeypatch.setattr(tensorboard, "_NUMBER", count(opened_before))
    first = board(tmp_path)
    for version in range(4):
        first.on_row({"version": version, "reward/mean": float(version)})
    first.close("completed")
    resumed = board(tmp_path, undone_from=2)
    for version in (2, 3, 4):
        resumed.on_row({"version": version, "reward/mean": 10.0 * version})
    resumed.close("completed")
    folder = tmp_path / "tensorboard"
    assert scalars(folder) == {"reward/mean": [(0, 0.0), (1, 1.0), (2, 20.0), (3, 30.0), (4, 40.0)]}
    assert [path.name for path in folder.iterdir() if "tfevents" not in path.name] == []


def test_a_full_disk_is_an_error_of_that_row_and_later_ones_are_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tracker, folder = board(tmp_path), tmp_path / "tensorboard"
    tracker.on_row({"version": 0, "reward/mean": 0.5})
    with files_of_at_most(next(folder.iterdir()).stat().st_size), pytest.raises(OSError, match="File too large"):
        tracker.on_row({"version": 1, "reward/mean": 0.75})
    tracker.on_row({"version": 1, "reward/mean": 0.75})
    tracker.close("completed")
    assert capfd.readouterr() == ("", "")
    assert scalars(folder) == {"reward/mean": [(0, 0.5), (1, 0.75)]}


@pytest.mark.slow
def test_neither_torch_nor_tensorflow_is_imported_by_any_report() -> None:
    program = (
        "import sys, tempfile, pathlib\n"
        "import headway.reports.report_manager\n"
        "from headway.reports.trackers.tensorboard import TensorBoardTracker\n"
        "from headway.reports.trackers.tracker import TrackerSetting\n"
        "board = TensorBoardTracker(TrackerSetting('p', 'n', pathlib.Path(tempfile.mkdtemp()) / 'trackers'))\n"
        "board.on_row({'version': 0, 'reward/mean': 1.0})\n"
        "board.close('completed')\n"
        "print(sorted({'torch', 'tensorflow', 'ray'} & set(sys.modules)))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(headway.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True, env=environment
    )
    assert done.stdout.strip() == "[]"
