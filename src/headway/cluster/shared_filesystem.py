"""Check that the machines of a run see the files that it needs, before any model is loaded.

    the run's directory    the driver and the training ranks leave a mark each ─▶ both read the other's
    the run's storage      the driver leaves a mark       ─▶ every worker reads it, where it is a directory
    the model's folder     every worker describes it                           ─▶ equal to the driver's
    the weights' directory the sender leaves a mark (`disk`, `shared_memory`)  ─▶ every receiver reads it

A run whose ranks write parts of a checkpoint on different disks would go on, and end well, without one. Replicas need
not see the run's directory: they only write their logs there, each on its own machine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from headway.cluster.roles.role import FileProbe
from headway.cluster.worker_group import Worker
from headway.cluster.worker_plan import ClusterPlan
from headway.config.transport_facts import TRANSPORTS
from headway.errors import ConfigError, ModelError, RunError
from headway.runtime.task_groups import concurrently

ELSEWHERE = "param_update.transport to broadcast or object_store"
"""Advice, as the end of a sentence, to set a weight transport that needs no file."""


@dataclass(frozen=True, slots=True)
class SharedFiles:
    """Files of one run that more than one machine may need."""

    run_dir: Path
    model_path: str
    """Folder of the model, or its name on the hub, which each machine finds for itself."""
    transport: str
    directory: Path | None
    """Directory where the transport leaves versions; None where it needs no files."""
    storage: Path | None = None
    """Directory of the run's storage; None where it has none, or that is no directory."""


