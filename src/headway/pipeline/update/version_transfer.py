"""Transfer of one version's weights from the trainer to its receivers, without serving it.

    together   gather ▶ send ║ recv ▶ register      one collective, bucket by bucket; the trainer is taken all the while
    apart      gather │ send ║ recv ▶ register      a complete copy first; then machine by machine, the trainer free

All-or-nothing: a receiver with a second buffer serves its old version until it has all of the new one. Each attempt
ends within `Timeouts.attempt_s`, even if no receiver answers. `decide` chooses what follows a failed attempt.

Also here: `Attempt`, with the answers of the trainer and the receivers, and the decision that follows:

    somebody is gone                     ▶ lost; once more for the others, whose failures were its doing
    several are silent, trainer included ▶ machine by machine, or one by one: in a collective, one that does not come
                                           keeps all others waiting
    one is silent                        ▶ lost; those that have it keep it, once more for the rest
    somebody failed, everybody answered  ▶ once more for all; at the second time one that fails alone is lost, where
                                           who maps another's copy does not fail with it

A silent receiver had not answered when the time was up.
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

from headway.config.sizing.timeouts import SETTLE_S
from headway.data.interfaces.training import TrainEngine
from headway.data.interfaces.weights import GatherReport, ReceiveReport, SendReport
from headway.errors import UpdateFailed, UpdateMissed
from headway.events import TrainerBusy, UpdatePhase, UpdateRetried
from headway.pipeline.admission.pipeline_state import RunState, now
from headway.pipeline.remote_workers import ReceiverClient, RemoteWorker, WorkerUnavailable, by_copy
from headway.pipeline.stage import Signal, WaitingFor
from headway.pipeline.update.replica_pool import ReplicaPool
from headway.runtime.task_groups import Tasks, concurrently, failing_as_one

MOST_TRIES = 2
"""Number of failed attempts in a row for the same receivers after which one of them is blamed."""


@dataclass(slots=True)
class Attempt:
    """Attempt to send a version to ``receivers``, with their answers. A receiver without an answer is silent."""

    version: int
    receivers: Sequence[ReceiverClient]
    failures: int
    """Number of failed attempts in a row before this one, for exactly these receivers."""
    limit: str
    """Description of the attempt's time limit, for messages."""
    began: float = 0.0
    """Time on the event clock at which sending began."""
    sent: SendReport | UpdateFailed | None = None
    answers: dict[RemoteWorker, ReceiveReport | UpdateFailed | WorkerUnavailable] = field(default_factory=dict)

    @property
    def gone(self) -> list[WorkerUnavailable]:
        return [answer for answer in self.answers.values() if isinstance(answer, WorkerUnavailable)]

    @property
    def silent(self) -> list[ReceiverClient]:
        return [receiver for receiver in self.receivers if receiver not in self.answers]

    @property
    def failed(self) -> dict[RemoteWorker, UpdateFailed]:
        return {receiver: answer for receiver, answer in self.answers.items() if isinstance(answer, UpdateFailed)}

    @property
    def holding(self) -> dict[ReceiverClient, ReceiveReport]:
        """Receiver -> report, for receivers that have the whole version. After `compare` their checksums are right,
        too.
        """
        if not isinstance(self.sent, SendReport):
            return {}
        answers = ((receiver, self.answers.get(receiver)) for receiver in self.receivers)
        return {receiver: answer for receiver, answer in answers if isinstance(answer, ReceiveReport)}

    def compare(self) -> None:
        """Count receivers with a wrong checksum as failed."""
        for receiver, report in self.holding.items():
            assert isinstance(self.sent, SendReport)
            sent = self.sent.checksums.get(receiver.name, self.sent.checksum)
            if report.checksum != sent:
                self.answers[receiver] = UpdateFailed(
                    f"{receiver.name} received weights of version {self.version} with checksum {report.checksum:08x}, "
                    f"the trainer sent {sent:08x}"
                )


@dataclass(frozen=True, slots=True)
class RetryDecision:
    """Consequences of an attempt. Receivers that hold the version (`Attempt.holding`) and are not listed are done."""

    lost: Sequence[WorkerUnavailable] = ()
    again: Sequence[Sequence[ReceiverClient]] = ()
    """Receivers of each further attempt; empty if none follows."""
    failures: int = 0
    """Value of `Attempt.failures` for the further attempts."""
    reason: str = ""


def decide(attempt: Attempt) -> RetryDecision:
    """Decide what follows ``attempt``. Raises `UpdateFailed` if repeating it would not help."""
    if gone := attempt.gone:
        return _go_on_without(attempt, gone)
    if attempt.silent:
        return _decide_on_silence(attempt)
    if attempt.sent is None:
        raise UpdateFailed(_silence(attempt, []))
    if attempt.failed or isinstance(attempt.sent, UpdateFailed):
        return _decide_on_failure(attempt)
    return RetryDecision()


