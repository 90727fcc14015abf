"""Check that the machines of a run see the files that it needs, before any model is loaded.

    the run's directory    the driver and ranks of all roles leave a mark each ─▶ both read the other's
    the run's storage      the driver leaves a mark       ─▶ every worker reads it, where it is a directory
    the model's folder     every worker describes it                           ─▶ equal to the driver's
    the weights' directory the sender leaves a mark (`disk`, `shared_memory`)  ─▶ every receiver reads it

If ranks wrote parts of a checkpoint to different disks, the run would end without an error and without a checkpoint.
Replicas need not see the run's directory: they only write logs there, each on its own machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

from headway.cluster.roles.role import FileProbe
from headway.cluster.roles.weight_roles import transport_in
from headway.cluster.worker_group import Worker, proxy
from headway.cluster.worker_plan import ClusterPlan
from headway.config.schema import Config
from headway.config.sizing.placement import ACTOR, CRITIC, LOGP, REF, ROLLOUT
from headway.config.transport_facts import TRANSPORTS
from headway.errors import ConfigError, ModelError, RunError
from headway.runtime.task_groups import concurrently

CONFIG = "config.yaml"
"""Name of a file that every run's directory contains."""
Probes = Mapping[str, FileProbe]
"""Name of a worker -> its access to files."""


