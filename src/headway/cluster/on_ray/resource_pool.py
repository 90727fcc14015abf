"""Devices of a Ray cluster, reserved for a run in one placement group: a bundle per worker, on nodes chosen here.

node shares ─▶ free devices of the living nodes ─▶ an assignment ─▶ one group, each bundle pinned to its node

A placement group is reserved as a whole or not at all, so two runs cannot wait for each other's halves. Ray's own
strategies know nothing of roles, so that bundles are pinned by their nodes' labels. Ray gives a node's GPUs to bundles
in their order, so that ranks are in the node's order, and a replica's devices are neighbours. A worker whose node is
gone gets a bundle of its own on another one, as Ray does not move what is pinned.

Which node share lies on which node is arithmetic (`assign_nodes`):

shares: trainer 0, trainer 1, rollout 0       nodes: a (8 free), b (4 free)
─▶ trainer 0 and rollout 0 on a, trainer 1 on b
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import floor
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headway.cluster.on_ray.network_interface import answers
from headway.config.sizing.placement import DeviceGroup, NodeShare
from headway.config.sizing.timeouts import MACHINE_ATTEMPTS, NODES_JOIN_S, RESERVE_S
from headway.errors import ConfigError, StallError

MOST_STEPS = 5_000
"""Most attempts to place shares, for one number of nodes: equal nodes need one attempt per share."""


@dataclass(frozen=True, slots=True)
class Node:
    """Living node of a cluster, and its number of devices: GPUs, or processes on CPUs."""

    id: str
    total: int
    free: int


def assign_nodes(shares: Sequence[NodeShare], nodes: Sequence[Node]) -> dict[int, str] | None:
    """Return device -> id of its node, for all devices of ``shares``; None if ``nodes`` have no room.

    A share lies on one node, and shares of one owner lie on different nodes. As few nodes as possible are used, so that
    weights and tokens stay near. The first suitable nodes are taken, each with the shares of the same index.
    """
    largest_first = sorted(shares, key=lambda share: -len(share.devices))
    least = max(Counter(share.owner for share in shares).values(), default=0)
    for most in range(least, min(len(nodes), len(shares)) + 1):
        if (found := _search(largest_first, nodes, most)) is not None:
            return {device: node for node, there in found.items() for share in there for device in share.devices}
    return None


def _search(shares: Sequence[NodeShare], nodes: Sequence[Node], most: int) -> dict[str, list[NodeShare]] | None:
    """Search depth-first for at most ``most`` nodes for the shares, in order. Returns node -> its shares, in the order
    of first use; None without a solution.
    """
    free = {node.id: node.free for node in nodes}
    if sum(sorted(free.values())[-most:]) < sum(len(share.devices) for share in shares):  # even the largest lack room
        return None
    found: dict[str, list[NodeShare]] = {}
    steps = count(1)

    def candidates(share: NodeShare) -> Iterator[str]:
        """Yield nodes with room for ``share``, used ones first. Of equal nodes only the first."""
        seen = set()
        unused = [node for node in free if node not in found] if len(found) < most else []
        for node in [*found, *unused]:
            owners = frozenset(other.owner for other in found.get(node, ()))
            alike = (free[node], owners)
            if share.owner not in owners and free[node] >= len(share.devices) and alike not in seen:
                seen.add(alike)
                yield node

    def lay(at: int) -> bool:
        """Place share ``at`` and all after it. Returns False, with nothing changed, if that is impossible."""
        if at == len(shares):
            return True
        for node in candidates(shares[at]):
            if next(steps) > MOST_STEPS:
                return False
            found.setdefault(node, []).append(shares[at])
            free[node] -= len(shares[at].devices)
            if lay(at + 1):
                return True
            free[node] += len(shares[at].devices)
            found[node].pop()
            if not found[node]:  # an empty entry would count as a node in use
                del found[node]
        return False

    return found if lay(0) else None


def lacking(shares: Sequence[NodeShare], nodes: Sequence[Node], *, on_gpus: bool) -> str:
    """Return a message with the devices that a run needs and those of the cluster."""
    unit = "GPU(s)" if on_gpus else "process(es)"
    sizes: dict[str, list[int]] = defaultdict(list)
    for share in shares:
        sizes[share.owner].append(len(share.devices))
    asked = [
        f"{owner} asks for {len(of)} node(s) with {max(of)} {unit} ({owner}.nnodes={len(of)})"
        for owner, of in sizes.items()
    ]
    alike = Counter((node.total, node.free) for node in nodes)
    has = [
        f"{number} node(s) with {total} {unit}" + (f", {free} free" if free < total else "")
        for (total, free), number in sorted(alike.items(), reverse=True)
    ]
    return f"{', '.join(asked)}, and Ray has {' and '.join(has) or 'no node'}"


CPU_SHARE = 0.01
"""Number of CPUs that a worker asks Ray for. Headway itself sets threads; a whole CPU per worker would leave a small
machine waiting for ever."""
LOOK_AGAIN_S = 0.5
"""Seconds between two queries of Ray's nodes: Ray does not report devices that become free."""
NODE_ID = "ray.io/node-id"
"""Label that Ray gives each node."""


