"""ParamUpdate: brings a new version from the trainer to every replica, in five phases.

    gather ▶ send (trainer)  ║  recv ▶ register (replica, decoding goes on)      then, replica by replica
    wait for its validation ▶ pause(policy) ▶ load ▶ resume

    consumes        updates from ActorTrain
    waits for       the transfer; a validation that still runs; in ``drain``, what is in flight
    produces        validations that are due

Synchronous schedule: the trainer waits until every replica has loaded. The pause comes last, so that a replica stops
for the swap alone.

A validation is due every ``test_freq`` versions, and for the last one. Which one is the last is known only when no more
updates come: a stop may be asked for, or the data end, while a version is already being served.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

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

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Load:
    validation_s: float
    """The replica's validation was waited for."""
    stall_s: float
    """From the end of the pause to the end of resume: nothing decoded."""
    interrupted: int


class ParamUpdate(Stage[Update | Validation, Validation]):
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
        self._validator = replicas[0]
        self._unvalidated: Validation | None = None
        """The version that is served, unless its validation was submitted."""

    async def get_input_data(self) -> Update | Validation | None:
        if (update := await self._input.get()) is not None:
            return update
        last, self._unvalidated = self._unvalidated, None
        if last is not None:
            self._state.validation(last.replica.name, running=True)
        return last

    async def process_data(self, item: Update | Validation) -> AsyncGenerator[Validation, None]:
        if isinstance(item, Validation):
            yield item
            return
        due = self._test_freq is not None and self._test_freq > 0 and item.version % self._test_freq == 0
        await self._update(item.version, validate=due)
        validation = Validation(item.version, self._validator)
        self._unvalidated = None if due or self._test_freq is None else validation
        if due:
            yield validation
        # Only now, so that the validation is the first to reach the replica.
        self._generate.resume()
        item.done.set()

    async def send_output_data(self, validation: Validation) -> bool:
        return await self._output.send(validation)

    def close_output(self) -> None:
        self._output.close()

    async def _update(self, version: int, *, validate: bool) -> None:
        started = now()
        gather_s = await self._transfer(version)
        loads = await concurrently(
            self._load(replica, version, validate=validate and replica is self._validator) for replica in self._replicas
        )
        self._emit(
            UpdateFinished(
                time=now(),
                version=version,
                trainer_stall_s=now() - started - gather_s,
                rollout_stall_s=sum(load.stall_s for load in loads) / len(loads),
                validation_stall_s=max(load.validation_s for load in loads),
                interrupted=sum(load.interrupted for load in loads),
            )
        )

    async def _transfer(self, version: int) -> float:
        """gather and send beside recv and register. Returns the seconds that the trainer spent gathering."""
        started = now()
        silent = ["the trainer to send", *(f"{replica.name} to receive" for replica in self._replicas)]
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                received: list[ReceiveReport]
                sent, received = await both(
                    self._answer(self._trainer.send_weights(version), silent[0], silent),
                    concurrently(
                        self._answer(replica.stage_weights(version), whom, silent)
                        for replica, whom in zip(self._replicas, silent[1:], strict=True)
                    ),
                )
        except TimeoutError:
            if not limit.expired():
                raise
            raise UpdateFailed(
                f"the weights of version {version} did not arrive within param_update.timeout_s={self._timeout_s:g} s: "
                f"ParamUpdate waited for {', '.join(silent)}; replicas still serve the version before"
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

    async def _answer(self, call: Coroutine[Any, Any, T], whom: str, silent: list[str]) -> T:
        """The call's result; ``silent`` loses whoever answered."""
        with self._waiting_within(whom):
            result = await call
        silent.remove(whom)
        return result

    async def _load(self, replica: RolloutEngine, version: int, *, validate: bool) -> Load:
        started = now()
        with self._waiting_within(f"{replica.name} to finish its validation"):
            await self._state.changed.until(lambda: replica.name not in self._state.validating)
        validated = now()
        # Not before that wait: training generation goes on beside a validation, refills included.
        self._generate.pause()
        with self._waiting_within(f"{replica.name} to {self._policy}"):
            paused = await replica.pause(self._policy)
        stopped = now()
        with self._waiting_within(f"{replica.name} to load"):
            seconds = await replica.activate(version)
        # Marked before the new version opens admission: a wave must not slip in ahead of its version's validation.
        if validate:
            self._state.validation(replica.name, running=True)
        self._state.load(replica.name, version)
        await replica.resume()
        self._emit(UpdatePhase(time=now(), version=version, phase="load", where=replica.name, seconds=seconds))
        return Load(validated - started, stall_s=now() - stopped, interrupted=paused.interrupted)

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
