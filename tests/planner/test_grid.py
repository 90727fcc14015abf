"""Which settings a plan compares."""

from fractions import Fraction

import pytest
from hypothesis import strategies as st

from headway.config.presets import PRESETS
from headway.errors import ConfigError
from headway.planner.grid import PlanSetting, around, full, own, setting_of, splits, triggers
from tests.planner.planning import profile_of
from tests.tiers import searched


def test_few_devices_are_split_in_every_possible_way():
    found = [str(split) for split in splits(profile_of(devices=4))]
    assert found == ["1:3", "2:2", "3:1"]


def test_many_devices_are_split_near_eighths():
    found = [str(split) for split in splits(profile_of(devices=128, rollout={"devices": 2}))]
    assert found == ["16:112", "32:96", "48:80", "64:64", "80:48", "96:32", "112:16"]


def test_shared_devices_are_split_in_one_way_and_leave_over_what_makes_no_replica():
    (split,) = splits(profile_of(devices=10, rollout={"devices": 4}), shared=True)
    assert (split.train_devices, split.rollout_devices, split.replicas, str(split)) == (10, 8, 2, "10 shared")


def test_replicas_of_several_devices_are_not_planned_on_shared_ones():
    kinds = {
        size: {setting.split.shared for setting in own(profile_of(devices=8, rollout={"devices": size}))}
        for size in (1, 2)
    }
    assert kinds == {1: {True, False}, 2: {False}}


@searched(100, devices=st.integers(2, 2000), per_replica=st.integers(1, 16), least=st.integers(1, 64))
def test_every_split_has_whole_replicas_and_enough_devices_to_train(devices, per_replica, least):
    profile = profile_of(devices=devices, rollout={"devices": per_replica}, train={"min_devices": least})
    try:
        found = splits(profile)
    except ConfigError:
        assert devices < per_replica + least
        return
    assert len(set(found)) == len(found) <= 7
    for split in found:
        assert split.train_devices + split.rollout_devices == devices
        assert split.train_devices >= least
        assert split.rollout_devices == split.replicas * per_replica > 0


def test_a_job_that_fits_no_split_says_how_many_devices_each_side_needs():
    profile = profile_of(devices=8, rollout={"devices": 4}, train={"min_devices": 6})
    with pytest.raises(ConfigError, match=r"got 8, .* replica needs 4 .* at least 6 .* expected 10 or more"):
        own(profile)


def test_a_presets_own_settings_use_its_own_eta_and_the_nearest_trigger_that_divides():
    profile = profile_of(batch={"groups_per_version": 6, "ppo_mini_batch_size": 2})
    settings = {setting.preset: setting for setting in own(profile)}
    assert set(settings) == set(PRESETS)
    partial = settings["async_partial"]
    assert (partial.eta, partial.trigger, partial.require_batches) == (Fraction(1, 2), 3, 1)
    assert (settings["one_step_off"].trigger, settings["one_step_off"].require_batches) == (1, 3)


def test_every_setting_trains_the_profiles_groups_per_version():
    profile = profile_of(batch={"groups_per_version": 24, "ppo_mini_batch_size": 2})
    assert triggers(profile) == [1, 2, 3, 4, 6, 12]
    for setting in full(profile):
        assert setting.trigger * setting.require_batches * 2 == 24


def test_eta_and_trigger_are_varied_around_a_setting_but_not_for_whole_waves():
    profile = profile_of(batch={"groups_per_version": 32, "ppo_mini_batch_size": 2})
    split = splits(profile)[0]
    varied = {(float(s.eta), s.trigger) for s in around(profile, setting_of(profile, "async_partial", split))}
    assert varied == {(0.25, 4), (1.0, 4), (0.5, 2), (0.5, 8)}
    assert around(profile, setting_of(profile, "one_step_off", split)) == []


def test_a_preset_that_lets_nothing_run_ahead_keeps_eta_zero():
    profile = profile_of()
    assert {setting.eta for setting in full(profile) if setting.preset == "stream_off_policy"} == {0}


def test_etas_that_would_let_no_whole_group_run_ahead_are_left_out():
    profile = profile_of(batch={"groups_per_version": 2, "ppo_mini_batch_size": 2})
    assert {float(s.eta) for s in full(profile) if s.preset == "async_partial"} == {0.5, 1.0}


def test_eta_is_exact():
    profile = profile_of()
    assert setting_of(profile, "async_partial", splits(profile)[0], eta=0.3).eta == Fraction(3, 10)


def test_a_setting_is_given_by_the_keys_that_make_it() -> None:
    setting = PlanSetting("async_partial", splits(profile_of())[0], Fraction(1, 2), trigger=2, require_batches=3)
    assert setting.settings == {
        "mode": "async_partial",
        "async_training.staleness_threshold": 0.5,
        "async_training.trigger_parameter_sync_step": 2,
        "async_training.require_batches": 3,
    }
