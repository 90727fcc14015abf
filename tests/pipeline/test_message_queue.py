"""The message queue: what may be taken, when, and that nothing is ever lost in it."""

from __future__ import annotations

import asyncio
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import SamplingParams
from headway.data.types import FinishReason, Trajectory, TrajectoryId
from headway.errors import LedgerImbalance
from headway.pipeline.admission.message_queue import MessageQueue
from headway.pipeline.admission.staleness import Staleness
from headway.planner.simulation.virtual_clock import Deadlock, run_virtual
from tests.pipeline.fakes import prompt


def queue(window: int | None = 1, b: int = 10, eta: Fraction = Fraction(0)) -> MessageQueue:
    """200 groups were admitted."""
    q = MessageQueue(Staleness(eta, b, window, None, loaded={"rollout-0": 0}))
    for number in range(200):
        q.expect(number, version=0)
    return q


def group(number: int) -> Group:
    return Group(number, prompt(0, number), 1, SamplingParams(1))


def finished_with(number: int, version: int) -> Group:
    """A group whose oldest token is of ``version``."""
    answer = Trajectory(TrajectoryId(0, number, 0, 0), "", "", 1, 1, FinishReason.STOP, [[0, version]], 0, 0, ())
    return Group(number, prompt(0, number), 1, SamplingParams(1), trajectories=(answer,))


async def put(queue: MessageQueue, *numbers: int) -> None:
    for number in numbers:
        await queue.send(group(number))


async def take(queue: MessageQueue, count: int) -> list[int]:
    return [group.number for group in await queue.take(count, 0, never)]


def never(group: Group) -> None:
    raise AssertionError(f"group {group.number} was dropped")


def test_fifo_waits_for_the_head_and_then_takes_by_number():
    async def main() -> tuple[list[int], float]:
        q = queue()
        await put(q, 2, 1, 3)
        taking = asyncio.ensure_future(take(q, 4))
        await asyncio.sleep(5)
        assert not taking.done()
        await put(q, 0)
        return await taking, asyncio.get_running_loop().time()

    assert run_virtual(main()) == ([0, 1, 2, 3], 5)


def test_a_window_lets_younger_groups_pass_a_slow_head_but_only_so_many():
    async def main() -> list[int]:
        q = queue(window=3)
        await put(q, 3, 2, 1)
        assert await take(q, 2) == [1, 2]
        taking = asyncio.ensure_future(take(q, 1))
        await asyncio.sleep(5)
        assert not taking.done(), "3 lies outside the window while 0 is the head"
        await put(q, 0)
        return await taking + await take(q, 1)

    assert run_virtual(main()) == [0, 3]


def test_ready_takes_in_order_of_completion():
    async def main() -> list[int]:
        q = queue(window=None)
        await put(q, 5, 0, 3)
        return await take(q, 3)

    assert run_virtual(main()) == [5, 0, 3]


def test_a_discarded_head_lets_the_queue_move_on():
    async def main() -> list[int]:
        q = queue()
        await put(q, 1, 2)
        taking = asyncio.ensure_future(take(q, 2))
        await asyncio.sleep(1)
        assert not taking.done()
        q.discard(0)
        return await taking

    assert run_virtual(main()) == [1, 2]


def test_discards_ahead_of_the_head_are_remembered():
    async def main() -> list[int]:
        q = queue()
        for number in (1, 2, 4):
            q.discard(number)
        await put(q, 5, 3, 0)
        return await take(q, 3)

    assert run_virtual(main()) == [0, 3, 5]


def test_take_waits_for_the_whole_batch():
    async def main() -> tuple[list[int], float]:
        q = queue()
        taking = asyncio.ensure_future(take(q, 3))
        for number in range(3):
            await asyncio.sleep(1)
            await put(q, number)
        return await taking, asyncio.get_running_loop().time()

    assert run_virtual(main()) == ([0, 1, 2], 3)


def test_after_close_the_last_batch_is_short_and_then_empty():
    async def main() -> list[list[int]]:
        q = queue()
        await put(q, 0, 1, 2)
        q.close()
        return [await take(q, 2), await take(q, 2), await take(q, 2)]

    assert run_virtual(main()) == [[0, 1], [2], []]


