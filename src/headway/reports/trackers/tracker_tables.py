"""Data formats of trackers: scalars of a row, a summary in one level, samples as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from headway.errors import cut

LONGEST_TEXT = 4000
"""Most characters of a prompt or an answer in a sample that trackers are given."""
MOST_EPISODES = 16
"""Most episodes of a group in a sample that trackers are given."""
COLUMNS = (
    *("version", "kind", "number", "source", "fate", "prompt", "truth"),
    *("k", "reward", "parts", "text", "turns", "length", "finish"),
)
"""Columns of the table of samples. ``number``: the group's, or the held-out problem's; ``truth``: the ground truth."""


def scalars(row: Mapping[str, Any]) -> dict[str, float | int]:
    """Return the finite numbers of a metrics row, without its version: histograms and missing values are left out."""
    return {name: value for name, value in row.items() if name != "version" and is_number(value)}


def is_number(value: Any) -> bool:
    """Tell whether ``value`` is a finite number, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield values of nested mappings under dotted names: ``groups.trained``. Lists become JSON, null is left out."""
    for name, value in values.items():
        key = f"{prefix}.{name}" if prefix else name
        match value:
            case Mapping():
                yield from flat(value, key)
            case None:
                continue
            case list() | tuple():
                yield key, json.dumps(value, default=str)
            case _:
                yield key, value


def trimmed(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample of ``samples.jsonl`` without what is there token by token, its texts cut to `LONGEST_TEXT`."""
    episodes = [
        {name: _short(value) for name, value in episode.items() if name not in ("rows", "conversation")}
        for episode in sample["episodes"][:MOST_EPISODES]
    ]
    return {name: _short(value) for name, value in sample.items() if name not in ("messages", "episodes")} | {
        "episodes": episodes
    }


def _short(value: Any) -> Any:
    return cut(value, LONGEST_TEXT) if isinstance(value, str) else value


def table(sample: Mapping[str, Any]) -> list[list[Any]]:
    """Return a sample as rows of `COLUMNS`, one for each episode."""
    held_out = "validation" in sample
    group = [
        sample["validation" if held_out else "version"],
        "validation" if held_out else "training",
        sample["problem" if held_out else "group"],
        sample.get("source"),
        None if held_out else sample.get("fate"),
        sample.get("prompt"),
        _as_text(sample.get("answer")),
    ]
    return [[*group, *_episode(episode)] for episode in sample["episodes"]]


def _episode(episode: Mapping[str, Any]) -> list[Any]:
    names = ("k", "reward", "parts", "text", "turns", "length", "finish")
    values = {name: episode.get(name) for name in names}
    values["parts"] = json.dumps(values["parts"] or {})
    return list(values.values())


def _as_text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, default=str)


def markdown(rows: list[list[Any]]) -> str:
    """Return rows of `COLUMNS` as one text of Markdown, an episode after the other."""
    return "\n\n".join(
        "\n".join(f"**{name}** {_fenced(value)}" for name, value in zip(COLUMNS, row, strict=True) if value is not None)
        for row in rows
    )


def _fenced(value: Any) -> str:
    text = str(value)
    return f"\n\n```\n{text}\n```\n" if "\n" in text or len(text) > 60 else text + "  "
