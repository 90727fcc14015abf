"""In which order settings are simulated: whatever looks quickest first, by what is known so far.

    nearest measured setting of the preset ─▶ its training, generation and rest, in seconds
                                                   │ × how the forecast of each changes
                                                   ▼
                                             guess of a setting

The baseline comes first, then one setting of each preset, then the best guess. In an adaptive search, η and trigger are
varied at a preset's best split as soon as no open split of that preset looks quicker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction

from headway.simulate.forecast import Shares
from headway.simulate.grid import Setting
from headway.simulate.measure import Measurement


class Search:
    """Open settings, and what was measured of the others."""

    def __init__(
        self,
        settings: Iterable[Setting],
        forecast: Callable[[Setting], Shares],
        *,
        first: Callable[[Setting], bool],
        around: Callable[[Setting], Iterable[Setting]] = lambda setting: (),
    ) -> None:
        """``around`` gives variations of a preset's best setting, to be simulated, too."""
        self._of = forecast
        self._first = first
        self._around = around
        self._forecast: dict[Setting, Shares] = {}
        self._measured: dict[Setting, Measurement] = {}
        self._nearest: dict[Setting, Setting | None] = {}
        """For each open setting the measured one of its preset that is most like it."""
        self._varied: set[str] = set()
        for setting in settings:
            self._add(setting)

    @property
    def open(self) -> list[Setting]:
        """Settings that were not measured, the most promising first."""
        return sorted(self._nearest, key=self._rank)

    def next(self) -> Setting | None:
        """The setting to simulate now; None when all are measured."""
        for preset in sorted({setting.preset for setting in self._measured} - self._varied):
            self._vary(preset)
        return min(self._nearest, key=self._rank, default=None)

    def measured(self, setting: Setting, measurement: Measurement) -> None:
        self._measured[setting] = measurement
        del self._nearest[setting]
        for other, near in self._nearest.items():
            if other.preset == setting.preset and (near is None or _distance(other, setting) < _distance(other, near)):
                self._nearest[other] = setting

    def guess(self, setting: Setting) -> float:
        """Seconds per version of an open setting."""
        expected, near = self._forecast[setting], self._nearest[setting]
        if near is None:
            return expected.step_s(setting)
        known, forecast = self._measured[near], self._forecast[near]
        shares = Shares((1 - known.trainer_idle) * known.step_s, (1 - known.rollouter_idle) * known.step_s)
        rest = max(0.0, known.step_s - shares.step_s(near))
        scaled = Shares(
            _scaled(shares.training, forecast.training, expected.training),
            _scaled(shares.generation, forecast.generation, expected.generation),
        )
        return scaled.step_s(setting) + rest

    def _rank(self, setting: Setting) -> tuple[bool, bool, float]:
        return not self._first(setting), self._nearest[setting] is not None, self.guess(setting)

    def _add(self, setting: Setting) -> None:
        if setting in self._forecast:
            return
        self._forecast[setting] = self._of(setting)
        alike = (other for other in self._measured if other.preset == setting.preset)
        self._nearest[setting] = min(alike, key=lambda other: _distance(setting, other), default=None)

    def _vary(self, preset: str) -> None:
        best = min((s for s in self._measured if s.preset == preset), key=lambda s: self._measured[s].step_s)
        if any(self.guess(s) < self._measured[best].step_s for s in self._nearest if s.preset == preset):
            return
        self._varied.add(preset)
        for setting in self._around(best):
            self._add(setting)


def _distance(one: Setting, other: Setting) -> tuple[int, Fraction, int]:
    return (
        abs(one.split.train_devices - other.split.train_devices),
        abs(one.eta - other.eta),
        abs(one.trigger - other.trigger),
    )


def _scaled(known: float, forecast: float, expected: float) -> float:
    return known * expected / forecast if forecast > 0 else expected
