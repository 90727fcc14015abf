"""Samples as a run writes them, small enough to be checked by hand."""

from __future__ import annotations

from typing import Any


def row(**others: Any) -> dict[str, Any]:
    """Four tokens, one of which was only read. Gaps: 0.01, −0.75, none, 0.3."""
    return {
        "context": "2+2=",
        "prompt_length": 4,
        "cut": 0,
        "ids": [5, 6, 7, 8],
        "pieces": ["4", " is", "\n<tool>", " right"],
        "mask": [1, 1, 0, 1],
        "versions": [3, 3, -1, 4],
        "behaviour": [-0.11, -0.25, 0.0, -2.3],
        "logprobs": [-0.1, -1.0, -5.0, -2.0],
        "entropy": [0.05, 0.7, 1.5, 2.5],
        "columns": {"advantages": [0.5, 0.5, 0.0, -1.5]},
        **others,
    }


def episode(k: int, rows: list[dict[str, Any]], **others: Any) -> dict[str, Any]:
    return {
        "k": k,
        "replica": "rollout-0",
        "reward": float(k),
        "parts": {"exact": float(k), "format": None},
        "turns": 1,
        "turn_rewards": [],
        "length": 3,
        "finish": "stop",
        "limit": None,
        "failure": None,
        "started": 101.5,
        "finished": 104.0,
        "waited_s": 0.0,
        "worked_s": 0.0,
        "text": "4 is right",
        "conversation": None,
        "rows": rows,
        **others,
    }


def sample(number: int, episodes: list[dict[str, Any]], **others: Any) -> dict[str, Any]:
    return {
        "group": number,
        "version": 4,
        "fate": "trained",
        "reason": None,
        "lag": 1,
        "source": "sums",
        "prompt": "2+2=",
        "answer": "4",
        "messages": None,
        "baseline": None,
        "times": {"admitted": 101.0, "generated": 104.0, "rewarded": 104.5, "settled": 110.5},
        "episodes": episodes,
        **others,
    }


def validation(version: int, problem: int, text: str) -> dict[str, Any]:
    one = {"k": 0, "reward": 1.0, "parts": {}, "turns": 1, "length": 3, "finish": "stop", "text": text}
    return {
        "validation": version,
        "problem": problem,
        "source": "sums",
        "prompt": "3+3=",
        "answer": "6",
        "time": 1.0,
        "episodes": [{**one, "conversation": None, "failure": None}],
    }
