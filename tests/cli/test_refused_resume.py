"""``headway train --resume`` of a run that it refuses: one message, and the run's directory as it was."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headway.cluster.on_ray.ray_cluster import RayCluster
from headway.config.loading import dump, load
from headway.data.sources import build_sources, read_rows
from headway.engines.train.state_file import REMOVE
from headway.events import Event, RunFinished, VersionReached
from headway.models.tokenizer import load_tokenizer
from headway.pipeline.admission.ledger import Ledger
from headway.reports.record.events_file import EventsFile
from headway.reports.run_directory import RunDirectory
from headway.runtime.process_tree import descendants
from tests.cli.test_bad_input import _matches, _table
from tests.integration.support import make_job, run_here
from tests.tiers import mostly_slow

NOTHING = Ledger().counts()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_job(tmp_path_factory.mktemp("job"))


class Stopped:
    """A run that is complete at version 4, with the checkpoints of versions 2 and 4, as it would stand on the disk."""

    def __init__(self, recipe: Path, path: Path, *settings: str) -> None:
        self.directory = directory = RunDirectory(path)
        path.mkdir()
        config = load(recipe, ["cluster.backend=inline", *settings, f"run.dir={path}"]).config
        directory.config.write_text(dump(config))
        events: list[Event] = [VersionReached(time=float(version), version=version, groups={}) for version in range(5)]
        file = EventsFile(directory.events, pytest.fail)
        for event in [*events, RunFinished(time=5.0, status="completed", reason=None, version=4, groups={})]:
            file.on_event(event)
        file.close()
        directory.metrics.write_text('{"version": 4}\n')
        directory.summary.write_text('{"status": "completed"}')
        directory.model.mkdir()
        (directory.model / "headway.json").write_text('{"version": 4}')
        tokenizer = load_tokenizer(str(config.model.path))
        self.taken: dict[str, Any] = {
            "consumed": 16,
            "data_ended": False,
            "ledger": Ledger().state(),
            "source": build_sources(config, tokenizer, read_rows(config)).train.state(),
        }
        for version in (2, 4):
            self.save(version)

    def save(self, version: int = 4, **changed: object) -> None:
        path = self.directory.checkpoints / f"version_{version}"
        path.mkdir(parents=True, exist_ok=True)
        sizes = {".metadata": 40, "__0_0.distcp": 80}
        for name, size in sizes.items():
            (path / name).write_bytes(bytes(size))
        state = {"optimizer_steps": 4, "extra": {**self.taken, **changed}, "files": sizes}
        (path / "state.json").write_text(json.dumps(state))

    @property
    def state_file(self) -> Path:
        return self.directory.checkpoints / "version_4" / "state.json"

    def contents(self) -> dict[str, bytes]:
        """Beside the lock, which says who took it last."""
        files = (path for path in self.directory.path.rglob("*") if path.is_file() and path.name != "run.lock")
        return {str(path.relative_to(self.directory.path)): path.read_bytes() for path in files}


def source(run: Stopped, **changed: object) -> Mapping[str, Any]:
    return {**run.taken["source"], **changed}


def ledger(run: Stopped) -> Mapping[str, Any]:
    return {**run.taken["ledger"], "admitted": 3, "fates": {"trained": 3}}


LONGER = "rollout.total_rollout_steps=64"
FIVE = ("rollout.total_rollout_steps=null", "data.epochs=5")
UNREADABLE = b'{"kind": "note", "\xff"}\n'


def before_the_record(run: Stopped, line: bytes) -> None:
    run.directory.events.write_bytes(line + run.directory.events.read_bytes())


@dataclass(frozen=True)
class Case:
    spoil: Callable[[Stopped], object]
    arguments: tuple[str, ...] = (LONGER,)
    settings: tuple[str, ...] = ()
    """That the run was begun with."""


REFUSED = {
    "a record that is not UTF-8": Case(lambda run: before_the_record(run, UNREADABLE)),
    "a record with a line that is no event": Case(lambda run: before_the_record(run, b"{}\n")),
    "a checkpoint whose state.json is empty": Case(lambda run: run.state_file.write_text("")),
    "a checkpoint without a file of its weights": Case(lambda run: run.state_file.with_name("__0_0.distcp").unlink()),
    "a checkpoint of which a file is empty": Case(lambda run: run.state_file.with_name(".metadata").write_bytes(b"")),
    "a checkpoint of another run": Case(lambda run: run.save(ledger=ledger(run))),
    "other data": Case(lambda run: run.save(source=source(run, rows=3))),
    "another model, or another tokenizer, in the same folder": Case(
        lambda run: run.save(source=source(run, model="4"))
    ),
    "data.accept_changes for the same data": Case(lambda run: None, (LONGER, "data.accept_changes=true")),
    "a relative path, in another directory": Case(
        lambda run: None, settings=("reward.function=rewards/mine.py:score",)
    ),
    "fewer groups than it has trained": Case(lambda run: None, ("rollout.total_rollout_steps=8",)),
    "fewer epochs than it has begun": Case(
        lambda run: run.save(source=source(run, epoch=4, position=1)), ("data.epochs=4",), FIVE
    ),
    "more epochs after data that ended within a version": Case(
        lambda run: run.save(data_ended=True, source=source(run, epoch=5)), ("data.epochs=6",), FIVE
    ),
    "a run that is complete": Case(lambda run: None, ()),
}
MESSAGES = _table("A run that is to go on")


def refused(run: Stopped, *arguments: str) -> str:
    """The message. The run is as it was."""
    (run.directory.checkpoints / "version_9").mkdir()  # of which the record does not tell
    (run.directory.checkpoints / "version_9" / "state.json").write_text("{}")
    before = run.contents()
    done = run_here("train", "--resume", str(run.directory.path), *arguments)
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    assert run.contents() == before
    return done.stderr.replace(str(run.directory.path), "RUN")


def test_the_document_lists_the_cases_and_nothing_else() -> None:
    assert set(MESSAGES) == set(REFUSED)
    assert {row.exit_code for row in MESSAGES.values()} == {2}


@mostly_slow(
    "name",
    REFUSED,
    quick=[
        "a record with a line that is no event",
        "a checkpoint whose state.json is empty",
        "a checkpoint of another run",
        "other data",
        "fewer groups than it has trained",
        "more epochs after data that ended within a version",
        "a run that is complete",
    ],
)
def test_what_is_refused_leaves_the_run_as_it_was(name: str, recipe: Path, tmp_path: Path) -> None:
    """Takes seconds: some are refused only when a model is loaded."""
    case = REFUSED[name]
    run = Stopped(recipe, tmp_path / "run", *case.settings)
    case.spoil(run)
    shown = refused(run, *case.arguments)
    assert _matches(MESSAGES[name].message, shown, tmp_path), shown


def test_a_dry_run_refuses_a_run_that_is_complete(recipe: Path, tmp_path: Path) -> None:
    run = Stopped(recipe, tmp_path / "run")
    assert "this run is complete, at version 4; there is nothing to resume" in refused(run, "--dry-run")
    done = run_here("train", "--resume", str(run.directory.path), LONGER, "--dry-run")
    assert done.exit_code == 0, done.output


@pytest.mark.slow
def test_a_refused_resume_leaves_nothing_of_the_ray_that_it_began(recipe: Path, tmp_path: Path) -> None:
    """Starts and ends a Ray of its own, which takes seconds."""
    run = Stopped(recipe, tmp_path / "run")
    run.save(source=source(run, rows=3))
    before, begun = set(descendants(os.getpid())), []

    def sessions() -> set[Path]:
        """Those that this process began: other tests' workers begin theirs beside it."""
        return set(Path(tempfile.gettempdir(), "ray").glob(f"session_2*_{os.getpid()}"))

    sessions_before = sessions()
    with pytest.MonkeyPatch.context() as patch:
        start = RayCluster._init
        patch.setattr(
            RayCluster, "_init", lambda cluster: (start(cluster), begun.append((descendants(os.getpid()), sessions())))
        )
        shown = refused(run, LONGER, "cluster.backend=ray")
    assert _matches(MESSAGES["other data"].message, shown, tmp_path), shown
    [(processes, own)] = begun
    assert len(processes) > len(before) + 2
    assert len(own) == len(sessions_before) + 1
    assert set(descendants(os.getpid())) <= before
    assert sessions() <= sessions_before


