import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from headway.data.interfaces.weights import ReceiveReport
from headway.errors import RunError
from headway.planner.profiles.job_profile import UpdateProfile
from headway.planner.simulation.simulated_trainer import SimulatedTransport, checksum
from headway.planner.simulation.virtual_clock import Deadlock, run_virtual

PHASES = UpdateProfile.model_validate(
    {
        "nbytes": 1000,
        "send": {"latency_s": 1, "bytes_per_s": 500},
        "recv": {"latency_s": 0.5, "bytes_per_s": 2000},
        "register": {"latency_s": 0.25},
    }
)
"""send takes 3 s, recv 1 s, register 0.25 s."""


def now() -> float:
    return asyncio.get_running_loop().time()


async def timed(coroutine: Coroutine[Any, Any, Any]) -> tuple[Any, float]:
    result = await coroutine
    return result, now()


async def after(seconds: float, coroutine: Coroutine[Any, Any, Any]) -> Any:
    await asyncio.sleep(seconds)
    return await coroutine


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def next_turn() -> None:
    await asyncio.sleep(0)


def test_both_ends_are_held_for_the_slower_one_then_the_replica_registers() -> None:
    async def main() -> None:
        transport = SimulatedTransport(PHASES)
        (send_s, sent), (report, received) = await asyncio.gather(
            timed(transport.send(7, ["a"])), timed(transport.receive("a", 7))
        )
        assert (send_s, sent) == (3.0, 3.0)
        assert report == ReceiveReport(recv_s=1.0, register_s=0.25, nbytes=1000, checksum=checksum(7))
        assert received == 3.25

    run_virtual(main())


@pytest.mark.parametrize("waits", [(5, 0, 2), (0, 5, 2), (0, 2, 5), (5, 5, 5)], ids=str)
def test_a_collective_begins_when_the_last_one_came_whoever_that_is(waits: tuple[float, float, float]) -> None:
    async def main() -> None:
        transport = SimulatedTransport(PHASES)
        ends = await asyncio.gather(
            timed(after(waits[0], transport.send(1, ["a", "b"]))),
            timed(after(waits[1], transport.receive("a", 1))),
            timed(after(waits[2], transport.receive("b", 1))),
        )
        assert [time for _, time in ends] == [8.0, 8.25, 8.25]

    run_virtual(main())


def test_transfers_to_single_replicas_do_not_wait_for_each_other() -> None:
    async def main() -> None:
        transport = SimulatedTransport(PHASES)
        ends = await asyncio.gather(
            timed(transport.send(1, ["a"])),
            timed(transport.send(1, ["b"])),
            timed(transport.receive("a", 1)),
            timed(after(10, transport.receive("b", 1))),
        )
        assert [time for _, time in ends] == [3.0, 13.0, 3.25, 13.25]

    run_virtual(main())


def test_checksums_are_equal_at_both_ends_and_tell_versions_apart() -> None:
    assert len({checksum(version) for version in range(100)}) == 100


def test_a_corrupted_transfer_arrives_with_another_checksum_at_that_replica_and_version_alone() -> None:
    async def main() -> None:
        transport = SimulatedTransport(PHASES)
        transport.corrupted.add(("b", 2))
        for version in (1, 2):
            _, a, b = await asyncio.gather(
                transport.send(version, ["a", "b"]), transport.receive("a", version), transport.receive("b", version)
            )
            assert a.checksum == checksum(version)
            assert (b.checksum == checksum(version)) is (version == 1)

    run_virtual(main())


def test_a_receiver_that_never_comes_holds_the_others() -> None:
    async def main() -> None:
        transport = SimulatedTransport(PHASES)
        await asyncio.gather(transport.send(1, ["a", "b"]), transport.receive("a", 1))

    with pytest.raises(Deadlock):
        run_virtual(main())


