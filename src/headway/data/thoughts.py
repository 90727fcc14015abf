"""Thoughts in a text: tags around a model's thinking, and the beginning of the answer after it."""

from __future__ import annotations

import re

TAGS = {"<think>": "</think>", "<thinking>": "</thinking>", "[THINK]": "[/THINK]", "<seed:think>": "</seed:think>"}
"""Opening tag of a thought → its closing tag."""
OPENED = re.compile("|".join(map(re.escape, TAGS)))
CLOSED = re.compile("|".join(map(re.escape, TAGS.values())))


def opened_thought(prompt: str) -> str:
    """Return the tag with which ``prompt`` ends: the answer then begins inside a thought. Empty if there is none."""
    end = prompt.rstrip()
    return next((tag for tag in TAGS if end.endswith(tag)), "")


def end_of_thought(response: str, *, opened: bool = False) -> int | None:
    """Return the position in ``response`` where the answer begins, 0 without a thought; None if a thought never ended.

    ``opened``: the prompt ends inside a thought.
    """
    end = max((found.end() for found in CLOSED.finditer(response)), default=0)
    if (opened and end == 0) or OPENED.search(response, end):
        return None
    return end
