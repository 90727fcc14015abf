"""Samples: one record for each drawn group and held-out problem, collected until its fate is known.

    admitted ─▶ generated: texts ─▶ rewarded: scores ─▶ trained: rows ─▶ settled ─▶ record
                    └───────────────────┴─────────────────────────────────▶┘        (filtered, dropped, failed)

Only a drawn group has a `DrawnGroup` in its ledger entry, which the stages fill in. Rows come from the ranks that
trained them, as their first optimizer step saw them; texts, scores and times are the driver's. docs/samples.md
describes the records.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headway.data.interfaces.episode_groups import Group, Scores
from headway.data.interfaces.training import TrainedRow
from headway.data.mixing import drawn_problems, place_of_group
from headway.data.types import Prompt, Trajectory
from headway.errors import cut, writable_json

DIGITS = 5
"""Significant digits of the numbers in a record."""
MOST_BYTES = 8 * 2**20
"""Largest size of a record in bytes of UTF-8: an eighth of the file's limit."""

Record = dict[str, Any]


class TokenDecoder(Protocol):
    """Converts token ids to text, special tokens included."""

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of all tokens together."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token. Bytes of an incomplete character are written as ``<0xE2>``."""


@dataclass(frozen=True, slots=True)
class SampleOutlet:
    """Destination of samples, and the decoder for their tokens."""

    keep: Callable[[Record], None]
    """Function that takes a record of JSON values. Must return at once and never raise."""
    texts: TokenDecoder


@dataclass(slots=True)
class DrawnGroup:
    """Contents so far of a drawn group's sample. Times are seconds on the event clock."""

    admitted: float
    generated: float | None = None
    rewarded: float | None = None
    episodes: tuple[Trajectory, ...] = ()
    """Episodes of the group with their texts, including failed ones but not the baseline."""
    scores: Scores | None = None
    """Scores of the episodes that did not fail, in order; a baseline's score is the last."""
    baseline: float | None = None
    rows: list[TrainedRow] = field(default_factory=list)


class Samples:
    """Collector of samples. Hands on the record of each drawn group when its fate is settled."""

    def __init__(self, outlet: SampleOutlet, *, seed: int, share: float, problems: int) -> None:
        """Draw a ``share`` of the groups, in [0, 1], and a number of held-out ``problems`` for each validation."""
        self.outlet, self.seed, self.share, self.problems = outlet, seed, share, problems

    def draws(self, number: int) -> bool:
        """Return True if group ``number`` leaves a sample."""
        return place_of_group(self.seed, number) < self.share

    def settled(self, number: int, prompt: Prompt, drawn: DrawnGroup, **ended: Any) -> None:
        """Hand on the record of a drawn group. ``ended``: fate, reason, lag, time and version at its end."""
        given = _by_episode(drawn.episodes, drawn.scores)
        rows: dict[int, list[TrainedRow]] = {}
        for row in drawn.rows:
            rows.setdefault(row.episode.k, []).append(row)
        times = {name: getattr(drawn, name) for name in ("admitted", "generated", "rewarded")}
        times["settled"] = ended.pop("time")
        record = {
            "group": number,
            **ended,
            **_asked(prompt),
            "messages": plain(prompt.messages),
            "baseline": _number(drawn.baseline),
            "times": {name: _moment(at) for name, at in times.items()},
            "episodes": [
                {
                    **_said(t, *given.get(t.id.k, (None, {}))),
                    "replica": t.replica,
                    "turn_rewards": [_number(one) for one in t.turn_rewards],
                    "limit": t.limit,
                    "failure": t.failure,
                    "notes": dict(t.notes),
                    "started": _moment(t.started),
                    "finished": _moment(t.finished),
                    "waited_s": _number(sum(end - start for start, end in t.waits)),
                    "worked_s": _number(sum(end - start for start, end in t.steps)),
                    "rows": [self._row(row, prompt) for row in rows.get(t.id.k, ())],
                }
                for t in drawn.episodes
            ],
        }
        self.outlet.keep(storable(record))

    def held_out(self, prompts: Sequence[Prompt]) -> frozenset[int]:
        """Return the indices of the held-out problems that leave a sample at each validation."""
        return drawn_problems(self.seed, [prompt.row for prompt in prompts], self.problems)

    def validated(self, version: int, problem: Group, scores: Scores | None, time: float) -> None:
        """Hand on the record of one problem at the validation of ``version``. ``scores``: scores of the episodes that
        did not fail, in order; None if scoring failed.
        """
        episodes = problem.trajectories
        given = _by_episode(episodes, scores)
        answers = [{**_said(t, *given.get(t.id.k, (None, {}))), "failure": t.failure} for t in episodes]
        record = {"validation": version, "problem": problem.number, **_asked(problem.prompt)}
        self.outlet.keep(storable({**record, "time": _moment(time), "episodes": answers}))

    def _row(self, row: TrainedRow, prompt: Prompt) -> Record:
        texts, ids = self.outlet.texts, row.ids.tolist()
        same = np.array_equal(row.prompt_ids, prompt.token_ids)
        return {
            "context": None if same else texts.text(row.prompt_ids.tolist()),
            "prompt_length": len(row.prompt_ids),
            "cut": row.cut,
            "ids": ids,
            "pieces": texts.pieces(ids),
            "mask": row.mask.astype(np.int64).tolist(),
            "versions": row.versions.tolist(),
            "behaviour": rounded(row.behaviour),
            "logprobs": rounded(row.logprobs),
            "entropy": rounded(row.entropy),
            "columns": {name: rounded(values) for name, values in row.columns.items()},
        }


