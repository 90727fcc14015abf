"""What single steps took, by how many sequences decoded: what a decode curve is fitted to."""

from __future__ import annotations

from headway.data.interfaces.rollout import EngineStats, OnUpdate
from tests.engines.rollout.support import finish, make_core, make_model, make_request, steps

MODEL = make_model()
PLAIN_S = 3.0
"""The test's clock ticks once whenever it is read: as a step starts, after sampling, and as it ends."""


def steps_of(stats: EngineStats) -> dict[int, int]:
    return {active: steps for active, (steps, _, _) in stats.decode_steps.items()}


def test_each_step_is_counted_once_by_the_sequences_that_it_gave_a_token() -> None:
    core = make_core(MODEL, slots=4)
    core.ask([make_request(0, n=2, length=5, max_tokens=6, stop_token_ids=())], "owner")
    core.ask([make_request(1, n=1, length=7, max_tokens=3, stop_token_ids=())], "owner")
    finish(core)
    stats = core.stats()
    assert steps_of(stats) == {3: 2, 2: 3}
    assert [steps[:3] for steps in stats.prefill_steps.values()] == [(1, 3, 5 + 7)]
    assert stats.generated_tokens == 3 + sum(active * count for active, count in steps_of(stats).items())


def test_cached_tokens_are_added_up_over_the_steps() -> None:
    core = make_core(MODEL, slots=4)
    core.ask([make_request(0, n=2, length=5, max_tokens=4, stop_token_ids=())], "owner")
    finish(core)
    stats = core.stats()
    ((_, _, _, _, cached),) = stats.prefill_steps.values()
    assert cached == 2 * 5
    # The first token came with the prefill; each of the other three steps writes the one before into the cache.
    assert stats.decode_steps[2][2] == 2 * (6 + 7 + 8)


def test_a_step_lasts_from_the_end_of_the_one_before_so_that_seconds_add_up_to_the_busy_time() -> None:
    core = make_core(MODEL, slots=4)
    core.ask([make_request(0, n=3, max_tokens=5, stop_token_ids=())], "owner")
    finish(core)
    stats = core.stats()
    ((begin, end),) = stats.busy
    ((_, _, _, start_s, _),) = stats.prefill_steps.values()
    assert start_s + stats.decode_steps[3][1] == end - begin
    assert stats.decode_steps[3][:2] == (4, 4 * PLAIN_S)


def test_time_in_which_nothing_decoded_belongs_to_no_step() -> None:
    core = make_core(MODEL, slots=4)
    core.ask([make_request(0, n=2, max_tokens=8, stop_token_ids=())], "owner")
    steps(core, 3)
    core.pause(OnUpdate.KEEP)
    for _ in range(50):
        core._clock()
    core.resume()
    steps(core, 2)
    # Two steps before the pause; of the two after it, the first has no step before it to last from.
    assert core.stats().decode_steps[2][:2] == (4, 2 * PLAIN_S + (PLAIN_S - 1) + PLAIN_S)


def test_a_sequence_that_starts_late_from_a_prompt_that_was_prefilled_before_costs_no_more_than_a_step() -> None:
    core = make_core(MODEL, slots=2)
    core.ask([make_request(0, n=4, length=5, max_tokens=3, stop_token_ids=())], "owner")
    finish(core)
    stats = core.stats()
    assert [steps[:3] for steps in stats.prefill_steps.values()] == [(1, 2, 5)] and steps_of(stats) == {2: 5}
    assert stats.prefilled_tokens == 5


def test_what_was_interrupted_begins_again_with_its_tokens_so_far() -> None:
    core = make_core(MODEL, slots=2)
    core.ask([make_request(0, n=2, length=5, max_tokens=9, stop_token_ids=())], "owner")
    steps(core, 4)
    core.pause(OnUpdate.INTERRUPT)
    core.resume()
    finish(core)
    merged = core.stats().prefill_steps
    assert {size: steps[:3] for size, steps in merged.items()} == {4: (1, 2, 5), 16: (1, 2, 2 * (5 + 4))}


def test_steps_are_told_once() -> None:
    core = make_core(MODEL)
    core.ask([make_request(0)], "owner")
    finish(core)
    assert core.stats().decode_steps
    again = core.stats()
    assert again.decode_steps == {} and again.prefill_steps == {}
