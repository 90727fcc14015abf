"""Group-in-group advantages: each episode against the others of its group, each turn against turns in the same state.

Shape suffixes: S trajectories of one batch, T response tokens (padded), K turns (padded), N turns that have tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from headway.algorithms.advantages.group_relative import above_mean
from headway.algorithms.advantages.groups import Groups
from headway.algorithms.advantages.inputs import ADVANTAGES, AdvantageInputs, from_states
from headway.errors import ConfigError


@ADVANTAGES.register("gigpo")
@from_states
def gigpo(inputs: AdvantageInputs, *, normalize_by_std: bool = True, step_weight: float = 1.0) -> Tensor:
    """Group-in-group advantages A^E + ``step_weight`` · A^S, of each turn, which all its tokens share.

    A^E compares episodes as `grpo` does: (r − mean) / (std + 1e-6), r an episode's rewards together, not discounted.

    A^S compares the turns, of all episodes of a group, that were taken in the same state: (R − mean) / (std + 1e-6),
    where R_t = Σ_{k ≥ t} γ^(k−t)·r_k over the turns k of the episode, γ = ``inputs.turn_discount``. It is exactly 0 for
    a turn whose state no other turn was taken in, and where all R are equal.

    Without ``normalize_by_std`` neither is divided.

    Returns:
        [S, T], 0 at tokens that do not count.

    Source: "Group-in-Group Policy Optimization for LLM Agent Training", Feng et al. 2025, arXiv:2505.10978, equations
    3, 7 and 8.

    Raises:
        ConfigError: the inputs have no ``states``; ``step_weight`` is negative.
        RunError: a reward is not finite.
    """
    if step_weight < 0:
        raise ConfigError(f"algorithm.step_weight: {step_weight} is negative; give 0 or more")
    states_ST = inputs.states_of_tokens("gigpo")
    counts_ST = inputs.counts()
    rewards_ST = inputs.rewards_of_tokens()
    turns_ST = torch.zeros_like(states_ST) if inputs.turns is None else inputs.turns
    turns = int(torch.where(counts_ST, turns_ST, 0).max()) + 1 if counts_ST.any() else 0
    # What does not count goes to one turn more, which is cut off.
    place_ST = torch.where(counts_ST, turns_ST, turns)
    rewards_SK = rewards_ST.new_zeros(len(counts_ST), turns + 1).scatter_add_(1, place_ST, rewards_ST)[:, :turns]
    states_SK = states_ST.new_zeros(len(counts_ST), turns + 1).scatter_(1, place_ST, states_ST)[:, :turns]
    taken_SK = counts_ST.new_zeros(len(counts_ST), turns + 1).scatter_(1, place_ST, True)[:, :turns]

    of_group_SK = inputs.groups[:, None].expand(states_SK.shape)
    labels_N = torch.stack([of_group_SK[taken_SK], states_SK[taken_SK]]).unique(dim=1, return_inverse=True)[1]
    returns_N = _returns(rewards_SK, inputs.turn_discount)[taken_SK]
    steps_SK = rewards_ST.new_zeros(len(counts_ST), turns + 1)
    steps_SK[:, :turns][taken_SK] = above_mean(returns_N, Groups.of(labels_N), by_std=normalize_by_std)

    scores_S = replace(inputs, turn_discount=1.0).scores()
    episodes_S = above_mean(scores_S, Groups.of(inputs.groups), by_std=normalize_by_std)
    advantages_ST = episodes_S[:, None] + step_weight * steps_SK.gather(1, place_ST)
    return torch.where(counts_ST, advantages_ST, 0.0).to(inputs.rewards.dtype)


def _returns(rewards: Float[Tensor, "S K"], discount: float) -> Float[Tensor, "S K"]:
    """The discounted sum of the rewards from each turn on.

    Turn by turn from the end, so that the same rewards that are equally far away give the same number to the last bit.
    """
    returns_SK = rewards.clone()
    for turn in reversed(range(rewards.shape[1] - 1)):
        returns_SK[:, turn] += discount * returns_SK[:, turn + 1]
    return returns_SK