class SharedFilesystem:
    """Check that the driver and all workers see one run's files. The workers must be up."""

    def __init__(
        self, config: Config, run_dir: Path, model_path: str, directory: Path | None, driver: FileProbe
    ) -> None:
        """Create the check. ``directory``: directory where the transport stores versions; None if it needs no files."""
        self._run_dir = run_dir.absolute()
        self._model_path = model_path
        self._transport = transport_in(config)
        self._directory = directory
        storage = config.run.storage
        self._storage = None if storage is None or "://" in storage else Path(storage).absolute()
        self._driver = driver
        self._sender: Probes = {}

    async def check(self, plan: ClusterPlan, workers: Mapping[str, Worker]) -> None:
        """Check that every worker sees the files.

        Raises:
            ConfigError: workers see different directories as the run's, or as that of the weights.
            ModelError: a worker's machine lacks the model's folder, or has another model there.
        """
        everybody = {name: _probe(worker) for name, worker in workers.items()}
        sender = plan.ranks[ACTOR][0].worker
        self._sender = {sender: everybody[sender]}
        # Ranks of the reference and of `logp` read tokens there if the tokens' machine was lost.
        ranks = plan.workers_of(ACTOR, REF, LOGP, CRITIC)
        await self._check_run_directory({name: everybody[name] for name in ranks})
        if self._storage is not None:  # any machine may have to bring the run back
            blind, _ = await _blind(self._driver, self._storage, everybody, make_directory=True)
            if blind:
                raise ConfigError(
                    f"{await self._not_shared('run.storage', self._storage, blind)}. A run whose driver's machine is "
                    "lost is resumed on another one. Give a path on a file system that they share, or a URL like "
                    "s3://bucket/run"
                )
        await self._check_model(everybody)
        await self._check_directory({name: everybody[name] for name in plan.workers_of(ROLLOUT, LOGP)})

    async def check_later(self, worker: Worker, *, receives: bool) -> None:
        """Check that a later ``worker`` sees the model and, if it ``receives`` weights, their directory. Raises like
        `check`.
        """
        probes = {worker.name: _probe(worker)}
        await self._check_model(probes)
        if receives:
            await self._check_directory(probes)

    async def check_rank(self, worker: Worker) -> None:
        """Check that a restarted rank sees the run's directory and the model. Raises like `check`.

        It may run on a machine that is new to the run. Nothing is written, since the disk may be full.
        """
        probes, file = {worker.name: _probe(worker)}, self._run_dir / CONFIG
        here = await self._driver.text_of(file)
        if here is not None and await probes[worker.name].text_of(file) != here:
            raise ConfigError(await self._not_shared("run.dir", self._run_dir, probes))
        await self._check_model(probes)

    async def _check_run_directory(self, writers: Probes) -> None:
        path = self._run_dir
        blind, why = await _blind(self._driver, path, writers)
        if why is not None:
            raise RunError(f"run.dir={path}: the driver cannot write there: {why}")
        # Also the other way round: a rank may see the directory but not be able to write to it.
        if not blind:
            seen = await concurrently(_blind(one, path, {"driver": self._driver}) for one in writers.values())
            blind = {name: writers[name] for name, one in zip(writers, seen, strict=True) if one != ({}, None)}
        if blind:
            raise ConfigError(
                f"{await self._not_shared('run.dir', path, blind)}. Training ranks write checkpoints and the model "
                "there, and all ranks read the journal. Set run.dir to a path on a file system that these machines "
                "share, and that all of them can write"
            )

    async def _not_shared(self, setting: str, path: Path, blind: Probes) -> str:
        return (
            f"{setting}={path} is not one directory for all that need it: the driver, on {await self._driver.place()}, "
            f"sees it; but not {await _named(blind)}"
        )

    async def _check_model(self, probes: Probes) -> None:
        path = self._model_path
        expected = await self._driver.model_files(path)
        if expected is None:
            return
        here = f"the driver, on {await self._driver.place()}, has it"
        todo = "Copy the folder to the same path there, or give a path on a file system that these machines share"
        if Path(path).is_relative_to(self._run_dir):  # the driver made the directory there
            todo = (
                "Set run.dir to a path on a file system that these machines share, or copy the folder to a path that "
                "all of them have, and give that as model.path"
            )
        answers = await concurrently(probe.model_files(path) for probe in probes.values())
        found = dict(zip(probes, answers, strict=True))
        if lacking := {name: probes[name] for name, files in found.items() if files is None}:
            raise ModelError(f"{path}: no such folder for {await _named(lacking)}; {here}. {todo}")
        for name, files in found.items():
            if different := sorted(file for file, _ in expected.items() ^ (files or {}).items()):
                raise ModelError(
                    f"{path}: {await _named({name: probes[name]})} has another model there than the driver on "
                    f"{await self._driver.place()}: {different[0]} is missing, or another file. {todo}"
                )

    async def _check_directory(self, receivers: Probes) -> None:
        """Check that receivers can read the directory in which the sender stores versions."""
        if self._directory is None:
            return
        setting, in_memory = f"param_update.transport={self._transport}", TRANSPORTS[self._transport].leaves == "memory"
        (sender,) = self._sender.values()
        blind, why = await _blind(sender, self._directory, receivers, make_directory=not in_memory)
        if in_memory and (blind or why):
            raise ConfigError(
                f"{setting} works within one machine, and this run is on several: the driver on "
                f"{await self._driver.place()}, {await _named({**self._sender, **blind})}. Set param_update.transport "
                "to broadcast or object_store"
            )
        if blind or why:
            lacks = f"cannot be written: {why}" if why else f"does not show that to {await _named(blind)}"
            raise ConfigError(
                f"{setting}: {self._directory}, to which {await _named(self._sender)} writes, {lacks}. Set "
                "param_update.directory to a path on a file system that these machines share, or "
                "param_update.transport to broadcast or object_store"
            )


def _probe(worker: Worker) -> FileProbe:
    return proxy(worker, FileProbe, part="lookout")


async def _blind(
    by: FileProbe, directory: Path, readers: Probes, *, make_directory: bool = False
) -> tuple[Probes, str | None]:
    """Leave a mark in ``directory``. Returns the ``readers`` that do not see it, and the reason if no mark could be
    left.
    """
    text = uuid4().hex
    mark = directory / f".seen-{text[:12]}"
    try:
        if (why := await by.leave_mark(mark, text, make_directory)) is not None:
            return {}, why
        seen = await concurrently(reader.text_of(mark) for reader in readers.values())
        return {name: readers[name] for name, found in zip(readers, seen, strict=True) if found != text}, None
    finally:
        await by.remove_mark(mark)


async def _named(probes: Probes) -> str:
    """Name the workers, each with its machine: ``actor-0 and actor-1 on a (10.0.0.2), rollout-0 on b (10.0.0.3)``."""
    by_place: dict[str, list[str]] = {}
    for name, place in zip(probes, await concurrently(probe.place() for probe in probes.values()), strict=True):
        by_place.setdefault(place, []).append(name)
    return ", ".join(f"{' and '.join(names)} on {place}" for place, names in by_place.items())
