from __future__ import annotations

import pytest

from headway.config.loading import check_changes
from headway.errors import ConfigError
from tests.config.conftest import Load


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("run.seed=3", "run.seed: 3 instead of 0 .it keys the order of the data"),
        ("run.dir=elsewhere", "run.dir: .*goes on where"),
        ("mode=on_policy", "only a set of values"),
        ("model.make.hidden_size=64", "model.make.*: .*holds this model"),
        ("model.path=elsewhere", "model.path: .*holds this model"),
        ("data.task.size=7", "data.task.size: .*place in these data"),
        ("data.shuffle=false", "data.shuffle: .*place in these data"),
        ("data.max_prompt_length=32", "data.max_prompt_length: .*place in these data"),
        ("actor.ppo_mini_batch_size=8", r"actor.ppo_mini_batch_size: .*\bB\b"),
        ("async_training.require_batches=2", r"async_training.require_batches: .*\bB\b"),
        ("async_training.trigger_parameter_sync_step=2", r"trigger_parameter_sync_step: .*\bB\b"),
        ("actor.ppo_epochs=2", "actor.ppo_epochs: .*optimizer steps"),
        ("algorithm.adv_estimator=gae", "a critic"),
        ("rollout.total_rollout_steps=64", r"total_rollout_steps: 64 .* 128 groups"),
    ],
)
def test_what_the_state_rules_out_is_refused_by_name_with_the_reason(minimal: Load, override: str, why: str):
    with pytest.raises(ConfigError, match=why):
        check_changes(minimal().config, minimal(override).config, version=2)


def test_all_that_is_refused_is_in_one_message(minimal: Load):
    with pytest.raises(ConfigError, match=r"data\.task\.size.*run\.seed"):
        check_changes(minimal().config, minimal("run.seed=3", "data.task.size=7").config, version=2)


def test_everything_else_may_change_and_is_told(minimal: Load):
    changes = check_changes(
        minimal().config,
        minimal(
            "actor.optim.lr=1e-3",
            "async_training.staleness_threshold=0.25",
            "rollout.total_rollout_steps=1280",
            "trainer.n_gpus_per_node=2",
            "data.max_bad_rows=0.5",
            "rollout.n=4",
        ).config,
        version=2,
    )
    assert changes["rollout.total_rollout_steps"] == (640, 1280)
    assert changes.keys() >= {"actor.optim.lr", "data.max_bad_rows", "trainer.n_gpus_per_node", "rollout.n"}


def test_nothing_given_is_nothing_changed(minimal: Load):
    assert check_changes(minimal().config, minimal().config, version=0) == {}
