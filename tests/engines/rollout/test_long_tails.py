"""Positions that a decoding step attends to, where a few answers are much longer than most: rows keep in order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from headway.engines.rollout.native.decode_batch import DecodeRows
from headway.engines.rollout.native.model_runner import SPAN_STEP, blocks_of
from headway.engines.rollout.scheduler import RequestState, Scheduler
from tests.engines.rollout.support import VOCABULARY, make_call, make_request
from tests.tiers import mostly_slow

ROWS, MEAN, LONGEST = 256, 1000, 4096


def runs(seed: int) -> Iterator[RequestState]:
    """Calls of prompts of 80 to 400 tokens, and answers of lognormal length: the standard deviation is the mean."""
    random = np.random.default_rng(seed)
    sigma = np.sqrt(np.log(2))
    scheduler = Scheduler(seed=0, max_context=LONGEST + 400, vocabulary=VOCABULARY)
    for number in range(100_000):
        answer = min(int(random.lognormal(np.log(MEAN) - sigma**2 / 2, sigma)) + 1, LONGEST)
        request = make_request(number, length=int(random.integers(80, 400)), max_tokens=answer, stop_token_ids=())
        yield from scheduler.submit("me", [make_call(request, number=number)])


def trace(rows: DecodeRows, refilled: int, seed: int) -> Iterator[None]:
    """Decode until no row is left; rows that end are replaced in the first ``refilled`` steps."""
    waiting = runs(seed)
    step = 0
    while step == 0 or rows.active:
        while rows.active < rows.slots and step <= refilled:
            rows.add(next(waiting))
        yield
        rows.record(np.arange(rows.active), np.zeros(rows.active, np.int64), np.zeros(rows.active, np.float32), 0)
        rows.lengths[: rows.active] += 1
        for row, _ in rows.ended():
            rows.remove(row)
        step += 1


@mostly_slow("refilled", [0, 3 * MEAN], quick=[0], ids=["drain", "refill"])
def test_blocks_of_ordered_rows_read_little_more_than_the_rows_have(refilled: int) -> None:
    rows = DecodeRows(ROWS, LONGEST + 400, ordered=True)
    read = needed = calls = steps = 0
    for index, _ in enumerate(trace(rows, refilled, seed=0)):
        if index % 10:
            continue
        blocks = blocks_of(rows.lengths[: rows.active] + 1)
        read += sum((stop - start) * -(-span // SPAN_STEP) * SPAN_STEP for start, stop, span in blocks)
        needed += rows.cached + rows.active
        calls, steps = calls + len(blocks), steps + 1
    assert read <= 1.15 * needed
    assert calls <= 20 * steps


def test_a_call_keeps_what_it_wrote_wherever_its_row_moves() -> None:
    rows = DecodeRows(16, LONGEST + 400, ordered=True)
    seen: dict[int, list[int]] = {}
    random = np.random.default_rng(0)
    finished = 0
    waiting = runs(seed=1)
    while finished < 60:
        while rows.active < rows.slots:
            rows.add(next(waiting))
        tokens = random.integers(0, VOCABULARY, rows.active)
        for run, token in zip(rows.runs, tokens, strict=True):
            seen.setdefault(run.serial, []).append(int(token))
        rows.record(np.arange(rows.active), tokens, tokens.astype(np.float32), 3)
        rows.lengths[: rows.active] += 1
        for row, _ in rows.ended():
            length = len(rows.runs[row].request.input_ids) + len(seen[rows.runs[row].serial])
            assert rows.lengths[row] == length
            run, moves = rows.remove(row)
            assert run.written.ids.tolist() == seen.pop(run.serial) and len(run.written.ids) == run.limit
            assert [target for _, target in moves] == [row, *(source for source, _ in moves)][:-1]
            finished += 1
