"""Devices of a Ray cluster, reserved for a run: one placement-group bundle per device index of the placement."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headway.errors import StallError

CPU_SHARE = 0.01
"""CPUs that a worker asks Ray for. Threads are set by Headway; a whole CPU per worker would leave a small machine
waiting for ever."""


class ResourcePool:
    """Bundles 0 … ``devices`` - 1, reserved together. A worker takes a bundle whole."""

    def __init__(self, group: PlacementGroup, gpus: int) -> None:
        self._group = group
        self._gpus = gpus

    @classmethod
    async def reserve(cls, devices: int, *, on_gpus: bool, timeout_s: float) -> ResourcePool:
        """Wait until Ray has reserved everything. Raises `StallError` with what was asked for and what there is."""
        gpus = 1 if on_gpus else 0
        bundle = {"CPU": CPU_SHARE, "GPU": gpus} if on_gpus else {"CPU": CPU_SHARE}
        group = placement_group([dict(bundle) for _ in range(devices)], strategy="PACK")
        try:
            reserved = await asyncio.to_thread(group.wait, timeout_s)
        except BaseException:
            remove_placement_group(group)  # or it would take the devices as soon as they are free
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

    def options(self, device: int) -> dict[str, Any]:
        """Ray options that put a worker on ``device``."""
        return {
            "num_cpus": CPU_SHARE,
            "num_gpus": self._gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=device
            ),
        }

    def release(self) -> None:
        """Give the devices back; whatever still runs on them is killed by Ray."""
        remove_placement_group(self._group)
