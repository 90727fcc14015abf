"""A process that is killed at any step of a checkpoint leaves one that is complete, and nothing in the next one's way.

A kill is an exception that nothing handles, at the n-th change of a file: what follows is not done any more.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.api.run.new_run import _newest
from headway.api.sft.sft_run import SftData, _resumed
from headway.config.schema import Config
from headway.engines.train.fsdp import checkpoint
from headway.engines.train.state_file import read_state
from headway.events import CheckpointSaved
from headway.models import pretrained
from headway.reports import checkpoint_folders
from headway.reports.checkpoint_folders import CheckpointRetention, Checkpoints
from headway.reports.record.events_file import SurvivingRecord
from headway.reports.run_directory import RunDirectory
from tests.engines.train.test_engine import ModelPath, engine
from tests.full_disk import files_of_at_most
from tests.tiers import mostly_slow


def test_a_limit_on_the_size_of_files_that_a_checkpoint_meets_is_named(tmp_path: Path) -> None:
    size = 3 * checkpoint.PROBE
    (tmp_path / "__0_0.distcp").write_bytes(bytes(size))
    with files_of_at_most(size):
        assert "raise the limit on the size of files" in checkpoint._no_room(tmp_path)


class Killed(BaseException):
    """The end of the process."""


def killing(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Kill this process before change ``at`` of a file: a folder made, written, renamed, or removed file by file."""
    steps = itertools.count(1)

    def step(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **kwargs: Any) -> Any:
            if next(steps) >= at:
                raise Killed
            return change(*args, **kwargs)

        return changed

    def removed(path: Path, ignore_errors: bool = False) -> None:
        for file in sorted(path.glob("*")):
            step(os.unlink)(file)
        if path.is_dir():
            step(os.rmdir)(path)

    monkeypatch.setattr(checkpoint, "save", step(checkpoint.save))
    for module in (checkpoint, pretrained, checkpoint_folders):
        monkeypatch.setattr(module, "rmtree", removed)
    for name in ("mkdir", "rename"):
        monkeypatch.setattr(Path, name, step(getattr(Path, name)))
    monkeypatch.setattr(os, "fsync", step(os.fsync))


def newest(folder: Path) -> int | None:
    return Checkpoints(folder).newest(range(100), with_critic=False)


def test_checkpoints_in_a_folder_that_may_not_be_read_are_not_taken_for_none(tmp_path: Path, monkeypatch) -> None:
    """A resumed run said that there was none, and to start over. Who only asks for the newest one finds none."""
    run = RunDirectory(tmp_path)
    checkpoints = Checkpoints(run.checkpoints)
    checkpoints.check_readable()
    checkpoints.actor(3).mkdir(parents=True)
    (run.checkpoints / "4").mkdir()
    checkpoints.check_readable()
    assert newest(run.checkpoints) == 3

    def denied(path: str | Path) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, denied)
    assert newest(run.checkpoints) is None
    with pytest.raises(PermissionError, match=str(run.checkpoints)):
        _newest(run, checkpoints, SurvivingRecord(), Config())
    with pytest.raises(PermissionError, match=str(run.checkpoints)):
        _resumed(run, SftData.__new__(SftData))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.usefixtures("one_rank")
@mostly_slow(
    "there",
    ["the one before", "half of it", "it, but the driver was not told"],
    quick=["it, but the driver was not told"],
)
def test_a_kill_at_any_step_of_a_checkpoint(there: str, model_path: ModelPath, tmp_path: Path) -> None:
    """Some twenty checkpoints of a tiny model, which take 5 s beside other work."""
    trained, before = engine(model_path()), tmp_path / "before"
    trained.learner.save(before / "version_3", {"of": 3})
    if there == "half of it":
        shutil.copytree(before / "version_3", before / ".version_6.partial")
    if there == "it, but the driver was not told":
        trained.learner.save(before / "version_6", {"of": "6, before"})
    for at in itertools.count(1):
        folder, killed = tmp_path / f"killed-{at}", False
        shutil.copytree(before, folder)
        with pytest.MonkeyPatch.context() as patch:
            killing(patch, at)
            try:
                trained.learner.save(folder / "version_6", {"of": "6"})
            except Killed:
                killed = True
        complete = newest(folder)
        assert complete in (3, 6)
        state = read_state(folder / f"version_{complete}")
        assert str(state["extra"]["of"]).startswith(str(complete))
        assert state["optimizer_steps"] == 0
        trained.learner._copied = None
        trained.learner.save(folder / "version_9", {"of": "9"})
        assert not [name for name in names(folder) if name.endswith(".partial")]
        if not killed:
            assert at > 4
            assert trained.learner.load(folder / "version_9") == {"of": "9"}
            return


@pytest.mark.parametrize("critic", [False, True])
def test_a_kill_at_any_step_of_the_removal_of_an_older_one(critic: bool, tmp_path: Path) -> None:
    def run(folder: Path, versions: list[int]) -> None:
        for version in versions:
            for of in (folder / "critic", folder) if critic else (folder,):
                (of / f"version_{version}").mkdir(parents=True)
                (of / f"version_{version}" / "state.json").write_text(json.dumps({"of": version}))

    class AtOnce:
        """A removal in the thread that asks for it: a kill ends all."""

        def __init__(self, target: Callable[..., None], args: tuple[Any, ...], kwargs: Any, name: str) -> None:
            self.start = lambda: target(*args, **kwargs)

        def is_alive(self) -> bool:
            return False

    saved = CheckpointSaved(time=0.0, version=9, path="", span=(0.0, 0.0))
    for at in itertools.count(1):
        folder, killed = tmp_path / f"killed-{at}", False
        run(folder, [3, 6, 9])
        retention = CheckpointRetention(Checkpoints(folder), keep=2, recorded_version=lambda: 9)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint_folders, "Thread", AtOnce)
            killing(patch, at)
            try:
                retention.on_event(saved)
            except Killed:
                killed = True
        checkpoints = Checkpoints(folder)
        assert checkpoints.complete(with_critic=critic)[-2:] == [6, 9]
        checkpoints.forget_above(9)  # as a resume does
        run(folder, [12])
        resumed = CheckpointRetention(checkpoints, keep=2, recorded_version=lambda: 12)
        resumed.on_event(saved)
        resumed.close()
        assert names(folder) == [*(["critic"] if critic else []), "version_12", "version_9"]
        assert not critic or names(folder / "critic") == ["version_12", "version_9"]
        if not killed:
            return
