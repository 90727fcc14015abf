"""Inputs and results of an advantage estimator.

    AdvantageInputs ─▶ estimator ─▶ [S], [S, T] or Advantages ─▶ per_token ─▶ one [T] row per trajectory

A token *counts* if it lies within the trajectory's length and not in a hole of ``mask``. Rewards and values of all
other tokens are never read and may be anything, also NaN; advantages there are 0. Nothing decays over a hole: for
discounting and GAE, the tokens before and after it are neighbours.

A trajectory is an episode: the tokens of all its turns in order, even if they are trained in several rows. The discount
``turn_discount`` δ applies from each turn to the next: an episode's score is Σ δ^t·r_t over its turns t.

Shape suffixes: S trajectories of one batch, T response tokens (padded).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headway.algorithms.advantages.groups import Compaction, check_share
from headway.algorithms.registry import Registry
from headway.errors import ConfigError, RunError


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """All trajectories of one batch, in any order. Groups may differ in size.

    Raises:
        ConfigError: ``turn_discount`` is not in [0, 1].
        ValueError: the tensors' shapes do not match.
    """

    rewards: Float[Tensor, " S"]
    """One reward per trajectory [S]. Estimators with rewards per token give it to the last token that counts."""
    groups: Int[Tensor, " S"]
    """Group of each trajectory: any integers, equal within a group."""
    lengths: Int[Tensor, " S"]
    """Number of response tokens of each trajectory, including holes."""
    token_rewards: Float[Tensor, "S T"] | None = None
    """Rewards of single tokens. If given, they replace ``rewards``: a trajectory's reward is then their sum, discounted
    by turns."""
    mask: Bool[Tensor, "S T"] | None = None
    """True at tokens that the policy wrote; False in holes, such as the output of a tool. Default: no holes."""
    values: Float[Tensor, "S T"] | None = None
    """V(s_t): the critic's estimate, before token t, of the (discounted) rewards from token t on."""
    baselines: Float[Tensor, " S"] | None = None
    """Reward of the policy's greedy answer to the same prompt."""
    finished: Bool[Tensor, " S"] | None = None
    """Flag of each trajectory, False if its answer was cut off. Default: all are finished."""
    turns: Int[Tensor, "S T"] | None = None
    """Turn number of each token, from 0, never less than the one before. Default: all tokens are of turn 0."""
    states: Int[Tensor, "S T"] | None = None
    """State in which each token's turn was taken: any integers, equal for turns of a group in the same state. Only
    given to estimators declared with `from_states`."""
    turn_discount: float = 1.0
    """Discount δ from one turn to the next, in [0, 1]."""

    def __post_init__(self) -> None:
        size = self.rewards.shape[0]
        for name in ("rewards", "groups", "lengths", "baselines", "finished"):
            tensor: Tensor | None = getattr(self, name)
            if tensor is not None and tensor.shape != (size,):
                raise ValueError(f"{name} of {size} trajectories has the shape [{size}], not {list(tensor.shape)}")
        shape = (size, self.width)
        for name in ("token_rewards", "mask", "values", "turns", "states"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != shape:
                raise ValueError(
                    f"{name} has the shape {list(tensor.shape)}; for {size} trajectories, like the others of one value "
                    f"per token, it should be {list(shape)}"
                )
        check_share("turn_discount", self.turn_discount)
        if size and int(self.lengths.max()) > self.width:
            raise ValueError(f"a trajectory of {int(self.lengths.max())} tokens in tensors for {self.width}")

    @property
    def width(self) -> int:
        """The padded length T: that of the tensors with one value per token, or else of the longest trajectory."""
        for tensor in (self.token_rewards, self.mask, self.values, self.turns, self.states):
            if tensor is not None:
                return tensor.shape[-1]
        return int(self.lengths.max()) if self.lengths.numel() else 0

    def counts(self) -> Bool[Tensor, "S T"]:
        """Mask [S, T] of the tokens that count: response tokens that are not holes."""
        within_ST = torch.arange(self.width, device=self.lengths.device) < self.lengths[:, None]
        return within_ST if self.mask is None else within_ST & self.mask

    def written(self) -> Int[Tensor, " S"]:
        """Number of tokens that count in each trajectory."""
        return self.lengths if self.mask is None else self.counts().sum(dim=1)

    def scores(self) -> Float[Tensor, " S"]:
        """Return one reward per trajectory, in float64, so that differences between large rewards stay exact.

        Raises:
            RunError: a reward is not finite.
        """
        if self.token_rewards is not None:
            rewards_ST = self.rewards_of_tokens()
            if self.turns is not None and self.turn_discount != 1.0:
                # In float64 like the rewards: a power of integers would be float32.
                rewards_ST = rewards_ST * self.turn_discount ** self.turns.double()
            return rewards_ST.sum(dim=1)
        _check_finite(self.rewards, "reward")
        return self.rewards.double()

    def rewards_of_tokens(self) -> Float[Tensor, "S T"]:
        """Return the rewards of tokens in float64, 0 at tokens that do not count. A trajectory without tokens has none.

        Raises:
            RunError: a reward is not finite.
        """
        counts_ST = self.counts()
        if self.token_rewards is not None:
            return _of_tokens(self.token_rewards, counts_ST, "reward")
        _check_finite(self.rewards, "reward")
        written_S = counts_ST.sum(dim=1)
        # `counts_ST &`: holes after the last token that counts have the same sum.
        last_ST = counts_ST & (counts_ST.cumsum(dim=1) == written_S[:, None])
        return torch.where(last_ST, self.rewards.double()[:, None], 0.0)

    def decay(self, compaction: Compaction, per_token: float) -> float | Float[Tensor, "S T"]:
        """Return the decay from each token that counts to the next one: ``per_token`` · δ^(difference of their turns).

        Tokens are in the order of ``compaction``.
        """
        if self.turns is None or self.turn_discount == 1.0:
            return per_token
        turns_ST = compaction.compact(torch.where(compaction.counts, self.turns, 0))
        ahead_ST = torch.zeros_like(turns_ST)
        ahead_ST[:, :-1] = (turns_ST[:, 1:] - turns_ST[:, :-1]).clamp(min=0)  # no turn follows the last token
        return per_token * self.turn_discount ** ahead_ST.double()

    def values_of_tokens(self, estimator: str) -> Float[Tensor, "S T"]:
        """Return the critic's values in float64, 0 at tokens that do not count.

        Raises:
            ConfigError: there are none; the message names ``estimator``, which needs them.
            RunError: a value is not finite.
        """
        values = _needed(self.values, estimator, "a critic's value of each token, and this run computes none")
        return _of_tokens(values, self.counts(), "critic's value")

    def states_of_tokens(self, estimator: str) -> Int[Tensor, "S T"]:
        """Return ``states``. Raises `ConfigError`, naming ``estimator``, if there are none."""
        told = "the state that each turn was taken in; an estimator gets them if it is declared with from_states"
        return _needed(self.states, estimator, told)

    def greedy_rewards(self, estimator: str) -> Float[Tensor, " S"]:
        """Return ``baselines``, the rewards of the greedy answers, in float64.

        Raises:
            ConfigError: there are none; the message names ``estimator``, which needs them.
            RunError: a baseline is not finite.
        """
        told = "the reward of a greedy answer to each prompt, and this run samples none"
        baselines = _needed(self.baselines, estimator, told)
        _check_finite(baselines, "greedy answer's reward")
        return baselines.double()

    def shared(self, advantages: Float[Tensor, " S"]) -> Tensor:
        """Return one advantage per trajectory in an estimator's format, in the dtype of ``rewards``.

        The shape is [S] without a ``mask``, else [S, T] with exact zeros at tokens that do not count.
        """
        result_S = advantages.to(self.rewards.dtype)
        return result_S if self.mask is None else torch.where(self.counts(), result_S[:, None], 0.0)


@dataclass(frozen=True, slots=True)
class Advantages:
    """Result of an estimator with a critic; 0 at tokens that do not count."""

    advantages: Float[Tensor, "S T"]
    returns: Float[Tensor, "S T"]
    """Target of the critic's loss: the values that the critic should have predicted. Never whitened."""


AdvantageEstimator = Callable[..., Tensor | Advantages]
"""Function ``estimator(inputs, **params)``, with parameters of its own. It returns [S], one advantage per trajectory
for all its tokens; or [S, T], one per token, padded to the longest trajectory or the inputs' T; or `Advantages`."""


def _fits(result: Any, inputs: AdvantageInputs) -> bool:
    tensors = (result.advantages, result.returns) if isinstance(result, Advantages) else (result,)
    return all(isinstance(one, Tensor) and one.ndim in (1, 2) and len(one) == len(inputs.rewards) for one in tensors)


ADVANTAGES: Registry[AdvantageEstimator] = Registry(
    "advantage estimator",
    "algorithm.adv_estimator",
    expected="a tensor with a number for each episode, [S], or for each of its tokens, [S, L], or Advantages of such",
    fits=_fits,
)

E = TypeVar("E", bound=AdvantageEstimator)
_OUTCOMES_ALONE = "__headway_outcomes_alone__"
_STATES = "__headway_states__"


def from_outcomes_alone(estimator: E) -> E:
    """Declare that ``estimator`` looks at outcomes and not at tokens, unless tokens have rewards of their own.

    It then gets ``rewards``, ``groups``, ``baselines`` and, as ``lengths``, the number of tokens that count in each
    trajectory (`AdvantageInputs.written`). There is no mask, and it returns [S]. No tokens are fetched for it, and one
    number per trajectory is sent instead of one per token.
    """
    setattr(estimator, _OUTCOMES_ALONE, True)
    return estimator


def looks_at_tokens(estimator: AdvantageEstimator) -> bool:
    """Tell whether ``estimator`` may look at tokens: True unless it was declared with `from_outcomes_alone`."""
    return not getattr(estimator, _OUTCOMES_ALONE, False)


def from_states(estimator: E) -> E:
    """Declare that ``estimator`` looks at the states in which turns were taken. It then gets ``states``, ``turns`` and
    ``token_rewards``, in which a trajectory's own reward is at its last token that counts."""
    setattr(estimator, _STATES, True)
    return estimator


def looks_at_states(estimator: AdvantageEstimator) -> bool:
    """Tell whether ``estimator`` was declared with `from_states`."""
    return bool(getattr(estimator, _STATES, False))


def per_token(
    advantages: Tensor | Advantages, lengths: Int[Tensor, " S"], mask: Bool[Tensor, "S T"] | None = None
) -> list[Float[Tensor, " T"]]:
    """Split the result of an estimator into one [T] tensor for each trajectory, 0 in the holes of ``mask``.

    Raises:
        ValueError: the result is neither [S] nor [S, T], or has fewer numbers than a trajectory has tokens.
    """
    rows = advantages.advantages if isinstance(advantages, Advantages) else advantages
    if rows.ndim not in (1, 2) or rows.shape[0] != lengths.shape[0]:
        raise ValueError(
            f"an advantage estimator returns [S] or [S, T] for S = {lengths.shape[0]} trajectories, "
            f"not {list(rows.shape)}"
        )
    if rows.ndim == 2 and lengths.numel() and rows.shape[1] < int(lengths.max()):
        raise ValueError(
            f"an advantage estimator returned {rows.shape[1]} numbers per trajectory, and one has {int(lengths.max())} "
            "tokens; return [S], which all tokens of a trajectory share, or one number per token"
        )
    if mask is not None:
        rows = rows[:, None].expand(mask.shape) if rows.ndim == 1 else rows
        width = min(rows.shape[1], mask.shape[1])
        # A user's own estimator may give more tokens than the mask has, or fewer.
        rows = torch.where(mask[:, :width], rows[:, :width], 0.0)
    if rows.ndim == 1:
        # Views of one number each: not to be written to.
        return [row.expand(length) for row, length in zip(rows, lengths.tolist(), strict=True)]
    return [row[:length] for row, length in zip(rows, lengths.tolist(), strict=True)]


def _needed(given: Tensor | None, estimator: str, what: str) -> Tensor:
    if given is None:
        raise ConfigError(f"algorithm.adv_estimator: {estimator} needs {what}")
    return given


def _check_finite(values: Tensor, what: str) -> None:
    finite = values.isfinite()
    if not finite.all():
        index = int((~finite).nonzero()[0])
        raise RunError(
            f"the {what} of trajectory {index} (of {len(values)} in the batch) is {float(values[index])}; advantages "
            "need finite numbers, and one that is not would spoil its whole group"
        )


def _of_tokens(values: Tensor, counts: Tensor, what: str) -> Tensor:
    # `where`, not a product: tokens that do not count may be NaN.
    result_ST = torch.where(counts, values.double(), 0.0)
    finite_ST = result_ST.isfinite()
    if not finite_ST.all():
        row, token = (int(i) for i in (~finite_ST).nonzero()[0])
        raise RunError(
            f"the {what} of token {token} of trajectory {row} (of {len(values)} in the batch) is "
            f"{float(values[row, token])}; advantages need finite numbers"
        )
    return result_ST
