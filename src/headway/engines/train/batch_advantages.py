"""Advantages of a batch: from its episodes and rewards to the estimators' tensors, and back to rows.

rewards ──────────────────────────────────────▶ estimator ─▶ one number per episode, where outcomes are enough
rewards ─▶ [− kl_coef · KL(π_prox‖π_ref) per token] ─▶ estimator ─▶ advantages, and a critic's returns

    rows ─▶ Episodes.join ─▶ one array [L] per episode ─▶ estimator ─▶ one array [L] per episode ─▶ cut ─▶ rows

Shape suffixes: T response tokens of a row, L tokens of an episode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headway.algorithms.advantages import (
    ADVANTAGES,
    AdvantageInputs,
    Advantages,
    looks_at_states,
    looks_at_tokens,
    per_token,
)
from headway.algorithms.kl import kl_in_reward
from headway.config.sections.learning import AlgorithmConfig
from headway.data.packing import CollatedRow
from headway.data.types import ColumnName, Outcomes
from headway.errors import ConfigError, RunError
from headway.runtime.user_code import Parameters

Get = Callable[[CollatedRow], NDArray[Any]]
"""Function that returns an array [T] of a row."""


class Episodes:
    """Episodes of a batch's rows.

    An episode with one row is that row unchanged, including holes. An episode with several rows consists of the tokens
    that they train, in the order of its turns, also if turns fork.
    """

    def __init__(self, rows: Sequence[CollatedRow], episode_of: NDArray[np.int64]) -> None:
        """``episode_of`` [S] has the index of each row's episode, ascending from 0.

        Raises:
            ValueError: they are not one index for each row, ascending without gaps.
        """
        steps = np.diff(episode_of, prepend=-1)  # -1: the first episode has to be 0
        if len(episode_of) != len(rows) or not ((steps == 0) | (steps == 1)).all() or (steps[:1] == 0).any():
            raise ValueError(f"{len(rows)} rows are of the episodes {episode_of}; expected 0, 1, … in order, one each")
        starts = np.flatnonzero(steps)
        self.rows = rows
        self._rows_of = [rows[a:b] for a, b in pairwise([*starts, len(rows)])]
        """The rows of each episode."""
        self._orders = [_order(own) for own in self._rows_of]
        """Indices of each episode's tokens among those of its rows, one row after the other."""

    def join(self, get: Get) -> list[NDArray[Any]]:
        """Return the arrays [L] of the episodes, from those [T] that ``get`` returns of their rows."""
        joined = []
        for own, order in zip(self._rows_of, self._orders, strict=True):
            arrays = [get(row) for row in own]
            # That of a single row is no copy: a batch may have gigabytes of them.
            joined.append(np.concatenate(arrays)[order] if len(arrays) > 1 else arrays[0])
        return joined

    def cut(self, arrays: Sequence[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
        """Return the arrays [T] of the rows, given the arrays [L] of their episodes; 0 in holes of joined rows."""
        result: list[NDArray[np.float32]] = []
        for own, order, array in zip(self._rows_of, self._orders, arrays, strict=True):
            if len(own) == 1:  # no copy, as in `join`
                result.append(array)
                continue
            ends = np.cumsum([len(row.loss_mask) for row in own])
            joined = np.zeros(ends[-1], np.float32)
            joined[order] = array  # what `join` read by the same order
            result += np.split(joined, ends[:-1])
        return result


def _order(rows: Sequence[CollatedRow]) -> NDArray[np.int64] | slice:
    if len(rows) == 1:
        return slice(None)
    trained = np.flatnonzero(np.concatenate([row.loss_mask for row in rows]))
    # Stable: the tokens of one turn keep their order.
    return trained[np.argsort(np.concatenate([turn_numbers(row) for row in rows])[trained], kind="stable")]


def turn_numbers(row: CollatedRow) -> NDArray[np.int64]:
    """Return the turn number [T] of each response token of ``row``; a hole has the number of the turn before it."""
    return _of_turns(row, [turn.number for turn in row.turns])


def turn_states(row: CollatedRow) -> NDArray[np.int64]:
    """Return the state [T] of each response token's turn in ``row``; a hole has the state of the turn before it."""
    return _of_turns(row, [turn.state for turn in row.turns])


def _of_turns(row: CollatedRow, values: Sequence[int]) -> NDArray[np.int64]:
    if not row.turns:
        return np.zeros(len(row.loss_mask), np.int64)
    starts = [0, *(turn.start for turn in row.turns[1:]), len(row.loss_mask)]
    return np.repeat(np.array(values, np.int64), np.diff(starts))


Arrays = list[NDArray[np.float32]]
"""Float32 arrays, one [T] for each row, or one [L] for each episode."""


class BatchAdvantages:
    """Computes a batch's advantages: the configured estimator, with the steps before and after it."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        """Look up the configured estimator. Raises `ConfigError` or `UserCodeError` when it does not exist."""
        self._estimator = ADVANTAGES.get(algorithm.adv_estimator)
        params = {
            "normalize_by_std": algorithm.norm_adv_by_std_in_grpo,
            "gamma": algorithm.gamma,
            "lam": algorithm.lam,
            "k": algorithm.pass_k,
            "step_weight": algorithm.step_weight,
        }
        self._params = Parameters.of(self._estimator).given(params)
        self._algorithm = algorithm

    def __call__(self, rows: Sequence[CollatedRow], outcomes: Outcomes) -> dict[str, Arrays]:
        """Compute the ``advantages`` of each row, and ``returns`` where the estimator has a critic.

        ``rows`` have the columns that the configuration needs: ``values``; ``ref_logprobs`` and ``prox_logprobs``. All
        rows of an episode are used together.

        Raises `RunError`, naming a trajectory, for a reward, a value or an advantage that is not finite.
        """
        episodes = Episodes(rows, outcomes.episode_of)
        _check_finite("rewards", outcomes.rewards, outcomes)
        _check_finite("rewards of turns", outcomes.turn_rewards, outcomes)
        inputs = self._inputs(episodes, outcomes)
        estimate = self._estimator(inputs, **self._params)
        columns: dict[str, Arrays] = {ColumnName.ADVANTAGES: _arrays(estimate, inputs)}
        if isinstance(estimate, Advantages):
            columns[ColumnName.RETURNS] = _arrays(estimate.returns, inputs)
        for name, arrays in columns.items():
            _check_finite(name, arrays, outcomes)
        return {name: episodes.cut(arrays) for name, arrays in columns.items()}

    def of_outcomes(self, outcomes: Outcomes) -> NDArray[np.float32] | None:
        """Compute each episode's advantage, [E], which all tokens that it trains share, from ``outcomes`` alone.

        The result equals that from rows. None if tokens are needed: by the estimator, or for rewards of turns or a KL
        penalty per token.

        Raises:
            RunError: a reward or an advantage is not finite; the message names the trajectory.
            ConfigError: the estimator returned something else than one number for each trajectory.
        """
        algorithm = self._algorithm
        per_token = algorithm.use_kl_in_reward or outcomes.turn_rewards or algorithm.turn_discount != 1.0
        if per_token or outcomes.lengths is None or looks_at_tokens(self._estimator):
            return None
        _check_finite("rewards", outcomes.rewards, outcomes)
        inputs = _scored(outcomes, outcomes.lengths)
        estimate = self._estimator(inputs, **self._params)
        if not isinstance(estimate, torch.Tensor) or estimate.shape != inputs.rewards.shape:
            said = list(estimate.shape) if isinstance(estimate, torch.Tensor) else type(estimate).__name__
            raise ConfigError(
                f"algorithm.adv_estimator: {algorithm.adv_estimator} is declared to look at outcomes alone, so it "
                f"returns one number for each of {len(outcomes.ids)} trajectories, not {said}; return [S], or drop "
                "from_outcomes_alone"
            )
        numbers: NDArray[np.float32] = estimate.numpy().astype(np.float32)
        _check_finite(ColumnName.ADVANTAGES, numbers, outcomes)
        return numbers

    def _inputs(self, episodes: Episodes, outcomes: Outcomes) -> AdvantageInputs:
        masks = episodes.join(lambda row: row.loss_mask)

        def known(name: str, get: Get) -> torch.Tensor:
            arrays = episodes.join(get)
            _check_finite(name, [array[mask] for array, mask in zip(arrays, masks, strict=True)], outcomes)
            return _padded(arrays)

        valued = all(ColumnName.VALUES in row.columns for row in episodes.rows)
        inputs = replace(
            _scored(outcomes, [len(mask) for mask in masks]),
            mask=None if all(mask.all() for mask in masks) else _padded(masks),
            values=known("the critic's values", lambda row: row.columns[ColumnName.VALUES]) if valued else None,
            # Every answer was scored as it is, even if it was cut off: nothing comes after its last token.
            finished=None,
            turn_discount=self._algorithm.turn_discount,
        )
        by_state = looks_at_states(self._estimator)
        if outcomes.turn_rewards or self._algorithm.turn_discount != 1.0 or by_state:
            turns = episodes.join(turn_numbers)
            token_rewards = inputs.rewards_of_tokens()
            if outcomes.turn_rewards:
                token_rewards += _padded(_rewards_of_turns(outcomes.turn_rewards, turns, masks))
            inputs = replace(inputs, token_rewards=token_rewards, turns=_padded(turns))
        if by_state:
            inputs = replace(inputs, states=_padded(episodes.join(turn_states)))
        if not self._algorithm.use_kl_in_reward:
            return inputs
        reference = known(ColumnName.REF_LOGPROBS, lambda row: row.columns[ColumnName.REF_LOGPROBS])
        policy = known(ColumnName.PROX_LOGPROBS, lambda row: row.columns.get(ColumnName.PROX_LOGPROBS, row.logprobs))
        rewards, _ = kl_in_reward(
            inputs.rewards_of_tokens(),
            policy,
            reference,
            inputs.counts(),
            coef=self._algorithm.kl_ctrl.kl_coef,
            kind=self._algorithm.kl_penalty,
        )
        return replace(inputs, token_rewards=rewards)


def _scored(outcomes: Outcomes, lengths: Any) -> AdvantageInputs:
    """Inputs of an estimator that looks at outcomes alone. ``lengths`` [E]: of the episodes."""
    return AdvantageInputs(
        rewards=torch.tensor(outcomes.rewards),
        groups=torch.tensor(outcomes.groups),
        lengths=torch.tensor(lengths),
        baselines=torch.tensor(outcomes.baselines) if outcomes.baselines is not None else None,
    )


def _rewards_of_turns(
    rewards: Sequence[Sequence[float]], turns: Sequence[NDArray[np.int64]], masks: Sequence[NDArray[np.bool_]]
) -> list[NDArray[np.float64]]:
    """Return the rewards of each episode's turns, [L], each at the last trained token of its turn.

    The reward of a turn without trained tokens is at the last token before it, or at the episode's first token.
    """
    placed = []
    for of_turns, turns_L, mask_L in zip(rewards, turns, masks, strict=True):
        result_L = np.zeros(len(mask_L))
        trained = np.flatnonzero(mask_L)
        if len(trained) and of_turns:
            last = np.searchsorted(turns_L[trained], np.arange(len(of_turns)), side="right") - 1
            # Several turns may share a token: `+=` with an index would add only one of their rewards.
            np.add.at(result_L, trained[last.clip(min=0)], np.asarray(of_turns, np.float64))
        placed.append(result_L)
    return placed


def _padded(arrays: Sequence[NDArray[Any]]) -> torch.Tensor:
    """The arrays, one [L] for each episode, as one tensor, zero-padded on the right."""
    padded = np.zeros((len(arrays), max(map(len, arrays))), dtype=arrays[0].dtype)
    for i, values in enumerate(arrays):
        padded[i, : len(values)] = values
    return torch.from_numpy(padded)


def _arrays(estimate: torch.Tensor | Advantages, inputs: AdvantageInputs) -> Arrays:
    return [row.numpy().astype(np.float32) for row in per_token(estimate, inputs.lengths, inputs.mask)]


def _check_finite(name: str, arrays: Iterable[Any], outcomes: Outcomes) -> None:
    for index, array in enumerate(arrays):
        if not np.isfinite(array).all():
            group = outcomes.groups[index]
            raise RunError(
                f"{name} of trajectory {tuple(outcomes.ids[index])} (group {group}) are not finite; its group's "
                f"rewards are {outcomes.rewards[outcomes.groups == group]}"
            )
