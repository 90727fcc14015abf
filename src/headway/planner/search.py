"""The order in which settings are simulated, and which of them are not worth it, by what is known so far.

nearest measured setting of the preset ─▶ its training, generation and rest, in seconds
                                               │ × how the forecast of each changes
                                               ▼
                                         guess of a setting

Everything   all settings: the baseline, then one of each preset, then the best guess
Climb        the baseline; the splits of one preset, from the best guess on to either side as long as they get no
             slower; the others, from the split that was best there; at last η and trigger at the best splits of the
             best presets that run ahead
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import takewhile

from headway.planner.grid import DeviceSplit, PlanSetting, Shares
from headway.planner.measure import Measurement

MUCH_SLOWER = 1.25
"""Multiple of the best known step time beyond which a guess is not worth a simulation."""
MAY_BE_QUICKER = 1.03
"""Multiple of the best split's step time: a split beside it whose guess is below this may turn out to be quicker."""
VARIED = 3
"""Number of presets whose η and trigger are varied."""


class Guess:
    """Guesses the seconds per version of settings that were not measured, from those that were."""

    def __init__(self, forecast: Callable[[PlanSetting], Shares]) -> None:
        self._forecast = forecast
        self._forecasts: dict[PlanSetting, Shares] = {}
        self.measured: dict[PlanSetting, Measurement] = {}
        self._by_preset: dict[str, list[PlanSetting]] = {}
        self._by_split: dict[tuple[str, Fraction, int], dict[DeviceSplit, PlanSetting]] = {}
        """Measured settings that differ only in their split, by (preset, η, trigger)."""

    def add(self, setting: PlanSetting, measurement: Measurement) -> None:
        self.measured[setting] = measurement
        self._by_preset.setdefault(setting.preset, []).append(setting)
        self._by_split.setdefault((setting.preset, setting.eta, setting.trigger), {})[setting.split] = setting

    def __call__(self, setting: PlanSetting) -> float:
        alike = self._by_preset.get(setting.preset)
        if alike is None:
            return self.forecast(setting)
        near = min(alike, key=lambda other: _distance(setting, other))
        elsewhere = self._ratio_elsewhere(setting, near)
        return self._scaled(setting, near) if elsewhere is None else self.measured[near].step_s * elsewhere

    def forecast(self, setting: PlanSetting) -> float:
        """Seconds per version of ``setting``, forecast from the profile alone."""
        return self._of(setting).step_s(setting)

    def _ratio_elsewhere(self, setting: PlanSetting, near: PlanSetting) -> float | None:
        """Factor by which the change of split from ``near`` to ``setting`` changed another such preset's step time."""
        if (setting.eta, setting.trigger) != (near.eta, near.trigger):
            return None
        for splits in self._by_split.values():
            before, after = splits.get(near.split), splits.get(setting.split)
            if before is not None and after is not None and after.synchronous == setting.synchronous:
                return self.measured[after].step_s / self.measured[before].step_s
        return None

    def _scaled(self, setting: PlanSetting, near: PlanSetting) -> float:
        known, forecast, expected = self.measured[near], self._of(near), self._of(setting)
        shares = Shares((1 - known.trainer_idle) * known.step_s, (1 - known.rollouter_idle) * known.step_s)
        rest = max(0.0, known.step_s - shares.step_s(near))
        scaled = Shares(
            _scaled(shares.training, forecast.training, expected.training),
            _scaled(shares.generation, forecast.generation, expected.generation),
        )
        return scaled.step_s(setting) + rest

    def _of(self, setting: PlanSetting) -> Shares:
        if setting not in self._forecasts:
            self._forecasts[setting] = self._forecast(setting)
        return self._forecasts[setting]


class Everything:
    """Search that simulates all settings."""

    def __init__(self, settings: Iterable[PlanSetting], guess: Guess, *, baseline: str) -> None:
        """Search ``settings``, beginning with the preset ``baseline``."""
        self._settings = list(dict.fromkeys(settings))
        self._guess = guess
        self._baseline = baseline

    def next(self) -> PlanSetting | None:
        """The setting to simulate now; None when there is no other."""
        return min(self._candidates(), key=self._rank, default=None)

    @property
    def open(self) -> list[PlanSetting]:
        """Settings to simulate, as far as that can be said now; the next one first."""
        return sorted(self._candidates(), key=self._rank)

    @property
    def skipped(self) -> list[PlanSetting]:
        """Settings that are expected to be slower than others, and are not simulated for that reason."""
        return []

    @property
    def to_come(self) -> int:
        """Number of settings that are still to be simulated, roughly."""
        return sum(1 for _ in self._candidates())

    def measured(self, setting: PlanSetting, measurement: Measurement) -> None:
        self._guess.add(setting, measurement)

    def _rank(self, setting: PlanSetting) -> tuple[object, ...]:
        return setting.preset != self._baseline, setting.preset in self._begun, self._guess(setting)

    @property
    def _begun(self) -> set[str]:
        return {setting.preset for setting in self._guess.measured}

    def _candidates(self) -> Iterator[PlanSetting]:
        return (setting for setting in self._settings if setting not in self._guess.measured)