def _decide_on_silence(attempt: Attempt) -> RetryDecision:
    silent, receivers = attempt.silent, attempt.receivers
    # The receivers wait for each other: separate attempts show which one hangs.
    if len(silent) > 1 and not isinstance(attempt.sent, SendReport):
        groups = list(by_copy(receivers).values())
        apart = groups if len(groups) > 1 else [[receiver] for receiver in receivers]
        return RetryDecision(again=apart, reason=_silence(attempt, silent))
    # The trainer's failure may be why the receiver is silent: one more attempt before it is given up.
    if len(receivers) == 1 and isinstance(attempt.sent, UpdateFailed) and not attempt.failures:
        return RetryDecision(again=[receivers], failures=1, reason=str(attempt.sent))
    return _go_on_without(
        attempt, [WorkerUnavailable(receiver, UpdateFailed(_silence(attempt, [receiver]))) for receiver in silent]
    )


def _decide_on_failure(attempt: Attempt) -> RetryDecision:
    receivers, failed = attempt.receivers, attempt.failed
    # A receiver's error says more than the trainer's, which may only say that a peer gave up.
    error = next(iter(failed.values()), attempt.sent)
    assert isinstance(error, UpdateFailed)
    if attempt.failures < MOST_TRIES - 1:
        return RetryDecision(again=[receivers], failures=1, reason=str(error))
    own = [receiver for receiver, why in failed.items() if not isinstance(why, UpdateMissed)]
    alone: Sequence[RemoteWorker] = receivers if len(receivers) == 1 else own
    if len(alone) == 1:
        return _go_on_without(attempt, [WorkerUnavailable(alone[0], error)])
    raise error


def _go_on_without(attempt: Attempt, gone: Sequence[WorkerUnavailable]) -> RetryDecision:
    done: set[RemoteWorker] = {*(one.remote for one in gone), *attempt.holding}
    rest = [receiver for receiver in attempt.receivers if receiver not in done]
    return RetryDecision(gone, [rest] if rest else [], reason=str(gone[0].why))


def _silence(attempt: Attempt, silent: Sequence[ReceiverClient]) -> str:
    """Describe that ``silent`` receivers, and the trainer if it was one of them, did not answer in time."""
    who = ", ".join(receiver.name for receiver in silent) or "the trainer"
    trainer = "; nor did the trainer" if silent and attempt.sent is None else ""
    failure = f": {attempt.sent}" if isinstance(attempt.sent, UpdateFailed) else ""
    return f"{who} did not answer within {attempt.limit}, for version {attempt.version}{trainer}{failure}"


Send = Callable[[int, Sequence[str]], Coroutine[Any, Any, SendReport]]
"""Coroutine function that sends a version to the receivers with the given names."""


@dataclass(slots=True)
class Delivery:
    """Result of a delivery: the receivers of the version, and its cost."""

    receivers: list[ReceiverClient] = field(default_factory=list)
    """Receivers that hold the version now. All others that it was sent to are gone."""
    gather_s: float = 0.0
    probe: NDArray[np.float32] | None = None
    full_nbytes: int | None = None
    changed: float | None = None


