"""Each policy loss has a section of its own: its keys, its defaults, and what becomes of another loss's keys."""

from __future__ import annotations

import pytest
import yaml

from headway.config.doctor import diagnose
from headway.config.loading import dump, load
from headway.config.schema_keys import tables
from headway.config.sections.losses import LOSSES
from headway.errors import ConfigError
from tests.tiers import mostly_slow

from .conftest import MINIMAL, Load, Write

MODE = "algorithm.policy_loss.loss_mode"
TAU = "algorithm.policy_loss.tau_neg"
C = "algorithm.policy_loss.clip_ratio_c"


@mostly_slow("loss", LOSSES, quick=[*LOSSES][::7])
def test_the_resolved_configuration_shows_the_defaults_that_apply(minimal: Load, write: Write, loss: str) -> None:
    config = minimal(f"{MODE}={loss}").config
    shown = yaml.safe_load(dump(config))["algorithm"]["policy_loss"]
    assert shown == LOSSES[loss]().model_dump()
    assert None not in shown.values()
    assert load(write(dump(config))).config == config


@mostly_slow("loss", LOSSES, quick=[*LOSSES][1::4])
def test_the_reference_shows_each_losss_keys_and_defaults(loss: str) -> None:
    [part] = [part for part in tables() if part.chosen_by == f"loss_mode: {loss}"]
    shown = {key.name.rpartition(".")[2]: yaml.safe_load(key.default) for key in part.keys}
    assert shown == LOSSES[loss]().model_dump(exclude={"loss_mode"})


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("tau_pos=2", "tau_pos (on the command line) has no effect: algorithm.policy_loss.loss_mode is ppo_clip, and "
         "this is a key of sapo"),
        ("clip_ratio_c=4", "and this is a key of dual_clip, dppo_tv or dppo_kl"),
        ("tau_poss=2", "tau_poss: unknown key (on the command line); did you mean algorithm.policy_loss.tau_pos?"),
        ("loss_mode=ppo_clop", "got 'ppo_clop' (on the command line), expected 'ppo_clip', 'dual_clip', "),
        ("loss_mode=ppo_clop", "or 'file.py:function'; did you mean 'ppo_clip'?"),
        ("loss_mode=7", "algorithm.policy_loss.loss_mode: got 7"),
    ],
)  # fmt: skip
def test_a_key_or_a_loss_that_there_is_not_is_refused(minimal: Load, setting: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        minimal(f"algorithm.policy_loss.{setting}")
    assert complaint in str(refused.value)


def test_keys_go_with_the_loss_that_a_file_names_and_stay_with_its_own(write: Write) -> None:
    path = write(MINIMAL + "algorithm: {policy_loss: {loss_mode: dppo_tv, clip_ratio_c: 10}}")
    assert load(path).config.algorithm.policy_loss == LOSSES["dppo_tv"](clip_ratio_c=10)
    assert load(path, [f"{MODE}=dppo_tv"]).config.algorithm.policy_loss == LOSSES["dppo_tv"](clip_ratio_c=10)
    assert load(path, [f"{MODE}=dual_clip"]).config.algorithm.policy_loss == LOSSES["dual_clip"]()
    assert load(path, [f"{MODE}=gpg"]).config.algorithm.policy_loss == LOSSES["gpg"]()
    nameless = write(MINIMAL + "algorithm: {policy_loss: {clip_ratio_c: 10}}")
    assert load(nameless, [f"{MODE}=dual_clip"]).config.algorithm.policy_loss == LOSSES["dual_clip"](clip_ratio_c=10)


def test_null_takes_a_losss_key_back(write: Write) -> None:
    path = write(MINIMAL + "algorithm: {policy_loss: {loss_mode: sapo, tau_neg: 3}}")
    assert load(path, [f"{TAU}=null"]).config.algorithm.policy_loss == LOSSES["sapo"]()


def test_a_loss_of_ones_own_takes_keys_of_its_own(minimal: Load, write: Write) -> None:
    loaded = minimal(f"{MODE}=mine.py:loss", "algorithm.policy_loss.strength=3", f"{C}=5")
    diagnose(loaded)
    own = loaded.config.algorithm.policy_loss
    assert (own.strength, own.clip_ratio_c) == (3, 5)  # type: ignore[attr-defined]
    assert load(write(dump(loaded.config))).config == loaded.config
