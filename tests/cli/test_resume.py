"""``headway train --resume``: what it reads and hands over. Nothing is trained here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from headway.api.run.training_run import is_of_the_end
from headway.cli import cli
from headway.config.loading import LoadedConfig, dump, load
from headway.config.schema import Config
from headway.reports.run_directory import RunDirectory
from tests.cli.test_commands import RECIPE


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Of a run with two replicas, as it wrote its configuration down."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    directory = tmp_path / "run"
    directory.mkdir()
    config = load(tmp_path / "recipe.yaml", ["rollout.n_gpus_per_node=2"]).config
    (directory / "config.yaml").write_text(dump(config))
    (directory / "events.jsonl").write_text("")
    return directory


class ScriptedApp:
    """Stands for the composition root."""

    def __init__(self) -> None:
        self.given: list[tuple[Path, Config, LoadedConfig]] = []

    def resume(self, path: Path, before: Config, loaded: LoadedConfig) -> int:
        self.given.append((path, before, loaded))
        return 130


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> ScriptedApp:
    scripted = ScriptedApp()
    monkeypatch.setitem(sys.modules, "headway.api.run", scripted)  # type: ignore[arg-type]
    return scripted


def train(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["train", *arguments])


@pytest.mark.parametrize("first", [True, False])
def test_the_runs_configuration_and_what_is_put_on_top_are_handed_over(
    app: ScriptedApp, run_dir: Path, first: bool
) -> None:
    resume, settings = ["--resume", str(run_dir)], ["actor.optim.lr=1e-4", "rollout.total_rollout_steps=1280"]
    assert train(*(resume + settings if first else settings + resume)).exit_code == 130
    ((path, before, loaded),) = app.given
    assert path == run_dir
    assert (before.rollout.total_rollout_steps, loaded.config.rollout.total_rollout_steps) == (640, 1280)
    assert loaded.config.actor.optim.lr == 1e-4
    assert loaded.user_keys == {"actor.optim.lr", "rollout.total_rollout_steps"}


ALONE = ("rollout.n_gpus_per_node=1", "cluster.backend=inline")


def test_what_loses_its_effect_by_a_change_is_no_mistake(app: ScriptedApp, run_dir: Path) -> None:
    """``cluster.max_replica_restarts`` stands in the run's own file; with one replica in one process it has none."""
    assert "max_replica_restarts" in (run_dir / "config.yaml").read_text()
    done = train("--resume", str(run_dir), *ALONE)
    assert done.exit_code == 130, done.stderr


def test_a_run_s_own_file_begins_another_one_with_fewer_replicas(app: ScriptedApp, run_dir: Path) -> None:
    """All that it says of two replicas is what the schema says, too."""
    done = train(str(run_dir / "config.yaml"), "rollout.n_gpus_per_node=1", "--dry-run")
    assert done.exit_code == 0, done.stderr


def test_a_choice_without_effect_in_a_file_is_a_mistake(app: ScriptedApp, run_dir: Path) -> None:
    file = run_dir / "config.yaml"
    file.write_text(file.read_text().replace("max_replica_restarts: 3", "max_replica_restarts: 4"))
    done = train(str(file), *ALONE, "--dry-run")
    assert done.exit_code == 2
    assert "cluster.max_replica_restarts has no effect" in done.stderr


def test_what_the_user_gives_without_effect_is_one(app: ScriptedApp, run_dir: Path) -> None:
    done = train("--resume", str(run_dir), *ALONE, "cluster.max_replica_restarts=3")
    assert done.exit_code == 2
    assert "cluster.max_replica_restarts has no effect" in done.stderr
    assert app.given == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected CONFIG, a YAML file or a recipe's name, like demo, or --resume RUN"),
        (["--resume", "RUN", "recipe.yaml"], "takes the settings that RUN was begun with; drop recipe.yaml"),
        (["--resume", "nowhere"], "got nowhere, which does not exist"),
        (["--resume", "RUN", "actor.optim.lr=fast"], "actor.optim.lr"),
    ],
)
def test_what_the_user_got_wrong_is_one_message(
    app: ScriptedApp, run_dir: Path, arguments: list[str], message: str
) -> None:
    done = train(*(str(run_dir) if argument == "RUN" else argument for argument in arguments))
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert app.given == []


def test_a_dry_run_shows_what_would_hold_and_touches_nothing(app: ScriptedApp, run_dir: Path) -> None:
    before = {path: path.read_text() for path in run_dir.iterdir()}
    done = train("--resume", str(run_dir), "trainer.save_freq=3", "--dry-run")
    assert done.exit_code == 0, done.stderr
    assert "save_freq: 3" in done.stdout
    assert "# saves: every 3 versions" in done.stdout
    assert {path: path.read_text() for path in run_dir.iterdir()} == before
    assert app.given == []


def test_a_dry_run_refuses_what_a_resumed_run_cannot_change(app: ScriptedApp, run_dir: Path) -> None:
    done = train("--resume", str(run_dir), "run.seed=7", "--dry-run")
    assert done.exit_code == 2
    assert "what a resumed run cannot change: run.seed: 7 instead of 0" in done.stderr


@pytest.mark.parametrize(
    ("told", "newest", "of_the_end"),
    [
        ('{"version": 4}', [4], True),
        ('{"version": 2}', [4], False),  # made longer, and not exported since
        ('{"version": 4}', [], False),
        (None, [4], True),
        ("{", [4], True),
    ],
)
def test_a_model_s_folder_of_an_earlier_end_is_known(
    run_dir: Path, told: str | None, newest: list[int], of_the_end: bool
) -> None:
    directory = RunDirectory(run_dir)
    assert not is_of_the_end(directory, newest)
    directory.model.mkdir()
    if told is not None:
        (directory.model / "headway.json").write_text(told)
    assert is_of_the_end(directory, newest) is of_the_end
