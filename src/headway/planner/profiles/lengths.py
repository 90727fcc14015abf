"""Lengths of prompts and answers in tokens: draws that depend on the trajectory's id, never on the order of calls.

    (seed, epoch, row, attempt) ─mix─▶ the group's key ─▶ what its answers have in common
                                           └──── k ──mix─▶ the answer's own share

A draw hashes its key instead of advancing a generator, so any order of calls gives the same lengths. The hash is
SplitMix64's output function (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from statistics import NormalDist

from headway.data.types import TrajectoryId
from headway.planner.profiles.job_profile import ConstantLengths, EmpiricalLengths, LengthsProfile, LognormalLengths

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
"""The odd number nearest to 2⁶⁴ divided by the golden ratio: what SplitMix64 steps its counter by."""

_inverse_normal = NormalDist().inv_cdf

LengthSampler = Callable[[TrajectoryId], int]
"""Function from a trajectory's id to its number of tokens, at least 1, the same at every call.

A prompt's length is its trajectory 0's. Two samplers of one seed share their draws: two recorded sets of equal size
then draw the same recorded group, but distributions that should be independent need seeds of their own.
"""


def lengths_of(profile: LengthsProfile, seed: int) -> LengthSampler:
    """Make the sampler of lengths that ``profile`` describes."""
    match profile:
        case ConstantLengths():
            return lambda id: profile.tokens
        case LognormalLengths():
            return _lognormal(profile, seed)
        case EmpiricalLengths():
            groups, recorded = profile.groups, _recorded(profile, seed)
            return lambda id: (lengths := groups[recorded(id)])[id.k % len(lengths)]


FilterSampler = Callable[[TrajectoryId], bool]
"""Function from a trajectory's id to True if the recorded group of its lengths was filtered."""


def filtered_of(profile: LengthsProfile, seed: int) -> FilterSampler | None:
    """Make the function that tells which groups of `lengths_of` were filtered; None if that is unknown."""
    if not isinstance(profile, EmpiricalLengths) or profile.filtered is None:
        return None
    filtered, recorded = frozenset(profile.filtered), _recorded(profile, seed)
    return lambda id: recorded(id) in filtered


def _lognormal(profile: LognormalLengths, seed: int) -> LengthSampler:
    """Lengths exp(μ + σ·(√w·g + √(1−w)·e)), rounded and cut; g is the group's, e the answer's, both standard normal."""
    mu = math.log(profile.mean) - profile.sigma**2 / 2
    common, own = (profile.sigma * math.sqrt(share) for share in (profile.within_group, 1 - profile.within_group))
    log_max = math.log(profile.max)

    @lru_cache(maxsize=1)  # a sampler is asked for one group after the other
    def of_group(epoch: int, row: int, attempt: int) -> tuple[int, float]:
        """The group's key, and the mean logarithm of its lengths."""
        key = _key(seed, epoch, row, attempt)
        return key, mu + common * _inverse_normal(_uniform(key, -1))  # −1 is the group's own draw

    def length(id: TrajectoryId) -> int:
        epoch, row, attempt, k = id
        key, location = of_group(epoch, row, attempt)
        logarithm = location + own * _inverse_normal(_uniform(key, k))
        # Cut before `exp`, which raises for large numbers.
        return profile.max if logarithm >= log_max else round(math.exp(logarithm)) or 1

    return length


def _recorded(profile: EmpiricalLengths, seed: int) -> Callable[[TrajectoryId], int]:
    """Return a function from a group to the recorded group whose lengths it takes: by its row in turn, or at random.

    Rows are admitted in order, so that a replay follows the order of admission, in which groups were recorded.
    """
    count = len(profile.groups)
    if profile.replay:
        return lambda id: id.row % count
    return lambda id: _key(seed, id.epoch, id.row, id.attempt) % count


def lengths_id(id: TrajectoryId, key: int) -> TrajectoryId:
    """Return the id that a sampler gets for an episode's call ``key``: the episode's own id for its first call.

    Further calls have lengths of their own, which vary together with those of the group.
    """
    return id._replace(k=_mix(_mix(key) + id.k)) if key else id


def uniform_of(*key: int) -> float:
    """Return a number in (0, 1) that looks random, and depends on ``key`` alone."""
    return _uniform(_key(*key), 0)


def _key(*parts: int) -> int:
    key = 0
    for part in parts:
        key = _mix(key + part)
    return key


def _uniform(key: int, index: int) -> float:
    """A number in (0, 1), never an end: the top 52 bits, in the middle of their bin."""
    return ((_mix(key + index) >> 12) + 0.5) * 2.0**-52


def _mix(value: int) -> int:
    """Hash any integer to 64 bits that look random."""
    # + 1, or 0 would hash to 0, and so would a key of zeros.
    value = (value + 1) * _GAMMA & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