@dataclass(frozen=True, slots=True)
class _WorkerBundle:
    """Place of a worker: a bundle on a node."""

    group: PlacementGroup
    bundle: int
    node: str
    """Ray's id of the node."""
    devices: tuple[int, ...]
    """The run's devices that are in the bundle."""


class ResourcePool:
    """Pool of a run's devices, reserved together. A worker takes a whole device, or a whole group of them."""

    def __init__(self, places: Iterable[_WorkerBundle], *, on_gpus: bool) -> None:
        self._places = {device: place for place in places for device in place.devices}
        self._on_gpus = on_gpus
        self._avoided: set[tuple[int, str]] = set()
        """Pairs (device, node): `find_place` neither accepts the device on the node nor moves it there."""

    @classmethod
    async def reserve(
        cls,
        shares: Sequence[NodeShare],
        groups: Sequence[DeviceGroup] = (),
        *,
        on_gpus: bool,
        timeout_s: float,
        may_grow: bool = False,
    ) -> ResourcePool:
        """Wait until Ray has reserved all devices of ``shares``. ``groups``: groups of devices for one worker each.
        ``may_grow``: True if further nodes may join the cluster.

        Raises:
            ConfigError: the nodes could not hold the run even if free; the message names needed and present devices.
            StallError: they could, but had no room within ``timeout_s``.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        joined_by = min(deadline, loop.time() + (NODES_JOIN_S if may_grow else 0.0))
        while True:
            nodes = await asyncio.to_thread(_nodes, on_gpus)
            found = assign_nodes(shares, nodes)
            if found is not None:
                together = {device: group for group in groups for device in group}
                # In this order Ray fills a node's GPUs.
                bundles = list(dict.fromkeys(together.get(device, (device,)) for device in sorted(found)))
                nodes_of = [found[devices[0]] for devices in bundles]
                group = await _reserved(nodes_of, [len(devices) for devices in bundles], on_gpus)
                if group is not None:
                    places = zip(nodes_of, bundles, strict=True)
                    return cls((_WorkerBundle(group, at, *place) for at, place in enumerate(places)), on_gpus=on_gpus)
            empty = [Node(node.id, node.total, node.total) for node in nodes]
            if loop.time() >= joined_by and assign_nodes(shares, empty) is None:
                raise ConfigError(
                    f"{lacking(shares, empty, on_gpus=on_gpus)}. All devices of a role on one node are on one machine, "
                    "and its nodes are different machines: lower nnodes or n_gpus_per_node, or start Ray on further "
                    "machines (`ray start --address=…`). More devices of one machine are n_gpus_per_node"
                )
            if loop.time() >= deadline:
                raise StallError(
                    f"{lacking(shares, nodes, on_gpus=on_gpus)}; there was no room within {timeout_s:.3g} s. Ask for "
                    "fewer devices (trainer.n_gpus_per_node, rollout.n_gpus_per_node), or free some"
                )
            await asyncio.sleep(min(LOOK_AGAIN_S, max(0.0, deadline - loop.time())))

    def node(self, device: int) -> str:
        """Return Ray's id of the node of ``device``."""
        return self._places[device].node

    def sharing(self, device: int) -> int:
        """Return how many of the run's devices are on the node of ``device``, itself included."""
        node = self._places[device].node
        return sum(place.node == node for place in self._places.values())

    async def find_place(self, device: int, others: Sequence[int] = (), *, move: bool = True) -> int:
        """Wait, for ever if need be, until a device is on a node on which Ray answers. Returns the first such device.

        With ``move`` the ``device`` moves to any node with room if its own is gone. Ray takes some seconds to notice a
        lost machine, and would start a worker there meanwhile: so each node is asked directly.
        """
        failed = 0
        while True:
            for one in (device, *others):
                node = self._places[one].node
                alive = None if (one, node) in self._avoided else await asyncio.to_thread(described, node)
                if await _answers(alive):
                    return one
                if one == device:
                    # None: Ray knows by itself that it is gone
                    failed = MACHINE_ATTEMPTS if alive is None else failed + 1
            if move and failed >= MACHINE_ATTEMPTS and await self._moved(device):
                return device
            await asyncio.sleep(LOOK_AGAIN_S)

    def avoid(self, device: int) -> None:
        """Exclude the current node of ``device`` as its place: `find_place` no longer accepts the device there."""
        self._avoided.add((device, self._places[device].node))

    async def _moved(self, device: int) -> bool:
        """Give the worker of ``device`` a bundle on any node that has room and answers. Returns False if there is
        none.
        """
        devices = self._places[device].devices
        for node in await asyncio.to_thread(_nodes, self._on_gpus):
            has_room = node.free >= len(devices) and (device, node.id) not in self._avoided
            if has_room and await _answers(await asyncio.to_thread(described, node.id)):
                group = await _reserved([node.id], [len(devices)], self._on_gpus)
                if group is not None:
                    before = self._places[device].group
                    self._places |= dict.fromkeys(devices, _WorkerBundle(group, 0, node.id, devices))
                    if all(place.group.id != before.id for place in self._places.values()):
                        remove_placement_group(before)
                    return True
        return False

    def options(self, device: int, *, beside: bool = False) -> dict[str, Any]:
        """Return Ray's options that put a worker on the bundle of ``device`` or, with ``beside``, on the same node
        without it.
        """
        place = self._places[device]
        return {
            "num_cpus": 0 if beside else CPU_SHARE,
            "num_gpus": len(place.devices) if self._on_gpus and not beside else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=place.group, placement_group_bundle_index=place.bundle
            ),
        }

    def release(self) -> None:
        """Release the devices; Ray kills processes left on them."""
        for group in {place.group.id: place.group for place in self._places.values()}.values():
            remove_placement_group(group)


