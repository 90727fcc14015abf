"""ParamUpdate: brings a new version from the trainer to every replica, in five phases.

    gather ▶ send (trainer)  ║  recv ▶ register (replica, decoding goes on)      then, replica by replica
    wait for its validation ▶ pause(policy) ▶ load ▶ resume

    consumes        updates from ActorTrain
    waits for       the transfer; a validation that still runs; in ``drain``, what is in flight
    produces        validations that are due

Synchronous schedule: the trainer waits until every replica has loaded. The pause comes last, so that a replica stops for
the swap alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from headway.errors import UpdateFailed
from headway.events import TrainerBusy, UpdateFinished, UpdatePhase
from headway.interfaces import OnUpdate, ReceiveReport, RolloutEngine, SendReport, TrainEngine
from headway.pipeline.channel import Channel
from headway.pipeline.concurrently import both, concurrently
from headway.pipeline.stage import Stage
from headway.pipeline.stages.actor_train import Update
from headway.pipeline.stages.generate import Generate
from headway.pipeline.stages.validate import Validation
from headway.pipeline.state import RunState, now


@dataclass(frozen=True, slots=True)
class Load:
    stall_s: float
    """From the end of the pause to the end of resume: nothing decoded."""
    interrupted: int


class ParamUpdate(Stage[Update, Validation]):
    waits_for_input = "ActorTrain"

    def __init__(
        self,
        state: RunState,
        input: Channel[Update],
        output: Channel[Validation],
        trainer: TrainEngine,
        replicas: Sequence[RolloutEngine],
        generate: Generate,
        *,
        policy: OnUpdate,
        test_freq: int | None,
        timeout_s: float,
    ) -> None:
        """``test_freq`` counts versions between two validations; -1 validates the last alone, None never."""
        super().__init__(state.emit)
        self._state = state
        self._input = input
        self._output = output
        self._trainer = trainer
        self._replicas = replicas
        self._generate = generate
        self._policy = policy
        self._test_freq = test_freq
        self._timeout_s = timeout_s

    async def get_input_data(self) -> Update | None:
        return await self._input.get()

    async def process_data(self, update: Update) -> AsyncGenerator[Validation, None]:
        started = now()
        gather_s = await self._transfer(update.version)
        due = self._validation_due(update)
        self._generate.pause()
        validator = self._replicas[0]
        loads = await concurrently(self._load(r, update.version, due and r is validator) for r in self._replicas)
        self._generate.resume()
        self._emit(
            UpdateFinished(
                time=now(),
                version=update.version,
                trainer_stall_s=now() - started - gather_s,
                rollout_stall_s=sum(load.stall_s for load in loads) / len(loads),
                interrupted=sum(load.interrupted for load in loads),
            )
        )
        if due:
            yield Validation(update.version, validator)
        update.done.set()

    async def send_output_data(self, validation: Validation) -> bool:
        return await self._output.send(validation)

    def close_output(self) -> None:
        self._output.close()

    def _validation_due(self, update: Update) -> bool:
        match self._test_freq:
            case None:
                return False
            case -1:
                return update.last
            case freq:
                return update.last or (freq > 0 and update.version % freq == 0)

    async def _transfer(self, version: int) -> float:
        """gather and send beside recv and register. Returns the seconds that the trainer spent gathering."""
        started = now()
        try:
            async with asyncio.timeout(self._timeout_s):
                received: list[ReceiveReport]
                sent, received = await both(
                    self._trainer.send_weights(version),
                    concurrently(replica.stage_weights(version) for replica in self._replicas),
                )
        except TimeoutError:
            raise UpdateFailed(
                f"the weights of version {version} did not arrive within param_update.timeout_s={self._timeout_s:g} s: "
                f"ParamUpdate waited for the trainer to send and for {', '.join(r.name for r in self._replicas)} to "
                "receive; replicas still serve the version before"
            ) from None
        self._report_sent(version, sent, started)
        for replica, report in zip(self._replicas, received, strict=True):
            self._report_received(version, replica.name, report)
            if report.checksum != sent.checksum:
                raise UpdateFailed(
                    f"{replica.name} received weights of version {version} with checksum {report.checksum:08x}, the "
                    f"trainer sent {sent.checksum:08x}; replicas still serve the version before"
                )
        return sent.gather_s

    async def _load(self, replica: RolloutEngine, version: int, validate: bool) -> Load:
        await self._state.changed.until(lambda: replica.name not in self._state.validating)
        paused = await replica.pause(self._policy)
        stopped = now()
        seconds = await replica.activate(version)
        # Marked before the new version opens admission: a wave must not slip in ahead of its version's validation.
        if validate:
            self._state.validation(replica.name, running=True)
        self._state.load(replica.name, version)
        await replica.resume()
        self._emit(UpdatePhase(time=now(), version=version, phase="load", where=replica.name, seconds=seconds))
        return Load(stall_s=now() - stopped, interrupted=paused.interrupted)

    def _report_sent(self, version: int, sent: SendReport, started: float) -> None:
        span = (started, started + sent.gather_s)
        self._emit(TrainerBusy(time=now(), what="gather", version=version, span=span))
        for phase, seconds in (("gather", sent.gather_s), ("send", sent.send_s)):
            self._emit(
                UpdatePhase(
                    time=now(), version=version, phase=phase, where="actor", seconds=seconds, nbytes=sent.nbytes
                )
            )

    def _report_received(self, version: int, replica: str, report: ReceiveReport) -> None:
        for phase, seconds in (("recv", report.recv_s), ("register", report.register_s)):
            self._emit(
                UpdatePhase(
                    time=now(), version=version, phase=phase, where=replica, seconds=seconds, nbytes=report.nbytes
                )
            )
