"""In which order settings are simulated, and which of them are not worth it, by what is known so far.

    nearest measured setting of the preset ─▶ its training, generation and rest, in seconds
                                                   │ × how the forecast of each changes
                                                   ▼
                                             guess of a setting

    Everything   all settings, the best guess first
    Climb        of each preset one split; its neighbours as long as they may be quicker; then η and trigger at the best
                 splits of the best presets that run ahead

The baseline comes first in both, then one setting of each preset.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import takewhile

from headway.simulate.forecast import Shares
from headway.simulate.grid import Setting
from headway.simulate.measure import Measurement

MUCH_SLOWER = 1.25
"""A guess of so many times the best known step time is not worth a simulation."""
VARIED = 3
"""Presets whose η and trigger are varied."""


class Guess:
    """Seconds per version of settings that were not measured, from those that were."""

    def __init__(self, forecast: Callable[[Setting], Shares]) -> None:
        self._forecast = forecast
        self._forecasts: dict[Setting, Shares] = {}
        self.measured: dict[Setting, Measurement] = {}

    def __call__(self, setting: Setting) -> float:
        expected = self._of(setting)
        alike = (other for other in self.measured if other.preset == setting.preset)
        near = min(alike, key=lambda other: _distance(setting, other), default=None)
        if near is None:
            return expected.step_s(setting)
        known, forecast = self.measured[near], self._of(near)
        shares = Shares((1 - known.trainer_idle) * known.step_s, (1 - known.rollouter_idle) * known.step_s)
        rest = max(0.0, known.step_s - shares.step_s(near))
        scaled = Shares(
            _scaled(shares.training, forecast.training, expected.training),
            _scaled(shares.generation, forecast.generation, expected.generation),
        )
        return scaled.step_s(setting) + rest

    def _of(self, setting: Setting) -> Shares:
        if setting not in self._forecasts:
            self._forecasts[setting] = self._forecast(setting)
        return self._forecasts[setting]


class Everything:
    """All settings."""

    def __init__(self, settings: Iterable[Setting], guess: Guess, *, baseline: str) -> None:
        """``baseline`` is the preset to begin with."""
        self._settings = list(dict.fromkeys(settings))
        self._guess = guess
        self._baseline = baseline

    @property
    def open(self) -> list[Setting]:
        """Settings to simulate, as far as that can be said now; the next one first."""
        known = {setting.preset for setting in self._guess.measured}
        return sorted(
            self._candidates(),
            key=lambda each: (each.preset != self._baseline, each.preset in known, self._guess(each)),
        )

    @property
    def skipped(self) -> list[Setting]:
        """Settings that are expected to be slower than others, and are not simulated for that reason."""
        return []

    @property
    def to_come(self) -> int:
        """How many settings will be simulated still, roughly."""
        return len(self.open)

    def measured(self, setting: Setting, measurement: Measurement) -> None:
        self._guess.measured[setting] = measurement

    def _candidates(self) -> Iterator[Setting]:
        return (setting for setting in self._settings if setting not in self._guess.measured)


class Climb(Everything):
    """Of each preset the best split, as if its step time had one minimum over them, and what varies it."""

    def __init__(
        self,
        settings: Iterable[Setting],
        guess: Guess,
        *,
        baseline: str,
        around: Callable[[Setting], Sequence[Setting]],
    ) -> None:
        """``settings`` has each preset's splits; ``around`` varies η and trigger of one."""
        super().__init__(settings, guess, baseline=baseline)
        self._around = around
        self._splits: dict[str, list[Setting]] = {}
        for setting in sorted(self._settings, key=lambda each: each.split):
            self._splits.setdefault(setting.preset, []).append(setting)

    @property
    def skipped(self) -> list[Setting]:
        passed = {*self._settings} - {*self._guess.measured, *self._candidates()}
        return sorted(passed, key=self._guess)

    @property
    def to_come(self) -> int:
        begun = {setting.preset for setting in self._guess.measured}
        neighbours = sum(2 for preset, splits in self._splits.items() if preset not in begun and len(splits) > 1)
        variations = 0 if begun == {*self._splits} else VARIED * 2
        return len(self.open) + neighbours + variations

    def _candidates(self) -> Iterator[Setting]:
        best = {preset: self._best(splits) for preset, splits in self._splits.items()}
        climbing = set()
        for preset, top in best.items():
            if top is None:
                yield min(self._splits[preset], key=self._guess)
                climbing.add(preset)
                continue
            for neighbour in self._neighbours(self._splits[preset], top):
                yield neighbour
                climbing.add(preset)
        if None in best.values():
            return
        ahead = [top for top in best.values() if top is not None and top.eta > 0 and self._worth(top)]
        for top in sorted(ahead, key=self._step_s)[:VARIED]:
            if top.preset not in climbing:
                yield from (each for each in self._around(top) if self._unknown(each) and self._worth(each))

    def _best(self, settings: Iterable[Setting]) -> Setting | None:
        known = (setting for setting in settings if setting in self._guess.measured)
        return min(known, key=self._step_s, default=None)

    def _neighbours(self, splits: Sequence[Setting], top: Setting) -> Iterator[Setting]:
        """On either side of the best split the next one; behind splits that may be as good, if it looks quicker."""
        at = splits.index(top)
        for side in (splits[at + 1 :], splits[:at][::-1]):
            passed = list(takewhile(lambda each: self._may_be_as_good(each, top), side))
            for following in side[len(passed) : len(passed) + 1]:
                looks_quicker = self._guess(following) < self._step_s(top)
                if self._unknown(following) and self._worth(following) and (looks_quicker or not passed):
                    yield following

    def _may_be_as_good(self, setting: Setting, top: Setting) -> bool:
        known = self._guess.measured
        if setting not in known:
            return False
        return known[setting].step_s - known[setting].half_width <= known[top].step_s + known[top].half_width

    def _worth(self, setting: Setting) -> bool:
        """Compared with the best of its kind. Synchronous settings are a kind of their own, as others are held against
        them; so are splits, as varying η and trigger may do for others what it did for the best."""
        varied = setting not in self._settings
        kind = [other for other in self._guess.measured if other.synchronous == setting.synchronous]
        best = min((self._step_s(other) for other in kind if varied or other in self._settings), default=math.inf)
        expected = self._guess(setting) if self._unknown(setting) else self._step_s(setting)
        return expected <= MUCH_SLOWER * best

    def _unknown(self, setting: Setting) -> bool:
        return setting not in self._guess.measured

    def _step_s(self, setting: Setting) -> float:
        return self._guess.measured[setting].step_s


def _distance(one: Setting, other: Setting) -> tuple[int, Fraction, int]:
    return (
        abs(one.split.train_devices - other.split.train_devices),
        abs(one.eta - other.eta),
        abs(one.trigger - other.trigger),
    )


def _scaled(known: float, forecast: float, expected: float) -> float:
    return known * expected / forecast if forecast > 0 else expected
