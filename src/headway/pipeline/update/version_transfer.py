"""Transfer of one version's weights from the trainer to its receivers, without serving it.

    together   gather ▶ send ║ recv ▶ register      one collective, bucket by bucket; the trainer is taken all the while
    apart      gather │ send ║ recv ▶ register      a complete copy first; then machine by machine, the trainer free

All-or-nothing: a receiver with a second buffer serves its old version until it has all of the new one. Each attempt
ends within `Timeouts.attempt_s`, whoever answers or not; `update_attempt.judge` decides what follows from a failed one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.config.sizing.timeouts import SETTLE_S, Timeouts
from headway.data.interfaces.training import OverlappingTrainEngine, TrainEngine
from headway.data.interfaces.weights import GatherReport, ReceiveReport, SendReport
from headway.errors import UpdateFailed
from headway.events import TrainerBusy, UpdatePhase, UpdateRetried
from headway.pipeline.admission.pipeline_state import RunState, now
from headway.pipeline.conditions import Signal
from headway.pipeline.stage import WaitingFor
from headway.pipeline.update.replica_pool import ReplicaPool
from headway.pipeline.update.update_attempt import Attempt, Audience, judge
from headway.pipeline.weight_receiver import ReceiverClient, WorkerUnavailable
from headway.runtime.task_groups import Tasks, concurrently, failing_as_one

Send = Callable[[Sequence[str]], Coroutine[Any, Any, SendReport]]
"""Coroutine function that sends a version to the receivers named."""


@dataclass(slots=True)
class Delivered:
    """Result of a delivery: who received the version, and what that took."""

    receivers: list[ReceiverClient] = field(default_factory=list)
    """Receivers that hold the version now; any other that it was meant for is gone."""
    gather_s: float = 0.0
    probe: NDArray[np.float32] | None = None
    full_nbytes: int | None = None
    changed: float | None = None

    def add(self, sent: SendReport, receivers: Sequence[ReceiverClient]) -> None:
        self.receivers += receivers
        self.gather_s += sent.gather_s
        self.probe, self.full_nbytes, self.changed = sent.probe, sent.full_nbytes, sent.changed


class Transfer:
    """Transfers of a run's versions, each repeated until the remaining receivers have it."""

    def __init__(self, state: RunState, fleet: ReplicaPool, waiting_for: WaitingFor, timeouts: Timeouts) -> None:
        self._state = state
        self._fleet = fleet
        self._waiting_for = waiting_for
        self._timeouts = timeouts
        self._sending = 0
        self._sent = Signal()

    async def together(self, trainer: TrainEngine, version: int, receivers: Sequence[ReceiverClient]) -> Delivered:
        """Send ``version`` to all ``receivers`` at once."""

        async def send(names: Sequence[str]) -> SendReport:
            return await trainer.send_weights(version, names)

        return await self._deliver(trainer, version, receivers, send, where="actor")

    async def gather(self, trainer: OverlappingTrainEngine, version: int) -> GatherReport:
        """Gather ``version`` into the trainer's copy, as soon as the version in that copy is no longer being sent."""
        with self._waiting_for("replicas to receive the version before"):
            await self._sent.until(lambda: self._sending == 0)
        started = now()
        with self._waiting_for("the trainer to gather"):
            gathered = await trainer.gather_weights(version)
        self._report_gathered(version, started, gathered.gather_s, gathered.nbytes)
        return gathered

    async def apart(
        self, trainer: OverlappingTrainEngine, version: int, receivers: Sequence[ReceiverClient]
    ) -> Delivered:
        """Send the trainer's copy, which holds ``version``, to ``receivers``, which load from one copy of theirs."""

        async def send(names: Sequence[str]) -> SendReport:
            return await trainer.send_gathered(version, names)

        self._sending += 1
        try:
            return await self._deliver(trainer, version, receivers, send, where=receivers[0].name)
        finally:
            self._sending -= 1
            self._sent.changed()

    async def _deliver(
        self, trainer: TrainEngine, version: int, receivers: Sequence[ReceiverClient], send: Send, *, where: str
    ) -> Delivered:
        """Repeat attempts until all remaining receivers hold ``version``. Raises `UpdateFailed` if that cannot be."""
        delivered = Delivered()
        due = deque([Audience(receivers)])
        while due:
            audience = due.popleft().still_there()
            if not audience.receivers:
                continue
            limit_s = self._timeouts.attempt_s
            attempt = Attempt(version, audience, self._timeouts.update_limit(limit_s))
            await self._make(attempt, trainer, send, limit_s)
            verdict = judge(attempt)
            again = {receiver for audience in verdict.again for receiver in audience.receivers}
            arrived = {one: report for one, report in attempt.holding.items() if one not in again}
            self._accept(attempt, arrived, delivered, where)
            for gone in verdict.lost:
                await self._fleet.lose(gone)
            if verdict.again:
                names = [receiver.name for audience in verdict.again for receiver in audience.receivers]
                self._state.emit(UpdateRetried(time=now(), version=version, receivers=names, reason=verdict.reason))
            due.extendleft(reversed(verdict.again))
        return delivered

    async def _make(self, attempt: Attempt, trainer: TrainEngine, send: Send, limit_s: float) -> None:
        """Make one attempt: send, and collect the receivers' answers that come in time."""
        names = [receiver.name for receiver in attempt.audience.receivers]
        try:
            async with asyncio.timeout(limit_s) as limit:
                if not await self._reach(attempt, trainer, names):
                    return
                attempt.began = now()
                receiving = (self._receive(attempt, receiver, limit) for receiver in attempt.audience.receivers)
                await concurrently([self._send(attempt, send(names)), *receiving])
        except TimeoutError:
            if not limit.expired():
                raise

    async def _reach(self, attempt: Attempt, trainer: TrainEngine, names: Sequence[str]) -> bool:
        with self._waiting_for(f"the trainer to reach {', '.join(names)}"):
            try:
                await failing_as_one(partial(_unless_gone, attempt.audience.receivers, trainer.reach(names)))
            except UpdateFailed as failure:
                attempt.sent = failure
            except WorkerUnavailable as gone:  # whoever meets one that will not come waits for it: the others meet anew
                attempt.received[gone.remote.name] = gone
        return attempt.sent is None and not attempt.received

    async def _send(self, attempt: Attempt, sending: Coroutine[Any, Any, SendReport]) -> None:
        with self._waiting_for("the trainer to send"):
            try:
                attempt.sent = await sending
            except UpdateFailed as failure:
                attempt.sent = failure

    async def _receive(self, attempt: Attempt, receiver: ReceiverClient, limit: asyncio.Timeout) -> None:
        with self._waiting_for(f"{receiver.name} to receive"):
            try:
                attempt.received[receiver.name] = await receiver.stage_weights(attempt.version)
            except UpdateFailed as failure:
                attempt.received[receiver.name] = failure
            except WorkerUnavailable as gone:
                attempt.received[receiver.name] = gone
                end = now() + SETTLE_S
                if not limit.expired() and (limit.when() or end) > end:
                    limit.reschedule(end)

    def _accept(
        self, attempt: Attempt, arrived: Mapping[ReceiverClient, ReceiveReport], delivered: Delivered, where: str
    ) -> None:
        sent, version = attempt.sent, attempt.version
        if not arrived or not isinstance(sent, SendReport):
            return
        delivered.add(sent, list(arrived))
        self._timeouts.transferred(now() - attempt.began)
        if where == "actor":
            self._report_gathered(version, attempt.began, sent.gather_s, sent.full_nbytes or sent.nbytes)
        self._report_phase(version, "send", where, sent.send_s, sent.nbytes)
        for receiver, report in arrived.items():
            self._report_phase(version, "recv", receiver.name, report.recv_s, report.nbytes)
            self._report_phase(version, "register", receiver.name, report.register_s, report.nbytes)

    def _report_gathered(self, version: int, started: float, seconds: float, nbytes: int) -> None:
        span = (started, started + seconds)
        self._state.emit(TrainerBusy(time=now(), what="gather", version=version, span=span))
        self._report_phase(version, "gather", "actor", seconds, nbytes)

    def _report_phase(self, version: int, phase: str, where: str, seconds: float, nbytes: int) -> None:
        self._state.emit(
            UpdatePhase(time=now(), version=version, phase=phase, where=where, seconds=seconds, nbytes=nbytes)
        )


async def _unless_gone(receivers: Sequence[ReceiverClient], call: Coroutine[Any, Any, None], tasks: Tasks) -> None:
    """Return the result of ``call``, or raise `WorkerUnavailable` as soon as one of ``receivers`` is gone."""
    watching = [tasks.start(receiver.gone()) for receiver in receivers]
    try:
        await call
    finally:
        for task in watching:
            task.cancel()
