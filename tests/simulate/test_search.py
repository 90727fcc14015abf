"""In which order settings are simulated."""

from dataclasses import replace

import pytest

from headway.config.presets import PRESETS
from headway.simulate.forecast import Shares, forecast
from headway.simulate.grid import Setting, around, own
from headway.simulate.search import Search
from tests.simulate.planning import MEASURED, profile_of, setting

PROFILE = profile_of(
    train={"points": [{"devices": 1, "token_s": 0.05}]},
    rollout={"decode": [[1, 0.1], [16, 1.0]]},
)


def search_of(settings: list[Setting], *, vary: bool = False) -> Search:
    return Search(
        settings,
        lambda each: forecast(PROFILE, each),
        first=lambda each: each.preset == "colocate_sync",
        around=lambda each: around(PROFILE, each) if vary else (),
    )


def take(search: Search, step_s: float = 10.0) -> Setting:
    found = search.next()
    assert found is not None
    search.measured(found, replace(MEASURED, step_s=step_s))
    return found


def test_the_baseline_comes_first_then_one_setting_of_every_preset():
    search = search_of(own(PROFILE))
    first = [take(search).preset for _ in PRESETS]
    assert first[0] == "colocate_sync"
    assert sorted(first) == sorted(PRESETS)


def test_the_first_setting_of_a_preset_is_the_split_with_the_quickest_forecast():
    splits = [setting("async_partial", train, 8 - train) for train in range(1, 8)]
    expected = min(splits, key=lambda each: forecast(PROFILE, each).step_s(each))
    assert search_of(splits).next() == expected


def test_devices_move_to_the_side_that_was_measured_to_be_busy():
    splits = [setting("async_partial", train, 8 - train) for train in (3, 4, 5)]
    for trainer_idle, rollouter_idle, then in ((0.6, 0.0, 3), (0.0, 0.6, 5)):
        search = search_of(splits)
        search.measured(splits[1], replace(MEASURED, trainer_idle=trainer_idle, rollouter_idle=rollouter_idle))
        found = search.next()
        assert found is not None
        assert found.split.train_devices == then


def test_a_guess_scales_what_was_measured_nearest():
    near, far = setting("async_partial", 4, 4), setting("async_partial", 2, 6)
    search = Search(
        [near, far],
        lambda each: Shares(training=8 / each.split.train_devices, generation=4 / each.split.replicas),
        first=lambda each: False,
    )
    search.measured(near, replace(MEASURED, step_s=10.0, trainer_idle=0.2, rollouter_idle=0.5))
    # 8 s of training become 16 on half the devices, 5 s of generation 3.3; 2 s were neither.
    assert search.guess(far) == pytest.approx(16 + 2)


def test_eta_and_trigger_are_varied_once_no_open_split_looks_quicker():
    splits = [setting("async_partial", train, 8 - train) for train in (3, 4)]
    search = search_of(splits, vary=True)
    best = take(search, step_s=10.0)
    variations = around(PROFILE, best)
    later = {take(search, step_s=20.0) for _ in range(len(variations) + 1)}
    assert search.next() is None
    assert later == {*variations, *splits} - {best}


def test_nothing_is_varied_while_another_split_looks_quicker():
    splits = [setting("async_partial", train, 8 - train) for train in (3, 4, 5)]
    search = search_of(splits, vary=True)
    search.measured(splits[1], replace(MEASURED, trainer_idle=0.6, rollouter_idle=0.0))
    assert search.next() == splits[0]
    assert set(search.open) == {splits[0], splits[2]}


def test_every_setting_is_simulated_once():
    settings = own(PROFILE)
    search = search_of(settings)
    found = [take(search, step_s=1.0 + i % 7) for i in range(len(settings))]
    assert sorted(map(str, found)) == sorted(map(str, settings))
    assert search.next() is None
    assert search.open == []