async def _answers(node: dict[str, Any] | None) -> bool:
    return node is not None and await answers(node["NodeManagerAddress"], node["NodeManagerPort"])


async def _reserved(nodes: Sequence[str], sizes: Sequence[int], on_gpus: bool) -> PlacementGroup | None:
    """Reserve a bundle of ``sizes`` devices on each of ``nodes``, or none. Returns None if another run was faster."""
    bundle = {"CPU": CPU_SHARE, "GPU": 1.0} if on_gpus else {"CPU": CPU_SHARE}
    group = placement_group(
        [{resource: size * each for resource, each in bundle.items()} for size in sizes],
        strategy="PACK",
        bundle_label_selector=[{NODE_ID: node} for node in nodes],
    )
    reserved = False
    try:
        reserved = await asyncio.to_thread(group.wait, RESERVE_S)
        return group if reserved else None
    finally:
        if not reserved:
            remove_placement_group(group)  # otherwise it would take the devices as soon as they are free


def _nodes(on_gpus: bool) -> list[Node]:
    """Return the living nodes and their devices, the driver's first."""
    free: dict[str, dict[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
    here: str = ray.get_runtime_context().get_node_id()
    # False sorts first: the driver's node.
    alive = sorted(alive_nodes(), key=lambda node: node["NodeID"] != here)
    return [
        Node(node["NodeID"], _devices(node["Resources"], on_gpus), _devices(free.get(node["NodeID"], {}), on_gpus))
        for node in alive
    ]


def _devices(resources: dict[str, float], on_gpus: bool) -> int:
    """Return the number of devices in ``resources``: GPUs, or processes on the CPU."""
    cpus = floor(resources.get("CPU", 0.0) / CPU_SHARE + 1e-6)  # in floats 0.29 / 0.01 is 28.999…
    return min(cpus, floor(resources.get("GPU", 0.0))) if on_gpus else cpus


def described(node: str) -> dict[str, Any] | None:
    """Return the living node of this id, as `ray.nodes` describes it; None if there is none."""
    return next((one for one in alive_nodes() if one["NodeID"] == node), None)


def alive_nodes() -> list[dict[str, Any]]:
    """Return the living nodes, as `ray.nodes` describes them."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in nodes if node["Alive"]]