def test_close_wakes_whoever_waits_for_more():
    async def main() -> list[int]:
        q = queue()
        await put(q, 0)
        taking = asyncio.ensure_future(take(q, 2))
        await asyncio.sleep(1)
        q.close()
        return await taking

    assert run_virtual(main()) == [0]


def test_abandon_gives_a_waiting_batch_nothing():
    async def main() -> list[int]:
        q = queue()
        await put(q, 0)
        taking = asyncio.ensure_future(take(q, 2))
        await asyncio.sleep(1)
        q.abandon()
        return await taking

    assert run_virtual(main()) == []


@pytest.mark.parametrize(("eta", "capacity"), [(Fraction(0), 10), (Fraction(3, 10), 13), (Fraction(1, 3), 13)])
def test_more_groups_than_admission_can_let_in_are_a_broken_promise_not_a_reason_to_drop(eta: Fraction, capacity: int):
    async def main() -> None:
        q = queue(eta=eta)
        await put(q, *range(capacity))
        with pytest.raises(LedgerImbalance, match=f"more than .* = {capacity}"):
            await q.send(group(capacity))
        assert len(q) == capacity

    run_virtual(main())


def test_a_group_that_comes_twice_is_refused():
    async def main() -> None:
        q = queue(window=None)
        await put(q, 0, 2, 3)
        await take(q, 2)
        q.discard(5)
        for number in (0, 2, 3, 5):
            with pytest.raises(LedgerImbalance, match=f"group {number} .*second time"):
                await q.send(group(number))

    run_virtual(main())


def test_a_batch_that_can_never_be_filled_waits():
    async def main() -> None:
        q = queue()
        await put(q, 1, 2)
        await take(q, 1)

    with pytest.raises(Deadlock):
        run_virtual(main())


@given(st.permutations(range(12)), st.sets(st.integers(0, 11), max_size=6), st.sampled_from([1, 2, 5, 12, None]))
def test_whatever_the_order_of_completion_every_group_comes_out_once(
    finished: list[int], discarded: set[int], window: int | None
):
    async def main() -> list[int]:
        q = queue(window, b=12)
        for number in finished:
            if number in discarded:
                q.discard(number)
            else:
                await put(q, number)
        q.close()
        return await take(q, 12)

    taken = run_virtual(main())
    assert sorted(taken) == sorted(set(range(12)) - discarded)
    if window is not None:
        for place, number in enumerate(taken):
            assert number < min(taken[place:]) + window


# ------------------------------------------------------------------------- a plain reference for a largest lag's order


def plain_next(live: dict[int, int], finished: list[int], version: int, room: int, max_lag: int, b: int) -> list[int]:
    """The group to be taken next, by looking at all of them. ``finished`` is in the order of completion."""
    due, falling_due = 0, Counter(max(0, oldest + max_lag - version) for oldest in live.values())
    for ahead in range(max_lag + 1):
        due += falling_due[ahead]
        if due >= room + ahead * b:
            return [number for number in finished if live[number] + max_lag <= version + ahead][:1]
    return finished[:1]


@given(st.data(), st.integers(1, 6), st.integers(0, 3), st.booleans())
def test_with_a_largest_lag_groups_come_in_the_order_of_the_plain_reference(
    data: st.DataObject, b: int, max_lag: int, drops: bool
):
    """Groups are admitted, finish, end early and are taken in any order, and may have newer tokens than expected."""
    q = MessageQueue(Staleness(Fraction(20), b, None, None, {"rollout-0": 0}, max_lag, drops))
    live: dict[int, int] = {}
    finished: list[int] = []
    admitted = taken = version = 0

    async def main() -> None:
        nonlocal admitted, taken, version
        for act in data.draw(st.lists(st.sampled_from("aaaasssstttdv"), max_size=60)):
            running = [number for number in live if number not in finished]
            if act == "a" and admitted < b * 20:
                q.expect(admitted, max(0, version - 1))
                live[admitted] = max(0, version - 1)
                admitted += 1
            elif act == "s" and running:
                number = data.draw(st.sampled_from(running))
                live[number] = data.draw(st.integers(live[number], version))
                finished.append(number)
                await q.send(finished_with(number, live[number]))
            elif act == "d" and live:
                number = data.draw(st.sampled_from(list(live)))
                end(number)
                q.discard(number)
            elif act == "t":
                overdue = [n for n in finished if drops and live[n] < version - max_lag]
                room = (version + 1) * b - taken
                kept = {n: oldest for n, oldest in live.items() if n not in overdue}
                waiting = [n for n in finished if n not in overdue]
                expected = waiting[:1] if drops else plain_next(kept, waiting, version, room, max_lag, b)
                if overdue and not expected:
                    continue  # it would drop them and wait
                dropped: list[int] = []
                taking = asyncio.ensure_future(
                    q.take(1, version, lambda group, told=dropped: (told.append(group.number), q.discard(group.number)))
                )
                await asyncio.sleep(1)
                assert (dropped, taking.done()) == (overdue, bool(expected))
                if expected:
                    assert [group.number for group in taking.result()] == expected
                    taken += 1
                else:
                    taking.cancel()
                for number in [*overdue, *expected]:
                    end(number)
            elif act == "v":
                version += 1

    def end(number: int) -> None:
        del live[number]
        if number in finished:
            finished.remove(number)

    run_virtual(main())


