"""Random numbers from a token's identity (run, trajectory, call, position), independent of time and batch.

The uniform of a token is a pure function of (run seed, trajectory id, call key, position in the call): the
trajectory's fields and the call's key are folded into a 64-bit key, and position ``t`` is output ``t`` of a SplitMix64
generator whose state starts at that key (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", OOPSLA
2014). There is no generator state to carry across interrupts, replicas or restarts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.data.types import TrajectoryId

_GAMMA = 0x9E3779B97F4A7C15
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MIX1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX2) & _MASK
    return z ^ (z >> 31)


def trajectory_key(seed: int, trajectory: TrajectoryId, call: int = 0) -> int:
    """The 64-bit key of the uniforms of one call of a trajectory. Injective in each field while the others are fixed.

    ``call``: `headway.data.interfaces.generation.GenerateRequest.key`, of which 64 bits count. Calls of key 0 take the
    trajectory's own key.
    """
    key = _mix((seed + _GAMMA) & _MASK)
    for field in trajectory if call == 0 else (*trajectory, call):
        key = _mix((key + _GAMMA * (field + 1)) & _MASK)
    return key


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """[A] uniforms in [0, 1) with 53 random bits, one for each (key, position in the call)."""
    z = keys + np.uint64(_GAMMA) * (positions.astype(np.uint64) + np.uint64(1))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX2)
    z ^= z >> np.uint64(31)
    bits: NDArray[np.uint64] = z >> np.uint64(11)
    return np.ldexp(bits.astype(np.float64), -53)
