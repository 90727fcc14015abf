"""Base class of all roles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from headway.cluster.machine.batch_cache import BatchCache
from headway.cluster.machine.worker_setup import Hardware, hardware_here
from headway.cluster.profiled_processes import ProcessProfile
from headway.cluster.roles.file_probe import FileProbe
from headway.config.schema import Config
from headway.config.sizing.timeouts import Timeouts, model_nbytes
from headway.data.types import Handle
from headway.devices import kind_of
from headway.engines.weights.transports.links import Address, EndContext

if TYPE_CHECKING:
    from headway.engines.train.fsdp.device_mesh import TrainMesh


class Role:
    """Base class of roles, whose registered methods a worker group calls.

    ``put`` keeps an object where other processes can get it, ``fetch`` returns the objects of handles; ``host`` is this
    machine's address for others.
    """

    def __init__(
        self,
        *,
        config: Config,
        model_path: str,
        name: str,
        device: str,
        threads: int,
        fetch: Callable[[Sequence[Handle[Any]]], list[Any]],
        put: Callable[[Any], Handle[Any]],
        host: str = "127.0.0.1",
    ) -> None:
        self._config = config
        self._model_path = model_path
        self.name = name
        self._device = device
        self._threads = threads
        self._fetch = fetch
        self._put = put
        self._host = host
        self.lookout = FileProbe(host)
        self.profile = ProcessProfile(name)
        self.batch = BatchCache(fetch)
        """The rows of the batch that has begun."""

    def hardware(self) -> Hardware:
        """Return a description of the hardware that this rank computes on; call it once the role is built."""
        return hardware_here(self._device)

    def memory_domain(self) -> str:
        """Name the processes with which this one can share memory."""
        from headway.engines.weights.incoming_version import memory_domain

        return memory_domain()

    def _set_threads(self) -> None:
        import torch

        torch.set_num_threads(self._threads)

    def _join_ranks(self, store: Address | None, role: str, rank: int, world_size: int) -> None:
        """Make torch.distributed's default group of this role's ranks; without a store the process has one already."""
        if store is None:
            return
        import torch.distributed as dist

        from headway.engines.weights.transports.process_group import join_store

        dist.init_process_group(
            kind_of(self._device).process_groups,
            store=join_store(store, f"ranks/{role}", self._timeouts.start_s),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=self._timeouts.ranks_s),
        )

    @property
    def _timeouts(self) -> Timeouts:
        """Time limits by which ranks wait for each other."""
        on_gpu = kind_of(self._device).flex_attention
        return Timeouts.of(self._config, model_nbytes(self._model_path), on_gpu=on_gpu)

    @cached_property
    def _mesh(self) -> TrainMesh:
        """The role's ranks, once they have met: one mesh for all models on them. Collective where it is made."""
        import torch

        from headway.engines.train.fsdp.device_mesh import TrainMesh

        within = timedelta(seconds=self._timeouts.ranks_s)
        return TrainMesh.make(self._config.actor.parallel, torch.device(self._device), within)

    def _here(self) -> EndContext:
        return EndContext(self._host, self._put, self._fetch)

    def close(self) -> None:
        """Release what would outlive the process or the role."""
