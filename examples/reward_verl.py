"""A reward as it is written for verl, used as it is: ``reward.function=examples/reward_verl.py:compute_score``.

It is called once for each response, with these four arguments and whatever ``reward.params`` holds (verl's
``reward_kwargs``). It returns a number, or a dictionary whose ``score`` is the reward.
"""

import re
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, hint: float = 0.1
) -> dict[str, Any]:
    """1 for the right number after ``####``, or ``hint`` for any number there."""
    found = re.search(r"####\s*(-?[\d,]+)", solution_str)
    if found is None:
        return {"score": 0.0, "acc": False}
    right = found[1].replace(",", "") == str(ground_truth).replace(",", "")
    return {"score": 1.0 if right else hint, "acc": right}
