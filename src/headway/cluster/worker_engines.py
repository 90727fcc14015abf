"""Engines for the pipeline, made of workers: the same on Ray and in one process."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from headway.cluster.machine.token_files import TokenFile
from headway.cluster.roles.rollout_role import RolloutRole
from headway.cluster.weight_sync.weight_sync import WeightPaths
from headway.cluster.worker_group import ReplicaCalls, Worker, WorkerGroup, proxy
from headway.config.sizing.placement import LOGP
from headway.data.interfaces.episode_groups import EpisodeWorkerProtocol, Group
from headway.data.interfaces.rollout import Capabilities, RolloutEngine
from headway.data.interfaces.training import CriticEngine, LogProbEngine, TrainEngine
from headway.data.interfaces.weights import PolicyReceiver, ReceiveReport
from headway.data.types import AnyColumn, ColumnName, Outcomes, TrainSample
from headway.errors import HeadwayError, ModelError
from headway.runtime.task_groups import concurrently


class TrainGroup:
    """Implementation of `TrainEngine` over the ranks of `ActorRole`."""

    def __init__(self, ranks: WorkerGroup, paths: WeightPaths, *, with_returns: bool = False) -> None:
        """Create the engine. ``with_returns``: True if the advantage estimator has a critic."""
        self._ranks = ranks
        self._engine = engine = proxy(ranks, TrainEngine)
        self.forward_logprobs, self.proximal_logprobs = engine.forward_logprobs, engine.proximal_logprobs
        self.train_step, self.copy_state = engine.train_step, engine.copy_state
        self.save, self.load = engine.save, engine.load
        self.begin_batch, self.end_batch = engine.begin_batch, engine.end_batch
        self.reach, self.send_weights = paths.reach, paths.send
        self.gather_weights, self.send_gathered = paths.gather, paths.send_gathered
        self._with_returns = with_returns

    async def advantages(self, samples: Sequence[TrainSample], outcomes: Outcomes) -> dict[str, Sequence[AnyColumn]]:
        """Return advantages as an `AdvantageFn` does, computed on rank zero. Tokens never reach the driver, and reach
        rank zero only if outcomes are not enough.
        """
        if self._with_returns:
            advantages = await self._ranks.advantages(samples, outcomes)
            return {ColumnName.ADVANTAGES: advantages, ColumnName.RETURNS: await self._ranks.returns(samples)}
        numbers: NDArray[np.float32] | None = await self._ranks.outcome_advantages(outcomes)
        if numbers is None:
            return {ColumnName.ADVANTAGES: await self._ranks.advantages(samples, outcomes)}
        return {ColumnName.ADVANTAGES: numbers[outcomes.episode_of].tolist()}

    async def export(self, path: Path) -> None:
        await self._engine.export(path)


def reference_of(ranks: WorkerGroup) -> LogProbEngine:
    """Return the reference policy on ranks of `RefRole`, or on the trainer's own: both register the method."""
    return proxy(ranks, LogProbEngine, forward_logprobs="reference_logprobs")


def critic_of(ranks: WorkerGroup) -> CriticEngine:
    """Return the critic on ranks of `CriticRole`, or on the trainer's own: both register the methods."""
    names = {"train_step": "critic_step", "copy_state": "copy_critic", "save": "save_critic", "load": "load_critic"}
    return proxy(ranks, CriticEngine, **names)


class LogpReceiver:
    """Implementation of `PolicyReceiver` over all ranks of `LogpRole`, which hold a copy of the policy together."""

    name = LOGP

    def __init__(self, ranks: WorkerGroup, paths: WeightPaths, verify: bool) -> None:
        self._ranks = ranks
        self._paths = paths
        self._verify = verify

    @property
    def copy(self) -> str:
        return self._paths.copy_of(LOGP)

    async def stage_weights(self, version: int) -> ReceiveReport:
        return await self._paths.stage(self.name, version)

    async def activate(self, version: int) -> float:
        seconds: list[float] = await concurrently(
            worker.call("copy.activate", version) for worker in self._ranks.workers
        )
        return max(seconds)

    async def probe(self) -> NDArray[np.float32] | None:
        if not self._verify:
            return None
        served: NDArray[np.float32]
        # On all ranks, since the forward pass is collective, though one answer is enough.
        served, *_ = await concurrently(worker.call("copy.probe") for worker in self._ranks.workers)
        return served


