"""From the pipeline's groups to the advantage estimators' tensors, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headway.algorithms.advantages import AdvantageEstimator, AdvantageInputs, per_token
from headway.data.types import FinishReason, Group
from headway.errors import RunError


class GroupAdvantages:
    """An `interfaces.AdvantageFn` over an estimator of `headway.algorithms.advantages` and its parameters."""

    def __init__(self, estimator: AdvantageEstimator, params: Mapping[str, Any]) -> None:
        """``params``: of all estimators; this one gets those that it names."""
        names = signature(estimator).parameters.values()
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in names)
        self._estimator = estimator
        self._params = dict(params) if takes_all else {p.name: params[p.name] for p in names if p.name in params}

    def __call__(self, groups: Sequence[Group]) -> list[list[NDArray[np.float32]]]:
        """For each group one [T] float32 array per trajectory. Raises `RunError` on an advantage that is not finite."""
        inputs = AdvantageInputs(
            rewards=torch.from_numpy(np.concatenate([group.rewards for group in groups])),
            groups=torch.tensor([i for i, group in enumerate(groups) for _ in group.trajectories]),
            lengths=torch.tensor([t.length for group in groups for t in group.trajectories]),
            finished=torch.tensor([t.finish_reason is FinishReason.STOP for g in groups for t in g.trajectories]),
        )
        rows = iter(per_token(self._estimator(inputs, **self._params), inputs.lengths))
        result = [[next(rows).numpy().astype(np.float32) for _ in group.trajectories] for group in groups]
        for group, advantages in zip(groups, result, strict=True):
            for trajectory, row in zip(group.trajectories, advantages, strict=True):
                if not np.isfinite(row).all():
                    raise RunError(
                        f"the advantage of trajectory {tuple(trajectory.id)} (group {group.number}) is not finite; its "
                        f"group's rewards are {group.rewards}"
                    )
        return result
