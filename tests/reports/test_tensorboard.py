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
from headway.reports.trackers.tensorboard import TensorBoardFile
from headway.reports.trackers.tracker import TrackerSetting
from tests.full_disk import files_of_at_most


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    reader = EventAccumulator(str(directory), size_guidance={"tensors": 0, "scalars": 0})
    reader.Reload()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def test_each_versions_numbers_are_scalars_at_that_step(tmp_path: Path) -> None:
    board = TensorBoardFile(tmp_path, pytest.fail)
    row: dict[str, Any] = {"version": 0, "reward/mean": 0.5, "lag/histogram": {"0": 3}, "lag/max": 1, "x": float("nan")}
    board.on_row(row)
    board.on_row({"version": 1, "reward/mean": 0.75})
    board.close()
    assert scalars(tmp_path) == {"reward/mean": [(0, 0.5), (1, 0.75)], "lag/max": [(0, 1.0)]}


def texts(directory: Path) -> dict[str, list[tuple[int, str]]]:
    reader = EventAccumulator(str(directory), size_guidance={"tensors": 0})
    reader.Reload()
    return {
        tag: [(e.step, e.tensor_proto.string_val[0].decode()) for e in reader.Tensors(tag)]
        for tag in reader.Tags()["tensors"]
        if reader.SummaryMetadata(tag).plugin_data.plugin_name == "text"
    }


def test_settings_samples_and_the_summary_are_texts(tmp_path: Path) -> None:
    board = TensorBoardFile(tmp_path, pytest.fail, TrackerSetting("p", "n", tmp_path, {"run.seed": 7}))
    episode = {"k": 0, "reward": 1.0, "parts": {}, "turns": 1, "length": 3, "finish": "stop", "text": "it is\nfour"}
    board.on_sample(
        {"validation": 2, "problem": 5, "source": "sums", "prompt": "2+2", "answer": 4, "episodes": [episode]}
    )
    board.on_row({"version": 3, "reward/mean": 0.5})
    board.on_summary({"status": "completed"})
    board.close()
    told = texts(tmp_path)
    assert told["settings"] == [(0, '```json\n{\n "run.seed": 7\n}\n```')]
    assert told["summary"] == [(3, '```json\n{\n "status": "completed"\n}\n```')]
    ((step, sample),) = told["samples/validation"]
    assert step == 2
    assert "**prompt** 2+2" in sample
    assert "**text** \n\n```\nit is\nfour\n```" in sample


def test_a_sample_that_cannot_be_written_costs_that_sample_alone(tmp_path: Path) -> None:
    problems: list[str] = []
    board = TensorBoardFile(tmp_path, problems.append)
    board.on_sample({"version": 0})  # no sample at all
    broken = {"k": 0, "text": "half an emoji: \ud83d"}
    board.on_sample({"version": 0, "group": 1, "prompt": "?", "answer": None, "episodes": [broken]})
    board.on_row({"version": 0, "reward/mean": 0.5})
    board.close()
    assert problems == [f"a sample is left out of {tmp_path}: KeyError: 'group'"]
    assert "half an emoji: \\ud83d" in texts(tmp_path)["samples/training"][0][1]
    assert scalars(tmp_path)["reward/mean"] == [(0, 0.5)]


@pytest.mark.parametrize("opened_before", [0, 8, 9, 98])
def test_what_is_undone_is_forgotten_and_the_rest_stays_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened_before: int
) -> None:
    monkeypatch.setattr(tensorboard, "_NUMBER", count(opened_before))
    first = TensorBoardFile(tmp_path, pytest.fail)
    for version in range(4):
        first.on_row({"version": version, "reward/mean": float(version)})
    first.close()
    resumed = TensorBoardFile(tmp_path, pytest.fail, TrackerSetting("p", "n", tmp_path, undone_from=2))
    for version in (2, 3, 4):
        resumed.on_row({"version": version, "reward/mean": 10.0 * version})
    resumed.close()
    assert scalars(tmp_path) == {"reward/mean": [(0, 0.0), (1, 1.0), (2, 20.0), (3, 30.0), (4, 40.0)]}
    assert [path.name for path in tmp_path.iterdir() if "tfevents" not in path.name] == []


def test_a_full_disk_is_reported_once_without_a_traceback_and_the_run_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    problems: list[str] = []
    board = TensorBoardFile(tmp_path, problems.append)
    board.on_row({"version": 0, "reward/mean": 0.5})
    with files_of_at_most(next(tmp_path.iterdir()).stat().st_size):
        board.on_row({"version": 1, "reward/mean": 0.75})
        board.on_row({"version": 2, "reward/mean": 1.0})
    board.close()
    assert problems == [f"cannot write to {tmp_path}: File too large; the run goes on without TensorBoard files"]
    assert capfd.readouterr() == ("", "")
    assert scalars(tmp_path) == {"reward/mean": [(0, 0.5)]}


def test_a_disk_that_is_full_from_the_start_is_reported_too(tmp_path: Path) -> None:
    problems: list[str] = []
    with files_of_at_most(0):
        board = TensorBoardFile(tmp_path, problems.append)
    board.on_row({"version": 0, "reward/mean": 0.5})
    board.close()
    assert problems == [f"cannot write to {tmp_path}: File too large; the run goes on without TensorBoard files"]


def test_neither_torch_nor_tensorflow_is_imported_by_any_report() -> None:
    program = (
        "import sys, tempfile, pathlib\n"
        "import headway.reports.report_manager\n"
        "from headway.reports.trackers.tensorboard import TensorBoardFile\n"
        "board = TensorBoardFile(pathlib.Path(tempfile.mkdtemp()), print)\n"
        "board.on_row({'version': 0, 'reward/mean': 1.0})\n"
        "board.close()\n"
        "print(sorted({'torch', 'tensorflow', 'ray'} & set(sys.modules)))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(headway.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    assert done.stdout.strip() == "[]"
