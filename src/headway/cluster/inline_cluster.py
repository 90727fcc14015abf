"""Cluster of one process, for debugging, tests and notebooks: a thread for the trainer, one for each engine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn

from headway.cluster.machine.worker_setup import math_environment, threads_of
from headway.cluster.role_host import RoleHost
from headway.cluster.worker_plan import ClusterPlan, WorkerSpec
from headway.config.schema import Config
from headway.config.sizing.placement import CRITIC, LOGP, REF
from headway.data.types import Handle
from headway.devices import chosen, kind_of
from headway.errors import ConfigError
from headway.runtime.task_groups import never


def _itself(value: Any) -> Handle[Any]:
    return value


class InlineWorker(RoleHost):
    """Implementation of `Worker` and `Peer` in this process: handles are the objects themselves."""

    def __init__(self, spec: WorkerSpec, device: str, threads: int) -> None:
        role = spec.role(**spec.arguments, name=spec.name, device=device, threads=threads, fetch=list, put=_itself)
        super().__init__(role, spec.name)

    async def up(self) -> None:
        """Return at once: the worker is this process."""

    async def keep(self, method: str, parts: Sequence[Sequence[int]], *args: Any) -> list[Handle[Any]]:
        result = await self.call(method, *args)
        return [[result[place] for place in part] for part in parts]

    def peer(self) -> InlineWorker:
        """Return the worker itself: all workers are in one process."""
        return self

    def close(self) -> None:
        """Do nothing, as a `Peer`: the worker itself ends with `kill`."""

    async def died(self) -> NoReturn:
        """Wait for ever: the worker has no process of its own that could end."""
        await never()

    async def lost(self) -> NoReturn:
        """Wait for ever: a worker within the driver's process cannot be lost alone."""
        await self.died()

    async def kill(self) -> None:
        await self.end()


class InlineCluster:
    """Implementation of `Cluster` in this process."""

    separate_processes = False
    address = "127.0.0.1"
    _users: ClassVar[int] = 0
    """Number of clusters in this process that use the process group made by the first one."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._device = "cpu"
        self._threads = 1
        self._uses_group = False

    def begin(self) -> None:
        """Do nothing: this process is the cluster."""

    async def connect(self) -> str:
        """Return the device that torch sees here. Raises `ConfigError` if it is not the configured one."""
        self._device = chosen(self._config.cluster.device)
        return self._device

    async def reserve(self, plan: ClusterPlan) -> None:
        """Set the process's thread count, and make its group of one rank.

        Raises `ConfigError` for what one process cannot do.
        """
        for role in (REF, LOGP, CRITIC):  # of the trainer's ranks a rule of the settings says it
            if (count := len(plan.ranks.get(role, ()))) > 1:
                raise ConfigError(
                    f"cluster.backend=inline has one {role} rank, not {count}: one process is one rank. "
                    f"Set {role}.nnodes=1 and {role}.n_gpus_per_node=1, or cluster.backend=ray"
                )
        self._make_group()
        computing = [spec for spec in plan.workers if not spec.beside]
        devices = sum(len(spec.devices) for spec in computing)
        self._threads = max(threads_of(spec.threads, devices) for spec in computing)
        for variable, value in math_environment(self._threads).items():
            os.environ.setdefault(variable, value)

    async def find_place(self, spec: WorkerSpec, others: Sequence[int] = ()) -> int:
        """Return the device of ``spec`` at once: this process has room for everything."""
        return spec.device

    def avoid(self, spec: WorkerSpec) -> None:
        raise AssertionError("unreachable: there is no other machine")

    def launch(self, spec: WorkerSpec) -> InlineWorker:
        return InlineWorker(spec, self._device, self._threads)

    async def died(self) -> NoReturn:
        """Wait for ever: the cluster is this process."""
        await never()

    async def stop(self) -> None:
        """Destroy the torch.distributed process group if clusters made it and this is the last cluster."""
        if self._uses_group:
            import torch.distributed as dist

            self._uses_group = False
            InlineCluster._users -= 1
            if not InlineCluster._users:
                dist.destroy_process_group()

    def _make_group(self) -> None:
        """Make torch.distributed's default group, which FSDP's device mesh builds on, unless there is one."""
        import torch.distributed as dist

        if InlineCluster._users == 0:
            if dist.is_initialized():  # the caller's own group: `stop` must not destroy it
                return
            store = dist.HashStore()  # in memory: no port that another process could have taken
            dist.init_process_group(kind_of(self._device).process_groups, store=store, rank=0, world_size=1)
        self._uses_group = True
        InlineCluster._users += 1
