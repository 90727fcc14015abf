"""Devices of a Ray cluster, reserved for a run: one placement-group bundle per device index of the placement."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headway.cluster.address import answers
from headway.errors import StallError

CPU_SHARE = 0.01
"""Number of CPUs that a worker asks Ray for. Headway itself sets threads; a whole CPU per worker would leave a small
machine waiting for ever."""
LOOK_AGAIN_S = 0.5
"""Seconds between two looks at where Ray has a device: Ray does not report when it moves one."""


class ResourcePool:
    """Pool of the bundles 0 … ``devices`` - 1, reserved together. A worker takes a whole bundle."""

    def __init__(self, group: PlacementGroup, gpus: int) -> None:
        self._group = group
        self._gpus = gpus

    @classmethod
    async def reserve(cls, devices: int, *, on_gpus: bool, timeout_s: float) -> ResourcePool:
        """Wait until Ray has reserved everything. Raises `StallError` with what was requested and what there is."""
        gpus = 1 if on_gpus else 0
        bundle = {"CPU": CPU_SHARE, "GPU": gpus} if on_gpus else {"CPU": CPU_SHARE}
        group = placement_group([dict(bundle) for _ in range(devices)], strategy="PACK")
        try:
            reserved = await asyncio.to_thread(group.wait, timeout_s)
        except BaseException:
            remove_placement_group(group)  # otherwise it would take the devices as soon as they are free
            raise
        if not reserved:
            remove_placement_group(group)
            resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
            there = {name: amount for name, amount in resources.items() if name in ("CPU", "GPU")}
            raise StallError(
                f"Ray did not reserve {devices} x {bundle} within {timeout_s:g} s; the cluster has {there} in all. "
                "Ask for fewer devices (trainer.n_gpus_per_node, rollout.n_gpus_per_node), or free some"
            )
        return cls(group, gpus)

    async def find_place(self, *devices: int) -> int:
        """Wait, for ever if need be, until the bundle of a device is on a machine on which Ray answers. Returns the
        first such device.

        Ray takes some seconds to notice that a machine is gone, and would start a worker there meanwhile.
        """
        while True:
            for device in devices:
                if await self._answers(await asyncio.to_thread(self._node, device)):
                    return device
            await asyncio.sleep(LOOK_AGAIN_S)  # Ray has no event for it

    def _node(self, device: int) -> dict[str, Any] | None:
        """Return the machine of a device, as `ray.nodes` describes it. None while Ray has none for it."""
        table: dict[str, Any] = placement_group_table(self._group)
        holder = table["bundles_to_node_id"].get(device)
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        return next((node for node in nodes if node["NodeID"] == holder and node["Alive"]), None)

    async def _answers(self, node: dict[str, Any] | None) -> bool:
        return node is not None and await answers(node["NodeManagerAddress"], node["NodeManagerPort"])

    def options(self, device: int, *, beside: bool = False) -> dict[str, Any]:
        """Return Ray's options that put a worker on ``device``, or ``beside`` the one that has it."""
        return {
            "num_cpus": 0 if beside else CPU_SHARE,
            "num_gpus": 0 if beside else self._gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=device
            ),
        }

    def release(self) -> None:
        """Release the devices; Ray kills whatever still runs on them."""
        remove_placement_group(self._group)
