"""Costs in seconds, in closed form: decoding under processor sharing, training, one phase of an update.

While the set of active sequences stays the same, a step gives each of ``active`` sequences one token, so the cache
grows by ``active`` tokens a step, and step j (from 0) takes ``curve(active) + kv_token_s · (kv + active·j)``, with
``kv`` the tokens that were cached before the first. Summed over s steps:

    T(s) = (curve(active) + kv_token_s·kv)·s + kv_token_s·active·s·(s − 1)/2

T is exact for whole s, and is used for parts of a step too: it is additive, that is, stopping after s₁ steps and going
on for s₂ from a cache of kv + active·s₁ takes T(s₁ + s₂). It grows with s because each sequence has a token cached.

`Division` divides the trainer's work over data ranks: the rank that has most decides. `Contention` is of sides on one
machine: each computes more slowly while the other one does.

trainer begins or ends ─▶ every replica's steps get longer or shorter, from that moment on
first replica begins, last one ends ─▶ so does what is left of the trainer's work
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headway.data.assignment import Cost, assign, split
from headway.data.types import TrainSample, TrajectoryId
from headway.planner.profiles.job_profile import (
    ContentionProfile,
    PhaseProfile,
    RolloutProfile,
    TrainPoint,
    TrainProfile,
)


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
    points = list(profile.decode)
    if len(points) > 1 and points[-1][0] < profile.slots:
        (fewer, quicker), (more, slower) = points[-2:]
        points.append((profile.slots, slower + (slower - quicker) / (more - fewer) * (profile.slots - more)))
    curve = np.interp(np.arange(profile.slots + 1), [count for count, _ in points], [seconds for _, seconds in points])
    return DecodeCost(tuple(curve.tolist()), profile.kv_token_s)


def train_cost(profile: TrainProfile, devices: int) -> TrainPoint:
    """Cost of training on ``devices`` devices: interpolated on logarithms between two measured numbers of devices;
    outside, from the nearest: seconds per token inversely with devices, seconds per step unchanged."""
    counts = [point.devices for point in profile.points]
    nearest = min(max(devices, counts[0]), counts[-1])

    def cost(seconds: Callable[[TrainPoint], float]) -> float:
        measured = np.array([seconds(point) for point in profile.points])
        if nearest in counts:
            return float(measured[counts.index(nearest)])
        if measured.all():
            return float(np.exp(np.interp(np.log(nearest), np.log(counts), np.log(measured))))
        return float(np.interp(np.log(nearest), np.log(counts), measured))  # a zero has no logarithm

    return TrainPoint(
        devices=devices,
        step_s=cost(lambda point: point.step_s),
        token_s=cost(lambda point: point.token_s) * nearest / devices,
        forward_token_s=cost(lambda point: point.forward_token_s) * nearest / devices,
    )


def phase_seconds(phase: PhaseProfile, nbytes: int) -> float:
    """Seconds of one phase of an update that moves ``nbytes``."""
    return phase.latency_s + (nbytes / phase.bytes_per_s if phase.bytes_per_s is not None else 0.0)


class Division:
    """Work of a batch over ``ranks`` data ranks, in tokens."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._owners: Mapping[TrajectoryId, int] | None = None

    def begin(self, mini_batches: Sequence[Sequence[TrainSample]]) -> None:
        """Assign a batch. Without one, samples are assigned by themselves."""
        if self._ranks > 1:
            self._owners = assign(mini_batches, self._ranks, Cost())

    def end(self) -> None:
        """Forget the batch."""
        self._owners = None

    def tokens(self, samples: Sequence[TrainSample]) -> int:
        """Number of ranks times the tokens, prompts and answers, of the one that has most: how many it would take to
        keep all ranks at work for as long. Without uneven loads, the tokens of ``samples``.
        """
        if self._ranks == 1:
            return _tokens(samples)
        owners = assign([samples], self._ranks, Cost()) if self._owners is None else self._owners
        return self._ranks * max(_tokens([samples[i] for i in share]) for share in split(samples, owners, self._ranks))


def _tokens(samples: Sequence[TrainSample]) -> int:
    return sum(sample.total_length for sample in samples)


class Contention:
    """The sides that compute on one machine at a moment, and how they slow each other. Sides begin and stop between two
    moments only, so that work is a sum of stretches at constant speed.
    """

    def __init__(self, profile: ContentionProfile) -> None:
        self._profile = profile
        self._slow_replicas: list[Callable[[float], None]] = []
        self._computing: set[str] = set()
        """Names of the replicas that compute now."""
        self._changed = asyncio.Event()
        """Event that is set when replicas begin or stop computing, so that training looks again. Replaced each time."""

    def add_replica(self, slow_down: Callable[[float], None]) -> None:
        """Add a replica. ``slow_down`` is called with the factor by which everything takes longer from now on."""
        self._slow_replicas.append(slow_down)

    def replica_computes(self, name: str, computing: bool) -> None:
        """Note that the replica ``name`` begins or stops computing."""
        before = bool(self._computing)
        if computing:
            self._computing.add(name)
        else:
            self._computing.discard(name)
        if bool(self._computing) != before:
            self._changed.set()
            self._changed = asyncio.Event()

    async def train(self, seconds: float) -> None:
        """Wait until the trainer has done what would take it ``seconds`` alone."""
        loop = asyncio.get_running_loop()
        self._slow_down(self._profile.rollout)
        try:
            while True:
                factor = self._profile.train if self._computing else 1.0
                # Read before the wait: it is replaced by another one as soon as it is set.
                began, changed = loop.time(), self._changed
                try:
                    async with asyncio.timeout(seconds * factor):
                        await changed.wait()
                except TimeoutError:
                    return
                seconds -= (loop.time() - began) / factor
        finally:
            self._slow_down(1.0)

    def _slow_down(self, factor: float) -> None:
        for slow_down in self._slow_replicas:
            slow_down(factor)
