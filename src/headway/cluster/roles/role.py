"""Base class of all roles, and their access to the files that a run's machines share."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.cluster.machine.batch_cache import BatchCache
from headway.cluster.machine.worker_setup import Hardware, hardware_here
from headway.cluster.profiled_processes import ProcessProfile
from headway.cluster.worker_group import Dispatch, register
from headway.config.schema import Config
from headway.config.sizing.timeouts import Timeouts, model_nbytes
from headway.data.types import Handle
from headway.devices import kind_of
from headway.engines.weights.protocols import Address, EndContext
from headway.models.model_folder import fingerprint

if TYPE_CHECKING:
    from headway.engines.train.fsdp.device_mesh import TrainMesh


class FileProbe:
    """Access to files for every role and the driver. Runs on another thread, also while a worker computes.

    A mark is a small file with a text of its own. A process that reads that text (`text_of`) sees the directory in
    which the mark was left, and not one of the same path on another machine.
    """

    def __init__(self, host: str) -> None:
        """Remember ``host``, this machine's address for the others."""
        self._host = host

    async def place(self) -> str:
        """Return the name of this machine, and its address for the others."""
        return place(self._host)

    async def leave_mark(self, mark: Path, text: str, make_directory: bool = False) -> str | None:
        """Write ``text`` to the file ``mark``. Returns why that failed, or None."""

        def write() -> None:
            if make_directory:
                mark.parent.mkdir(parents=True, exist_ok=True)
            mark.write_text(text, encoding="utf-8")

        try:
            await asyncio.to_thread(write)
        except OSError as error:
            return error.strerror or str(error)
        return None

    async def text_of(self, file: Path) -> str | None:
        """Return the text of ``file``; None if there is none."""
        try:
            return await asyncio.to_thread(file.read_text, encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None

    async def remove_mark(self, mark: Path) -> None:
        """Remove the file ``mark``, if it is there and can be removed."""
        with suppress(OSError):  # a small hidden file does no harm
            await asyncio.to_thread(mark.unlink, missing_ok=True)

    async def model_files(self, path: str) -> dict[str, str] | None:
        """Return the `fingerprint` of the model's folder at ``path``; None if there is none."""
        return await asyncio.to_thread(fingerprint, Path(path))


def place(host: str) -> str:
    """Name this machine for messages: its own name, and its address ``host``."""
    return f"{socket.gethostname()} ({host})"


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
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self._store: Any = None
        self._config = config
        self._model_path = model_path
        self.name = name
        self._device = device
        self._threads = threads
        self._host = host
        self._here = EndContext(host, put, fetch)
        self.lookout = FileProbe(host)
        self.profile = ProcessProfile(name)
        self.batch = BatchCache(fetch)
        """Cache of the open batch's rows."""

    @register(Dispatch.RANK_ZERO)
    def open_store(self) -> Address:
        """Host the store at which the role's ranks meet, and the trainer's with its receivers. Returns its address."""
        from headway.engines.weights.transports.process_group import open_store

        # Kept, because the store lives as long as this object.
        self._store, port = open_store(self._host, self._timeouts.start_s)
        return self._host, port

    def hardware(self) -> Hardware:
        """Return a description of the hardware that this rank computes on; call it once the role is built."""
        return hardware_here(self._device)

    def memory(self) -> tuple[str, int | None, int | None]:
        """Return this machine's name, the size of the rank's device and its free memory, in bytes. On a CPU the size is
        None, and free memory is the machine's.
        """
        kind = kind_of(self._device)
        return place(self._host), kind.total_memory(self._device), kind.free_memory(self._device)

    def memory_domain(self) -> str:
        """Name the processes with which this one can share memory."""
        from headway.engines.weights.incoming_version import memory_domain

        return memory_domain()

    def _join_ranks(self, store: Address | None, role: str) -> None:
        """Set the thread count, and make torch.distributed's default group of this role's ranks, which meet at
        ``store``; without one the process has a group already.
        """
        import torch

        torch.set_num_threads(self._threads)
        if store is None:
            return
        import torch.distributed as dist

        from headway.engines.weights.transports.process_group import join_store

        dist.init_process_group(
            kind_of(self._device).process_groups,
            store=join_store(store, f"ranks/{role}", self._timeouts.start_s),
            rank=self._rank,
            world_size=self._world_size,
            # Longer than all watches of the driver, which knows the hanging rank: torch's limit would end the waiting
            # ones.
            timeout=timedelta(seconds=self._timeouts.ranks_s),
        )

    @property
    def _timeouts(self) -> Timeouts:
        """Return the time limits for ranks that wait for each other."""
        on_gpu = kind_of(self._device).flex_attention
        return Timeouts.of(self._config, model_nbytes(self._model_path), on_gpu=on_gpu)

    @cached_property
    def _mesh(self) -> TrainMesh:
        """Mesh of the role's ranks, shared by all models on them. The first access is collective."""
        import torch

        from headway.engines.train.fsdp.device_mesh import TrainMesh

        within = timedelta(seconds=self._timeouts.ranks_s)
        return TrainMesh.make(self._config.actor.parallel, torch.device(self._device), within)

    def close(self) -> None:
        """Release resources that would outlive the process or the role."""
