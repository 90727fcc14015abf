"""Processes of a run that can be profiled, one for all workers in it."""

from __future__ import annotations

from collections.abc import Sequence

from headway.cluster.proxy import proxy
from headway.cluster.worker_group import PartOf, Worker
from headway.engines.profiler import ProcessProfile


class ProfiledProcess:
    """Implementation of `Profiled` over one of the workers in the process, each of which has a `ProcessProfile`."""

    def __init__(self, name: str, worker: Worker) -> None:
        self.name = name
        self._profile = profile = proxy(worker, ProcessProfile, part="profile")
        self.start, self.stop = profile.start, profile.stop

    async def take(self, origin: float) -> bytes:
        return await self._profile.take(origin, self.name)


def profiled(workers: Sequence[Worker], *, separate_processes: bool) -> list[ProfiledProcess]:
    """Return the processes of ``workers``, in order. Without ``separate_processes`` all of them are in one."""
    hosts = [worker.whole if isinstance(worker, PartOf) else worker for worker in workers]
    found: dict[str, tuple[Worker, list[str]]] = {}
    for worker, host in zip(workers, hosts, strict=True):
        _, names = found.setdefault(host.name if separate_processes else "", (host, []))
        names.append(worker.name)
    return [ProfiledProcess("_".join(dict.fromkeys(names)), host) for host, names in found.values()]
