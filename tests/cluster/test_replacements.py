"""A replica in the place of one that is gone: where it goes, how long that may take, and what it has to see."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio

from headway.cluster.on_ray import network_interface, resource_pool
from headway.cluster.on_ray.network_interface import answers, stops_answering
from headway.cluster.on_ray.resource_pool import Node, ResourcePool
from headway.cluster.roles.rollout_role import RolloutRole
from headway.cluster.worker_engines import RolloutReplica
from headway.cluster.worker_group import Worker
from headway.cluster.worker_plan import Rank, WorkerSpec, in_meshes
from headway.cluster.workers import LaunchedWorkers, StartWaits
from headway.config.sizing.timeouts import Timeouts
from headway.errors import ModelError, StallError

SPEC = WorkerSpec("rollout-1", RolloutRole, 1, 1, {})


class Place:
    """Notes what is asked of a cluster and of the workers on it, in order."""

    def __init__(self, *, found: bool = True) -> None:
        self.log: list[str] = []
        self._found = asyncio.Event()
        if found:
            self._found.set()

    async def find_place(self, spec: WorkerSpec, others: Sequence[int] = ()) -> int:
        self.log.append(f"find a place for {spec.name}")
        await self._found.wait()
        return spec.device

    def launch(self, spec: WorkerSpec) -> Worker:
        self.log.append(f"launch {spec.name}")
        return self.worker(spec.name)

    def worker(self, name: str) -> Worker:
        def noted(what: str) -> Callable[..., Any]:
            async def note(*args: Any) -> None:
                self.log.append(f"{what} {name}")

            return note

        return cast(Worker, SimpleNamespace(name=name, kill=noted("kill")))


async def replace(
    place: Place, failure: Exception | None = None, timeout_s: float = 5.0
) -> tuple[Any, list[RolloutReplica]]:
    """The worker that takes the place of ``rollout-1``, and the replicas that there are then."""

    async def start(worker: Worker, waits: StartWaits) -> Any:
        place.log.append(f"start {worker.name}")
        if failure is not None:
            raise failure
        return worker

    workers = LaunchedWorkers(cast(Any, place), Timeouts(timeout_s, 5, 300))
    workers.launch(SPEC)
    place.log.clear()
    current = [cast(RolloutReplica, workers["rollout-1"])]
    return await workers.replace("rollout-1", start=start, current=current), current


async def test_a_place_is_found_before_anything_is_started_there() -> None:
    place = Place()
    made, current = await replace(place)
    assert made.name == "rollout-1+1"
    assert place.log == ["find a place for rollout-1", "kill rollout-1", "launch rollout-1+1", "start rollout-1+1"]
    assert [one.name for one in current] == ["rollout-1+1"]


async def test_where_no_machine_has_room_the_wait_is_bounded_and_says_so() -> None:
    place = Place(found=False)
    with pytest.raises(
        StallError,
        match=r"rollout-1 .* = 0\.05 s: .*waited for a device .*rollout-1",
    ):
        await replace(place, timeout_s=0.05)
    assert place.log == ["find a place for rollout-1"]


@pytest.mark.parametrize(
    ("without_a_place", "inner", "least", "expected"),
    [
        ([], 1, 1, [0, 1, 2, 3, 4, 5]),
        ([0, 4], 1, 1, [1, 2, 3, 5]),
        ([0], 2, 2, [2, 3, 4, 5]),
        ([0, 3], 2, 2, [4, 5]),
        ([5], 1, 2, [0, 1, 2, 3]),
        ([0], 2, 4, [2, 3, 4, 5]),
        ([0, 5], 1, 6, []),
    ],
)
def test_ranks_go_on_in_whole_meshes_where_others_have_no_place(
    without_a_place: list[int], inner: int, least: int, expected: list[int]
) -> None:
    ranks = [Rank(f"actor-{rank}", f"actor-{rank}") for rank in range(6)]
    workers = {rank.worker for number, rank in enumerate(ranks) if number not in without_a_place}
    assert in_meshes(ranks, workers, inner=inner, least=least) == [ranks[number] for number in expected]


async def test_only_workers_without_a_place_in_time_are_left_out() -> None:
    class Half(Place):
        async def find_place(self, spec: WorkerSpec, others: Sequence[int] = ()) -> int:
            return 1 if spec.name == "rollout-1" else await super().find_place(spec, others)

    workers = LaunchedWorkers(cast(Any, Half(found=False)), Timeouts(5, 5, 300))
    for name in ("rollout-0", "rollout-1"):
        workers.launch(dataclasses.replace(SPEC, name=name))
    assert await workers.places(["rollout-0", "rollout-1"], 0.01) == {"rollout-1": 1}


async def test_a_machine_without_the_model_gets_no_replica() -> None:
    place = Place()
    with pytest.raises(ModelError, match="no such folder"):
        await replace(place, ModelError("m: no such folder"))
    assert place.log[-2:] == ["start rollout-1+1", "kill rollout-1+1"], "it would hold its device"


class Reserved:
    """Ray's nodes and groups, as a pool of the devices 0 to 2 sees them: bundles 0, 1, 2 of one group on node a."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, alive: dict[str, int | None], *, several: bool = False) -> None:
        """``alive``: the port at which Ray's process on each node should answer; None for nodes that Ray has not.

        ``several``: there is a bundle 3, of the devices 3 and 4, which one worker has.
        """
        self.alive = alive
        self.free = dict.fromkeys(alive, 0)
        self.removed: list[object] = []
        group = SimpleNamespace(id="first")
        places = [resource_pool._WorkerBundle(cast(Any, group), bundle, "a", (bundle,)) for bundle in range(3)]
        if several:
            places.append(resource_pool._WorkerBundle(cast(Any, group), 3, "a", (3, 4)))
        self.pool = ResourcePool(places, on_gpus=True)
        monkeypatch.setattr(resource_pool, "LOOK_AGAIN_S", 0.0)
        monkeypatch.setattr(resource_pool, "described", self._described)
        monkeypatch.setattr(resource_pool, "_nodes", lambda on_gpus: [Node(n, 4, self.free[n]) for n in self.alive])
        monkeypatch.setattr(resource_pool, "_reserved", self._reserved)
        monkeypatch.setattr(resource_pool, "remove_placement_group", lambda group: self.removed.append(group.id))

    def bundle(self, device: int) -> tuple[str, int]:
        strategy = self.pool.options(device)["scheduling_strategy"]
        return strategy.placement_group.id, strategy.placement_group_bundle_index

    def _described(self, node: str) -> dict[str, Any] | None:
        port = self.alive[node]
        return None if port is None else {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}

    async def _reserved(self, nodes: Sequence[str], sizes: Sequence[int], on_gpus: bool) -> Any:
        (node,), (size,) = nodes, sizes
        if self.free[node] < size:
            return None
        self.free[node] -= size
        return SimpleNamespace(id=f"on {node}, {self.free[node]} left")