@dataclass(eq=False)
class VersionTransfer:
    """Transfers of a run's versions. Each is repeated until all remaining receivers have the version."""

    state: RunState
    pool: ReplicaPool
    trainer: TrainEngine
    waiting_for: WaitingFor

    _sending: int = field(default=0, init=False)
    _sent: Signal = field(default_factory=Signal, init=False)

    async def together(self, version: int, receivers: Sequence[ReceiverClient]) -> Delivery:
        """Send ``version`` to all ``receivers`` at once."""
        return await self._deliver(version, receivers, self.trainer.send_weights, where="actor")

    async def gather(self, version: int) -> GatherReport:
        """Gather ``version`` into the trainer's copy. Waits until the version in that copy is no longer being sent."""
        with self.waiting_for("replicas to receive the version before"):
            # Gathering writes into the copy that is being sent.
            await self._sent.until(lambda: self._sending == 0)
        started = now()
        with self.waiting_for("the trainer to gather"):
            gathered = await self.trainer.gather_weights(version)
        self._report_gathered(version, started, gathered.gather_s, gathered.nbytes)
        return gathered

    async def apart(self, version: int, receivers: Sequence[ReceiverClient]) -> Delivery:
        """Send the trainer's copy of ``version`` to ``receivers``, which share one copy on their side."""
        self._sending += 1
        try:
            return await self._deliver(version, receivers, self.trainer.send_gathered, where=receivers[0].name)
        finally:
            self._sending -= 1
            self._sent.changed()

    async def _deliver(self, version: int, receivers: Sequence[ReceiverClient], send: Send, *, where: str) -> Delivery:
        """Repeat attempts until all remaining receivers hold ``version``. Raises `UpdateFailed` if that is
        impossible.
        """
        delivered = Delivery()
        due = deque([(receivers, 0)])
        while due:
            receivers, failures = due.popleft()
            there = [receiver for receiver in receivers if not receiver.is_gone]
            if not there:
                continue
            limit_s = self.pool.timeouts.attempt_s
            attempt = Attempt(version, there, failures, self.pool.timeouts.update_limit(limit_s))
            await self._make(attempt, send, limit_s)
            decision = decide(attempt)
            again = [receiver for group in decision.again for receiver in group]
            arrived = {one: report for one, report in attempt.holding.items() if one not in again}
            self._accept(attempt, arrived, delivered, where)
            for gone in decision.lost:
                await self.pool.lose(gone)
            if again:
                names = [receiver.name for receiver in again]
                self.state.emit(UpdateRetried(time=now(), version=version, receivers=names, reason=decision.reason))
            # Before other attempts that are due; `extendleft` reverses the order.
            due.extendleft((group, decision.failures) for group in reversed(decision.again))
        return delivered

    async def _make(self, attempt: Attempt, send: Send, limit_s: float) -> None:
        """Make one attempt: send, and collect the answers that come in time."""
        names = [receiver.name for receiver in attempt.receivers]
        try:
            async with asyncio.timeout(limit_s) as limit:
                if not await self._reach(attempt, names):
                    return
                attempt.began = now()  # after `reach`: the transfer's duration sets the limits of later ones
                receiving = (self._receive(attempt, receiver, limit) for receiver in attempt.receivers)
                await concurrently([self._send(attempt, send(attempt.version, names)), *receiving])
        except TimeoutError:
            if not limit.expired():  # a timeout raised by the work itself, not the attempt's
                raise
        attempt.compare()

    async def _reach(self, attempt: Attempt, names: Sequence[str]) -> bool:
        with self.waiting_for(f"the trainer to reach {', '.join(names)}"):
            try:
                await failing_as_one(partial(_unless_gone, attempt.receivers, self.trainer.reach(names)))
            except UpdateFailed as failure:
                attempt.sent = failure
            except WorkerUnavailable as gone:  # peers wait for the missing one: they must start again
                attempt.answers[gone.remote] = gone
        return attempt.sent is None and not attempt.answers

    async def _send(self, attempt: Attempt, sending: Coroutine[Any, Any, SendReport]) -> None:
        with self.waiting_for("the trainer to send"):
            try:
                attempt.sent = await sending
            except UpdateFailed as failure:
                attempt.sent = failure

    async def _receive(self, attempt: Attempt, receiver: ReceiverClient, limit: asyncio.Timeout) -> None:
        with self.waiting_for(f"{receiver.name} to receive"):
            try:
                attempt.answers[receiver] = await receiver.stage_weights(attempt.version)
            except UpdateFailed as failure:
                attempt.answers[receiver] = failure
            except WorkerUnavailable as gone:
                attempt.answers[receiver] = gone
                # Its peers may wait for it within the transfer: they get a moment to notice, not the whole limit.
                end = now() + SETTLE_S
                if not limit.expired() and (limit.when() or end) > end:
                    limit.reschedule(end)

    def _accept(
        self, attempt: Attempt, arrived: Mapping[ReceiverClient, ReceiveReport], delivered: Delivery, where: str
    ) -> None:
        sent, version = attempt.sent, attempt.version
        if not arrived or not isinstance(sent, SendReport):
            return
        delivered.receivers += arrived
        delivered.gather_s += sent.gather_s
        delivered.probe, delivered.full_nbytes, delivered.changed = sent.probe, sent.full_nbytes, sent.changed
        self.pool.timeouts.transferred(now() - attempt.began)
        if where == "actor":
            self._report_gathered(version, attempt.began, sent.gather_s, sent.full_nbytes or sent.nbytes)
        self._report_phase(version, "send", where, sent.send_s, sent.nbytes)
        for receiver, report in arrived.items():
            self._report_phase(version, "recv", receiver.name, report.recv_s, report.nbytes)
            self._report_phase(version, "register", receiver.name, report.register_s, report.nbytes)

    def _report_gathered(self, version: int, started: float, seconds: float, nbytes: int) -> None:
        span = (started, started + seconds)
        self.state.emit(TrainerBusy(time=now(), what="gather", version=version, span=span))
        self._report_phase(version, "gather", "actor", seconds, nbytes)

    def _report_phase(self, version: int, phase: str, where: str, seconds: float, nbytes: int) -> None:
        self.state.emit(
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
