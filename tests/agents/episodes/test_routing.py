"""Which replica gets which call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np

from headway.agents.episodes.request_dispatcher import Affinity, PendingRequest, RequestDispatcher
from headway.data.interfaces.rollout import Completion, GenerateRequest, SamplingParams
from headway.data.types import TrajectoryId

THREE = ["a", "b", "c"]
CALL = GenerateRequest(0, TrajectoryId(0, 0, 0, 0), np.zeros(1, np.int32), SamplingParams(8))


class Silent:
    """An engine that answers no call."""

    def __init__(self, name: str, slots: int) -> None:
        self.name, self.slots = name, slots

    async def submit(self, client: str, calls: Sequence[GenerateRequest]) -> None: ...

    async def finished(self, client: str) -> AsyncIterator[Sequence[Completion]]:
        await asyncio.Event().wait()
        yield []

    async def abort(self, client: str, numbers: Sequence[int]) -> None: ...

    async def release(self, trajectories: Sequence[TrajectoryId]) -> None: ...


def dispatcher_of(*names: str, slots: int = 8) -> RequestDispatcher:
    dispatcher = RequestDispatcher("worker")
    for name in names:
        dispatcher.join(Silent(name, slots))
    dispatcher.route(names)
    return dispatcher


def calls(dispatcher: RequestDispatcher, number: int = 4) -> list[PendingRequest]:
    """Calls of one group."""
    affinity, nothing = Affinity(), lambda *_: None
    asked: list[Any] = [PendingRequest(CALL, affinity, done=nothing, failed=nothing) for _ in range(number)]
    for one in asked:
        dispatcher.ask(one)
    return asked


def group(dispatcher: RequestDispatcher, number: int = 4) -> list[str]:
    """The replicas of a group's calls."""
    return [asked.replica for asked in calls(dispatcher, number)]


async def test_a_wave_is_spread_evenly_in_order():
    dispatcher = dispatcher_of(*THREE, slots=64)
    assert [set(group(dispatcher)) for _ in range(7)] == [{"a"}, {"b"}, {"c"}, {"a"}, {"b"}, {"c"}, {"a"}]
    await dispatcher.close()


async def test_a_group_goes_to_the_replica_with_the_fewest_calls():
    dispatcher = dispatcher_of("a", "b", slots=64)
    first = calls(dispatcher, 8)
    assert [{one.replica for one in first}, *(set(group(dispatcher, 2)) for _ in range(2))] == [{"a"}, {"b"}, {"b"}]
    dispatcher.drop(first)
    assert set(group(dispatcher)) == {"a"}
    await dispatcher.close()


async def test_calls_without_a_slot_at_home_go_to_a_replica_that_has_one():
    dispatcher = dispatcher_of(*THREE, slots=3)
    assert group(dispatcher, 5) == ["a", "a", "a", "b", "c"]
    await dispatcher.close()


async def test_where_no_replica_has_a_slot_they_wait_at_home():
    dispatcher = dispatcher_of("a", "b", slots=2)
    assert group(dispatcher, 6) == ["a", "a", "b", "b", "a", "a"]
    await dispatcher.close()


async def test_only_the_open_replicas_get_anything():
    dispatcher = dispatcher_of(*THREE, slots=64)
    dispatcher.route(["b"])
    assert set(group(dispatcher, 3)) == {"b"}
    dispatcher.route([])
    assert set(group(dispatcher, 3)) == {""}
    await dispatcher.close()


async def test_a_replica_that_was_left_gets_nothing_and_its_calls_go_to_others():
    dispatcher = dispatcher_of(*THREE, slots=64)
    left = calls(dispatcher)
    assert {one.replica for one in left} == {"a"}
    await dispatcher.leave("a")
    assert [one.replica for one in left] == ["b", "c", "b", "c"]
    dispatcher.route(THREE)
    assert set(group(dispatcher)) == {"b"}
    await dispatcher.close()
