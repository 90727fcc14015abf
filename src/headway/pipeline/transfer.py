"""Bringing one version's weights from the trainer into replicas' back buffers; nobody serves them yet.

    together   gather ▶ send ║ recv ▶ register      one collective, bucket by bucket; the trainer is taken all the while
    apart      gather │ send ║ recv ▶ register      a complete copy first; then each replica by itself, the trainer free

All-or-nothing: a transfer that fails leaves every replica serving what it served. A replica that dies in it is left
out, and the transfer begins again for the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from headway.errors import UpdateFailed, WorkerDied
from headway.events import TrainerBusy, UpdatePhase
from headway.interfaces import OverlappingTrainEngine, ReceiveReport, RolloutEngine, SendReport, TrainEngine
from headway.pipeline.concurrently import both, concurrently
from headway.pipeline.fleet import Fleet
from headway.pipeline.signal import Signal
from headway.pipeline.state import RunState, now

T = TypeVar("T")

WaitingFor = Callable[[str], AbstractContextManager[None]]
"""Says whom the stage waits for while it is open."""


class ReceiverDied(Exception):
    """A replica died in a transfer: the trainer did not."""

    def __init__(self, replica: RolloutEngine, death: WorkerDied) -> None:
        super().__init__(replica.name)
        self.replica = replica
        self.death = death


class Transfer:
    """The transfers of a run."""

    def __init__(self, state: RunState, fleet: Fleet, waiting_for: WaitingFor, timeout_s: float) -> None:
        self._state = state
        self._fleet = fleet
        self._waiting_for = waiting_for
        self._timeout_s = timeout_s
        self._sending = 0
        self._sent = Signal()

    async def together(self, trainer: TrainEngine, version: int) -> tuple[float, list[RolloutEngine]]:
        """To all receivers at once. Returns the seconds that the trainer gathered, and who holds the version now."""
        while True:
            started, replicas = now(), self._fleet.receivers
            names = [replica.name for replica in replicas]
            try:
                sent, received = await self._attempt(version, replicas, trainer.send_weights(version, names))
            except ReceiverDied as lost:
                await self._fleet.lose(lost.replica, lost.death)
                continue
            self._report_gathered(version, started, sent.gather_s, sent.nbytes)
            self._accept(version, "actor", replicas, sent, received)
            return sent.gather_s, replicas

    async def gather(self, trainer: OverlappingTrainEngine, version: int) -> float:
        """Into the trainer's copy, as soon as the one in it is not being sent any more. Returns the seconds it took."""
        with self._waiting_for("replicas to receive the version before"):
            await self._sent.until(lambda: self._sending == 0)
        started = now()
        with self._waiting_for("the trainer to gather"):
            gathered = await trainer.gather_weights(version)
        self._report_gathered(version, started, gathered.gather_s, gathered.nbytes)
        return gathered.gather_s

    async def apart(self, trainer: OverlappingTrainEngine, version: int, replica: RolloutEngine) -> None:
        """The copy, which holds ``version``, to one replica. Raises `ReceiverDied` when that died."""
        self._sending += 1
        try:
            sent, received = await self._attempt(version, [replica], trainer.send_gathered(version, replica.name))
            self._accept(version, replica.name, [replica], sent, received)
        finally:
            self._sending -= 1
            self._sent.changed()

    async def _attempt(
        self, version: int, replicas: Sequence[RolloutEngine], sending: Coroutine[Any, Any, SendReport]
    ) -> tuple[SendReport, list[ReceiveReport]]:
        silent = ["the trainer to send", *(f"{replica.name} to receive" for replica in replicas)]
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await both(
                    self._answer(sending, silent[0], silent),
                    concurrently(
                        self._receive(replica, version, whom, silent)
                        for replica, whom in zip(replicas, silent[1:], strict=True)
                    ),
                )
        except TimeoutError:
            if not limit.expired():
                raise
            raise UpdateFailed(
                f"the weights of version {version} did not arrive within param_update.timeout_s={self._timeout_s:g} s: "
                f"ParamUpdate waited for {', '.join(silent)}; replicas still serve the version before"
            ) from None

    async def _receive(self, replica: RolloutEngine, version: int, whom: str, silent: list[str]) -> ReceiveReport:
        try:
            return await self._answer(replica.stage_weights(version), whom, silent)
        except WorkerDied as death:
            raise ReceiverDied(replica, death) from death

    async def _answer(self, call: Coroutine[Any, Any, T], whom: str, silent: list[str]) -> T:
        """The call's result; ``silent`` loses whoever answered."""
        with self._waiting_for(whom):
            result = await call
        silent.remove(whom)
        return result

    def _accept(
        self,
        version: int,
        where: str,
        replicas: Sequence[RolloutEngine],
        sent: SendReport,
        received: Sequence[ReceiveReport],
    ) -> None:
        """Raises `UpdateFailed` when a replica holds anything but what was sent."""
        self._report_phase(version, "send", where, sent.send_s, sent.nbytes)
        for replica, report in zip(replicas, received, strict=True):
            self._report_phase(version, "recv", replica.name, report.recv_s, report.nbytes)
            self._report_phase(version, "register", replica.name, report.register_s, report.nbytes)
            if report.checksum != sent.checksum:
                raise UpdateFailed(
                    f"{replica.name} received weights of version {version} with checksum {report.checksum:08x}, the "
                    f"trainer sent {sent.checksum:08x}; replicas still serve the version before"
                )

    def _report_gathered(self, version: int, started: float, seconds: float, nbytes: int) -> None:
        span = (started, started + seconds)
        self._state.emit(TrainerBusy(time=now(), what="gather", version=version, span=span))
        self._report_phase(version, "gather", "actor", seconds, nbytes)

    def _report_phase(self, version: int, phase: str, where: str, seconds: float, nbytes: int) -> None:
        self._state.emit(
            UpdatePhase(time=now(), version=version, phase=phase, where=where, seconds=seconds, nbytes=nbytes)
        )