class HillClimb(Everything):
    """A search for the best split of each preset, as if step time had one minimum over them, then for η and trigger."""

    def __init__(
        self,
        settings: Iterable[PlanSetting],
        guess: Guess,
        *,
        baseline: str,
        around: Callable[[PlanSetting], Sequence[PlanSetting]],
    ) -> None:
        """Search ``settings``, the splits of each preset; ``around`` returns a setting with η and trigger varied."""
        super().__init__(settings, guess, baseline=baseline)
        self._around = around
        self._splits: dict[str, list[PlanSetting]] = {}
        for setting in sorted(self._settings, key=lambda each: each.split):
            self._splits.setdefault(setting.preset, []).append(setting)
        self._leaders = {preset: self._leader(preset) for preset in self._splits}

    @property
    def skipped(self) -> list[PlanSetting]:
        candidates, begun = {*self._candidates()}, self._begun
        passed = (each for each in self._settings if each.preset in begun and self._unknown(each))
        return sorted((each for each in passed if each not in candidates), key=self._guess)

    @property
    def to_come(self) -> int:
        ahead = sum(min(len(splits), 3) for preset, splits in self._splits.items() if preset not in self._begun)
        return max(super().to_come, ahead) + (VARIED * 2 if ahead else 0)

    def _rank(self, setting: PlanSetting) -> tuple[object, ...]:
        # Whoever comes later knows more: what a split does for one preset it does for others of its kind, roughly.
        leader = self._leaders[setting.preset]
        waits = leader != setting.preset and setting.preset not in self._begun and any(self._next_splits(leader))
        baseline, *rest = super()._rank(setting)
        return (baseline, waits, *rest)

    def _candidates(self) -> Iterator[PlanSetting]:
        following = {preset: list(self._next_splits(preset)) for preset in self._splits}
        for splits in following.values():
            yield from splits
        best = [self._best(splits) for splits in self._splits.values()]
        if None in best:
            return
        ahead = [top for top in best if top is not None and top.eta > 0 and self._worth(top)]
        for top in sorted(ahead, key=self._step_s)[:VARIED]:
            if not following[top.preset]:
                yield from (each for each in self._around(top) if self._unknown(each) and self._worth(each))

    def _next_splits(self, preset: str) -> Iterator[PlanSetting]:
        splits, leader = self._splits[preset], self._leaders[preset]
        if (top := self._best(splits)) is not None:
            yield from self._neighbours(splits, top, leads=preset == leader)
        elif (known := self._best(self._splits[leader])) is not None:
            yield next(each for each in splits if each.split == known.split)
        else:
            yield min(splits, key=self._guess)

    def _leader(self, preset: str) -> str:
        """The preset of the same kind, with the same splits, that has the best forecast."""
        places, kind = {each.split for each in self._splits[preset]}, self._splits[preset][0].synchronous
        alike = [
            other
            for other, splits in self._splits.items()
            if {each.split for each in splits} == places and splits[0].synchronous == kind
        ]
        return min(alike, key=lambda other: min(map(self._guess.forecast, self._splits[other])))

    def _best(self, settings: Iterable[PlanSetting]) -> PlanSetting | None:
        known = (setting for setting in settings if setting in self._guess.measured)
        return min(known, key=self._step_s, default=None)

    def _neighbours(self, splits: Sequence[PlanSetting], top: PlanSetting, *, leads: bool) -> Iterator[PlanSetting]:
        """The next splits on either side of the best one: a leader's in any case, others where it may be quicker.
        Behind splits that may be as good as the best, the next one where it looks quicker.
        """
        at = splits.index(top)
        for side in (splits[at + 1 :], splits[:at][::-1]):
            passed = list(takewhile(lambda each: self._may_be_as_good(each, top), side))
            for following in side[len(passed) : len(passed) + 1]:
                limit = self._step_s(top) * (1 if passed else MAY_BE_QUICKER)
                promising = self._guess(following) < limit and self._worth(following)
                if self._unknown(following) and (promising or (leads and not passed)):
                    yield following

    def _may_be_as_good(self, setting: PlanSetting, top: PlanSetting) -> bool:
        known = self._guess.measured
        if setting not in known:
            return False
        return known[setting].step_s - known[setting].half_width <= known[top].step_s + known[top].half_width

    def _worth(self, setting: PlanSetting) -> bool:
        """Tell whether ``setting`` is not much slower than the best of its kind. Synchronous settings are one kind,
        since others are held against them; splits are one, since varying η and trigger may do for others what it did
        for the best."""
        varied = setting not in self._settings
        kind = [other for other in self._guess.measured if other.synchronous == setting.synchronous]
        best = min((self._step_s(other) for other in kind if varied or other in self._settings), default=math.inf)
        expected = self._guess(setting) if self._unknown(setting) else self._step_s(setting)
        return expected <= MUCH_SLOWER * best

    def _unknown(self, setting: PlanSetting) -> bool:
        return setting not in self._guess.measured

    def _step_s(self, setting: PlanSetting) -> float:
        return self._guess.measured[setting].step_s


def _distance(one: PlanSetting, other: PlanSetting) -> tuple[int, Fraction, int]:
    return (
        abs(one.split.train_devices - other.split.train_devices),
        abs(one.eta - other.eta),
        abs(one.trigger - other.trigger),
    )


def _scaled(known: float, forecast: float, expected: float) -> float:
    return known * expected / forecast if forecast > 0 else expected
