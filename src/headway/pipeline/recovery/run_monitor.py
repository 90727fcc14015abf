"""Monitoring of a run: reports the activity of its replicas, and ends a run that stalls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any

from headway.config.sizing.timeouts import HEARTBEAT_S, file_stall_s
from headway.data.interfaces.rollout import EngineStats
from headway.errors import StallError
from headway.events import Emit, Event, ReplicaActivity
from headway.pipeline.admission.pipeline_state import now
from headway.pipeline.recovery.liveness import ask
from headway.pipeline.recovery.supervision import Restarts
from headway.pipeline.remote_workers import Replica, WorkerUnavailable
from headway.pipeline.stage import Stage, State
from headway.pipeline.update.replica_pool import ReplicaPool
from headway.runtime.progress import Living, OpenWork
from headway.runtime.task_groups import concurrently

SHORTEST_S = 1e-3
"""Shortest wait for a deadline, in seconds. Rounding may end a wait just short of its deadline."""


@dataclass(eq=False)
class RunMonitor:
    """Observer that reports each replica's activity every ``interval_s``, fences off a replica that computes no tokens
    of its open calls, and ends a run without progress.

    Events count as progress, and so does the work that a worker reports in its heartbeat: an optimizer step may take
    hours, as long as its micro-batches advance. Heartbeats are requested only after a long time without events.

    A replica is judged by its tokens: an engine's front end may answer while its core hangs. An idle replica, or one
    paused for new weights, need not compute any.

    consumes        what replicas report; the time of the last event; workers' heartbeats
    waits for       the interval, and the time that is left until nothing moved for `Timeouts.stall_s`
    is unblocked by time alone
    produces        `ReplicaActivity`; the loss of a replica that is silent; `StallError`, which ends the run
    """

    pool: ReplicaPool
    stages: Sequence[Stage[Any, Any]]
    restarts: Sequence[Restarts]
    """Counters of worker starts. The stall detector waits for starts under way."""
    emit: Emit
    _: KW_ONLY
    workers: Callable[[], Sequence[Living]] = tuple
    interval_s: float

    _work: dict[str, OpenWork] = field(default_factory=dict, init=False)
    """Name of a replica -> its open work."""
    _moved: float = field(default=0.0, init=False)
    """Time of the last progress, in seconds on the event clock."""

    def on_event(self, event: Event) -> None:
        """Count the event as progress, unless it reports an idle replica."""
        if not isinstance(event, ReplicaActivity) or event.generated_tokens + event.prefilled_tokens > 0:
            self._moved = event.time

    def close(self) -> None: ...

    async def run(self) -> None:
        """Report and watch until cancelled. Raises `StallError` after `Timeouts.stall_s` without progress."""
        self._moved = now()  # not 0: a real loop's clock is the machine's uptime, and a stall would be found at once
        # Side by side: a replica that does not even answer `stats` must not keep the stall from being noticed.
        await concurrently([self._report_always(), self._end_when_stalled()])

    async def _report_always(self) -> None:
        while True:
            await asyncio.sleep(self.pool.timeouts.look_s(self.interval_s))
            await self.report()

    async def _end_when_stalled(self) -> None:
        while True:
            stall_s = self.pool.timeouts.stall_s
            starts_until = [restarts.starts_until for restarts in self.restarts]
            deadline = max([self._moved, *starts_until]) + stall_s
            if now() >= deadline:
                answers = await ask(self.workers(), within_s=min(HEARTBEAT_S, stall_s))
                # `_moved` is read again: an event may have come while the workers answered.
                deadline = max(deadline, self._moved + stall_s, answers.deadline(stall_s, file_stall_s))
                if now() >= deadline:
                    said = f". Workers: {answers}" if answers.by_worker else ""
                    raise StallError(
                        f"nothing moved for {stall_s:g} s (cluster.stall_timeout_s): {self.who_waits()}{said}"
                    )
            await asyncio.sleep(max(SHORTEST_S, deadline - now()))

    async def report(self) -> None:
        """Emit one `ReplicaActivity` per serving replica, for the time since its previous one."""
        serving = self.pool.serving
        self._work = {replica.name: self._work.get(replica.name, OpenWork()) for replica in serving}
        await concurrently(self._report_one(replica) for replica in serving)

    async def _report_one(self, replica: Replica) -> None:
        async with self.pool.losing():
            stats = await replica.stats()
            told = {one.name: getattr(stats, one.name) for one in fields(ReplicaActivity) if hasattr(stats, one.name)}
            self.emit(ReplicaActivity(time=now(), replica=replica.name, **told))
            await self._fence_silent(replica, stats)

    async def _fence_silent(self, replica: Replica, stats: EngineStats) -> None:
        """Give ``replica`` up if it computed no token of its open calls for too long."""
        work = self._work[replica.name]
        # A halted replica computes nothing by order.
        calls = 0 if self.pool.pauses.stands(replica.name) else stats.running + stats.waiting
        moved = stats.generated_tokens + stats.prefilled_tokens > 0
        silent_s = work.silent_s(now(), is_open=calls > 0, moved=moved)
        if silent_s >= self.pool.timeouts.seen_silence_s(self.interval_s, began=work.began):
            why = (
                f"{replica.name} answers, but computed no token for {silent_s:.0f} s while {calls} of its calls were "
                "open: its engine hangs. Its log may say why; where a step takes so long, raise param_update.timeout_s"
            )
            await self.pool.lose(WorkerUnavailable(replica, StallError(why)))

    def who_waits(self) -> str:
        """Describe the waits of all stages: ``ActorTrain waits for groups from the message queue; Generate …``."""
        waits = [describe(stage) for stage in self.stages if stage.state is not State.STOPPED]
        return "; ".join(waits) or "all stages have stopped; the replicas' last report or the checkpoint does not end"


def describe(stage: Stage[Any, Any]) -> str:
    """Describe what a stage waits for, by its state or, while it processes, by its declared waits."""
    if stage.waiting_for:
        return f"{stage.name} waits for {stage.waiting_for}"
    if stage.inner_waits:
        return f"{stage.name} waits for {', '.join(sorted(set(stage.inner_waits)))} ({stage.active} item(s))"
    return f"{stage.name} processes {stage.active} item(s)"
