"""A setting that is typed as an option is answered with how it is written; a misspelt option with the option."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from headway.cli import cli


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        (["--lr", "1e-3"], "--lr. Settings have no dashes: actor.optim.lr=1e-3"),
        (["-lr", "1e-3"], "-lr. Settings have no dashes: actor.optim.lr=1e-3"),
        (["--actor.optim.lr=1"], "--actor.optim.lr. Settings have no dashes: actor.optim.lr=1"),
        (["--actor.optim.lr", "--debug"], "--actor.optim.lr. Settings have no dashes: actor.optim.lr=…"),
        (
            ["--learning-rate", "1", "rollout.n=2"],
            "--learning-rate. TRL's learning_rate is actor.optim.lr here; settings have no dashes: actor.optim.lr=1",
        ),
        (["--kl-coef=1"], "--kl-coef. Settings have no dashes: actor.kl_loss_coef=1 or algorithm.kl_ctrl.kl_coef=1"),
        (["--dryrun"], "--dryrun (Possible options: --dry-run)"),
        (["--debg"], "--debg (Possible options: --debug)"),
        (["--nothing-like-this"], "--nothing-like-this"),
    ],
)
@pytest.mark.parametrize("command", ["train", "doctor"])
def test_a_setting_with_dashes_is_answered_with_how_it_is_written(command: str, typed: list[str], answer: str) -> None:
    if command == "doctor" and "--dryrun" in typed:
        pytest.skip("it has no --dry-run")
    done = CliRunner().invoke(cli, [command, "recipe.yaml", *typed])
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1] == f"Error: No such option: {answer}"


def test_another_value_of_dry_run_is_answered_with_the_one_that_there_is() -> None:
    done = CliRunner().invoke(cli, ["train", "recipe.yaml", "--dry-run=full"])
    assert done.exit_code == 2
    assert "--dry-run=static" in done.stderr


@pytest.mark.parametrize("typed", ["--dry-run", "--dry-run=static"])
def test_commands_without_a_dry_run_say_so(typed: str) -> None:
    done = CliRunner().invoke(cli, ["eval", "model", "test.jsonl", typed])
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1] == "Error: No such option: --dry-run"


def test_an_evaluation_answers_so_too_and_its_own_options_are_options() -> None:
    done = CliRunner().invoke(cli, ["eval", "model", "test.jsonl", "--n", "0", "--max-new-tokens", "8"])
    assert done.stderr.splitlines()[-1].endswith("Settings have no dashes: data.max_response_length=8")
    done = CliRunner().invoke(cli, ["eval", "model", "test.jsonl", "--n", "0"])
    assert "Invalid value for '--n'" in done.stderr
