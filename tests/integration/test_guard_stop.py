"""``algorithm.guard.action=stop``: exit code, message, summary and record tell of the same end."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from headway.reports.checkpoint_folders import Checkpoints
from headway.reports.record.events_file import look_through
from headway.reports.run_directory import RunDirectory
from tests.integration.support import make_job, run_here, summary

GROUPS_PER_VERSION = 4
OFF_POLICY = ("actor.ppo_epochs=2", "actor.optim.lr=0.1", "algorithm.guard.min_ess=0.999")
"""The second epoch of a version is far from the policy that sampled it."""


@pytest.mark.slow
@pytest.mark.parametrize("versions", [1, 2], ids=["in the last version", "before"])
def test_a_run_that_its_guard_stops_has_failed_and_goes_on_without_the_guard(tmp_path: Path, versions: int) -> None:
    """Makes two whole runs, the second of which resumes the first."""
    recipe, path = make_job(tmp_path), tmp_path / "a run"
    directory = RunDirectory(path)
    done = run_here(
        "train", str(recipe), "cluster.backend=inline", f"rollout.total_rollout_steps={versions * GROUPS_PER_VERSION}",
        *OFF_POLICY, "rollout.test_freq=-1", "algorithm.guard.action=stop", f"run.dir={path}",
    )  # fmt: skip
    assert done.exit_code == 3, done.output
    error, how = done.stderr.splitlines()
    assert error.startswith("error: algorithm.guard: the effective sample size of a step of version 0 is ")
    assert f"its model and a checkpoint are in {path}. Lower async_training.staleness_threshold" in error
    resume = f"headway train --resume {shlex.quote(str(path))} a.b=c"
    assert how == f"The newest checkpoint is that of version 1; go on from it with: {resume}"
    assert directory.model.is_dir()
    assert Checkpoints(directory.checkpoints).complete(with_critic=False) == [0, 1]

    told = summary(path)
    assert (told["status"], told["version"], told["balanced"]) == ("failed", 1, True)
    assert told["reason"] == f"StoppedByGuard: {error.removeprefix('error: ')}"
    assert look_through(directory.events).ended == "failed"

    rest = run_here("train", "--resume", str(path), "algorithm.guard.action=warn")
    assert rest.exit_code == 0, rest.output
    assert (summary(path)["status"], summary(path)["version"]) == ("completed", versions)