class RolloutReplica(ReplicaCalls):
    """Implementation of `RolloutEngine` over one worker that runs a `RolloutRole`. Episode workers call it."""

    def __init__(
        self, worker: Worker, capabilities: Capabilities, slots: int, paths: WeightPaths, verify: bool
    ) -> None:
        # The peer's calls cost tens of microseconds; each of Ray's takes the driver half a millisecond.
        super().__init__(worker.name, slots, peer := worker.peer())
        self.copy = paths.copy_of(worker.name)
        self._paths = paths
        self._verify = verify
        self.capabilities = capabilities
        self.worker = worker
        self._engine = engine = proxy(peer, RolloutEngine, part="engine")
        self.pause, self.resume, self.stats = engine.pause, engine.resume, engine.stats
        self.abort_older_than, self.drop = engine.abort_older_than, engine.drop
        self._role = role = proxy(peer, RolloutRole)
        self.activate, self.wake = role.activate, role.wake
        self.heartbeat = worker.heartbeat
        self.died = worker.lost  # a replica on a silent machine counts as dead; others go on

    @property
    def calls(self) -> ReplicaCalls:
        """Calls of the replica for episode workers; can be sent to another process."""
        return ReplicaCalls(self.name, self.slots, self._peer)

    async def stage_weights(self, version: int) -> ReceiveReport:
        return await self._paths.stage(self.name, version)

    async def probe(self) -> NDArray[np.float32] | None:
        return await self._engine.probe() if self._verify else None

    async def sleep(self, *, keep_weights: bool = True) -> None:
        await self._role.sleep(keep_weights)

    async def close(self) -> None:
        """Do nothing: the starter of the worker closes it."""


class RemoteEpisodeWorker:
    """`EpisodeWorkerProtocol` over a worker that runs an `EpisodeWorkerRole`. Groups' tokens are passed on unread.

    driver ──RemoteEpisodeWorker──▶ EpisodeWorkerRole ▶ EpisodeWorker ──ReplicaCalls──▶ a replica's engine
      └ a group, its tokens behind a handle ◀── TokenFiles ┘
    """

    def __init__(self, worker: Worker) -> None:
        self.name = worker.name
        self.worker = worker
        self._peer = peer = worker.peer()
        self._forgotten: list[TokenFile] = []
        """Files on another machine whose groups this process no longer uses."""
        there = proxy(peer, EpisodeWorkerProtocol, part="worker")
        self.leave, self.route, self.hold, self.go_on = there.leave, there.route, there.hold, there.go_on
        self.abort_older_than = there.abort_older_than
        self.heartbeat = worker.heartbeat
        self.died = worker.lost  # one on a silent machine counts as dead; others go on

    async def generate(self, requests: Sequence[Group], *, on: str | None = None) -> AsyncGenerator[Group, None]:
        forgotten, self._forgotten = self._forgotten, []
        open_groups = {group.number: group for group in requests}
        async with aclosing(self._peer.each("generate", list(requests), on, forgotten)) as finished:
            async for number, trajectories, tokens in finished:
                if isinstance(tokens, TokenFile) and tokens.data is None:
                    copy = TokenFile(tokens.host, tokens.path)  # a finalizer must not hold a reference to its object
                    finalize(tokens, self._forget, copy).atexit = False  # the run's end removes the whole directory
                yield replace(open_groups.pop(number), trajectories=trajectories, tokens=tokens)

    def _forget(self, file: TokenFile) -> None:
        """Remove ``file``, or leave that to its episode worker if it is on another machine."""
        try:
            os.unlink(file.path)  # noqa: PTH108 - for each group: a Path takes longer to make than the file to remove
        except OSError:
            self._forgotten.append(file)

    async def join(self, replica: RolloutEngine) -> None:
        assert isinstance(replica, RolloutReplica), "another process can call replicas of the cluster alone"
        await self._peer.call("worker.join", replica.calls)

    def failures(self) -> AsyncGenerator[tuple[str, HeadwayError], None]:
        return self._peer.each("worker.failures")

    async def close(self) -> None:
        await self._peer.call("worker.close")
        self._peer.close()


