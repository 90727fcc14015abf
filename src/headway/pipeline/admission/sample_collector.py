"""Samples: what drawn groups and held-out problems said, kept until their fate is known, one record for each.

    admitted ─▶ generated: texts ─▶ rewarded: scores ─▶ trained: rows ─▶ settled ─▶ record
                    └───────────────────┴─────────────────────────────────▶┘        (filtered, dropped, failed)

The ledger's entry of a drawn group has a `DrawnGroup`, which the stages fill in, and no other group's has. The rows
come from the ranks that trained them, as their first optimizer step saw them; texts, scores and times are the driver's
own. docs/samples.md describes the records.
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
"""Most bytes of a record as UTF-8: an eighth of the file's."""

Record = dict[str, Any]


class TokenDecoder(Protocol):
    """Text of token ids, special tokens included."""

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of all tokens together."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token. Bytes that are no whole character are spelled, as ``<0xE2>``."""


@dataclass(frozen=True, slots=True)
class SampleOutlet:
    """Outlet of samples, and the means to make text of their tokens."""

    keep: Callable[[Record], None]
    """Function that takes a record, which is JSON. Must return at once and never raise."""
    texts: TokenDecoder


@dataclass(slots=True)
class DrawnGroup:
    """Contents so far of the sample of a drawn group that is under way. Times are seconds on the event clock."""

    admitted: float
    generated: float | None = None
    rewarded: float | None = None
    episodes: tuple[Trajectory, ...] = ()
    """Its episodes with their texts, failed ones included, the baseline not."""
    scores: Scores | None = None
    """Scores of those that did not fail, in order; a baseline's is the last."""
    baseline: float | None = None
    rows: list[TrainedRow] = field(default_factory=list)


class Samples:
    """Keeps what drawn groups say, and hands on one record for each when its fate is settled."""

    def __init__(self, outlet: SampleOutlet, *, seed: int, share: float, problems: int) -> None:
        """Keep a ``share`` of the groups, in [0, 1], and so many held-out ``problems`` of each validation."""
        self.outlet, self.seed, self.share, self.problems = outlet, seed, share, problems

    def draws(self, number: int) -> bool:
        """Tell whether group ``number`` leaves a sample."""
        return place_of_group(self.seed, number) < self.share

    def settled(self, number: int, prompt: Prompt, drawn: DrawnGroup, **ended: Any) -> None:
        """Hand on the record of a drawn group. ``ended``: fate, reason, lag, time and version of its end."""
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
        """Return the indices of those held-out problems that are shown at each validation."""
        return drawn_problems(self.seed, [prompt.row for prompt in prompts], self.problems)

    def validated(self, version: int, problem: Group, scores: Scores | None, time: float) -> None:
        """Hand on the record of one problem at the validation of ``version``. ``scores``: of episodes that did not
        fail, in order; None where they could not be scored.
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
    """Return k → reward and its parts, of episodes that did not fail. A further score, of a baseline, is left out."""
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
    """Return ``record`` as a file can hold it: lone surrogates spelled, and of at most ``most`` bytes.

    One that is larger loses its rows first, then the ends of long texts, then its episodes, and has ``shortened``.
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
    """Return ``record`` without episodes, and with the beginning of what may be large."""
    large = {name: cut(str(record[name]), 2**8) for name in ("answer", "messages") if record.get(name) is not None}
    return {**_with_short_texts(record, 2**8), **large, "episodes": []}


def plain(value: Any) -> Any:
    """Return ``value`` as JSON has it; its text where JSON cannot hold it."""
    if value is None or isinstance(value, str):
        return value
    try:
        return json.loads(json.dumps(value, default=_spelled))
    except (TypeError, ValueError, RecursionError):  # keys that are no text, values that contain themselves
        return str(value)


def _spelled(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)


def rounded(values: NDArray[np.floating[Any]]) -> list[float]:
    """Return ``values`` [T] with `DIGITS` significant digits. What is not finite stays as it is."""
    wide = values.astype(np.float64)  # a float32 would be spelled with its rounding error: 0.1 as 0.10000000149
    with np.errstate(divide="ignore", invalid="ignore"):
        size = np.floor(np.log10(np.abs(wide)))
        places = np.where(np.isfinite(size), DIGITS - 1 - size, 0.0)
        # Powers of ten with a negative exponent are not exact, so that digits are cut off by a division either way.
        up, down = 10.0 ** np.maximum(places, 0.0), 10.0 ** np.maximum(-places, 0.0)
        result = np.where(places >= 0, np.round(wide * up) / up, np.round(wide / down) * down)
    return np.where(np.isfinite(result), result, wide).tolist()  # type: ignore[no-any-return]


def _number(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")


def _moment(time: float | None) -> float | None:
    return None if time is None else round(time, 4)
