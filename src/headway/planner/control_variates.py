"""Control variates: what is known of a row's answers before it is simulated, and what they turn out to be: control
variates of its times.

    tokens    of all answers that end within a version: what keeps slots, and later the trainer, busy
    longest   of each block of B groups, in the version in which the block's last answer ends: what an update that lets
              answers end, or a batch that must be complete, waits for

Both count each group once, whenever it ends. So at steady state their means are those of the groups that are admitted
in a version's time, whatever the order of completion, and those are known from the profile.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from math import floor
from statistics import NormalDist

from headway.events import TrajectoryFinished
from headway.planner.estimate import ControlVariate
from headway.planner.grid import mean_length
from headway.planner.profiles.job_profile import (
    ConstantLengths,
    EmpiricalLengths,
    LengthsProfile,
    LognormalLengths,
    Profile,
)

_POINTS, _GROUP_POINTS, _FARTHEST = 200, 80, 7.0
"""Numbers of points of numerical integrals over tokens, and over what a group has in common; the standard deviations
that they reach."""


class AnswerControls:
    """Control variates of a row: counts by version. Recorded answers in their order are no sample, and give none; nor
    do episodes of several turns, which take more than their tokens.
    """

    def __init__(self, profile: Profile, eta: Fraction) -> None:
        batch, response = profile.batch, profile.response
        self._groups, self._answers = batch.groups_per_version, batch.groups_per_version * batch.n
        self._ahead = floor(eta * batch.groups_per_version)
        """Number of groups that are admitted ahead of the first update; blocks of B groups are counted from there."""
        self._blocks: dict[int, tuple[int, int]] = {}
        """Block → (answers that ended, tokens of the longest), for blocks that are not complete."""
        self._tokens = [0]
        self._longest = [0]
        self._expected: tuple[float, float] | None = None
        replayed = isinstance(response, EmpiricalLengths) and response.replay
        if not replayed and profile.program is None:
            blocks = 1 / (1 - profile.reward.filtered)
            self._expected = (
                blocks * self._answers * mean_length(response, answers=batch.n),
                blocks * mean_longest(response, groups=batch.groups_per_version, answers=batch.n),
            )

    def answer_ended(self, event: TrajectoryFinished) -> None:
        self._tokens[-1] += event.tokens
        block = (event.number - self._ahead) // self._groups
        ended, longest = self._blocks.get(block, (0, 0))
        ended, longest = ended + 1, max(longest, event.tokens)
        if ended < self._answers:
            self._blocks[block] = (ended, longest)
        else:
            self._blocks.pop(block, None)
            self._longest[-1] += longest

    def version_ended(self) -> None:
        self._tokens.append(0)
        self._longest.append(0)

    def of(self, first: int, count: int) -> list[ControlVariate]:
        """The controls of ``count`` versions from ``first`` on."""
        if self._expected is None:
            return []
        tokens, longest = self._expected
        versions = slice(first, first + count)
        return [ControlVariate(self._tokens[versions], tokens), ControlVariate(self._longest[versions], longest)]


def mean_longest(lengths: LengthsProfile, *, groups: int, answers: int) -> float:
    """Tokens of the longest answer among ``groups`` groups of ``answers``, on average."""
    match lengths:
        case ConstantLengths():
            return lengths.tokens
        case EmpiricalLengths():
            longest = sorted(max(group[:answers]) for group in lengths.groups)
            none_longer = [((i + 1) / len(longest)) ** groups for i in range(len(longest))]
            return math.fsum(
                tokens * (up_to - below)
                for tokens, below, up_to in zip(longest, [0.0, *none_longer], none_longer, strict=False)
            )
    return _mean_longest_lognormal(lengths, groups, answers)


def _mean_longest_lognormal(lengths: LognormalLengths, groups: int, answers: int) -> float:
    """Expected longest of ``answers`` · ``groups`` log-normal lengths: max − ∫ P(none is longer than x) dx.

    Answers of one group are independent given the part that they have in common.
    """
    if lengths.sigma == 0:
        return min(lengths.mean, lengths.max)
    mu, sigma, cdf = math.log(lengths.mean) - lengths.sigma**2 / 2, lengths.sigma, NormalDist().cdf
    common, own = math.sqrt(lengths.within_group), math.sqrt(1 - lengths.within_group)
    shared = [(common * g, math.exp(-g * g / 2)) for g in _grid(_GROUP_POINTS)] if common > 0 else [(0.0, 1.0)]
    total = math.fsum(weight for _, weight in shared)

    def none_longer(tokens: float) -> float:
        z = (math.log(tokens) - mu) / sigma
        if own == 0:
            return cdf(z) ** groups
        return (math.fsum(weight * cdf((z - g) / own) ** answers for g, weight in shared) / total) ** groups

    reached = [tokens for z in _grid(_POINTS) if (tokens := math.exp(mu + sigma * z)) < lengths.max]
    points = [(tokens, none_longer(tokens)) for tokens in (*reached, lengths.max)]
    return lengths.max - math.fsum((b - a) * (p + q) / 2 for (a, p), (b, q) in pairwise(points))


def _grid(points: int) -> list[float]:
    """A grid of evenly spaced standard normal values."""
    return [_FARTHEST * (2 * i + 1 - points) / points for i in range(points)]
