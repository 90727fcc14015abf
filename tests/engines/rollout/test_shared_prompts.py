"""Rows of one prompt read its keys once: with the same results, to the last bit, whoever decodes beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import OnUpdate
from headway.engines.rollout.native.step_attention import (
    LEAST_CALLS,
    LEAST_TOKENS,
    TOGETHER,
    AttentionShape,
    DecodeAttention,
    SharedPrompts,
    places_do_not_matter,
)
from headway.engines.rollout.native.supported_models import Windows
from headway.engines.rollout.scheduler import RequestState, Scheduler
from tests.engines.rollout.support import (
    VOCABULARY,
    AskedCore,
    activate,
    assert_logprobs,
    finish,
    make_call,
    make_core,
    make_model,
    make_request,
    steps,
)

LONG = 256
N = 10
"""Answers of a group: more than one attention call to a prompt takes."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model(max_position_embeddings=LONG)


def long_core(model: PreTrainedModel, slots: int = 40, **changes: Any) -> AskedCore:
    return make_core(model, slots=slots, max_context=LONG, max_batched_tokens=400, **changes)


def requests(max_tokens: int = 12) -> list[Group]:
    """Groups with prompts of which one is shorter than what is attended to apart."""
    lengths = (LEAST_TOKENS, 150, 40, 171)
    return [make_request(i, n=N, length=length, max_tokens=max_tokens) for i, length in enumerate(lengths)]


def answers(core: AskedCore) -> dict[tuple[int, int], tuple[list[int], bytes]]:
    core.ask(requests(max_tokens=5))
    return {
        (group.number, k): (row.ids.tolist(), row.logprobs.tobytes())
        for group in finish(core)
        for k, row in enumerate(group.tokens)
    }


def test_an_answer_is_the_same_to_the_last_bit_with_its_group_beside_it_and_alone(model: PreTrainedModel):
    whole = answers(long_core(model))
    assert len(whole) == 4 * N
    assert answers(long_core(model, slots=1)) == whole
    assert answers(long_core(model, slots=7)) == whole


def test_logprobs_are_those_of_the_whole_sequence(model: PreTrainedModel):
    core = long_core(model)
    core.ask(requests())
    assert_logprobs(finish(core), {0: model})


def test_rows_of_long_prompts_are_attended_to_apart_and_others_are_not(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
):
    seen: set[tuple[int, int]] = set()
    attend = DecodeAttention._to_prompts

    def spy(self: DecodeAttention, layer: int, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.update((length, len(rows)) for rows, _, length in self._prompts)
        return attend(self, layer, queries)

    monkeypatch.setattr(DecodeAttention, "_to_prompts", spy)
    core = long_core(model)
    core.ask(requests())
    steps(core, 6)
    assert {length for length, _ in seen} == {LEAST_TOKENS, 150, 171}
    assert (150, TOGETHER) in seen and (150, N - TOGETHER) in seen


def test_what_an_update_interrupts_goes_on_with_the_prompt_under_the_new_weights(model: PreTrainedModel):
    other = make_model(max_position_embeddings=LONG, seed=1)
    core = long_core(model)
    core.ask(requests())
    steps(core, 4)
    core.pause(OnUpdate.INTERRUPT)
    activate(core, 1, other)
    core.resume()
    assert_logprobs(finish(core), {0: model, 1: other})


def run(number: int, k: int = 0, **changes: Any) -> RequestState:
    call = make_call(make_request(number, n=N, length=LEAST_TOKENS), k, **changes)
    return Scheduler(seed=0, max_context=LONG, vocabulary=VOCABULARY).submit("me", [call])[0]


def add(prompts: SharedPrompts, row: int, run: RequestState) -> None:
    prompts.add(row, run.request.input_ids, run.request.together)


def rows_by_prompt(prompts: SharedPrompts, active: int) -> list[list[int]]:
    return [one.rows.tolist() for one in prompts.of(active)]


def test_prompts_that_were_prefilled_under_different_weights_are_different_prompts():
    prompts = SharedPrompts(8)
    for row in range(3):
        add(prompts, row, run(0, row))
    prompts.renew()
    for row in range(3, 5):
        add(prompts, row, run(0, row))
    assert rows_by_prompt(prompts, 5) == [[0, 1, 2], [3, 4]]


def test_a_row_that_moves_takes_its_prompt_with_it():
    prompts = SharedPrompts(8)
    for row, number in enumerate([0, 0, 1, 1]):
        add(prompts, row, run(number, row))
    prompts.move(3, 0)
    assert rows_by_prompt(prompts, 3) == [[0, 2], [1]]
    prompts.move(2, 1)
    add(prompts, 2, run(0, 5))
    assert rows_by_prompt(prompts, 3) == [[0, 1], [2]]


def test_calls_without_a_group_attend_to_their_context_whole():
    prompts = SharedPrompts(8)
    add(prompts, 0, run(0, together=LEAST_CALLS - 1))
    add(prompts, 1, run(0, together=LEAST_CALLS))
    assert rows_by_prompt(prompts, 2) == [[1]]


@pytest.mark.parametrize("heads", [(4, 4, 32), (8, 2, 64), (14, 2, 64), (8, 1, 128)])
def test_the_place_of_a_row_in_a_call_to_a_prompt_does_not_matter(heads: tuple[int, int, int]):
    shape = AttentionShape(*heads, Windows(None, (False,)), torch.float32)
    assert places_do_not_matter(shape)
