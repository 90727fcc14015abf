"""In which order settings are simulated, and which are left out."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from headway.config.presets import PRESETS
from headway.planner.grid import PlanSetting, Shares, around, forecast, own
from headway.planner.search import MUCH_SLOWER, Guess, SettingSearch
from tests.planner.planning import MEASURED, profile_of, setting

PROFILE = profile_of(
    train={"points": [{"devices": 1, "token_s": 0.05}]},
    rollout={"decode": [[1, 0.1], [16, 1.0]]},
)

Seconds = Callable[[PlanSetting], float]


def guess() -> Guess:
    return Guess(lambda each: forecast(PROFILE, each))


def climb_of(settings: list[PlanSetting], *, vary: bool = False) -> SettingSearch:
    return SettingSearch(
        settings, guess(), baseline="colocate_sync", around=lambda each: around(PROFILE, each) if vary else []
    )


def take_all(search: SettingSearch, step_s: Seconds, **measured: float) -> list[PlanSetting]:
    taken = []
    while (found := search.next()) is not None:
        assert found == search.open[0]
        search.measured(found, replace(MEASURED, step_s=step_s(found), **measured))
        taken.append(found)
    return taken


def splits_of(preset: str, trains: range = range(1, 8)) -> list[PlanSetting]:
    return [setting(preset, train, 8 - train) for train in trains]


def train_devices(settings: list[PlanSetting]) -> list[int]:
    return [each.split.train_devices for each in settings]


def test_everything_is_the_baseline_then_one_setting_of_every_preset_then_the_rest_each_once():
    settings = own(PROFILE)
    search = SettingSearch(settings, guess(), baseline="colocate_sync")
    found = take_all(search, lambda each: 1.0 + each.split.train_devices % 3)
    first = [each.preset for each in found[: len(PRESETS)]]
    assert first[0] == "colocate_sync"
    assert sorted(first) == sorted(PRESETS)
    assert sorted(map(str, found)) == sorted(map(str, settings))
    assert search.skipped == []


def test_the_first_setting_of_a_preset_is_the_split_with_the_quickest_forecast():
    splits = splits_of("async_partial")
    expected = min(splits, key=lambda each: forecast(PROFILE, each).step_s(each))
    assert climb_of(splits).open == [expected]


def test_devices_move_to_the_side_that_was_measured_to_be_busy():
    splits = splits_of("async_partial", range(3, 6))
    for trainer_idle, rollouter_idle, then in ((0.6, 0.0, 3), (0.0, 0.6, 5)):
        search = climb_of(splits)
        search.measured(splits[1], replace(MEASURED, trainer_idle=trainer_idle, rollouter_idle=rollouter_idle))
        assert search.open[0].split.train_devices == then


def test_a_guess_scales_what_was_measured_nearest():
    near, far = setting("async_partial", 4, 4), setting("async_partial", 2, 6)
    seconds = Guess(lambda each: Shares(training=8 / each.split.train_devices, generation=4 / each.split.replicas))
    seconds.add(near, replace(MEASURED, step_s=10.0, trainer_idle=0.2, rollouter_idle=0.5))
    # 8 s of training become 16 on half the devices, 5 s of generation 3.3; 2 s were neither.
    assert seconds(far) == pytest.approx(16 + 2)


def test_a_guess_is_what_the_same_change_of_split_did_for_another_preset():
    seconds = guess()
    for each, step_s in zip(splits_of("overlapped", range(3, 5)), (12.0, 8.0), strict=True):
        seconds.add(each, replace(MEASURED, step_s=step_s))
    here, there = splits_of("async_partial", range(3, 5))
    seconds.add(here, replace(MEASURED, step_s=15.0))
    assert seconds(there) == pytest.approx(10.0)


def test_a_climb_goes_on_as_long_as_splits_get_quicker_and_stops_behind_the_best():
    splits = splits_of("async_partial")
    search = climb_of(splits)
    found = take_all(search, lambda each: 10.0 + abs(each.split.train_devices - 6))
    assert 6 in train_devices(found)
    assert 7 in train_devices(found)
    assert train_devices(found) == sorted(train_devices(found)) or len(found) < len(splits)
    assert {*search.skipped} == {*splits} - {*found}


def test_a_split_that_looks_quicker_is_tried_though_one_before_it_was_slower():
    def bumpy(each: PlanSetting) -> float:
        return {3: 10.0, 4: 10.1, 5: 9.0}[each.split.train_devices]

    splits = splits_of("async_partial", range(3, 6))
    search = climb_of(splits)
    training_bound = {"trainer_idle": 0.0, "rollouter_idle": 0.9}
    search.measured(splits[0], replace(MEASURED, step_s=10.0, **training_bound))
    assert splits[2] in take_all(search, bumpy, **training_bound)


def test_splits_beside_the_best_are_tried_of_the_quickest_preset_alone():
    settings = splits_of("async_partial") + splits_of("overlapped") + splits_of("async_stale")
    search = climb_of(settings)
    slower = {"async_partial": 0.0, "overlapped": 1.0, "async_stale": 2.0}
    found = take_all(search, lambda each: 10.0 + slower[each.preset] + abs(each.split.train_devices - 5))
    assert train_devices([each for each in found if each.preset == "async_partial"])[:2] == [4, 5]
    assert {4, 5, 6} <= {*train_devices([each for each in found if each.preset == "async_partial"])}
    assert 7 not in train_devices([each for each in found if each.preset == "async_stale"])


def test_eta_and_trigger_are_varied_at_the_best_splits_of_the_best_three_presets_that_run_ahead():
    ahead = ["async_partial", "overlapped", "async_stale", "colocate_async"]
    seconds = dict(zip(ahead, (10.0, 10.5, 11.0, 11.5), strict=True))
    settings = [setting(preset, *((8, 8) if preset == "colocate_async" else (4, 4))) for preset in ahead]
    search = climb_of([*settings, setting("stream_off_policy"), setting("on_policy")], vary=True)
    found = take_all(search, lambda each: seconds.get(each.preset, 10.0))
    varied = [each.preset for each in found[len(settings) + 2 :]]
    assert set(varied) == set(ahead[:3])


def test_what_looks_much_slower_is_left_out_and_listed():
    settings = [setting("async_partial"), setting("one_step_off"), setting("overlapped")]
    search = climb_of(settings, vary=True)
    slow = {"overlapped": 10 * MUCH_SLOWER + 0.1}
    found = take_all(search, lambda each: slow.get(each.preset, 10.0))
    assert sum(each.preset == "overlapped" for each in found) == 1
    assert sum(each.preset == "async_partial" for each in found) > 1


def test_synchronous_splits_are_compared_among_themselves():
    settings = [*splits_of("on_policy"), setting("async_partial")]
    search = climb_of(settings)
    found = take_all(search, lambda each: 100.0 + each.split.train_devices if each.synchronous else 10.0)
    assert 1 in train_devices([each for each in found if each.preset == "on_policy"])


def test_presets_that_were_not_begun_are_open_and_not_left_out():
    search = climb_of(own(PROFILE))
    assert {each.preset for each in search.open} == set(PRESETS)
    assert search.skipped == []
    assert search.to_come >= len(PRESETS)
    take_all(search, lambda each: 10.0)
    assert search.to_come == 0
