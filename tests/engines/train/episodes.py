"""Random episodes of many turns, each in one row, and the same episodes in several rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headway.data.packing import CollatedRow
from headway.data.types import Outcomes, TrajectoryId, TurnSpan

GROUPS = (4, 4, 9, 4, 9, 2)
"""Group of each episode: of three, of two and of one."""
STATES = (-(2**63), 7, 2**63 - 1)
COLUMNS = ("now", "advantages", "values", "ref_logprobs", "prox_logprobs", "entropy")


def whole(seed: int, *, turns: int = 4) -> tuple[list[CollatedRow], Outcomes]:
    """Episodes of 1 to ``turns`` turns in one row each, with holes between turns, rewards and states of turns.

    The column ``place`` numbers all tokens of the batch.
    """
    rng, of_states = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    rows, count = [], 0
    for k, group in enumerate(GROUPS):
        mask: list[bool] = []
        spans = []
        for number in range(int(rng.integers(1, turns + 1))):
            mask += [False] * (int(rng.integers(0, 3)) if number else 0)
            start = len(mask)
            mask += [True] * int(rng.integers(1, 5))
            spans.append(TurnSpan(number, start, len(mask), int(of_states.choice(STATES))))
        length = len(mask)
        near = (-2.0 + 0.3 * rng.standard_normal(length)).astype(np.float32)
        columns = {name: (near + 0.3 * rng.standard_normal(length)).astype(np.float32) for name in COLUMNS}
        columns["place"] = np.arange(count, count + length, dtype=np.float32)
        count += length
        rows.append(
            CollatedRow(
                input_ids=rng.integers(2, 18, 3 + length).astype(np.int32),
                prompt_length=3,
                logprobs=np.where(mask, near, 0.0).astype(np.float32),
                versions=np.where(mask, rng.integers(1, 4, length), -1).astype(np.int32),
                loss_mask=np.array(mask),
                columns=columns,
                episode=TrajectoryId(0, group, 0, k),
                turns=tuple(spans),
            )
        )
    outcomes = Outcomes(
        ids=tuple(row.episode for row in rows if row.episode is not None),
        rewards=(2 * rng.standard_normal(len(rows))).astype(np.float32),
        groups=np.array(GROUPS),
        episode_of=np.arange(len(rows)),
        baselines=rng.standard_normal(len(rows)).astype(np.float32),
        turn_rewards=tuple(tuple(float(r) for r in rng.standard_normal(len(row.turns))) for row in rows),
    )
    return rows, outcomes


def cut_anywhere(row: CollatedRow, at: Sequence[int]) -> list[CollatedRow]:
    """The row cut before these response tokens: each part has all parts before it in its prompt."""
    ends = sorted({min(place, len(row.loss_mask)) for place in at} - {0, len(row.loss_mask)})
    parts = []
    for start, stop in zip([0, *ends], [*ends, len(row.loss_mask)], strict=True):
        part = _part(row, np.arange(start, stop))
        prompt = row.prompt_length + start
        parts.append(replace(part, input_ids=row.input_ids[: row.prompt_length + stop], prompt_length=prompt))
    return parts


def dealt(row: CollatedRow, hands: int) -> list[CollatedRow]:
    """The row's turns dealt out to ``hands`` rows in turn, as an episode of several conversations has them."""
    parts = []
    for hand in range(min(hands, len(row.turns))):
        kept = [np.arange(turn.start, turn.stop) for turn in row.turns if turn.number % hands == hand]
        parts.append(_part(row, np.concatenate(kept)))
    return parts


def in_rows(parts: Sequence[Sequence[CollatedRow]], outcomes: Outcomes) -> tuple[list[CollatedRow], Outcomes]:
    """All rows, in order, and the outcomes that say whose they are."""
    rows = [row for of_episode in parts for row in of_episode]
    return rows, replace(outcomes, episode_of=np.repeat(np.arange(len(parts)), [len(rows) for rows in parts]))


def _part(row: CollatedRow, kept: NDArray[np.int64]) -> CollatedRow:
    numbers = np.full(len(row.loss_mask), -1)
    for turn in row.turns:
        numbers[turn.start : turn.stop] = turn.number
    spans = []
    for turn in row.turns:
        (places,) = np.nonzero(numbers[kept] == turn.number)
        if len(places):
            spans.append(turn._replace(start=int(places[0]), stop=int(places[-1]) + 1))
    return replace(
        row,
        input_ids=np.concatenate([row.input_ids[: row.prompt_length], row.input_ids[row.prompt_length :][kept]]),
        logprobs=row.logprobs[kept],
        versions=row.versions[kept],
        loss_mask=row.loss_mask[kept],
        columns={name: values[kept] for name, values in row.columns.items()},
        turns=tuple(spans),
    )
