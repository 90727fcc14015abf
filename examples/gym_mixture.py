"""A task of one's own: several datasets of reasoning-gym, mixed by weight, each with its own verifier.

data:
  task:
    name: examples/gym_mixture.py:mixture
    params:
      datasets: [{name: leg_counting, weight: 2, config: {max_animals: 4}}, {name: chain_sum, weight: 1}]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headway.data.gym import GymTask
from headway.data.tasks import Problem

INSTRUCTION = "Think step by step, then give the final answer alone between <answer> and </answer>."


class Mixture(GymTask):
    """reasoning-gym's ``composite``: each problem is drawn from one of its datasets, which scores it, too."""

    def __init__(self, datasets: list[Mapping[str, Any]], instruction: str, seed: int, problems: int) -> None:
        super().__init__("composite", {"datasets": datasets}, seed=seed, problems=problems)
        self._instruction = instruction

    def problem(self, index: int) -> Problem:
        problem = super().problem(index)
        return replace(problem, prompt=f"{problem.prompt}\n\n{self._instruction}") if self._instruction else problem


def mixture(params: Mapping[str, Any], seed: int, problems: int) -> Mixture:
    """``params``: ``datasets``, a list of ``{name, weight, config}``; ``instruction``, which follows each problem."""
    return Mixture(params["datasets"], params.get("instruction", INSTRUCTION), seed, problems)
