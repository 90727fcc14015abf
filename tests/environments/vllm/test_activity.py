"""What is made of vLLM's counts, on a clock that the tests set."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headway.engines.rollout.engine_activity import VllmActivity


class Told:
    """An `VllmActivity`, and vLLM's side of it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.activity = VllmActivity(lambda: self.now)

    def step(
        self,
        *,
        first: int = 0,
        latencies: tuple[float, ...] = (),
        prompts: int = 0,
        context: int = 0,
        more: int = 0,
        preempted: int = 0,
    ) -> None:
        """One in which ``first`` calls get their first token, behind ``prompts`` tokens of which ``context``
        are computed, and others go on after ``latencies``; ``more``: tokens beyond one each that those compute;
        ``preempted``: so often were they before it.
        """
        goes_on = len(latencies)
        iteration: Any = SimpleNamespace(
            num_generation_tokens=first + goes_on,
            prompt_token_stats=SimpleNamespace(computed=context, cached_tokens=prompts - context, total=prompts),
            inter_token_latencies_iter=list(latencies),
            time_to_first_tokens_iter=[0.5] * first,
            num_preempted_reqs=preempted,
        )
        self.activity.step(self.details(first=first, context=context, goes_on=goes_on, more=more), iteration)

    @staticmethod
    def details(*, first: int = 0, context: int = 0, goes_on: int, more: int = 0) -> Any:
        details = SimpleNamespace(
            num_ctx_requests=first,
            num_ctx_tokens=context,
            num_generation_requests=goes_on,
            num_generation_tokens=goes_on + more,
        )
        return SimpleNamespace(iteration_details=details, num_running_reqs=first + goes_on)


@pytest.fixture
def told() -> Told:
    return Told()


def test_a_step_takes_what_vllm_says_and_where_it_cannot_know_until_now(told: Told) -> None:
    told.activity.running(2)
    told.now = 101.0
    told.step(first=2, prompts=10, context=6)
    told.now = 102.0
    told.step(latencies=(0.25, 0.25))
    told.now = 102.5
    told.step(latencies=(0.5, 0.5))
    stats = told.activity.take(2, 0, 0)
    assert stats.prefill_steps == {4: (1, 2, 6, 1.0, 10)}
    assert stats.decode_steps == {2: (2, 0.75, 12 + 14)}
    assert (stats.generated_tokens, stats.prefilled_tokens, stats.cached_tokens) == (6, 6, 4)
    assert (stats.busy, stats.slot_seconds) == ([(100.0, 102.5)], 5.0)


def test_a_halt_is_no_part_of_the_step_behind_it(told: Told) -> None:
    told.activity.running(1)
    told.now = 101.0
    told.step(first=1, prompts=4, context=4)
    told.activity.running(0)
    told.now = 111.0
    told.activity.running(1)
    told.now = 111.5
    told.step(latencies=(10.5,), more=4)  # interrupted: its context is computed again
    told.now = 112.0
    told.step(latencies=(0.25,))
    stats = told.activity.take(1, 0, 0)
    assert stats.prefill_steps == {4: (2, 2, 8, 1.5, 9)}
    assert stats.decode_steps == {1: (1, 0.25, 6)}
    assert stats.busy == [(100.0, 101.0), (111.0, 112.0)]


def test_a_step_with_those_that_stood_still_takes_what_it_took_the_others(told: Told) -> None:
    told.activity.running(2)
    told.now = 101.0
    told.step(first=2, prompts=2, context=2)
    told.step(latencies=(3.0, 0.5))
    assert told.activity.take(2, 0, 0).decode_steps == {2: (1, 0.5, 4)}


def test_what_ended_is_not_in_the_cache_any_more(told: Told) -> None:
    told.activity.running(2)
    told.step(first=2, prompts=10, context=10)
    told.activity.ended(6)
    told.activity.take(1, 0, 0)
    told.step(latencies=(0.25,))
    assert told.activity.take(1, 0, 0).decode_steps == {1: (1, 0.25, 6)}


def test_a_step_that_gave_nobody_a_token_is_none(told: Told) -> None:
    """All that it was for have been aborted in the middle of it, and vLLM has no outputs of it."""
    told.activity.running(1)
    told.step(first=1, prompts=3, context=3)
    told.activity.take(1, 0, 0)
    told.activity.step(told.details(goes_on=1), None)
    assert told.activity.take(1, 0, 0).decode_steps == {}


def test_a_step_that_spans_two_reports_is_in_the_second_as_a_whole(told: Told) -> None:
    told.activity.running(1)
    told.step(first=1, prompts=3, context=3)
    told.now = 101.0
    assert told.activity.take(1, 0, 0).busy == [(100.0, 101.0)]
    told.now = 102.0
    told.step(latencies=(2.0,))
    stats = told.activity.take(1, 0, 0)
    assert (stats.busy, stats.decode_steps) == ([(101.0, 102.0)], {1: (1, 2.0, 4)})


def test_what_an_interrupt_cut_was_not_preempted_for_want_of_memory(told: Told) -> None:
    """vLLM counts both, and tells of them with the next token of each."""
    told.activity.running(3)
    told.step(first=2, prompts=2, context=2)  # the third has to wait for memory
    told.activity.interrupted()
    told.activity.interrupted()  # of nothing any more
    told.step(latencies=(0.5,), preempted=1)
    told.step(latencies=(0.5, 0.5), preempted=2)
    assert told.activity.take(3, 0, 0).preempted == 1
    told.step(latencies=(0.5, 0.5), preempted=1)
    assert told.activity.take(3, 0, 0).preempted == 1


def test_of_what_was_aborted_behind_an_interrupt_vllm_never_tells(told: Told) -> None:
    told.activity.running(2)
    told.step(first=2, prompts=2, context=2)
    told.activity.interrupted()
    told.activity.running(0, halted=True)
    told.activity.running(2)
    told.step(first=2, prompts=2, context=2)
    told.step(latencies=(0.5, 0.5), preempted=1)
    assert told.activity.take(2, 0, 0).preempted == 1


def test_without_vllms_details_tokens_are_counted_and_steps_are_not(told: Told) -> None:
    """As with ``rollout.engine_kwargs.enable_logging_iteration_details: false``."""
    told.activity.running(1)
    prompt = SimpleNamespace(computed=3, cached_tokens=0, total=3)
    told.activity.step(
        SimpleNamespace(iteration_details=None, num_running_reqs=1),
        SimpleNamespace(
            num_generation_tokens=1,
            prompt_token_stats=prompt,
            inter_token_latencies_iter=[],
            time_to_first_tokens_iter=[0.1],
            num_preempted_reqs=2,
        ),
    )
    stats = told.activity.take(1, 0, 0)
    assert (stats.generated_tokens, stats.prefilled_tokens, stats.preempted) == (1, 3, 2)
    assert (stats.prefill_steps, stats.decode_steps) == ({}, {})
