"""Cancelled at any moment, a run is over at that moment: nothing runs on, each group has its one fate, it says so once.

Every await is a place where a cancellation may arrive. A loop that counts what is put on it cancels before the k-th
callback; for single waits all k are tried, for whole runs many.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from itertools import product
from math import ceil
from typing import Any

import pytest
from hypothesis import strategies as st

from headway.data.interfaces.rollout import OnUpdate
from headway.errors import NothingToTrain
from headway.events import RunFinished
from headway.pipeline.stage import Channel, Signal
from headway.planner.simulation.virtual_clock import VirtualClockLoop
from headway.runtime.task_groups import concurrently
from tests.pipeline.books import Books
from tests.pipeline.cases import SCHEDULES, Case, cases, for_each
from tests.pipeline.invariants import cancelled_after
from tests.pipeline.machines import check_machines
from tests.pipeline.scenario import MODES, Run, Scenario
from tests.tiers import a_share_and_all, a_twentieth_and_all, enough, mostly_slow

# ---------------------------------------------------------------------------------------------- whole runs


def check_cancelled(run: Run) -> None:
    """Whatever state the run was in. One that was over before is like any other."""
    finished = run.of(RunFinished)[0]
    if run.cancelled_at is not None:
        assert run.ended == run.cancelled_at, "it did not end at once"
        assert (finished.status, finished.reason) == ("interrupted", "left at once")
        assert run.status is None and run.error is None
    run.assert_clean()
    Books(run).check()
    check_machines(run)


def small(mode: str) -> Scenario:
    return Scenario(mode, problems=2, replicas=2, total=32, slots=4, sections={"trainer": {"save_freq": 1}})


@a_share_and_all
@mostly_slow("mode", MODES, quick=["async_partial", "colocate_async"])
def test_a_run_that_is_cancelled_at_any_event_is_over_at_once(mode: str, share: float):
    """A whole run for each of 40 places, or for a share of them."""
    events = len(small(mode).run().assert_completed().events)
    for k in range(1, events, max(1, events // ceil(share * 40))):
        check_cancelled(cancelled_after(small(mode), k))


@a_share_and_all
@mostly_slow("mode", MODES, quick=["one_step_off", "overlapped"])
def test_a_second_cancellation_while_the_first_is_under_way_changes_nothing(mode: str, share: float):
    """Runs a job once for each of many moments."""
    events = len(small(mode).run().assert_completed().events)
    for k in range(7, events, max(1, events // ceil(share * 15))):
        check_cancelled(cancelled_after(small(mode), k, k + 1, k + 3))


@a_twentieth_and_all
def test_a_random_run_may_be_cancelled_at_any_moment(share: float):
    """Hundreds of whole runs, as a cancellation comes between any two events."""
    left_at_once = 0

    def check(drawn: tuple[Case, int]) -> None:
        nonlocal left_at_once
        case, k = drawn
        run = cancelled_after(case.scenario(), k)
        if not isinstance(run.error, NothingToTrain):
            check_cancelled(run)
        left_at_once += run.cancelled_at is not None

    for_each(st.tuples(cases(), st.integers(1, 600)), share * SCHEDULES["cancelled"], check)
    assert left_at_once > enough(SCHEDULES["cancelled"] / 2, share)


@a_share_and_all
@mostly_slow("mode", MODES, quick=["async_stale", "colocate_sync"])
def test_a_run_that_is_cancelled_between_any_two_turns_of_the_loop_is_over_at_once(mode: str, share: float):
    """Also where nothing is said: 40 places spread over all callbacks of the run, or a share of them."""

    def start(loop: CancellingLoop) -> Coroutine[Any, Any, Run]:
        return cancelled_from(small(mode), "run.started", loop)

    callbacks = CancellingLoop.count(start)
    for k in range(1, callbacks, callbacks // ceil(share * 40)):
        check_cancelled(CancellingLoop.run(start, k))


# ---------------------------------------------------------------------------------------------- single waits


class CancellingLoop(VirtualClockLoop):
    """Calls a function before the k-th callback that is put on it after `cancel_with`."""

    def __init__(self, k: int) -> None:
        self._left = k
        self.callbacks = 0
        self._cancel: Callable[[], object] | None = None
        super().__init__()

    def cancel_with(self, cancel: Callable[[], object]) -> None:
        self._cancel = cancel

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        if self._cancel is not None:
            self.callbacks += 1
            self._left -= 1
            if self._left == 0:
                super().call_soon(self._cancel)
        return super().call_soon(callback, *args, context=context)

    @classmethod
    def run(cls, start: Callable[[CancellingLoop], Coroutine[Any, Any, Any]], k: int) -> Any:
        with asyncio.Runner(loop_factory=lambda: cls(k)) as runner:
            loop = runner.get_loop()
            assert isinstance(loop, CancellingLoop)
            return runner.run(start(loop))

    @classmethod
    def count(cls, start: Callable[[CancellingLoop], Coroutine[Any, Any, Any]]) -> int:
        """Callbacks of an undisturbed run."""
        with asyncio.Runner(loop_factory=lambda: cls(-1)) as runner:
            loop = runner.get_loop()
            assert isinstance(loop, CancellingLoop)
            runner.run(start(loop))
            return loop.callbacks


def at_every_turn(wait: Callable[[], Awaitable[Any]], afterwards: Callable[[bool], None]) -> int:
    """Cancel ``wait()`` before each of its callbacks in turn; ``afterwards`` is told whether it was cancelled."""
    tried = 0

    async def main(loop: CancellingLoop) -> None:
        task = asyncio.ensure_future(wait())
        loop.cancel_with(task.cancel)
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()
        afterwards(task.cancelled())
        assert [t for t in asyncio.all_tasks() if t is not asyncio.current_task()] == []

    for k in range(1, CancellingLoop.count(main) + 1):
        CancellingLoop.run(main, k)
        tried += 1
    return tried


def cancelled_from(scenario: Scenario, kind: str, loop: CancellingLoop) -> Coroutine[Any, Any, Run]:
    """The loop counts from the first event of that kind on."""

    def script(run: Run) -> None:
        run.recorder.on = lambda event: loop.cancel_with(run.cancel) if event.kind == kind else None

    scenario.script = script
    return scenario.running()


def test_a_channel_loses_nothing_to_a_receiver_that_was_cancelled():
    received: list[int] = []
    sent: list[int] = []
    channel: Channel[int] = Channel("numbers")

    async def send() -> None:
        for i in range(3):
            await asyncio.sleep(1.0)
            sent.append(i)
            await channel.send(i)

    async def wait() -> None:
        nonlocal channel
        channel, received[:], sent[:] = Channel("numbers"), [], []
        sending = asyncio.ensure_future(send())
        try:
            while len(received) < 3:
                item = await channel.get()
                assert item is not None
                received.append(item)
        finally:
            sending.cancel()
            await asyncio.wait([sending])

    def afterwards(_: bool) -> None:
        assert received + channel.take_waiting() == sent, "lost, doubled or out of order"

    assert at_every_turn(wait, afterwards) > 6


def test_a_signal_forgets_a_waiter_that_was_cancelled_and_wakes_the_others():
    woken: list[int] = []

    async def wait() -> None:
        signal, woken[:] = Signal(), []
        holds = False

        async def waiter(i: int) -> None:
            await signal.until(lambda: holds)
            woken.append(i)

        others = [asyncio.ensure_future(waiter(i)) for i in range(3)]
        await asyncio.sleep(1.0)
        others[1].cancel()
        await asyncio.sleep(1.0)
        holds = True
        signal.changed()
        await asyncio.wait(others)
        assert woken == [0, 2]

    async def main() -> None:
        await wait()

    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        runner.run(main())


def test_things_done_concurrently_all_end_when_they_are_cancelled_at_any_turn():
    ended: list[str] = []

    async def one(name: str, seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
            await asyncio.sleep(seconds)
            return name
        finally:
            await asyncio.sleep(0)  # an end that takes a turn of its own
            ended.append(name)

    async def wait() -> list[str]:
        ended.clear()
        return await concurrently([one("a", 1.0), one("b", 2.0), one("c", 3.0)])

    def afterwards(cancelled: bool) -> None:
        assert len(ended) == len(set(ended)) and (cancelled or len(ended) == 3)

    assert at_every_turn(wait, afterwards) > 10


@a_share_and_all
@mostly_slow(
    ("mode", "policy"),
    product(["async_partial", "colocate_async"], OnUpdate),
    quick=[("async_partial", OnUpdate.DRAIN), ("colocate_async", OnUpdate.INTERRUPT)],
)
def test_whoever_waits_for_a_halt_or_the_lease_may_be_cancelled_at_every_turn(
    mode: str, policy: OnUpdate, share: float
):
    """From the first group that is trained to the end of the first update, every single callback, or every tenth."""
    if mode == "colocate_async" and policy is OnUpdate.KEEP:
        pytest.skip("an engine that sleeps keeps no cache")
    values = {"on_update": policy.value, "trigger_parameter_sync_step": 1}

    def start(loop: CancellingLoop) -> Coroutine[Any, Any, Run]:
        scenario = Scenario(mode, async_training=values, problems=1, mini_batch=2, total=4, n=1, slots=2)
        return cancelled_from(scenario, "fetch.taken", loop)

    for k in range(1, CancellingLoop.count(start) + 1, int(1 / share)):
        check_cancelled(CancellingLoop.run(start, k))