def test_a_later_attempt_with_fewer_receivers_works_after_the_first_was_cancelled() -> None:
    async def main() -> None:
        transport = SimulatedTransport(PHASES)
        first = [asyncio.create_task(transport.send(1, ["a", "b"])), asyncio.create_task(transport.receive("a", 1))]
        await asyncio.sleep(1)
        for task in first:
            await cancelled(task)
        await asyncio.gather(transport.send(1, ["a"]), transport.receive("a", 1))
        assert now() == 1 + 3.25

    run_virtual(main())


def test_a_receiver_that_waits_is_met_by_the_next_attempt() -> None:
    async def main() -> None:
        transport = SimulatedTransport(PHASES)
        send = asyncio.create_task(transport.send(1, ["a", "b"]))
        receive = asyncio.create_task(transport.receive("a", 1))
        await next_turn()
        await cancelled(send)
        await transport.send(1, ["a"])
        await receive

    run_virtual(main())


def test_a_receiver_that_left_is_absent_again_and_may_come_back() -> None:
    async def main() -> None:
        transport = SimulatedTransport(PHASES)
        leaving = asyncio.create_task(transport.receive("a", 1))
        await next_turn()
        send = asyncio.create_task(transport.send(1, ["a", "b"]))
        await next_turn()
        await cancelled(leaving)
        b = asyncio.create_task(transport.receive("b", 1))
        await asyncio.sleep(10)
        assert not send.done()
        await asyncio.gather(transport.receive("a", 1), send, b)
        assert now() == 13.25

    run_virtual(main())


@pytest.mark.parametrize(("leaves", "comes"), [("send", "receive"), ("receive", "send")])
def test_whoever_was_cancelled_is_not_met_even_before_it_has_noticed(leaves: str, comes: str) -> None:
    async def main() -> None:
        transport = SimulatedTransport(PHASES)
        calls = {"send": lambda: transport.send(1, ["a"]), "receive": lambda: transport.receive("a", 1)}
        leaving = asyncio.create_task(calls[leaves]())
        await next_turn()
        leaving.cancel()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(20):
                await calls[comes]()
        await asyncio.gather(calls[leaves](), calls[comes]())

    run_virtual(main())


@pytest.mark.parametrize("again", ["send", "receive"])
def test_a_call_can_be_made_again_before_the_cancelled_one_has_noticed(again: str) -> None:
    async def main() -> None:
        transport = SimulatedTransport(PHASES)
        calls = {"send": lambda: transport.send(1, ["a", "b"]), "receive": lambda: transport.receive("a", 1)}
        others = [after(1, call()) for name, call in calls.items() if name != again]
        coming = [asyncio.create_task(other) for other in (*others, after(10, transport.receive("b", 1)))]
        leaving = asyncio.create_task(calls[again]())
        await asyncio.sleep(2)
        leaving.cancel()
        await calls[again]()
        await asyncio.gather(*coming)
        assert now() == 13.25

    run_virtual(main())


def test_one_that_is_cancelled_during_the_transfer_does_not_disturb_the_others() -> None:
    async def main() -> None:
        transport = SimulatedTransport(PHASES)
        send, a, b = (
            asyncio.create_task(call)
            for call in (transport.send(1, ["a", "b"]), transport.receive("a", 1), transport.receive("b", 1))
        )
        await asyncio.sleep(2)
        await cancelled(a)
        assert await send == 3.0
        assert (await b).checksum == checksum(1)
        await asyncio.gather(transport.send(1, ["a"]), transport.receive("a", 1))

    run_virtual(main())


def test_one_replica_cannot_be_sent_the_same_version_twice_at_once() -> None:
    async def main() -> None:
        transport = SimulatedTransport(PHASES)
        with pytest.raises(RunError, match=r"version 1 .*sent to a already"):
            await asyncio.gather(transport.send(1, ["a", "b"]), transport.send(1, ["a"]))
        with pytest.raises(RunError, match="b waits for version 1 already"):
            await asyncio.gather(transport.receive("b", 1), transport.receive("b", 1))

    run_virtual(main())
