"""Measurement of how far the probe's log-probs may differ by rounding alone: while trainer and receiver are the same.

    model folder ─┬▶ trainer  ─▶ probe ─┐
                  └▶ receiver ─▶ probe ─┴▶ difference ─▶ × SAFETY, between the dtype's FLOOR and CEILING ─▶ tolerance

Everybody opens the same folder, also in a run that is resumed (its checkpoint comes later) and in the place of a
replica that was lost. So what the probes differ by before any update is what two implementations make of equal weights.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from headway.data.interfaces.weights import PolicyReceiver
from headway.errors import ModelError
from headway.runtime.task_groups import concurrently

SAFETY = 10.0
"""Factor from a receiver's difference at version 0 to its tolerance: eight log-probs are a small sample, and weights
change meanwhile."""
FLOOR = {"float32": 1e-3, "bfloat16": 0.05}
"""Smallest tolerance in nats, by the dtype of the coarser side: a model that begins with small logits rounds less than
it will once its distributions are sharp."""
CEILING = {"float32": 0.05, "bfloat16": 0.5}
"""Largest tolerance, and largest difference at version 0, in nats, by dtype. Rounding explains no more."""


class ProbeTolerance:
    """Tolerances of one run's receivers, by name."""

    def __init__(self, dtypes: Iterable[str], expected: NDArray[np.float32] | None) -> None:
        """Prepare to measure. ``expected``: the trainer's probe [N] at version 0; None: nothing is to be verified."""
        dtypes = tuple(dtypes)
        self._floor = max(FLOOR[dtype] for dtype in dtypes)
        self._ceiling = max(CEILING[dtype] for dtype in dtypes)
        self._expected = expected
        self._tolerances: dict[str, float] = {}

    def tolerance(self, name: str) -> float:
        """Return the nats by which ``name`` may differ from the trainer; `CEILING` where nothing was measured."""
        return self._tolerances.get(name, self._ceiling)

    async def measure(self, receivers: Iterable[PolicyReceiver]) -> None:
        """Set the tolerance of each of ``receivers``, which hold version 0 and decode nothing.

        Raises `ModelError` for a receiver whose log-probs differ by more than rounding could explain.
        """
        if self._expected is not None:
            await concurrently(self._measure(receiver, self._expected) for receiver in receivers)

    async def _measure(self, receiver: PolicyReceiver, expected: NDArray[np.float32]) -> None:
        served = await receiver.probe()
        if served is None:
            return
        same = served.shape == expected.shape
        off = float(np.abs(served.astype(np.float64) - expected).max(initial=0.0)) if same else float("inf")
        if not off <= self._ceiling:  # holds also for NaN
            raise ModelError(
                f"{receiver.name} and the trainer compute different log-probs from the same model: those of the probe "
                f"differ by up to {off:.3g} nats before any update, and rounding explains at most {self._ceiling:g}. "
                "The rollout engine does not run this model as transformers does; try another rollout.name, or "
                "model.dtype=float32 and rollout.dtype=float32. param_update.verify=false turns the check off"
            )
        self._tolerances[receiver.name] = min(self._ceiling, max(self._floor, SAFETY * off))
