"""Decoding steps that are recorded and replayed, with a recorder that needs no GPU: it runs the function again."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from headway.engines.rollout.native.graphs import Compute, Recorder, recorded_rows
from headway.errors import RunError
from headway.interfaces import OnUpdate
from tests.engines.rollout.support import (
    CONTEXT,
    FAMILIES,
    activate,
    assert_logprobs,
    finish,
    make_core,
    make_model,
    make_request,
    steps,
    tokens_of,
)

LONG = 640
"""Positions: more than two spans of recorded steps."""


class Replays:
    """Records as a CUDA graph does: the function of fixed memory, whose result always lies in the same place."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0

    def __call__(self, compute: Compute) -> Compute:
        result = compute()
        self.recorded += 1

        def replay() -> torch.Tensor:
            self.replayed += 1
            return result.copy_(compute())

        return replay


@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_steps_give_the_tokens_of_steps_that_are_not_recorded(family: str) -> None:
    model = make_model(family)
    requests = [make_request(number, max_tokens=4 + 5 * number) for number in range(4)]
    trajectories = []
    replays = Replays()
    for recorder in (None, replays):
        core = make_core(model, recorder=recorder)
        core.submit(requests, "test")
        groups = finish(core)
        assert_logprobs(groups, {0: model})
        trajectories.append(tokens_of(groups))
    assert trajectories[0] == trajectories[1]
    assert replays.replayed > 3 * replays.recorded > 0


def test_a_shape_is_recorded_once_and_longer_answers_are_other_shapes() -> None:
    model = make_model(max_position_embeddings=LONG)
    replays = Replays()
    core = make_core(model, max_context=LONG, recorder=replays)
    core.submit([make_request(0, n=1, length=5, max_tokens=LONG - 5, stop_token_ids=())], "test")
    groups = finish(core)
    assert_logprobs(groups, {0: model})
    rooms = math.ceil(LONG / 64)
    assert replays.recorded <= rooms, "one for each length of the cache's rows, at most"
    assert replays.replayed == LONG - 5 - 1


def test_what_is_recorded_decodes_with_the_weights_that_were_written_last() -> None:
    old, new = make_model(), make_model(seed=3)
    replays = Replays()
    core = make_core(old, recorder=replays)
    core.submit([make_request(0, max_tokens=30, stop_token_ids=())], "test")
    steps(core, 10)
    recorded = replays.recorded
    core.pause(OnUpdate.KEEP)
    activate(core, 1, new)
    core.resume()
    (group,) = finish(core)
    response = group.tokens.responses[0]
    assert set(response.versions.tolist()) == {0, 1}
    assert replays.recorded == recorded
    core.submit([make_request(1, max_tokens=8, stop_token_ids=())], "test")
    assert_logprobs(finish(core), {1: new})


def test_sleep_forgets_what_was_recorded_over_memory_that_is_given_back() -> None:
    model = make_model()
    replays = Replays()
    core = make_core(model, recorder=replays)
    core.submit([make_request(0)], "test")
    finish(core)
    recorded = replays.recorded
    core.pause(OnUpdate.INTERRUPT)
    core.sleep(keep_weights=True)
    core.wake()
    core.resume()
    core.submit([make_request(0)], "test")
    assert_logprobs(finish(core), {0: model})
    assert replays.recorded == 2 * recorded


def test_a_step_that_cannot_be_recorded_ends_in_a_message_that_names_the_setting() -> None:
    def broken(compute: Compute) -> Compute:
        raise RuntimeError("operation not permitted when stream is capturing")

    recorder: Recorder = broken
    core = make_core(make_model(), recorder=recorder)
    core.submit([make_request(0)], "test")
    with pytest.raises(RunError, match=r"4 rows and \d+ positions .* not permitted .*rollout\.enforce_eager=true"):
        finish(core)


@pytest.mark.parametrize(("rows", "recorded"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16), (127, 128)])
def test_rows_are_filled_up_to_one_of_a_few_numbers(rows: int, recorded: int) -> None:
    assert recorded_rows(rows) == recorded


def test_no_more_rows_are_filled_up_than_the_cache_has() -> None:
    model, replays = make_model(), Replays()
    core = make_core(model, slots=5, max_context=CONTEXT, recorder=replays)
    core.submit([make_request(0, n=5, max_tokens=9, stop_token_ids=())], "test")
    (group,) = finish(core)
    assert_logprobs([group], {0: model})
    assert np.all([len(response.ids) == 9 for response in group.tokens.responses])