@pytest_asyncio.fixture
async def port() -> AsyncIterator[int]:
    """One that answers; nothing does at port 9."""
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def test_a_device_stays_where_it_is_while_ray_answers_there(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    ray = Reserved(monkeypatch, {"a": port, "b": port})
    ray.free["b"] = 4
    assert await ray.pool.find_place(1) == 1
    assert (ray.pool.node(1), ray.bundle(1), ray.pool.sharing(1)) == ("a", ("first", 1), 3)


async def test_a_device_of_a_node_that_is_gone_moves_to_one_that_has_room_and_answers(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    ray = Reserved(monkeypatch, {"a": None, "silent": 9, "full": port, "b": port})
    ray.free |= {"silent": 4, "b": 3}
    for device in (1, 2, 0):
        async with asyncio.timeout(60):
            assert await ray.pool.find_place(device) == device
    assert [(ray.pool.node(device), ray.pool.sharing(device)) for device in range(3)] == [("b", 3)] * 3
    assert [ray.bundle(device) for device in (1, 2, 0)] == [(f"on b, {left} left", 0) for left in (2, 1, 0)]
    assert ray.removed == ["first"], "when nobody has a bundle of it any more"


async def test_a_device_moves_away_from_a_node_that_is_avoided_and_to_none_that_is(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    ray = Reserved(monkeypatch, {"a": port, "b": port, "c": port})
    ray.free |= {"b": 1, "c": 1}
    for node in "bc":
        ray.pool.avoid(1)
        async with asyncio.timeout(60):
            await ray.pool.find_place(1)
        assert ray.pool.node(1) == node
    assert await ray.pool.find_place(1) == 1, "it stays"
    assert await ray.pool.find_place(2) == 2 and ray.pool.node(2) == "a", "others may be there"


async def test_the_devices_of_a_replica_move_together_to_a_node_that_has_room_for_all(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    ray = Reserved(monkeypatch, {"a": None, "one left": port, "b": port}, several=True)
    ray.free |= {"one left": 1, "b": 2}
    assert ray.pool.sharing(3) == 5
    async with asyncio.timeout(60):
        assert await ray.pool.find_place(3) == 3
    assert [(ray.pool.node(device), ray.bundle(device)) for device in (3, 4)] == [("b", ("on b, 0 left", 0))] * 2
    assert ray.pool.options(4)["num_gpus"] == ray.pool.sharing(3) == 2
    assert ray.removed == [], "others have bundles of the first group"


async def test_a_device_of_a_node_that_is_silent_moves_after_several_looks(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    ray = Reserved(monkeypatch, {"a": 9, "b": port})
    ray.free["b"] = 1
    async with asyncio.timeout(60):
        await ray.pool.find_place(1)
    assert ray.pool.node(1) == "b" and ray.pool.node(0) == "a"
    assert ray.removed == []


async def test_what_has_no_device_of_its_own_moves_none_and_goes_beside_one_that_is_alive(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    ray = Reserved(monkeypatch, {"a": 9, "b": port})
    ray.free["b"] = 2
    async with asyncio.timeout(60):
        episode_worker = asyncio.create_task(ray.pool.find_place(1, [0, 2], move=False))
        await ray.pool.find_place(2)
        assert await episode_worker == 2
    assert ray.free["b"] == 1


async def test_a_machine_is_given_up_after_several_failures_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    came = iter([True, False, False, False, True, False, False, False, False])
    asked: list[bool] = []

    async def says(host: str, port: int) -> bool:
        asked.append(next(came))
        return asked[-1]

    monkeypatch.setattr(network_interface, "MACHINE_AGAIN_S", 0.0)
    monkeypatch.setattr(network_interface, "answers", says)
    await stops_answering("10.0.0.2", 1)
    assert len(asked) == 9


async def test_a_port_at_which_nothing_listens_does_not_answer() -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert await answers("127.0.0.1", port)
    server.close()
    await server.wait_closed()
    assert not await answers("127.0.0.1", port)