@pytest.mark.parametrize("end", ["came", "of another prompt", "too old", "discarded", "full", "closed", "abandoned"])
def test_a_batch_is_taken_again_as_it_was_or_not_at_all(end: str):
    async def main() -> list[int] | None:
        q = queue(window=1, eta=Fraction(1))
        assert q._staleness.bound == 1
        q._staleness.load("rollout-0", 2)
        q._staleness.admitted = 200
        q.restore(200, 0, live={})
        for number in (7, 1, 4):
            await q.send(finished_with(number, version=2))
        place = 9 if end == "of another prompt" else 5
        other = 205 if end == "full" else 5  # nobody has room to admit it
        taking = asyncio.ensure_future(q.take_again({4: (0, 4, 0), other: (0, place, 0)}, 2))
        await asyncio.sleep(1)
        assert not taking.done()
        match end:
            case "discarded":
                q.discard(5)
            case "full":
                for number in set(q.live) - {1, 4, 7}:
                    q.discard(number)
            case "closed":
                q.close()
            case "abandoned":
                q.abandon()
            case _:
                await q.send(finished_with(5, version=0 if end == "too old" else 2))
        taken = await taking
        return None if taken is None else [group.number for group in taken]

    assert run_virtual(main()) == {"came": [4, 5], "abandoned": []}.get(end)


@pytest.mark.parametrize("window", [1, 2, None])
def test_groups_of_a_later_version_wait_for_it_and_others_go_before_them(window: int | None):
    async def main() -> list[list[int]]:
        q = queue(window=window, eta=Fraction(1))
        q.restore(200, 0, live={})
        for number, version in ((0, 0), (1, 1), (3, 1)):
            await q.send(finished_with(number, version))
        taking = asyncio.ensure_future(q.take(2, 0, never))
        await asyncio.sleep(1)
        assert not taking.done(), "group 2 is made"
        await q.send(finished_with(2, version=0))
        return [[group.number for group in await taken] for taken in (taking, q.take(2, 1, never))]

    assert run_virtual(main()) == [[0, 2], [1, 3]]


@pytest.mark.parametrize("end", ["full", "full before the version is served", "closed"])
def test_groups_of_a_later_version_are_dropped_where_nothing_else_can_come(end: str):
    async def main() -> list[int]:
        q = queue(b=2, eta=Fraction(1))
        q._staleness.admitted = 200
        q._staleness.load("rollout-0", 1 if end == "full" else 0)
        q.restore(200, 0, live={})
        for number in range(4, 200):
            q.discard(number)
        q._staleness.discarded = 194  # two were trained on
        dropped: list[int] = []

        def drop(group: Group) -> None:
            dropped.append(group.number)
            q.discard(group.number)
            q._staleness.discarded += 1

        for number in range(4):
            await q.send(finished_with(number, version=2))
        taking = asyncio.ensure_future(q.take(1, 1, drop))
        await asyncio.sleep(1)
        if end == "full":
            assert dropped == [3], "there may be room now"
        else:
            assert not dropped
        q.close()
        assert await taking == []
        return dropped

    assert sorted(run_virtual(main())) == [0, 1, 2, 3]
