"""Weights from training ranks to replicas in the same processes, on devices that they share in turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from headway.cluster.roles.fused_role import WITHIN
from headway.cluster.roles.weight_roles import Send, SentWeights
from headway.cluster.worker_group import Worker, WorkerGroup
from headway.data.interfaces.weights import GatherReport, ReceiveReport, SendReport
from headway.errors import UpdateFailed

NO_COPY = "within a process weights are handed over while training stands still, not sent from a copy"


class WithinProcesses:
    """Implementation of `WeightPaths` where each receiver gets weights from the training rank in its process."""

    def __init__(self, actor: WorkerGroup, receivers: Mapping[str, Worker], dtype: str, *, verify: bool) -> None:
        self._actor = actor
        self._receivers = receivers
        self._dtype = dtype
        self._verify = verify

    async def reach(self, names: Sequence[str]) -> None:
        """Do nothing: every receiver shares a process with its sender."""

    async def send(self, version: int, names: Sequence[str]) -> SendReport:
        sends = [Send(self._dtype, WITHIN, None)]
        weights: SentWeights = await self._actor.send_weights(version, sends, True, self._verify)
        (sent,) = weights.sent
        assert sent is not None, "rank zero has a replica in its process"
        return replace(sent.report, probe=weights.probe)

    async def gather(self, version: int) -> GatherReport:
        raise UpdateFailed(f"version {version}: {NO_COPY}")

    async def send_gathered(self, version: int, names: Sequence[str]) -> SendReport:
        raise UpdateFailed(f"version {version} to {', '.join(names)}: {NO_COPY}")

    def copy_of(self, name: str) -> str:
        return name

    async def stage(self, name: str, version: int) -> ReceiveReport:
        report: ReceiveReport = await self._receivers[name].call("stage_weights", version, ())
        return report
