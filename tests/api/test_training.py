"""Directories of runs that are started from Python."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import headway
from headway.api import training
from headway.api.function_files import Functions
from headway.api.python_settings import load_resumed
from headway.config.layers import Layer
from headway.config.loading import LoadedConfig, dump, load
from headway.errors import UserCodeError
from headway.reports.run_directory import Occupied, RunDirectory
from headway.runtime.user_code import load_function

RECIPE = {"data.task.name": "sort", "model.path": "m", "cluster.backend": "inline", "rollout.total_rollout_steps": 128}


def score(response: str) -> float:
    return float(len(response))


def test_a_start_that_fails_leaves_what_was_there_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(job: partial[int], show: object) -> None:
        assert Path(str(job.args[0].config.reward.function).partition(":")[0]).is_file()
        raise UserCodeError("no")

    monkeypatch.setattr(training, "carry_out_apart", refuse)
    with pytest.raises(UserCodeError):
        headway.train(RECIPE, run={"dir": tmp_path / "run"}, reward=score)
    assert not any(tmp_path.iterdir())

    mine = tmp_path / "run" / "code" / "mine.py"
    mine.parent.mkdir(parents=True)
    mine.touch()
    with pytest.raises(Occupied, match=r"has code already"):
        headway.train(RECIPE, run={"dir": tmp_path / "run"}, reward=score)
    with pytest.raises(UserCodeError):
        headway.train(RECIPE, run={"dir": tmp_path / "run"}, reward=f"{mine}:score")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [mine]


def test_functions_of_a_run_are_found_where_its_directory_was_moved(tmp_path: Path) -> None:
    old, new = RunDirectory(tmp_path / "old"), RunDirectory(tmp_path / "new")
    mine = f"{tmp_path}/mine/code/other.py:other"
    functions = Functions({"reward.functions": [{"function": score, "params": {"a": 1}}, {"function": mine}]})
    functions.write(old.code)
    given = RECIPE | functions.settings(old.code)
    old.config.write_text(dump(load(None, Layer("here", given)).config))
    old.events.touch()
    old.path.rename(new.path)
    for config in (*load_resumed(new.path, ["run.seed=3"]), headway.load(new.path).config):
        found = config.config if isinstance(config, LoadedConfig) else config
        assert found.reward.functions is not None
        one, other = found.reward.functions
        assert (one.function, one.params, other.function) == (f"{new.code}/score.py:score", {"a": 1}, mine)
        assert load_function(one.function)("abc") == 3