@pytest.mark.parametrize(
    ("epoch", "position", "said"),
    [(5, 0, "the checkpoint has begun epoch 5 already"), (4, 0, "this run is complete, at version 4")],
)
def test_a_length_in_epochs_may_be_as_short_as_what_was_begun(
    epoch: int, position: int, said: str, recipe: Path, tmp_path: Path
) -> None:
    run = Stopped(recipe, tmp_path / "run", *FIVE)
    run.save(source=source(run, epoch=epoch, position=position))
    assert said in refused(run, "data.epochs=4")


@mostly_slow("line", [UNREADABLE, b"{}\n"], quick=[UNREADABLE])
def test_a_damaged_record_is_one_message_of_profile_too(line: bytes, recipe: Path, tmp_path: Path) -> None:
    run = Stopped(recipe, tmp_path / "run")
    before_the_record(run, line)
    done = run_here("profile", str(run.directory.path))
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith(f"error: {run.directory.events}:1 is ")


def test_the_message_s_remedy_for_a_damaged_checkpoint_leads_to_the_one_before(recipe: Path, tmp_path: Path) -> None:
    run = Stopped(recipe, tmp_path / "run")
    for version in (4, 2):
        state = run.directory.checkpoints / f"version_{version}" / "state.json"
        state.write_text("")
        done = run_here("train", "--resume", str(run.directory.path), LONGER)
        assert f"version_{version}: the checkpoint is damaged" in done.stderr
        assert "Remove it, to resume from the one before" in done.stderr
        shutil.rmtree(state.parent)


