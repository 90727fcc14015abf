"""Costs in seconds: decoding under processor sharing, training, one phase of an update. Closed forms only.

While the set of active sequences stays the same, a step gives each of ``active`` sequences one token, so the cache
grows by ``active`` tokens a step, and step j (from 0) takes ``curve(active) + kv_token_s · (kv + active·j)``, with
``kv`` the tokens that were cached before the first. Summed over s steps:

    T(s) = (curve(active) + kv_token_s·kv)·s + kv_token_s·active·s·(s − 1)/2

T is exact for whole s, and is used for parts of a step too: it is additive, that is, stopping after s₁ steps and going
on for s₂ from a cache of kv + active·s₁ takes T(s₁ + s₂). It grows with s because each sequence has a token cached.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from headway.planner.profiles.job_profile import PhaseProfile, RolloutProfile, TrainPoint, TrainProfile


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Cost of one replica's decode steps, in seconds."""

    curve: tuple[float, ...]
    """Seconds of a step by active sequences, from 0 to the replica's slots, without what the cache costs."""
    kv_token_s: float

    def step_s(self, active: int, kv: float = 0.0) -> float:
        """Seconds of one step with ``kv`` tokens cached before it."""
        return self.curve[active] + self.kv_token_s * kv

    def slower(self, factor: float) -> DecodeCost:
        """Return these costs multiplied by ``factor``."""
        return DecodeCost(tuple(seconds * factor for seconds in self.curve), self.kv_token_s * factor)

    def seconds(self, active: int, kv: float, steps: float) -> float:
        """Seconds of ``steps`` steps, which need not be whole, with ``kv`` ≥ ``active`` tokens cached before."""
        growth = self.kv_token_s * active / 2
        return steps * (self.curve[active] + self.kv_token_s * kv - growth + growth * steps)

    def steps(self, active: int, kv: float, seconds: float) -> float:
        """Number of steps, with the part of one, that fit into ``seconds``: the inverse of `seconds`."""
        growth = self.kv_token_s * active / 2
        first = self.curve[active] + self.kv_token_s * kv - growth
        # The root in the form that cancels nothing, and that is seconds / first where the cache costs nothing.
        return 2 * seconds / (first + math.sqrt(first * first + 4 * growth * seconds))


def decode_cost(profile: RolloutProfile) -> DecodeCost:
    """Cost of decoding: linear between the measured points, level before the first, the last slope beyond the end."""
    curve = tuple(_on_curve(profile.decode, active) for active in range(profile.slots + 1))
    return DecodeCost(curve, profile.kv_token_s)


@dataclass(frozen=True, slots=True)
class TrainCost:
    """Cost of training on a certain number of devices, in wall seconds of the whole trainer, as in `TrainPoint`."""

    step_s: float
    token_s: float
    forward_token_s: float


def train_cost(profile: TrainProfile, devices: int) -> TrainCost:
    """Cost of training on ``devices`` devices: interpolated on logarithms between two measured numbers of devices;
    outside, from the nearest: seconds per token inversely with devices, seconds per step unchanged."""
    points = profile.points
    above = bisect_left([point.devices for point in points], devices)
    if above < len(points) and points[above].devices == devices:
        return _scaled(points[above], 1.0)
    if above in (0, len(points)):
        nearest = points[0] if above == 0 else points[-1]
        return _scaled(nearest, nearest.devices / devices)
    return _between(points[above - 1], points[above], devices)


def phase_seconds(phase: PhaseProfile, nbytes: int) -> float:
    """Seconds of one phase of an update that moves ``nbytes``."""
    return phase.latency_s + (nbytes / phase.bytes_per_s if phase.bytes_per_s is not None else 0.0)


def _on_curve(points: Sequence[tuple[int, float]], active: int) -> float:
    if active <= points[0][0] or len(points) == 1:
        return points[0][1]
    (fewer, quicker), (more, slower) = next(
        (pair for pair in pairwise(points) if active <= pair[1][0]), (points[-2], points[-1])
    )
    return quicker + (slower - quicker) * (active - fewer) / (more - fewer)


def _scaled(point: TrainPoint, factor: float) -> TrainCost:
    return TrainCost(point.step_s, point.token_s * factor, point.forward_token_s * factor)


def _between(low: TrainPoint, high: TrainPoint, devices: int) -> TrainCost:
    share = math.log(devices / low.devices) / math.log(high.devices / low.devices)

    def blend(a: float, b: float) -> float:
        if a > 0 and b > 0:
            return math.exp((1 - share) * math.log(a) + share * math.log(b))
        return (1 - share) * a + share * b  # a zero has no logarithm

    return TrainCost(
        blend(low.step_s, high.step_s),
        blend(low.token_s, high.token_s),
        blend(low.forward_token_s, high.forward_token_s),
    )
