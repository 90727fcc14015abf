"""Advantages of a fetch: from its rows and rewards to the estimators' tensors, and back.

rewards ─▶ [− kl_coef · KL(π_prox‖π_ref) per token] ─▶ estimator ─▶ advantages, and a critic's returns
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headway.algorithms.advantages import ADVANTAGES, AdvantageInputs, Advantages, per_token
from headway.algorithms.kl import kl_in_reward
from headway.config.learning import AlgorithmConfig
from headway.data.collate import Row
from headway.data.types import ColumnName, Outcomes
from headway.errors import RunError

Arrays = list[NDArray[np.float32]]
"""Float32 arrays [T], one for each trajectory."""


class FetchAdvantages:
    """Computes a fetch's advantages: the configured estimator, with the steps before and after it."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        """Look up the configured estimator. Raises `ConfigError` or `UserCodeError` when it does not exist."""
        self._estimator = ADVANTAGES.get(algorithm.adv_estimator)
        self._params = _named(
            self._estimator,
            {
                "normalize_by_std": algorithm.norm_adv_by_std_in_grpo,
                "gamma": algorithm.gamma,
                "lam": algorithm.lam,
                "k": algorithm.pass_k,
            },
        )
        self._algorithm = algorithm

    def __call__(self, rows: Sequence[Row], outcomes: Outcomes) -> dict[str, Arrays]:
        """Compute the ``advantages`` of each trajectory, and ``returns`` where the estimator has a critic.

        ``rows`` have the columns that are asked for: ``values``; ``ref_logprobs`` and ``prox_logprobs``.

        Raises `RunError`, naming a trajectory, for a reward, a value or an advantage that is not finite.
        """
        _check_finite("rewards", [np.atleast_1d(reward) for reward in outcomes.rewards], outcomes)
        if ColumnName.VALUES in rows[0].columns:
            _check_finite(
                "the critic's values", [row.columns[ColumnName.VALUES][row.loss_mask] for row in rows], outcomes
            )
        inputs = self._penalised(_inputs(rows, outcomes), rows, outcomes)
        estimate = self._estimator(inputs, **self._params)
        columns: dict[str, list[NDArray[np.float32]]] = {ColumnName.ADVANTAGES: _arrays(estimate, inputs)}
        if isinstance(estimate, Advantages):
            columns[ColumnName.RETURNS] = _arrays(estimate.returns, inputs)
        for name, arrays in columns.items():
            _check_finite(name, arrays, outcomes)
        return columns

    def _penalised(self, inputs: AdvantageInputs, rows: Sequence[Row], outcomes: Outcomes) -> AdvantageInputs:
        if not self._algorithm.use_kl_in_reward:
            return inputs
        for name in (ColumnName.REF_LOGPROBS, ColumnName.PROX_LOGPROBS):
            known = [row.columns.get(name, row.logprobs)[row.loss_mask] for row in rows]
            _check_finite(name, known, outcomes)
        rewards, _ = kl_in_reward(
            inputs.rewards_of_tokens(),
            _padded(rows, inputs.width, lambda row: row.columns.get(ColumnName.PROX_LOGPROBS, row.logprobs)),
            _padded(rows, inputs.width, lambda row: row.columns[ColumnName.REF_LOGPROBS]),
            inputs.counts(),
            coef=self._algorithm.kl_ctrl.kl_coef,
            kind=self._algorithm.kl_penalty,
        )
        return replace(inputs, token_rewards=rewards)


def _inputs(rows: Sequence[Row], outcomes: Outcomes) -> AdvantageInputs:
    lengths = torch.tensor([len(row.logprobs) for row in rows])
    width = int(lengths.max())
    mask = _padded(rows, width, lambda row: row.loss_mask)
    valued = all(ColumnName.VALUES in row.columns for row in rows)
    return AdvantageInputs(
        rewards=torch.from_numpy(outcomes.rewards),
        groups=torch.from_numpy(outcomes.groups),
        lengths=lengths,
        mask=None if all(row.loss_mask.all() for row in rows) else mask,
        values=_padded(rows, width, lambda row: row.columns[ColumnName.VALUES]) if valued else None,
        # Every answer was scored as it is, also one that was cut off: nothing comes after its last token.
        finished=None,
        baselines=torch.from_numpy(outcomes.baselines) if outcomes.baselines is not None else None,
    )


def _padded(rows: Sequence[Row], width: int, get: Callable[[Row], NDArray[Any]]) -> torch.Tensor:
    """The array [T] that ``get`` returns for each row, as one tensor [S, width], zero-padded on the right."""
    arrays = [get(row) for row in rows]
    padded = np.zeros((len(rows), width), dtype=arrays[0].dtype)
    for i, values in enumerate(arrays):
        padded[i, : len(values)] = values
    return torch.from_numpy(padded)


def _arrays(estimate: torch.Tensor | Advantages, inputs: AdvantageInputs) -> Arrays:
    return [row.numpy().astype(np.float32) for row in per_token(estimate, inputs.lengths, inputs.mask)]


def _check_finite(name: str, arrays: Arrays, outcomes: Outcomes) -> None:
    for index, array in enumerate(arrays):
        if not np.isfinite(array).all():
            group = outcomes.groups[index]
            raise RunError(
                f"{name} of trajectory {tuple(outcomes.ids[index])} (group {group}) are not finite; its group's "
                f"rewards are {outcomes.rewards[outcomes.groups == group]}"
            )


def _named(estimator: Callable[..., Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Select the ``params`` that the estimator has as parameters: all of them if it takes ``**`` arguments."""
    names = signature(estimator).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in names):
        return dict(params)
    return {p.name: params[p.name] for p in names if p.name in params}
