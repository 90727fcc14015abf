"""The stage as a state machine: its loop, its states, and what it does with failures."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Literal

import pytest

from headway.errors import ScoringFailed, StageFailed
from headway.events import StageChanged
from headway.pipeline import stages
from headway.pipeline.stage import Channel, Stage, State
from headway.planner.simulation.virtual_clock import run_virtual
from tests.pipeline.fakes import Recorder

Work = Callable[[int], Awaitable[None]]


class Doubling(Stage[int, int]):
    """Twice its input, after `work`."""

    waits_for_input = "the test"

    def __init__(
        self,
        recorder: Recorder,
        work: Work | None = None,
        concurrency: Literal[1] | None = 1,
        gate: asyncio.Event | None = None,
    ) -> None:
        super().__init__(recorder.on_event, None, None)
        self.items: Channel[int] = Channel("input")
        self.doubled: Channel[int] = Channel("output")
        self.closed = 0
        self.concurrency = concurrency  # type: ignore[misc]
        self.gate = gate
        self._work_on = work

    async def get_input_data(self) -> int | None:
        return await self.items.get()

    async def process_data(self, item: int) -> AsyncGenerator[int, None]:
        if self._work_on is not None:
            await self._work_on(item)
        yield 2 * item

    async def send_output_data(self, output: int) -> None:
        await self.doubled.send(output)

    def close_output(self) -> None:
        self.closed += 1
        self.doubled.close()

    async def feed(self, *items: int) -> None:
        for item in items:
            await self.items.send(item)
        self.items.close()

    async def outputs(self) -> list[int]:
        taken = []
        while (item := await self.doubled.get()) is not None:
            taken.append(item)
        return taken


def opened() -> asyncio.Event:
    gate = asyncio.Event()
    gate.set()
    return gate


def states(recorder: Recorder) -> list[str]:
    return [event.state for event in recorder.events if isinstance(event, StageChanged)]


async def takes(seconds: float) -> None:
    await asyncio.sleep(seconds)


def test_one_item_at_a_time_goes_through_the_states_in_order():
    recorder = Recorder()

    async def main() -> list[int]:
        stage = Doubling(recorder)
        await stage.feed(1, 2)
        await stage.run()
        return await stage.outputs()

    assert run_virtual(main()) == [2, 4]
    item = ["processing", "waiting_output", "processing"]
    waiting = "waiting_input"
    assert states(recorder) == [waiting, *item, waiting, *item, waiting, "draining", "stopped"]


def test_every_transition_says_when_and_what_the_stage_waits_for():
    recorder = Recorder()

    async def main() -> None:
        stage = Doubling(recorder, lambda _: takes(3))
        running = asyncio.ensure_future(stage.run())
        await asyncio.sleep(1)
        await stage.feed(1)
        await running

    run_virtual(main())
    events = [e for e in recorder.events if isinstance(e, StageChanged)]
    assert [(e.time, e.state) for e in events] == [
        (0, "waiting_input"),
        (1, "processing"),
        (4, "waiting_output"),
        (4, "processing"),
        (4, "waiting_input"),
        (4, "draining"),
        (4, "stopped"),
    ]
    assert {e.state: e.waiting_for for e in events} == {
        "processing": None,
        "waiting_output": "its consumer",
        "waiting_input": "the test",
        "draining": None,
        "stopped": None,
    }


def test_a_stage_with_concurrency_one_never_works_on_two_items():
    active, most = 0, 0

    async def work(_: int) -> None:
        nonlocal active, most
        active, most = active + 1, max(most, active + 1)
        await asyncio.sleep(1)
        active -= 1

    async def main() -> float:
        stage = Doubling(Recorder(), work)
        await stage.feed(1, 2, 3)
        await stage.run()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 3
    assert most == 1


@pytest.mark.parametrize(("concurrency", "seconds"), [(None, 1), (1, 4)])
def test_a_stage_processes_one_item_after_the_other_or_all_at_once(concurrency: Literal[1] | None, seconds: float):
    async def main() -> float:
        stage = Doubling(Recorder(), lambda _: takes(1), concurrency)
        await stage.feed(1, 2, 3, 4)
        await stage.run()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == seconds


def test_a_concurrent_stage_sends_on_completion_not_in_order():
    async def main() -> list[int]:
        stage = Doubling(Recorder(), takes, None)
        await stage.feed(3, 1, 2)
        await stage.run()
        return await stage.outputs()

    assert run_virtual(main()) == [2, 4, 6]


def test_a_concurrent_stage_tells_how_many_items_are_in_processing_and_drains_at_the_end():
    recorder = Recorder()

    async def main() -> None:
        stage = Doubling(recorder, takes, None)
        await stage.feed(1, 2)
        await stage.run()

    run_virtual(main())
    events = [(e.time, e.state, e.active) for e in recorder.events if isinstance(e, StageChanged)]
    assert events == [
        (0, "waiting_input", 0),
        (0, "draining", 0),
        (0, "processing", 1),
        (0, "processing", 2),
        (1, "waiting_output", 2),
        (1, "processing", 2),
        (1, "processing", 1),
        (2, "waiting_output", 1),
        (2, "processing", 1),
        (2, "draining", 0),
        (2, "stopped", 0),
    ]


@pytest.mark.parametrize("concurrency", [1, None])
def test_a_foreign_exception_is_attributed_to_the_stage_and_chained(concurrency: Literal[1] | None):
    recorder = Recorder()

    async def work(_: int) -> None:
        raise ZeroDivisionError("by zero")

    async def main() -> Doubling:
        stage = Doubling(recorder, work, concurrency)
        await stage.feed(1, 2)
        with pytest.raises(StageFailed, match=r"Doubling failed: ZeroDivisionError: by zero") as caught:
            await stage.run()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        return stage

    stage = run_virtual(main())
    assert states(recorder)[-1] == "failed"
    assert stage.closed == 0, "its consumer would take this for the end of its input"


def test_headways_own_errors_pass_through_unchanged():
    async def work(_: int) -> None:
        raise ScoringFailed("as it is")

    async def main() -> None:
        stage = Doubling(Recorder(), work)
        await stage.feed(1)
        await stage.run()

    with pytest.raises(ScoringFailed, match="as it is"):
        run_virtual(main())


def test_a_failure_of_one_item_cancels_the_others_and_leaves_no_task_behind():
    cancelled = []

    async def work(item: int) -> None:
        if item == 2:
            await asyncio.sleep(1)
            raise ValueError("two")
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            cancelled.append(item)
            raise

    async def main() -> float:
        stage = Doubling(Recorder(), work, None)
        await stage.feed(1, 2, 3)
        with pytest.raises(StageFailed, match="two"):
            await stage.run()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 1
    assert sorted(cancelled) == [1, 3]


@pytest.mark.parametrize("concurrency", [1, None])
def test_a_cancelled_stage_stops_and_does_not_close_its_output(concurrency: Literal[1] | None):
    recorder = Recorder()

    async def main() -> Doubling:
        stage = Doubling(recorder, lambda _: takes(10), concurrency)
        await stage.feed(1, 2)
        running = asyncio.ensure_future(stage.run())
        await asyncio.sleep(1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return stage

    stage = run_virtual(main())
    assert states(recorder)[-1] == "stopped"
    assert stage.closed == 0


@pytest.mark.parametrize("concurrency", [1, None])
def test_a_paused_stage_starts_nothing_and_loses_nothing(concurrency: Literal[1] | None):
    recorder = Recorder()
    started: list[tuple[float, int]] = []

    async def work(item: int) -> None:
        started.append((asyncio.get_running_loop().time(), item))
        await asyncio.sleep(1)

    async def main() -> list[int]:
        gate = opened()
        stage = Doubling(recorder, work, concurrency, gate)
        running = asyncio.ensure_future(stage.run())
        await stage.items.send(1)
        await asyncio.sleep(0.5)
        gate.clear()
        await stage.feed(2)
        await asyncio.sleep(4)
        assert stage.state is State.PAUSED
        assert stage.waiting_for == "resume"
        gate.set()
        await running
        return await stage.outputs()

    assert run_virtual(main()) == [2, 4]
    assert started == [(0, 1), (4.5, 2)]


def test_a_gate_that_is_shut_again_before_the_stage_wakes_up_lets_nothing_through():
    started: list[float] = []

    async def work(_: int) -> None:
        started.append(asyncio.get_running_loop().time())

    async def main() -> None:
        gate = opened()
        gate.clear()
        stage = Doubling(Recorder(), work, gate=gate)
        running = asyncio.ensure_future(stage.run())
        await stage.feed(1)
        await asyncio.sleep(1)
        gate.set()
        gate.clear()
        await asyncio.sleep(1)
        assert (started, stage.state) == ([], State.PAUSED)
        gate.set()
        await running

    run_virtual(main())
    assert started == [2]


def test_a_pause_without_an_item_in_hand_is_waiting_for_input():
    recorder = Recorder()

    async def main() -> None:
        gate = opened()
        stage = Doubling(recorder, takes, None, gate)
        running = asyncio.ensure_future(stage.run())
        await stage.items.send(2)
        await asyncio.sleep(1)
        gate.clear()
        await asyncio.sleep(3)
        gate.set()
        assert stage.state is State.WAITING_INPUT
        await stage.feed()
        await running

    run_virtual(main())
    assert "paused" not in states(recorder)


def test_an_input_that_ends_while_the_stage_is_paused_ends_the_stage():
    async def main() -> None:
        gate = opened()
        gate.clear()
        stage = Doubling(Recorder(), gate=gate)
        await stage.feed()
        await stage.run()

    run_virtual(main())


def test_an_exception_while_getting_input_is_attributed_too():
    class Broken(Doubling):
        async def get_input_data(self) -> int | None:
            raise OSError("no input")

    with pytest.raises(StageFailed, match="Broken failed: OSError: no input"):
        run_virtual(Broken(Recorder(), concurrency=None).run())


class Even(Stage[int, int]):
    """A plain stage: one channel in, one channel out."""

    async def process_data(self, item: int) -> AsyncGenerator[int, None]:
        if item % 2 == 0:
            yield item


def test_a_plain_stage_says_only_what_it_does_with_its_input():
    async def main() -> list[int]:
        source: Channel[int] = Channel("source")
        sink: Channel[int] = Channel("sink")
        for number in (1, 2, 3, 4):
            await source.send(number)
        source.close()
        stage = Even(Recorder().on_event, source, sink)
        await stage.run()
        assert stage.state is State.STOPPED
        return sink.take_waiting()

    assert run_virtual(main()) == [2, 4]


def test_a_stage_without_output_takes_all_of_its_input():
    async def main() -> int:
        source: Channel[int] = Channel("source")
        await source.send(2)
        await source.send(4)
        source.close()
        await Even(Recorder().on_event, source, None).run()
        return len(source)

    assert run_virtual(main()) == 0


def test_a_stage_that_does_not_say_where_its_input_comes_from_fails():
    with pytest.raises(StageFailed, match=r"Even .*no input"):
        run_virtual(Even(Recorder().on_event, None, None).run())


@pytest.mark.parametrize("stage", [one.name for one in iter_modules(stages.__path__)])
def test_every_stage_says_what_it_consumes_waits_for_is_unblocked_by_and_produces(stage: str):
    doc = import_module(f"{stages.__name__}.{stage}").__doc__ or ""
    words = re.findall(r"^ *(consumes|waits for|is unblocked by|produces) ", doc, re.MULTILINE)
    assert words == ["consumes", "waits for", "is unblocked by", "produces"]