def _by_episode(
    episodes: Sequence[Trajectory], scores: Scores | None
) -> dict[int, tuple[float, dict[str, float | None]]]:
    """Return k -> reward and its parts, for episodes that did not fail. The baseline's score is left out."""
    if scores is None:
        return {}
    return {
        t.id.k: (float(scores.rewards[place]), {name: values[place] for name, values in scores.parts.items()})
        for place, t in enumerate(t for t in episodes if t.failure is None)
    }


def _asked(prompt: Prompt) -> Record:
    question = prompt.question if prompt.question != prompt.text else None
    return {"source": prompt.source, "prompt": prompt.text, "question": question, "answer": plain(prompt.answer)}


def _said(t: Trajectory, reward: float | None, parts: Mapping[str, float | None]) -> Record:
    told = t.conversation
    return {
        "k": t.id.k,
        "reward": _number(reward),
        "parts": {name: _number(value) for name, value in parts.items()},
        "turns": t.turns,
        "length": t.length,
        "finish": t.finish_reason.value,
        "text": t.text,
        "conversation": None if told is None else plain({"prompt": told.prompt, "completion": told.completion}),
    }


def storable(record: Record, most: int = MOST_BYTES) -> Record:
    """Return ``record`` in a form that can be stored: lone surrogates escaped, at most ``most`` bytes.

    A larger record loses its rows first, then the ends of long texts, then its episodes, and is marked ``shortened``.
    """
    text = json.dumps(record, ensure_ascii=False)
    clean = writable_json(text)
    if clean != text:
        record = json.loads(clean)
    for shorter in (_without_rows, partial(_with_short_texts, longest=2**10), _alone):
        if len(json.dumps(record, ensure_ascii=False).encode()) <= most:
            break
        record = {**shorter(record), "shortened": True}
    return record


def _without_rows(record: Record) -> Record:
    return {**record, "episodes": [{**episode, "rows": []} for episode in record["episodes"]]}


def _with_short_texts(value: Any, longest: int) -> Any:
    if isinstance(value, str):
        return cut(value, longest)
    if isinstance(value, dict):
        return {name: _with_short_texts(one, longest) for name, one in value.items()}
    return [_with_short_texts(one, longest) for one in value] if isinstance(value, list) else value


def _alone(record: Record) -> Record:
    """Return ``record`` without episodes, with its large values shortened."""
    large = {name: cut(str(record[name]), 2**8) for name in ("answer", "messages") if record.get(name) is not None}
    return {**_with_short_texts(record, 2**8), **large, "episodes": []}


def plain(value: Any) -> Any:
    """Return ``value`` as a JSON value, or its text if JSON cannot represent it."""
    if value is None or isinstance(value, str):
        return value
    try:
        return json.loads(json.dumps(value, default=_spelled))
    except (TypeError, ValueError, RecursionError):  # keys that are no text, values that contain themselves
        return str(value)


def _spelled(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)


def rounded(values: NDArray[np.floating[Any]]) -> list[float]:
    """Return ``values`` [T] with `DIGITS` significant digits. Values that are not finite stay unchanged."""
    wide = values.astype(np.float64)  # a float32 would be spelled with its rounding error: 0.1 as 0.10000000149
    with np.errstate(divide="ignore", invalid="ignore"):
        size = np.floor(np.log10(np.abs(wide)))
        places = np.where(np.isfinite(size), DIGITS - 1 - size, 0.0)
        # Powers of ten with a negative exponent are not exact: `up` and `down` both have exponents of at least 0.
        up, down = 10.0 ** np.maximum(places, 0.0), 10.0 ** np.maximum(-places, 0.0)
        result = np.where(places >= 0, np.round(wide * up) / up, np.round(wide / down) * down)
    return np.where(np.isfinite(result), result, wide).tolist()  # type: ignore[no-any-return]


def _number(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")


def _moment(time: float | None) -> float | None:
    return None if time is None else round(time, 4)
