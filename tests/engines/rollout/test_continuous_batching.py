"""Which trajectory decodes when, and how it ends: the synchronous core, without a thread."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import Priority, SamplingParams
from headway.data.types import FinishReason, Prompt
from headway.engines.rollout.native.model_runner import BLOCK_COST, blocks_of
from headway.errors import DataError, NonFinite
from tests.engines.rollout.support import (
    CONTEXT,
    STOP,
    VOCABULARY,
    activate,
    finish,
    make_core,
    make_model,
    make_request,
    steps,
    tokens_of,
)
from tests.tiers import mostly_slow

MODEL = make_model()


def test_every_trajectory_of_every_group_comes_back_once_and_in_its_place() -> None:
    core = make_core(MODEL, slots=5)
    core.ask([make_request(i, n=3) for i in range(7)], "owner")
    groups = finish(core)
    assert sorted(g.number for g in groups) == list(range(7))
    for group in groups:
        prompt = make_request(group.number).prompt
        assert group.tokens[0].prompt_ids.tolist() == prompt.token_ids.tolist()
        assert [t.id for t in group.trajectories] == [prompt.trajectory_id(k) for k in range(3)]
        for trajectory, response in zip(group.trajectories, group.tokens, strict=True):
            assert trajectory.length == len(response.ids) == len(response.logprobs) == len(response.versions)
            assert response.loss_mask.all() and trajectory.prompt_length == len(prompt.token_ids)
            assert trajectory.text == " ".join(map(str, response.ids))
            assert trajectory.started <= trajectory.finished
    assert core.unfinished() == [] and not core.has_work


def test_a_response_ends_with_the_first_stop_token_or_at_its_limit() -> None:
    core = make_core(MODEL)
    core.ask([make_request(i, n=8, stop_token_ids=(STOP, 5, 9)) for i in range(4)], "owner")
    reasons = set()
    for group in finish(core):
        for trajectory, response in zip(group.trajectories, group.tokens, strict=True):
            stops = np.flatnonzero(np.isin(response.ids, (STOP, 5, 9)))
            reasons.add(trajectory.finish_reason)
            if trajectory.finish_reason is FinishReason.STOP:
                assert stops.tolist() == [trajectory.length - 1]
            else:
                assert stops.size == 0 and trajectory.length == 16
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


def test_a_stop_token_of_one_group_does_not_stop_another() -> None:
    core = make_core(MODEL)
    others = tuple(range(2, VOCABULARY))
    core.ask([make_request(0, stop_token_ids=others), make_request(1, stop_token_ids=())], "owner")
    lengths = {g.number: [t.length for t in g.trajectories] for g in finish(core)}
    assert max(lengths[0]) < 16 and lengths[1] == [16] * 4


def test_prompt_and_response_together_never_pass_the_context() -> None:
    core = make_core(MODEL)
    core.ask([make_request(0, length=CONTEXT - 3, max_tokens=50, stop_token_ids=())], "owner")
    core.ask([make_request(1, length=CONTEXT - 1, max_tokens=50, stop_token_ids=())], "owner")
    groups = {g.number: g for g in finish(core)}
    assert [t.length for t in groups[0].trajectories] == [3] * 4
    assert [t.length for t in groups[1].trajectories] == [1] * 4
    assert {t.finish_reason for g in groups.values() for t in g.trajectories} == {FinishReason.LENGTH}


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([3] * CONTEXT, f"a prompt of {CONTEXT} tokens"),
        ([], "a prompt of 0 tokens"),
        ([3, VOCABULARY], f"the model knows 0 to {VOCABULARY - 1}"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_everything_submitted_beside_it(
    tokens: list[int], message: str
) -> None:
    core = make_core(MODEL)
    prompt = Prompt(0, 9, 0, "test", "", np.array(tokens, np.int32))
    with pytest.raises(DataError, match=message):
        core.ask([make_request(0), Group(1, prompt, 1, SamplingParams(4))], "owner")
    assert core.unfinished() == [] and not core.has_work


@mostly_slow("slots", [1, 3, 4, 64], quick=[3, 64])
def test_a_groups_prompt_is_prefilled_once_however_its_trajectories_start(slots: int) -> None:
    requests = [make_request(i, n=8) for i in range(6)]
    core = make_core(MODEL, slots=slots)
    core.ask(requests, "owner")
    groups = finish(core)
    stats = core.stats()
    assert stats.prefilled_tokens == sum(len(r.prompt.token_ids) for r in requests)
    assert stats.generated_tokens == sum(t.length for g in groups for t in g.trajectories)


@pytest.mark.slow
def test_the_number_of_slots_does_not_change_what_is_sampled() -> None:
    results = []
    for slots in (1, 3, 64):
        core = make_core(MODEL, slots=slots)
        core.ask([make_request(i) for i in range(5)], "owner")
        results.append(tokens_of(finish(core)))
    assert results[0] == results[1] == results[2]


def test_two_runs_of_one_wave_are_identical_to_the_last_bit() -> None:
    results = []
    for _ in range(2):
        core = make_core(MODEL, slots=6)
        core.ask([make_request(i) for i in range(5)], "owner")
        groups = finish(core)
        results.append([(g.number, [(r.ids.tobytes(), r.logprobs.tobytes()) for r in g.tokens]) for g in groups])
    assert results[0] == results[1]


def test_seeds_and_attempts_have_randomness_of_their_own() -> None:
    found = set()
    for seed, attempt in ((7, 0), (8, 0), (7, 1)):
        core = make_core(MODEL, seed=seed)
        core.ask([make_request(0, n=1, attempt=attempt, stop_token_ids=())], "owner")
        found.add(tuple(finish(core)[0].tokens[0].ids.tolist()))
    assert len(found) == 3


def test_answers_to_one_prompt_differ() -> None:
    core = make_core(MODEL)
    core.ask([make_request(0, n=8, stop_token_ids=())], "owner")
    (group,) = finish(core)
    assert len({r.ids.tobytes() for r in group.tokens}) == 8


def test_validation_starts_before_training_that_waits() -> None:
    core = make_core(MODEL, slots=4)
    core.ask([make_request(i, stop_token_ids=()) for i in range(3)], "training")
    steps(core, 1)
    core.ask([make_request(i, n=2, priority=Priority.VALIDATION, stop_token_ids=()) for i in range(2)], "validation")
    order = [(g.number, g.trajectories[0].id.row, len(g.trajectories)) for g in finish(core)]
    assert [n for _, _, n in order] == [4, 2, 2, 4, 4]
    assert [number for number, _, n in order if n == 4] == [0, 1, 2]


def test_slots_are_refilled_as_they_become_free() -> None:
    core = make_core(MODEL, slots=2)
    core.ask([make_request(0, n=1, max_tokens=10, stop_token_ids=())], "owner")
    core.ask([make_request(i, n=1, max_tokens=2, stop_token_ids=()) for i in (1, 2, 3)], "owner")
    assert [g.number for g in steps(core, 6)] == [1, 2, 3]
    stats = core.stats()
    assert (stats.running, stats.waiting, stats.generated_tokens) == (1, 0, 12)


def test_a_prefill_never_passes_its_budget_unless_one_context_alone_does(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(MODEL, slots=64, max_batched_tokens=32)
    sizes: list[list[int]] = []
    forward = core._runner._forward
    inner = forward.step

    def watched(decoding, contexts, least_rows):  # type: ignore[no-untyped-def]
        sizes.append([len(context.tokens) for context in contexts])
        return inner(decoding, contexts, least_rows)

    monkeypatch.setattr(forward, "step", watched)
    core.ask([make_request(i, n=1, length=size) for i, size in enumerate((40, 3, 9, 8, 8, 8, 20))], "owner")
    steps(core, 5)
    assert sizes == [[40], [3, 9, 8, 8], [8, 20], [], []]  # the rest start in later steps, and the first go on


def test_a_prompt_that_several_answers_share_counts_once_against_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(MODEL, slots=64, max_batched_tokens=32)
    core.ask([make_request(i, n=8, length=10) for i in range(6)], "owner")
    for active in (24, 48):
        steps(core, 1)
        assert core.stats().running == active


def test_prompts_are_prefilled_in_the_pass_in_which_others_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(MODEL, slots=8)
    core.ask([make_request(0, n=4, stop_token_ids=())], "owner")
    steps(core, 2)
    passes: list[tuple[int, list[int]]] = []
    inner = core._runner._forward.step

    def watched(decoding, contexts, least_rows):  # type: ignore[no-untyped-def]
        passes.append((len(decoding.tokens), [len(context.tokens) for context in contexts]))
        return inner(decoding, contexts, least_rows)

    monkeypatch.setattr(core._runner._forward, "step", watched)
    core.ask([make_request(1, n=2, length=7), make_request(2, n=2, length=9)], "owner")
    steps(core, 2)
    assert passes == [(4, [7, 9]), (8, [])]


def test_activity_is_a_union_of_spans_in_which_something_decoded() -> None:
    core = make_core(MODEL, slots=2)
    core.ask([make_request(0, n=2, max_tokens=3, stop_token_ids=())], "owner")
    finish(core)
    core.ask([make_request(1, n=1, max_tokens=2, stop_token_ids=())], "owner")
    finish(core)
    stats = core.stats()
    assert len(stats.busy) == 2 and stats.busy[0][1] < stats.busy[1][0]
    # The test's clock ticks once whenever it is read: at a step's start, its sampling and its end.
    assert stats.slot_seconds == 2 * (2 + 2 + 2) + (2 + 2)
    assert core.stats().busy == [] and core.stats().generated_tokens == 0


def test_logits_that_are_not_finite_are_an_error_and_not_a_token() -> None:
    core = make_core(MODEL)
    diverged = copy.deepcopy(MODEL)
    torch.nn.init.constant_(diverged.model.norm.weight, float("nan"))
    activate(core, 1, diverged)
    core.ask([make_request(0)], "owner")
    with pytest.raises(NonFinite, match="under version 1"):
        finish(core)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=130))
def test_blocks_partition_the_rows_and_cover_every_span(spans: list[int]) -> None:
    blocks = blocks_of(np.array(spans))
    assert [start for start, _, _ in blocks] == [0, *(stop for _, stop, _ in blocks[:-1])]
    assert blocks[-1][1] == len(spans)
    assert all(span == max(spans[start:stop]) for start, stop, span in blocks)
    work = sum((stop - start) * span for start, stop, span in blocks) + BLOCK_COST * (len(blocks) - 1)
    assert work <= len(spans) * max(spans)