EXPLAINED = "Relative paths are those of the directory where the run was begun: give the command in that directory"


def test_a_damaged_checkpoint_of_the_critic_is_known_as_early(recipe: Path, tmp_path: Path) -> None:
    run = Stopped(recipe, tmp_path / "run", "algorithm.adv_estimator=gae")
    critic = run.directory.checkpoints / "critic"
    for version in (2, 4):
        shutil.copytree(run.directory.checkpoints / f"version_{version}", critic / f"version_{version}")
    (critic / "version_4" / "__0_0.distcp").unlink()
    assert f"critic/version_4: the checkpoint is damaged: __0_0.distcp is missing. {REMOVE}" in refused(run, LONGER)


@mostly_slow("what", ["data.train", "model.path"], quick=["data.train"])
def test_data_and_a_model_of_another_directory_are_explained(
    what: str, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, elsewhere = tmp_path / "begun", tmp_path / "elsewhere"
    begun.mkdir(), elsewhere.mkdir()
    (begun / "chat.jsonl").write_text('{"prompt": "ba", "answer": "ab"}\n' * 8)
    shutil.copytree(recipe.parent / "model", begun / "my-model")
    settings = {
        "data.train": ("data.task=null", "data.train=chat.jsonl", "data.val_size=2"),
        "model.path": ("model.path=my-model",),
    }
    monkeypatch.chdir(begun)
    run = Stopped(recipe, tmp_path / "run", *settings[what])
    monkeypatch.chdir(elsewhere)
    shown = refused(run, LONGER)
    path = settings[what][-1 if what == "model.path" else 1].partition("=")[2]
    message, explained = shown.splitlines()
    assert message.startswith(f"error: {path}: ")
    assert explained == EXPLAINED


def test_a_file_above_the_directory_is_explained_too(recipe: Path, tmp_path: Path) -> None:
    run = Stopped(recipe, tmp_path / "run", "reward.function=../nowhere/mine.py:score")
    assert EXPLAINED in refused(run, LONGER)


def test_a_mistake_of_another_kind_is_not_put_down_to_the_directory(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    run = Stopped(recipe, tmp_path / "run", f"reward.function={tmp_path / 'mine.py'}:score")
    assert "Relative paths" not in refused(run, LONGER)
