"""Training and generation that slow each other down: work is done at the speed of the moment."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.planner.profile_fitting.cost_fitting import Overlap, fit_slowdown
from headway.planner.profile_fitting.run_profiler import profile_run
from headway.planner.profiles.costs import Contention
from headway.planner.profiles.job_profile import ContentionProfile, RolloutProfile
from headway.planner.simulation.simulated_rollout import SimulatedRollout
from headway.planner.simulation.virtual_clock import run_virtual
from headway.reports.metrics.intervals import IntervalUnion

from .replica import arrives_at_once, calls, generate
from .test_profiling_simulations import TRUE, record

SLOW = ContentionProfile(train=1.5, rollout=4.0)


def now() -> float:
    return asyncio.get_running_loop().time()


async def timed(work: Coroutine[Any, Any, Any]) -> float:
    """When it was done."""
    await work
    return now()


def contended(contention: Contention, *, tokens: int = 10, prefill_s: float = 0.0) -> SimulatedRollout:
    """A token a second."""
    return SimulatedRollout(
        "rollout-0",
        profile=RolloutProfile(slots=1, decode=[(1, 1.0)], prefill_s=prefill_s),
        lengths=lambda id: tokens,
        receive=arrives_at_once,
        load_s=0.0,
        contention=contention,
    )


def test_alone_each_side_takes_its_own_time() -> None:
    async def main() -> list[float]:
        contention = Contention(SLOW)
        engine = contended(contention)
        return [await timed(contention.train(5)), await timed(generate(engine, calls(0)))]

    assert run_virtual(main()) == [5, 15]


def test_a_step_that_begins_alone_is_slowed_down_from_when_a_replica_computes_until_it_stops() -> None:
    async def main() -> list[float]:
        contention = Contention(SLOW)
        engine = contended(contention, tokens=1)
        step = asyncio.create_task(timed(contention.train(10)))
        await asyncio.sleep(4)
        token = await timed(generate(engine, calls(0)))
        return [token, await step]

    # The token takes 4 s beside the step. Of the step 4 s were done before, 4 / 1.5 meanwhile, the rest alone.
    assert run_virtual(main()) == [8, pytest.approx(8 + 10 - 4 - 4 / 1.5)]


def test_decoding_goes_on_more_slowly_from_the_middle_of_a_token() -> None:
    async def main() -> list[float]:
        contention = Contention(SLOW)
        answer = asyncio.create_task(timed(generate(contended(contention), calls(0))))
        await asyncio.sleep(2.5)
        return [await timed(contention.train(4)), await answer]

    # The step takes 6 s, in which one and a half of the ten tokens are sampled; after it the six that are left.
    assert run_virtual(main()) == [8.5, 14.5]


def test_a_prefill_under_way_is_slowed_down_too() -> None:
    async def main() -> float:
        contention = Contention(SLOW)
        answer = asyncio.create_task(timed(generate(contended(contention, tokens=1, prefill_s=3.0), calls(0))))
        await asyncio.sleep(1)
        await contention.train(2 / 1.5)  # 2 s beside the prefill, which does half a second's work
        return await answer

    assert run_virtual(main()) == pytest.approx(3 + 1.5 + 1)


def test_a_step_that_was_cancelled_slows_nobody_down_any_more() -> None:
    async def main() -> float:
        contention = Contention(SLOW)
        step = asyncio.create_task(contention.train(100))
        answer = asyncio.create_task(timed(generate(contended(contention), calls(0))))
        await asyncio.sleep(4)
        step.cancel()
        return await answer

    assert run_virtual(main()) == 4 + 9


# ---------------------------------------------------------------------------------------------- measured


def test_a_slowdown_is_found_from_stretches_with_different_shares() -> None:
    measured = [(share, 2.0 * (1 + 0.5 * share), 8, 1) for share in (0.0, 0.2, 0.7, 1.0)] * 3
    assert fit_slowdown(measured) == pytest.approx(1.5)


def test_large_work_that_has_larger_shares_is_not_taken_for_slowed_down() -> None:
    measured = [(share, 1.0 + size, size, 1) for size, share in ((1, 0.0), (5, 0.5), (9, 1.0), (9, 0.9))]
    assert fit_slowdown(measured * 3) == pytest.approx(1.0)


def test_stretches_that_are_all_alike_say_nothing() -> None:
    assert fit_slowdown([(0.0, 1.0, 1, 1)] * 20) is None
    assert fit_slowdown([(1.0, 1.0, 1, 1)] * 20) is None
    assert fit_slowdown([(0.0, 1.0, 1, 1), (1.0, 2.0, 1, 1)]) is None


def test_what_is_faster_beside_the_other_side_is_not_slowed_down() -> None:
    assert fit_slowdown([(0.0, 2.0, 1, 1), (1.0, 1.0, 1, 1)] * 10) == 1.0


def test_steps_of_the_warm_up_do_not_count_in_the_slowdown_of_training() -> None:
    """They are alone, and as slow as those beside generation: with them nothing would seem to be slowed down."""
    cold, alone, beside = range(20), range(100, 120), range(200, 220)
    steps = [SimpleNamespace(began=float(at), seconds=0.8, tokens=1) for at in cold]
    steps += [SimpleNamespace(began=float(at), seconds=0.5, tokens=1) for at in alone]
    steps += [SimpleNamespace(began=float(at), seconds=0.75, tokens=1) for at in beside]
    busy = IntervalUnion()
    busy.add((float(beside.start), float(beside.stop)))
    recording: Any = SimpleNamespace(
        training=SimpleNamespace(steps=steps, forwards=[]),
        busy={"rollout-0": busy},
        warm=lambda items: [item for item in items if item.began >= alone.start],
        warm_activity=lambda name: [],
    )
    assert Overlap(recording).training == pytest.approx(1.5)


@pytest.mark.slow
def test_contention_is_found_again_in_a_simulated_run_and_so_are_the_costs_without_it(tmp_path: Path) -> None:
    truth = TRUE.model_copy(update={"contention": ContentionProfile(train=1.3, rollout=1.6)})
    record(tmp_path / "run", "stream_off_policy", truth, report_every_s=1.0, versions=12)
    found = profile_run(tmp_path / "run")
    assert found.contention.train == pytest.approx(1.3, rel=0.1)
    assert found.contention.rollout == pytest.approx(1.6, rel=0.1)
    assert found.train.points[0].token_s == pytest.approx(5e-4, rel=0.1)
    assert dict(found.rollout.decode)[16] == pytest.approx(0.03, rel=0.1)
