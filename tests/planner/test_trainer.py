import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from headway.data.interfaces.training import StepContext
from headway.data.interfaces.weights import GatherReport, SendReport
from headway.data.types import TrainSample, TrajectoryId
from headway.errors import RunError
from headway.planner.profiles.job_profile import TrainPoint, UpdateProfile
from headway.planner.simulation.simulated_trainer import SimulatedTrainer, SimulatedTransport, checksum
from headway.planner.simulation.virtual_clock import run_virtual

COST = TrainPoint(devices=1, step_s=0.5, token_s=0.25, forward_token_s=0.125)
UPDATE = UpdateProfile.model_validate(
    {"nbytes": 8, "gather": {"latency_s": 1}, "send": {"bytes_per_s": 4}, "register": {"latency_s": 1}}
)
"""gather takes 1 s, send 2 s, register 1 s."""
SAMPLES = [
    TrainSample(None, k, prompt_length=3, length=length, episode=TrajectoryId(0, 0, 0, k))
    for k, length in enumerate((5, 9))
]
"""20 tokens."""


def now() -> float:
    return asyncio.get_running_loop().time()


def trained(script: Callable[[SimulatedTrainer, SimulatedTransport], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        transport = SimulatedTransport(UPDATE)
        await script(SimulatedTrainer(COST, UPDATE, transport), transport)

    run_virtual(main())


def test_a_step_takes_time_for_itself_and_for_every_token_a_forward_pass_for_tokens_alone() -> None:
    async def script(trainer: SimulatedTrainer, _: SimulatedTransport) -> None:
        report = await trainer.train_step(SAMPLES, StepContext())
        assert not report.skipped
        assert now() == 0.5 + 20 * 0.25
        columns = await trainer.forward_logprobs(SAMPLES)
        assert len(columns) == 2
        assert now() == 5.5 + 20 * 0.125

    trained(script)


def test_a_synchronous_update_holds_the_ranks_until_the_last_receiver_has_it() -> None:
    async def script(trainer: SimulatedTrainer, transport: SimulatedTransport) -> None:
        sent = asyncio.create_task(trainer.send_weights(3, ["a"]))
        await asyncio.sleep(10)
        with pytest.raises(RunError, match="optimizer step during send"):
            await trainer.train_step(SAMPLES, StepContext())
        await transport.receive("a", 3)
        assert now() == 10 + 2 + 1
        assert await sent == SendReport(gather_s=1.0, send_s=2.0, nbytes=8, checksum=checksum(3))

    trained(script)


def test_it_trains_on_while_a_gathered_version_is_sent_to_several_replicas() -> None:
    async def script(trainer: SimulatedTrainer, transport: SimulatedTransport) -> None:
        assert await trainer.gather_weights(3) == GatherReport(gather_s=1.0, nbytes=8)
        a, b, *_ = await asyncio.gather(
            trainer.send_gathered(3, ["a"]),
            trainer.send_gathered(3, ["b"]),
            trainer.train_step(SAMPLES, StepContext()),
            transport.receive("a", 3),
            transport.receive("b", 3),
        )
        assert a == b == SendReport(gather_s=0.0, send_s=2.0, nbytes=8, checksum=checksum(3))
        assert now() == 1 + 5.5

    trained(script)


def test_gather_does_not_overwrite_a_copy_that_is_being_sent() -> None:
    async def script(trainer: SimulatedTrainer, transport: SimulatedTransport) -> None:
        await trainer.gather_weights(3)
        sending = asyncio.create_task(trainer.send_gathered(3, ["a"]))
        await asyncio.sleep(0)
        with pytest.raises(RunError, match=r"gather of version 4 .*version 3, .*1 replica"):
            await trainer.gather_weights(4)
        await asyncio.gather(sending, transport.receive("a", 3))
        await trainer.gather_weights(4)
        with pytest.raises(RunError, match=r"version 3 .*sent to a: .*holds version 4"):
            await trainer.send_gathered(3, ["a"])

    trained(script)


def test_a_send_that_was_cancelled_leaves_the_copy_free() -> None:
    async def script(trainer: SimulatedTrainer, _: SimulatedTransport) -> None:
        await trainer.gather_weights(3)
        sending = asyncio.create_task(trainer.send_gathered(3, ["a"]))
        await asyncio.sleep(1)
        sending.cancel()
        await asyncio.wait([sending])
        await trainer.gather_weights(4)

    trained(script)


def test_its_ranks_do_one_thing_at_a_time() -> None:
    async def script(trainer: SimulatedTrainer, _: SimulatedTransport) -> None:
        step = asyncio.create_task(trainer.train_step(SAMPLES, StepContext()))
        await asyncio.sleep(0)
        for call in (
            trainer.train_step(SAMPLES, StepContext()),
            trainer.forward_logprobs(SAMPLES),
            trainer.gather_weights(1),
            trainer.send_weights(1, ["a"]),
        ):
            with pytest.raises(RunError, match="during an optimizer step"):
                await call
        await step
        await trainer.train_step(SAMPLES, StepContext())

    trained(script)