async def clock_offset(worker: Worker) -> float:
    """Return the seconds to add to the worker's monotonic clock to get this process's clock.

    Half the round trip bounds the error, so an offset within the fastest round trip counts as 0: processes of one
    machine share the clock.
    """
    role = proxy(worker, RolloutRole)
    best_trip, best_offset = float("inf"), 0.0
    for _ in range(3):
        sent = time.monotonic()
        there = await role.monotonic()
        trip = time.monotonic() - sent
        if trip < best_trip:
            best_trip, best_offset = trip, sent + trip / 2 - there
    return best_offset if abs(best_offset) > best_trip else 0.0


SAFETY = 10.0
"""Factor from a receiver's difference at version 0 to its tolerance: eight log-probs are a small sample, and weights
change meanwhile."""
FLOOR = {"float32": 1e-3, "bfloat16": 0.05}
"""Smallest tolerance in nats, by the dtype of the coarser side: a model that begins with small logits rounds less than
it will once its distributions are sharp."""
CEILING = {"float32": 0.05, "bfloat16": 0.5}
"""Largest tolerance, and largest difference at version 0, in nats, by dtype. Rounding explains no more."""


class ProbeTolerance:
    """Tolerances of one run's receivers, by name: how far the probe's log-probs may differ by rounding alone.

        model folder ─┬▶ trainer  ─▶ probe ─┐
                      └▶ receiver ─▶ probe ─┴▶ difference ─▶ × SAFETY, between FLOOR and CEILING ─▶ tolerance

    All workers open the same folder, also in a resumed run (its checkpoint is loaded later) and for a replacement of a
    lost replica. So before any update, probes differ only because two implementations compute with equal weights.
    """

    def __init__(self, dtypes: Iterable[str], expected: NDArray[np.float32] | None) -> None:
        """Prepare to measure. ``expected``: the trainer's probe [N] at version 0; None if nothing is verified."""
        dtypes = tuple(dtypes)
        self._floor = max(FLOOR[dtype] for dtype in dtypes)
        self._ceiling = max(CEILING[dtype] for dtype in dtypes)
        self._expected = expected
        self._tolerances: dict[str, float] = {}

    def tolerance(self, name: str) -> float:
        """Return the nats by which ``name`` may differ from the trainer; `CEILING` if nothing was measured."""
        return self._tolerances.get(name, self._ceiling)

    async def measure(self, receivers: Iterable[PolicyReceiver]) -> None:
        """Measure and set the tolerance of each of ``receivers``. They must hold version 0 and decode nothing.

        Raises `ModelError` for a receiver whose log-probs differ by more than rounding could explain.
        """
        if self._expected is not None:
            await concurrently(self._measure(receiver, self._expected) for receiver in receivers)

    async def _measure(self, receiver: PolicyReceiver, expected: NDArray[np.float32]) -> None:
        served = await receiver.probe()
        if served is None:
            return
        same = served.shape == expected.shape
        off = float(np.abs(served.astype(np.float64) - expected).max(initial=0.0)) if same else float("inf")
        if not off <= self._ceiling:  # holds also for NaN
            raise ModelError(
                f"{receiver.name} and the trainer compute different log-probs from the same model: those of the probe "
                f"differ by up to {off:.3g} nats before any update, and rounding explains at most {self._ceiling:g}. "
                "The rollout engine does not run this model as transformers does; try another rollout.name, or "
                "model.dtype=float32 and rollout.dtype=float32. param_update.verify=false turns the check off"
            )
        self._tolerances[receiver.name] = min(self._ceiling, max(self._floor, SAFETY * off))