class SharedFilesystem:
    """Check of one run's files, by the driver and all workers, which must be up."""

    def __init__(self, files: SharedFiles, driver: FileProbe) -> None:
        self._files = files
        self._driver = driver
        self._sender: Worker | None = None

    async def check(self, plan: ClusterPlan, workers: dict[str, Worker]) -> None:
        """Check from every worker that it sees the files.

        Raises:
            ConfigError: the run's directory, or that of the weights, is not the same one for all that need it.
            ModelError: a worker's machine lacks the model's folder, or has another model there.
        """
        self._sender = workers[plan.actor[0].worker]
        writers = {rank.worker for rank in (*plan.actor, *plan.critic)}
        receivers = {rank.worker for rank in (*plan.rollout, *plan.logp)}
        await self._check_run_directory([worker for name, worker in workers.items() if name in writers])
        await self._check_storage(list(workers.values()))
        await self._check_model(list(workers.values()))
        await self._check_directory([worker for name, worker in workers.items() if name in receivers])

    async def check_replica(self, worker: Worker) -> None:
        """Check that a ``worker`` started later sees the model and the weights directory. Raises as `check` does."""
        await self._check_model([worker])
        await self._check_directory([worker])

    async def check_episode_worker(self, worker: Worker) -> None:
        """Check that a ``worker`` started later, which keeps groups, sees the model. Raises as `check` does."""
        await self._check_model([worker])

    async def _check_run_directory(self, writers: Sequence[Worker]) -> None:
        path = self._files.run_dir.absolute()
        async with self._marked(self._driver, path) as (mark, text, why):
            if why is not None:
                raise RunError(f"run.dir={path}: the driver cannot write there: {why}")
            seen = await _ask(writers, "sees_mark", mark, text)
            blind = [worker for worker, sees in zip(writers, seen, strict=True) if not sees]
            if not blind:
                left = await concurrently(self._is_seen_by_driver(worker, mark, text) for worker in writers)
                blind = [worker for worker, is_seen in zip(writers, left, strict=True) if not is_seen]
        if blind:
            others = [worker for worker in writers if worker not in blind]
            also = f", and so do {await _named(others)}" if others else ""
            raise ConfigError(
                f"run.dir={path} is not one directory for all that write to it: the driver, on "
                f"{await self._driver.place()}, sees it{also}; but not {await _named(blind)}. Training ranks write "
                "checkpoints and the model there. Set run.dir to a path on a file system that these machines share, "
                "and that all of them can write"
            )

    async def _check_storage(self, workers: Sequence[Worker]) -> None:
        """Check that each machine sees the storage: any of them may have to bring the run back."""
        path = self._files.storage
        if path is None:
            return
        async with self._marked(self._driver, path, make_directory=True) as (mark, text, _):
            seen = await _ask(workers, "sees_mark", mark, text)
        if blind := [worker for worker, sees in zip(workers, seen, strict=True) if not sees]:
            raise ConfigError(
                f"run.storage={path} is not one directory for all machines of the run: the driver, on "
                f"{await self._driver.place()}, sees it; but not {await _named(blind)}. A run whose driver's machine "
                "is lost is resumed on another one. Give a path on a file system that they share, or a URL like "
                "s3://bucket/run"
            )

    async def _is_seen_by_driver(self, worker: Worker, mark: Path, text: str) -> bool:
        own = mark.with_name(f"{mark.name}-{worker.name}")
        why = await worker.call("lookout.leave_mark", own, text)
        try:
            return why is None and await self._driver.sees_mark(own, text)
        finally:
            await worker.call("lookout.remove_mark", own)

    async def _check_model(self, workers: Sequence[Worker]) -> None:
        path = self._files.model_path
        expected = await self._driver.model_files(path)
        if expected is None:
            return
        found: list[dict[str, str] | None] = await _ask(workers, "model_files", path)
        here = f"the driver, on {await self._driver.place()}, has it"
        todo = "Copy the folder to the same path there, or give a path on a file system that these machines share"
        if Path(path).is_relative_to(self._files.run_dir.absolute()):  # the driver made the directory there
            todo = (
                "Set run.dir to a path on a file system that these machines share, or copy the folder to a path that "
                "all of them have, and give that as model.path"
            )
        if lacking := [worker for worker, files in zip(workers, found, strict=True) if files is None]:
            raise ModelError(f"{path}: no such folder for {await _named(lacking)}; {here}. {todo}")
        for worker, files in zip(workers, found, strict=True):
            if files is not None and (different := _different(expected, files)):
                raise ModelError(
                    f"{path}: {await _named([worker])} has another model there than the driver on "
                    f"{await self._driver.place()}: {different}. {todo}"
                )

    async def _check_directory(self, receivers: Sequence[Worker]) -> None:
        """Check that receivers can read the directory in which the sender leaves versions."""
        directory = self._files.directory
        if directory is None or self._sender is None:
            return
        transport = f"param_update.transport={self._files.transport}"
        in_memory = TRANSPORTS[self._files.transport].leaves == "memory"
        async with self._marked(self._sender, directory, make_directory=not in_memory) as (mark, text, why):
            if why is not None:
                blind: list[Worker] = [self._sender]
            else:
                seen = await _ask(receivers, "sees_mark", mark, text)
                blind = [worker for worker, sees in zip(receivers, seen, strict=True) if not sees]
        if not blind:
            return
        sender = await _named([self._sender])
        if in_memory:
            everybody = [self._sender, *(worker for worker in blind if worker is not self._sender)]
            raise ConfigError(
                f"{transport} works within one machine, and this run is on several: the "
                f"driver on {await self._driver.place()}, {await _named(everybody)}. Set {ELSEWHERE}"
            )
        if why is not None:
            raise ConfigError(
                f"{transport}: {sender} cannot write to {directory}: {why}. Set param_update.directory "
                "to a place that all workers can write and read"
            )
        raise ConfigError(
            f"{transport}: what {sender} writes to {directory} is not there for {await _named(blind)}. "
            f"Set param_update.directory to a path on a file system that these machines share, or {ELSEWHERE}"
        )

    @asynccontextmanager
    async def _marked(
        self, by: FileProbe | Worker, directory: Path, *, make_directory: bool = False
    ) -> AsyncIterator[tuple[Path, str, str | None]]:
        """Leave a mark in ``directory`` until the block ends. Yields file, text, and why it failed, or None."""
        text = uuid4().hex
        mark = directory / f".seen-{text[:12]}"
        if isinstance(by, FileProbe):
            leave, remove = by.leave_mark, by.remove_mark
        else:
            leave, remove = partial(by.call, "lookout.leave_mark"), partial(by.call, "lookout.remove_mark")
        try:
            yield mark, text, await leave(mark, text, make_directory)
        finally:
            await remove(mark)


async def _ask(workers: Sequence[Worker], method: str, *args: Any) -> list[Any]:
    """Ask each worker's `FileProbe` a question. Returns the answers."""
    return await concurrently(worker.call(f"lookout.{method}", *args) for worker in workers)


async def _named(workers: Sequence[Worker]) -> str:
    """Name the workers, each with its machine: ``actor-0 and actor-1 on a (10.0.0.2), rollout-0 on b (10.0.0.3)``."""
    by_place: dict[str, list[str]] = {}
    for worker, place in zip(workers, await _ask(workers, "place"), strict=True):
        by_place.setdefault(place, []).append(worker.name)
    return ", ".join(f"{' and '.join(names)} on {place}" for place, names in by_place.items())


def _different(expected: Mapping[str, str], found: Mapping[str, str]) -> str | None:
    """Describe how two folders' files differ, by the first file that does; None where they do not."""
    for name in sorted({*expected, *found}):
        if name not in found:
            return f"{name} is missing"
        if expected.get(name) != found[name]:
            return f"{name} is another file" if name in expected else f"{name} is there, too"
    return None
