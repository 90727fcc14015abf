"""The order in which settings are simulated, and which of them are not worth it, by what is known so far.

nearest measured setting of the preset ─▶ its training, generation and rest, in seconds
                                               │ × how the forecast of each changes
                                               ▼
                                         guess of a setting

The baseline comes first, then one setting of each preset, then the best guess. What is left out, unless everything is
asked for: splits that look slower than the best measured one of their preset, but for those beside the best of all, and
what looks much slower than that. At
last come η and trigger at the best splits of the best presets that run ahead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction

from headway.planner.grid import DeviceSplit, PlanSetting, Shares
from headway.planner.measure import Measurement

MUCH_SLOWER = 1.25
"""Multiple of the best known step time beyond which a guess is not worth a simulation."""
MAY_BE_QUICKER = 1.03
"""Multiple of the best measured split's step time: one whose guess is below this may turn out to be quicker."""
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


class Search:
    """The settings of a plan in the order in which they are simulated. All of them, or those that may be the best."""

    def __init__(
        self,
        settings: Iterable[PlanSetting],
        guess: Guess,
        *,
        baseline: str,
        around: Callable[[PlanSetting], Sequence[PlanSetting]] | None = None,
    ) -> None:
        """Search ``settings``, beginning with the preset ``baseline``. With ``around``, which returns a setting with η
        and trigger varied, leave out what is expected to be slower.
        """
        self._settings = list(dict.fromkeys(settings))
        self._guess = guess
        self._baseline = baseline
        self._around = around

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
        candidates, begun = {*self._candidates()}, self._begun
        passed = (each for each in self._settings if each.preset in begun and self._unknown(each))
        return sorted((each for each in passed if each not in candidates), key=self._guess)

    @property
    def to_come(self) -> int:
        """Number of settings that are still to be simulated, roughly."""
        known, presets = sum(1 for _ in self._candidates()), {each.preset for each in self._settings}
        if self._around is None or presets <= self._begun:
            return known
        return max(known, 2 * len(presets - self._begun)) + 2 * VARIED

    def measured(self, setting: PlanSetting, measurement: Measurement) -> None:
        self._guess.add(setting, measurement)

    def _rank(self, setting: PlanSetting) -> tuple[object, ...]:
        return setting.preset != self._baseline, setting.preset in self._begun, self._guess(setting)

    @property
    def _begun(self) -> set[str]:
        return {setting.preset for setting in self._guess.measured}

    def _candidates(self) -> Iterator[PlanSetting]:
        unknown = [setting for setting in self._settings if self._unknown(setting)]
        if self._around is None:
            yield from unknown
            return
        begun = self._begun
        fresh = dict.fromkeys(each.preset for each in unknown if each.preset not in begun)
        for preset in fresh:
            yield min((each for each in unknown if each.preset == preset), key=self._guess)
        promising = [each for each in unknown if each.preset in begun and self._may_be_best(each)]
        yield from promising
        if fresh:
            return
        best = [self._best_of(preset) for preset in {each.preset: None for each in self._settings}]
        ahead = sorted((top for top in best if top.eta > 0 and self._worth(top)), key=self._step_s)
        for top in ahead[:VARIED]:
            if not any(each.preset == top.preset for each in promising):
                yield from (each for each in self._around(top) if self._unknown(each) and self._worth(each))

    def _may_be_best(self, setting: PlanSetting) -> bool:
        """Tell whether a split may be quicker than the best that was measured of its preset: it looks so, or it is
        beside the best of all presets of its kind.
        """
        top = self._best_of(setting.preset)
        quickest = min(self._kind_of(setting), key=self._step_s)
        splits = sorted(each.split for each in self._settings if each.preset == setting.preset)
        beside = top == quickest and abs(splits.index(setting.split) - splits.index(top.split)) == 1
        return beside or (self._guess(setting) < MAY_BE_QUICKER * self._step_s(top) and self._worth(setting))

    def _best_of(self, preset: str) -> PlanSetting:
        known = (each for each in self._settings if each.preset == preset and not self._unknown(each))
        return min(known, key=self._step_s)

    def _kind_of(self, setting: PlanSetting) -> list[PlanSetting]:
        """Measured settings that ``setting`` is held against: synchronous or not; splits among themselves, as another
        η or trigger may do for others what it did for the best.
        """
        known = [each for each in self._guess.measured if each.synchronous == setting.synchronous]
        return [each for each in known if each in self._settings or setting not in self._settings]

    def _worth(self, setting: PlanSetting) -> bool:
        """Tell whether ``setting`` is not much slower than the best of its kind."""
        best = min(map(self._step_s, self._kind_of(setting)), default=math.inf)
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
