"""A reward of one's own: ``headway train … reward.function=examples/reward.py:score``.

Headway calls ``score`` once for each response, with the arguments that its signature names: ``prompt``, ``response``,
``answer``, and the other columns of the row. It returns a number; larger is better. With a parameter ``responses``
instead of ``response`` it would get the whole group at once and return a list, and it may be ``async def``.

It runs in a process of its own. An exception, or a call that takes longer than ``reward.timeout_s``, costs the group
and is recorded; the run goes on.
"""

import re


def score(response: str, answer: str) -> float:
    """1 for the right number, a little for any number at all: a hint of the form while the model gets none right."""
    number = re.match(r"\s*(-?\d+)", response)
    if number is None:
        return 0.0
    return 1.0 if int(number[1]) == int(answer) else 0.1
