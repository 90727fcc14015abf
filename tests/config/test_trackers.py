"""``reports.trackers``, and what other systems call it."""

from __future__ import annotations

import pytest

from headway.config.doctor import diagnose
from headway.config.loading import load
from headway.errors import ConfigError

from .conftest import Load


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load(None, overrides)
    return str(refused.value)


@pytest.mark.parametrize(
    ("given", "trackers"),
    [
        ("[wandb, mlflow]", ("wandb", "mlflow")),
        ("wandb", ("wandb",)),
        ("[]", ()),
    ],
)
def test_trackers_are_a_list_or_one_name(given: str, trackers: tuple[str, ...]) -> None:
    assert load(None, [f"reports.trackers={given}"]).config.reports.trackers == trackers
    assert load(None).config.reports.trackers == ("tensorboard",)


def test_an_unknown_tracker_is_answered_with_those_that_there_are() -> None:
    message = refusal("reports.trackers=[comet]")
    assert message.startswith("reports.trackers[0]: got 'comet' (on the command line), expected 'tensorboard', 'wandb'")


def test_a_tracker_that_is_misspelled_is_answered_with_what_was_meant() -> None:
    assert refusal("reports.trackers=wanb").endswith("'trackio' or 'prometheus'; did you mean 'wandb'?")


def test_a_tracker_is_named_once() -> None:
    assert "expected each tracker once" in refusal("reports.trackers=[wandb, wandb]")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("reports.tensorboard=false", "reports.trackers"),
        ("report_to=wandb", "reports.trackers"),
        ("trainer.report_to=wandb", "reports.trackers"),
        ("trainer.logger=[console, wandb]", "reports.trackers"),
        ("logger=[console, wandb]", "reports.trackers"),
        ("use_wandb=true", "reports.trackers"),
        ("wandb=true", "reports.trackers"),
        ("wandb.mode=offline", "reports.trackers"),
        ("wandb.project=mine", "reports.project"),
        ("wandb_project=mine", "reports.project"),
        ("wandb.name=first", "run.name"),
        ("trainer.project_name=mine", "reports.project"),
        ("mlflow.experiment_name=mine", "reports.project"),
    ],
)
def test_what_other_systems_call_it_is_answered_with_the_key_here(written: str, meant: str) -> None:
    key = written.partition("=")[0]
    answer = refusal(written).partition(f"{key}: unknown key (on the command line); ")[2]
    assert answer == f"did you mean {meant}?" or answer.endswith(f" is {meant} here")


@pytest.mark.parametrize(
    ("setting", "trackers"),
    [
        ("reports.project=mine", "wandb"),
        ("reports.log_model=true", "mlflow"),
        ("reports.prometheus_port=0", "prometheus"),
    ],
)
def test_a_setting_of_trackers_that_are_not_named_has_no_effect(setting: str, trackers: str, minimal: Load) -> None:
    with pytest.raises(ConfigError, match=r"has no effect: reports.trackers does not name"):
        diagnose(minimal(setting))
    diagnose(minimal(setting, f"reports.trackers=[{trackers}]"))
