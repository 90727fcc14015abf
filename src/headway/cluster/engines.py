"""The pipeline's engines, made of workers: the same on Ray and in one process."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from headway.cluster.exchange import WeightPaths
from headway.cluster.worker_group import Worker, WorkerGroup
from headway.data.types import Column, Outcomes, Sample
from headway.interfaces import (
    Capabilities,
    EngineStats,
    FinishedGroup,
    GatherReport,
    GenerateRequest,
    OnUpdate,
    Paused,
    ReceiveReport,
    SendReport,
    StepContext,
    StepReport,
)


class TrainGroup:
    """`OverlappingTrainEngine` over the ranks of `ActorRole`.

    Paths of files are sent absolute: workers may run in another directory.
    """

    def __init__(self, ranks: WorkerGroup, paths: WeightPaths, *, with_returns: bool = False) -> None:
        """``with_returns``: the advantage estimator has a critic."""
        self._ranks = ranks
        self._paths = paths
        self._with_returns = with_returns

    async def forward_logprobs(self, samples: Sequence[Sample]) -> list[Column]:
        return cast(list[Column], await self._ranks.forward_logprobs(samples))

    async def proximal_logprobs(self, samples: Sequence[Sample], version: int) -> list[Column]:
        return cast(list[Column], await self._ranks.proximal_logprobs(samples, version))

    async def advantages(self, samples: Sequence[Sample], outcomes: Outcomes) -> dict[str, list[Column]]:
        """An `AdvantageFn`, on rank zero: a whole fetch is looked at, and nothing of it comes to the driver."""
        handle = await self._ranks.advantages(samples, outcomes)
        columns = {"advantages": [Column(handle, index) for index in range(len(samples))]}
        if self._with_returns:
            columns["returns"] = [Column(handle, len(samples) + index) for index in range(len(samples))]
        return columns

    async def train_step(self, samples: Sequence[Sample], context: StepContext) -> StepReport:
        return cast(StepReport, await self._ranks.train_step(samples, context))

    async def reach(self, receivers: Sequence[str]) -> None:
        await self._paths.reach(receivers)

    async def send_weights(self, version: int, receivers: Sequence[str]) -> SendReport:
        return await self._paths.send(version, receivers)

    async def gather_weights(self, version: int) -> GatherReport:
        return await self._paths.gather(version)

    async def send_gathered(self, version: int, receiver: str) -> SendReport:
        return await self._paths.send_gathered(version, receiver)

    async def save(self, path: Path, driver_state: Mapping[str, Any]) -> None:
        await self._ranks.save(_everywhere(path), dict(driver_state))

    async def load(self, path: Path) -> dict[str, Any]:
        return cast(dict[str, Any], await self._ranks.load(_everywhere(path)))

    async def export(self, path: Path) -> None:
        await self._ranks.export(_everywhere(path))

    async def close(self) -> None:
        """The workers are closed by whoever started them."""


class ReferenceGroup:
    """`LogProbEngine` over ranks of `RefRole`, or over the trainer's own ranks: both register the method."""

    def __init__(self, ranks: WorkerGroup) -> None:
        self._ranks = ranks

    async def forward_logprobs(self, samples: Sequence[Sample]) -> list[Column]:
        return cast(list[Column], await self._ranks.reference_logprobs(samples))


class ProximalGroup:
    """`ProximalEngine` over ranks of `LogpRole`."""

    def __init__(self, ranks: WorkerGroup) -> None:
        self._ranks = ranks

    async def proximal_logprobs(self, samples: Sequence[Sample], version: int) -> list[Column]:
        return cast(list[Column], await self._ranks.proximal_logprobs(samples, version))


class LogpReceiver:
    """`PolicyReceiver` over one rank of `LogpRole`."""

    def __init__(self, worker: Worker, paths: WeightPaths, verify: bool) -> None:
        self.name = worker.name
        self._worker = worker
        self._paths = paths
        self._verify = verify

    async def stage_weights(self, version: int) -> ReceiveReport:
        return await self._paths.stage(self.name, version)

    async def activate(self, version: int) -> float:
        return cast(float, await self._worker.call("activate", version))

    async def probe(self) -> NDArray[np.float32] | None:
        return cast(NDArray[np.float32], await self._worker.call("probe")) if self._verify else None


class CriticGroup:
    """`CriticEngine` over ranks of `CriticRole`, or over the trainer's own ranks: both register the methods."""

    def __init__(self, ranks: WorkerGroup) -> None:
        self._ranks = ranks

    async def forward_values(self, samples: Sequence[Sample]) -> list[Column]:
        return cast(list[Column], await self._ranks.forward_values(samples))

    async def train_step(self, samples: Sequence[Sample]) -> StepReport:
        return cast(StepReport, await self._ranks.critic_step(samples))

    async def save(self, path: Path) -> None:
        await self._ranks.save_critic(_everywhere(path))

    async def load(self, path: Path) -> None:
        await self._ranks.load_critic(_everywhere(path))


class RolloutReplica:
    """`RolloutEngine` over one worker that runs a `RolloutRole`. Groups' tokens are passed on unread."""

    def __init__(
        self, worker: Worker, capabilities: Capabilities, slots: int, paths: WeightPaths, verify: bool
    ) -> None:
        self.name = worker.name
        self._paths = paths
        self._verify = verify
        self.capabilities = capabilities
        self.slots = slots
        self._worker = worker

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncGenerator[FinishedGroup, None]:
        async with aclosing(self._worker.stream("generate", list(requests))) as finished:
            async for group, tokens in finished:
                yield replace(group, tokens=tokens)

    async def pause(self, policy: OnUpdate) -> Paused:
        return cast(Paused, await self._worker.call("engine.pause", policy))

    async def resume(self) -> None:
        await self._worker.call("engine.resume")

    async def stage_weights(self, version: int) -> ReceiveReport:
        return await self._paths.stage(self.name, version)

    async def activate(self, version: int) -> float:
        return cast(float, await self._worker.call("activate", version))

    async def probe(self) -> NDArray[np.float32] | None:
        return cast(NDArray[np.float32], await self._worker.call("engine.probe")) if self._verify else None

    async def abort(self, numbers: Sequence[int]) -> None:
        await self._worker.call("engine.abort", list(numbers))

    async def abort_older_than(self, version: int) -> list[int]:
        return cast(list[int], await self._worker.call("engine.abort_older_than", version))

    async def in_flight(self) -> list[int]:
        return cast(list[int], await self._worker.call("engine.in_flight"))

    async def sleep(self, *, keep_weights: bool = True) -> None:
        await self._worker.call("sleep", keep_weights)

    async def wake(self) -> None:
        await self._worker.call("wake")

    async def died(self) -> NoReturn:
        """Wait until the replica's process ends, and raise `WorkerDied`."""
        await self._worker.died()

    async def stats(self) -> EngineStats:
        return cast(EngineStats, await self._worker.call("engine.stats"))

    async def close(self) -> None:
        """The worker is closed by whoever started it."""


def _everywhere(path: Path) -> Path:
    return path.absolute()


async def clock_offset(worker: Worker, exchanges: int = 3) -> float:
    """Seconds to add to the worker's monotonic clock to have this process's.

    Half the round trip bounds the error, so an offset no larger than the fastest one is taken for none: processes of
    one machine share the clock.
    """
    best_trip, best_offset = float("inf"), 0.0
    for _ in range(exchanges):
        sent = time.monotonic()
        there = await worker.call("monotonic")
        trip = time.monotonic() - sent
        if trip < best_trip:
            best_trip, best_offset = trip, sent + trip / 2 - there
    return best_offset if abs(best_offset) > best_trip else 0.0
