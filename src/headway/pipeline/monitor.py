"""Watches a run from the side: what replicas are doing, and whether anything moves at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from headway.errors import StallError
from headway.events import Emit, Event, ReplicaActivity
from headway.interfaces import EngineStats
from headway.pipeline.concurrently import concurrently
from headway.pipeline.fleet import Fleet
from headway.pipeline.liveness import ANSWER_S, SHORTEST_S, ask
from headway.pipeline.receiver import Gone, Replica
from headway.pipeline.stage import Stage, State
from headway.pipeline.state import now
from headway.progress import Living

FILE_WORK_FIRST_S = 60.0
"""Seconds for which work with files that is stuck is left to whoever waits for it, and can say what it is."""


class Monitor:
    """Reports each replica's activity every ``interval_s``, and ends a run in which nothing moved for too long.

    What moves is an event, or the work of a worker, which tells of it in its heartbeat: an optimizer step may take
    hours, as long as its micro-batches go by. Workers are asked only when there was no event for so long.
    """

    def __init__(
        self,
        fleet: Callable[[], Fleet],
        stages: Callable[[], Sequence[Stage[Any, Any]]],
        emit: Emit,
        *,
        workers: Callable[[], Sequence[Living]] = tuple,
        stall_timeout_s: float,
        interval_s: float,
    ) -> None:
        self._fleet = fleet
        self._stages = stages
        self._emit = emit
        self._workers = workers
        self._stall_timeout_s = stall_timeout_s
        self._interval_s = interval_s
        self._moved = 0.0

    def on_event(self, event: Event) -> None:
        """Any event is progress, but for a replica that reports idleness."""
        if not isinstance(event, ReplicaActivity) or event.generated_tokens + event.prefilled_tokens > 0:
            self._moved = event.time

    def close(self) -> None: ...

    async def run(self) -> None:
        """Runs until cancelled. Raises `StallError` when nothing moved for ``stall_timeout_s``."""
        self._moved = now()
        # Side by side: a replica that does not even answer `stats` must not keep the stall from being noticed.
        await concurrently([self._report_always(), self._end_when_stalled()])

    async def _report_always(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self.report()

    async def _end_when_stalled(self) -> None:
        while True:
            deadline = self._moved + self._stall_timeout_s
            if now() >= deadline:
                answers = await ask(self._workers(), within_s=min(ANSWER_S, self._stall_timeout_s))
                workers_deadline = answers.deadline(self._stall_timeout_s, beyond_patience_s=FILE_WORK_FIRST_S)
                deadline = max(self._moved + self._stall_timeout_s, workers_deadline)
                if now() >= deadline:
                    said = f". Workers: {answers}" if answers.by_worker else ""
                    raise StallError(
                        f"nothing moved for {self._stall_timeout_s:g} s (cluster.stall_timeout_s): "
                        f"{self.who_waits()}{said}"
                    )
            await asyncio.sleep(max(SHORTEST_S, deadline - now()))

    async def report(self) -> None:
        """One `ReplicaActivity` per replica, for the time since the last one."""
        fleet = self._fleet()
        await concurrently(self._report_one(fleet, replica) for replica in fleet.serving)

    async def _report_one(self, fleet: Fleet, replica: Replica) -> None:
        try:
            stats = await replica.stats()
        except Gone as gone:
            await fleet.lose(gone)
        else:
            self._emit(activity(replica.name, stats))

    def who_waits(self) -> str:
        """``ActorTrain waits for groups from the message queue; Generate waits for rollout-0 (12 items); …``"""
        waits = [describe(stage) for stage in self._stages() if stage.state is not State.STOPPED]
        return "; ".join(waits) or "all stages have stopped; the replicas' last report or the checkpoint does not end"


def describe(stage: Stage[Any, Any]) -> str:
    """What a stage waits for, by its state or, while it processes, by what it said that it waits for."""
    if stage.waiting_for:
        return f"{stage.name} waits for {stage.waiting_for}"
    if stage.inner_waits:
        return f"{stage.name} waits for {', '.join(sorted(set(stage.inner_waits)))} ({stage.active} item(s))"
    return f"{stage.name} processes {stage.active} item(s)"


def activity(replica: str, stats: EngineStats) -> ReplicaActivity:
    return ReplicaActivity(
        time=now(),
        replica=replica,
        busy=stats.busy,
        slot_seconds=stats.slot_seconds,
        generated_tokens=stats.generated_tokens,
        prefilled_tokens=stats.prefilled_tokens,
        preempted=stats.preempted,
        decode_steps=stats.decode_steps,
        prefill_steps=stats.prefill_steps,
    )
