"""Roles without models: what a worker does with a call is visible in its answer."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.cluster.roles.role import Role
from headway.cluster.worker_group import Collect, Dispatch, register
from headway.cluster.worker_plan import ClusterPlan, WorkerSpec
from headway.config.sizing.placement import node_shares
from headway.data.types import Column, GroupTokens, RowTokens, SampledTokens, TrainSample, TrajectoryId
from headway.errors import UpdateFailed


def group_tokens(length: int, fill: float) -> GroupTokens:
    sampled = SampledTokens(
        ids=np.full(length, 7, np.int32),
        logprobs=np.full(length, fill, np.float32),
        versions=np.zeros(length, np.int32),
    )
    return (RowTokens.answer(np.array([1, 2], np.int32), sampled),)


def sample(tokens: Any, length: int, k: int = 0) -> TrainSample:
    return TrainSample(tokens=tokens, index=0, prompt_length=2, length=length, episode=TrajectoryId(0, 0, 0, k))


class EchoRole(Role):
    """Answers with who it is and what it was given."""

    def __init__(self, *, rank: int, **common: Any) -> None:
        super().__init__(**common)
        self._rank = rank
        self._left = threading.Event()

    @register(Dispatch.ONE_TO_ALL)
    def describe(self) -> dict[str, Any]:
        return {
            "rank": self._rank,
            "pid": os.getpid(),
            "thread": threading.current_thread().name,
            "omp": os.environ.get("OMP_NUM_THREADS"),
            "interrupt_blocked": signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
            or signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
        }

    @register(Dispatch.RANK_ZERO)
    def only_rank_zero(self) -> int:
        return self._rank

    @register(Dispatch.SPLIT, Collect.COLUMNS)
    def logprobs_plus(self, samples: Sequence[TrainSample], offset: float) -> list[NDArray[np.float32]]:
        return [row.logprobs + np.float32(offset) for row in self.batch.rows(samples)]

    @register(Dispatch.SPLIT)
    def lengths(self, samples: Sequence[TrainSample]) -> list[int]:
        return [s.length for s in samples]

    @register(Dispatch.SPLIT)
    def columns_seen(self, samples: Sequence[TrainSample]) -> list[float]:
        return [float(row.columns["ref_logprobs"][0]) for row in self.batch.rows(samples)]

    @register(Dispatch.ONE_TO_ALL)
    def fail_on(self, rank: int) -> None:
        if self._rank == rank:
            raise UpdateFailed(f"rank {rank} was told to fail")
        threading.Event().wait(30)

    @register(Dispatch.ONE_TO_ALL)
    def raise_foreign(self) -> None:
        raise KeyError("lost")

    @register(Dispatch.ONE_TO_ALL)
    def write(self, text: str) -> None:
        print(text)
        os.system(f"echo {text} from a child")

    @register(Dispatch.ONE_TO_ALL)
    def holds_the_interpreter(self, seconds: float) -> None:
        """Compute in one call that lets no other thread of this process run."""
        began = time.perf_counter()
        sum(range(1_000_000))
        sum(range(int(1_000_000 * seconds / (time.perf_counter() - began))))

    @register(Dispatch.ONE_TO_ALL)
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    async def monotonic(self) -> float:
        return time.monotonic()

    @register(Dispatch.SPLIT)
    def lengths_fetched(self, samples: Sequence[TrainSample]) -> list[int]:
        return [len(row.logprobs) for row in self.batch.rows(samples)]

    async def numbers(self, count: int) -> AsyncGenerator[int, None]:
        for number in range(count):
            yield number

    async def endless(self) -> AsyncGenerator[int, None]:
        try:
            yield 0
            await asyncio.Event().wait()
        finally:
            self._left.set()

    def was_left(self) -> bool:
        """Whether `endless` ends in time."""
        return self._left.wait(60)


def column(handle: Any, index: int) -> Column:
    return Column(handle, index)


def echo_specs(ranks: int, config: Any) -> list[WorkerSpec]:
    arguments = {"config": config, "model_path": str(Path("nowhere"))}
    return [WorkerSpec(f"echo-{r}", EchoRole, r, 1, {**arguments, "rank": r}) for r in range(ranks)]


def echo_plan(specs: Sequence[WorkerSpec], per_node: int | None = None) -> ClusterPlan:
    """A plan of such workers alone, all on one node or ``per_node`` on each."""
    shares = node_shares("echo", [spec.device for spec in specs], per_node or len(specs))
    return ClusterPlan(tuple(specs), {}, on_trainer_ranks=frozenset(), shared=False, shares=shares)
