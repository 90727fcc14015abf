"""The order in which settings are simulated, and which of them are not worth it, by what is known so far.

nearest measured setting of the preset ─▶ its training, generation and rest, in seconds
                                               │ × how the forecast of each changes
                                               ▼
                                         guess of a setting

The baseline comes first, then one preset of each kind (synchronous or not), then splits that look quicker than what was
measured of their preset, or are beside the best of their kind; further presets begin at the best split. At last come η
and trigger at the best splits of the best presets that run ahead. What is left out looks slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction

from headway.planner.grid import DeviceSplit, PlanSetting, Shares
from headway.planner.measure import Measurement

MUCH_SLOWER = 1.25
"""Multiple of the best known step time beyond which a guess is not worth a simulation."""
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


class SettingSearch:
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
        self._places = {each: place for place, each in enumerate(sorted(self._settings, key=_by_split))}
        """Setting → its place among the splits of its preset, in order."""
        self._quickest: dict[tuple[object, ...], PlanSetting] = {}
        """The quickest measured setting of a preset's splits, of synchronous splits or others, and with η and trigger
        varied of all synchronous settings or others."""
        self._guess = guess
        self._baseline = baseline
        self._around = around

    def next(self) -> PlanSetting | None:
        """The setting to simulate now; None when there is no other."""
        return next(iter(self.open), None)

    @property
    def open(self) -> list[PlanSetting]:
        """Settings to simulate, as far as that can be said now; the next one first."""
        return [setting for phase in self._phases() for setting in sorted(phase, key=self._rank)]

    @property
    def skipped(self) -> list[PlanSetting]:
        """Settings that are expected to be slower than others, and are not simulated for that reason."""
        candidates, begun = {*self.open}, self._begun
        passed = (each for each in self._settings if each.preset in begun and self._unknown(each))
        return sorted((each for each in passed if each not in candidates), key=self._guess)

    @property
    def to_come(self) -> int:
        """Number of settings that are still to be simulated, roughly."""
        known, presets = sum(map(len, self._phases())), {each.preset for each in self._settings}
        if self._around is None or presets <= self._begun:
            return known
        return max(known, 2 * len(presets - self._begun)) + 2 * VARIED

    def measured(self, setting: PlanSetting, measurement: Measurement) -> None:
        self._guess.add(setting, measurement)
        groups: list[tuple[object, ...]] = [("varied", setting.synchronous)]
        if setting in self._places:
            groups += [("split", setting.synchronous), ("preset", setting.preset)]
        for group in groups:
            before = self._quickest.get(group)
            if before is None or measurement.step_s < self._step_s(before):
                self._quickest[group] = setting

    def _rank(self, setting: PlanSetting) -> tuple[object, ...]:
        return setting.preset != self._baseline, setting.preset in self._begun, self._guess(setting)

    @property
    def _begun(self) -> set[str]:
        return {setting.preset for setting in self._guess.measured}

    def _phases(self) -> Iterator[list[PlanSetting]]:
        """Settings to simulate, as far as that can be said now: those of a phase before those of the next one."""
        unknown = [setting for setting in self._settings if self._unknown(setting)]
        if self._around is None:
            yield unknown
            return
        begun = self._begun
        fresh = [
            self._first_of(preset, unknown) for preset in {each.preset: None for each in unknown} if preset not in begun
        ]
        alone = [each for each in fresh if each.preset == self._baseline or not self._quickest_like(each)]
        yield alone
        varying = any(each not in self._places for each in self._guess.measured)
        promising = [] if varying else [each for each in unknown if each.preset in begun and self._may_be_best(each)]
        yield promising
        yield [each for each in fresh if each not in alone]
        if fresh or promising:
            return
        best = [top for group, top in self._quickest.items() if group[0] == "preset"]
        ahead = sorted((top for top in best if top.eta > 0 and self._worth(top)), key=self._step_s)
        for top in ahead[:VARIED]:
            yield [each for each in self._around(top) if self._unknown(each) and self._worth(each)]

    def _first_of(self, preset: str, unknown: Iterable[PlanSetting]) -> PlanSetting:
        """The split of ``preset`` to begin with: the one that is the best of another preset, or looks like the best."""
        splits = [each for each in unknown if each.preset == preset]
        top = self._quickest_like(splits[0])
        alike = (each for each in splits if top is not None and each.split == top.split)
        return next(alike, None) or min(splits, key=self._guess)

    def _quickest_like(self, setting: PlanSetting) -> PlanSetting | None:
        """The quickest measured split of the settings that are synchronous as ``setting`` is, or that are not."""
        return self._quickest.get(("split", setting.synchronous))

    def _may_be_best(self, setting: PlanSetting) -> bool:
        """Tell whether a split may be quicker than the best that was measured of its preset: it looks so, or it is
        beside the best of all presets of its kind.
        """
        top = self._quickest["preset", setting.preset]
        beside = abs(self._places[setting] - self._places[top]) == 1
        if beside and top == self._quickest_like(setting):
            return True
        return self._guess(setting) < self._step_s(top) and self._worth(setting)

    def _worth(self, setting: PlanSetting) -> bool:
        """Tell whether ``setting`` is not much slower than the best of its kind. Synchronous settings are one kind,
        since others are held against them; splits are one, since another η or trigger may do for others what it did for
        the best.
        """
        kind = "split" if setting in self._places else "varied"
        best = self._quickest.get((kind, setting.synchronous))
        expected = self._guess(setting) if self._unknown(setting) else self._step_s(setting)
        return best is None or expected <= MUCH_SLOWER * self._step_s(best)

    def _unknown(self, setting: PlanSetting) -> bool:
        return setting not in self._guess.measured

    def _step_s(self, setting: PlanSetting) -> float:
        return self._guess.measured[setting].step_s


def _by_split(setting: PlanSetting) -> tuple[object, ...]:
    return setting.preset, setting.split


def _distance(one: PlanSetting, other: PlanSetting) -> tuple[int, Fraction, int]:
    return (
        abs(one.split.train_devices - other.split.train_devices),
        abs(one.eta - other.eta),
        abs(one.trigger - other.trigger),
    )


def _scaled(known: float, forecast: float, expected: float) -> float:
    return known * expected / forecast if forecast > 0 else expected
