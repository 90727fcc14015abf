"""Thoughts in a text: what models put around their thinking, and where the answer behind it begins."""

from __future__ import annotations

import re

TAGS = {"<think>": "</think>", "<thinking>": "</thinking>", "[THINK]": "[/THINK]", "<seed:think>": "</seed:think>"}
"""What begins a thought → what ends it."""
OPENED = re.compile("|".join(map(re.escape, TAGS)))
CLOSED = re.compile("|".join(map(re.escape, TAGS.values())))


def opened_thought(prompt: str) -> str:
    """Return the tag with which ``prompt`` ends: the answer begins inside a thought. Empty if it does not."""
    end = prompt.rstrip()
    return next((tag for tag in TAGS if end.endswith(tag)), "")


def end_of_thought(response: str, *, opened: bool = False) -> int | None:
    """Return where in ``response`` the answer begins, 0 without a thought; None if a thought never ended.

    ``opened``: the prompt ends inside a thought.
    """
    end = max((found.end() for found in CLOSED.finditer(response)), default=0)
    if (opened and end == 0) or OPENED.search(response, end):
        return None
    return end
