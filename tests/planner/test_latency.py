"""What passes while nothing computes: who is held meanwhile, and who is not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headway.data.interfaces.rollout import OnUpdate
from headway.data.interfaces.training import StepContext
from headway.events import Event, OptimizerStepped
from headway.planner.profiles.job_profile import RolloutProfile, TrainPoint, UpdateProfile
from headway.planner.simulation.simulated_rollout import SimulatedRollout
from headway.planner.simulation.simulated_run import Simulation, config_for
from headway.planner.simulation.simulated_trainer import SimulatedTrainer, SimulatedTransport
from headway.planner.simulation.virtual_clock import run_virtual

from .jobs import profile
from .replica import arrives_at_once, calls, generate


def now() -> float:
    return asyncio.get_running_loop().time()


def far_replica(*, delivery_s: float = 0.0, resume_s: float = 0.0, slots: int = 1) -> SimulatedRollout:
    """A token a second, ten of them."""
    return SimulatedRollout(
        "rollout-0",
        profile=RolloutProfile(slots=slots, decode=[(1, 1.0)]),
        lengths=lambda id: 10,
        receive=arrives_at_once,
        load_s=3.0,
        delivery_s=delivery_s,
        resume_s=resume_s,
    )


def test_a_call_arrives_later_than_it_was_finished_and_holds_no_slot_meanwhile() -> None:
    async def main() -> list[tuple[float, float]]:
        engine = far_replica(delivery_s=4.0)

        async def arrival(number: int) -> tuple[float, float]:
            (done,) = await generate(engine, calls(number))
            return done.finished, now()

        return await asyncio.gather(*(arrival(number) for number in range(2)))

    assert run_virtual(main()) == [(10, 14), (20, 24)]


def test_calls_that_are_finished_together_arrive_together() -> None:
    async def main() -> float:
        await generate(far_replica(delivery_s=4.0, slots=2), calls(0), calls(1))
        return now()

    assert run_virtual(main()) == 14


def test_a_replica_decodes_on_while_the_answer_to_resume_is_under_way_but_only_after_a_load() -> None:
    async def main() -> tuple[list[float], float]:
        engine = far_replica(resume_s=5.0)
        answer = asyncio.create_task(generate(engine, calls(0)))
        took = []
        await asyncio.sleep(2)
        for loads in (False, True):
            await engine.pause(OnUpdate.KEEP)
            if loads:
                await engine.stage_weights(1)
                await engine.activate(1)
            since = now()
            await engine.resume()
            took.append(now() - since)
        await answer
        return took, now()

    assert run_virtual(main()) == ([0.0, 5.0], 10 + 3)


def test_the_latency_of_a_batch_passes_within_its_first_step() -> None:
    async def main() -> list[float]:
        update = UpdateProfile()
        cost = TrainPoint(devices=1, step_s=2.0, token_s=0.0, forward_token_s=0.0)
        trainer = SimulatedTrainer(cost, update, SimulatedTransport(update), fetch_s=1.0)
        times = []
        for _ in range(2):
            await trainer.begin_batch([])
            for _ in range(2):
                await trainer.train_step([], StepContext())
                times.append(now())
        return times

    assert run_virtual(main()) == [3, 5, 8, 10]


class StepTimes:
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_event(self, event: Event) -> None:
        if isinstance(event, OptimizerStepped):
            self.times.append(event.time)

    def close(self) -> None: ...


def seconds(latency: dict[str, Any], versions: int = 4) -> float:
    """From the first optimizer step to the last, where generation and training take turns."""
    job = profile({**profile().model_dump(by_alias=True), "latency": latency})
    config = config_for(job, "on_policy", train_devices=1, replicas=1, versions=versions)
    steps = StepTimes()
    Simulation(job, config, observers=[steps]).run()
    return steps.times[-1] - steps.times[0]


@pytest.mark.parametrize("name", ["group_s", "fetch_s", "update_s"])
def test_each_latency_is_paid_once_a_version_where_sides_take_turns(name: str) -> None:
    assert seconds({name: 0.5}) - seconds({}) == pytest.approx(3 * 0.5)
