"""Who holds the policy besides replicas: the trainer, a reference, and roles that generate nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.data.interfaces.training import StepContext, StepReport
from headway.data.interfaces.weights import GatherReport, ReceiveReport, SendReport
from headway.data.types import Column, Outcomes, TrainSample
from headway.errors import RunError
from headway.planner.profiles.job_profile import TrainPoint, UpdateProfile
from headway.planner.simulation.simulated_trainer import SimulatedTrainer, SimulatedTransport
from headway.runtime.progress import Heartbeat
from tests.pipeline.fakes import UPDATE, Probe, Time, now


async def _itself(call: Any) -> Any:
    return await call


class FakeReceiver:
    """A role that holds a copy of the policy and generates nothing."""

    def __init__(self, name: str, transport: SimulatedTransport, *, load_s: float = 0.125) -> None:
        self.name = self.copy = name
        self.loads: list[tuple[int, float]] = []
        """(version, time) of every activation."""
        self.version: int | None = 0
        """Which it can compute with: None from the start of a transfer, which comes over its only copy."""
        self.never_receives = False
        self.never_loads = False
        self.dies_on_receive: BaseException | None = None
        self.serves: Probe | None = None
        self.living: Callable[[Any], Any] = _itself
        """Returns the result of a call, unless its process ends."""
        self._transport = transport
        self._load_s = load_s

    async def stage_weights(self, version: int) -> ReceiveReport:
        report: ReceiveReport = await self.living(self._stage(version))
        return report

    async def _stage(self, version: int) -> ReceiveReport:
        if self.dies_on_receive is not None:
            raise self.dies_on_receive
        if self.never_receives:
            await asyncio.Event().wait()
        self.version = None
        return await self._transport.receive(self.name, version)

    async def activate(self, version: int) -> float:
        if self.never_loads:
            await asyncio.Event().wait()
        await self.living(asyncio.sleep(self._load_s))
        self.version = version
        self.loads.append((version, now()))
        return self._load_s

    async def probe(self) -> NDArray[np.float32] | None:
        return self.serves(self.loads[-1][0]) if self.serves else None


class FakeTrainer(SimulatedTrainer):
    """Takes ``step_s(step)`` for each optimizer step; ``skips(step)`` says whether it was not finite.

    ``ess(step)`` is its effective sample size, where it reports one.
    """

    def __init__(
        self,
        transport: SimulatedTransport,
        *,
        step_s: Callable[[int], float] = lambda _: 1.0,
        skips: Callable[[int], bool] = lambda _: False,
        ess: Callable[[int], float | None] = lambda _: None,
        forward_s: float = 0.5,
        save_s: float = 0.5,
        copy_s: float = 0.125,
        update: UpdateProfile = UPDATE,
    ) -> None:
        cost = TrainPoint(devices=1, token_s=0.0)
        super().__init__(cost, update, transport)
        self._save_s, self._copy_s = save_s, copy_s
        self._saving = False
        self.hangs_at: set[int] = set()
        """Steps that never end, and in which nothing moves."""
        self.raises_at: dict[int, BaseException] = {}
        """Step → what `train_step` raises there."""
        self.steps: list[list[TrainSample]] = []
        self.contexts: list[StepContext] = []
        """Of every step."""
        self.proximal: list[tuple[int, int]] = []
        """(version, steps that were made before) of every `proximal_logprobs`."""
        self.forwards: list[tuple[float, int]] = []
        """(time, samples) of every `forward_logprobs`."""
        self.saved: list[tuple[Path, dict[str, Any]]] = []
        self.writes: list[Time] = []
        """When each checkpoint was written, or failed to be."""
        self.fails_to_save: list[str] = []
        """Of the next checkpoints: ``copy`` or ``write`` where that fails; nothing where it does not."""
        self.computed: list[tuple[str, Time]] = []
        """(what, when) of everything that kept the ranks busy."""
        self.reached: list[tuple[float, tuple[str, ...]]] = []
        """(time, receivers) of every `reach`."""
        self.fails_to_reach: list[BaseException] = []
        """What the next calls of `reach` raise."""
        self.fails_to_send: list[BaseException] = []
        """What the next sends raise at once, while others still receive."""
        self.probes: Probe | None = None
        """What its probe finds under a version."""
        self.fetches: list[tuple[list[list[TrainSample]], int, int | None]] = []
        """Mini-batches of each batch that was begun, steps made until then, and until its end."""
        self.reports: dict[str, Any] = {}
        """Values of every `SendReport`."""
        self._step_s = step_s
        self._skips = skips
        self._ess = ess
        self._forward_s = forward_s

    async def begin_batch(self, mini_batches: Sequence[Sequence[TrainSample]]) -> None:
        assert not self.fetches or self.fetches[-1][2] is not None, "the batch before has not ended"
        self.fetches.append(([list(samples) for samples in mini_batches], len(self.steps), None))

    async def end_batch(self) -> None:
        mini_batches, begun, ended = self.fetches.pop()
        assert ended is None, "it was ended before"
        self.fetches.append((mini_batches, begun, len(self.steps)))

    async def forward_logprobs(self, samples: Sequence[TrainSample]) -> list[Column]:
        self.forwards.append((now(), len(samples)))
        await self._compute("a forward pass", self._forward_s)
        return [Column(None, index) for index in range(len(samples))]

    async def _compute(self, doing: str, seconds: float) -> None:
        started = now()
        await super()._compute(doing, seconds)
        self.computed.append((doing, (started, now())))

    async def proximal_logprobs(self, samples: Sequence[TrainSample], version: int) -> list[Column]:
        self.proximal.append((version, len(self.steps)))
        return [replace(column, handle=version) for column in await self.forward_logprobs(samples)]

    async def train_step(self, samples: Sequence[TrainSample], context: StepContext) -> StepReport:
        step = len(self.steps)
        self.steps.append(list(samples))
        self.contexts.append(context)
        if step in self.raises_at:
            raise self.raises_at[step]
        if step in self.hangs_at:
            with self._ranks("an optimizer step"):
                await asyncio.Event().wait()
        await self._compute("an optimizer step", self._step_s(step))
        ess = self._ess(step)
        metrics = {"loss": 0.0} if ess is None else {"loss": 0.0, "offpolicy/ess": ess}
        return StepReport(skipped=self._skips(step), metrics=metrics)

    async def reach(self, receivers: Sequence[str]) -> None:
        self.reached.append((now(), tuple(receivers)))
        if self.fails_to_reach:
            raise self.fails_to_reach.pop(0)

    async def send_weights(self, version: int, receivers: Sequence[str]) -> SendReport:
        if self.fails_to_send:
            raise self.fails_to_send.pop(0)
        sent = await super().send_weights(version, receivers)
        return replace(sent, probe=self._probe(version), **self.reports)

    async def gather_weights(self, version: int) -> GatherReport:
        return replace(await super().gather_weights(version), probe=self._probe(version))

    async def send_gathered(self, version: int, receivers: Sequence[str]) -> SendReport:
        if self.fails_to_send:
            raise self.fails_to_send.pop(0)
        return replace(await super().send_gathered(version, receivers), **self.reports)

    def _probe(self, version: int) -> NDArray[np.float32] | None:
        return self.probes(version) if self.probes else None

    async def copy_state(self) -> None:
        if self.fails_to_save and self.fails_to_save[0] == "copy":
            self.fails_to_save.pop(0)
            raise RunError("worker actor-0 ran out of memory in 'copy_state'")
        if self._saving:
            raise RunError("a checkpoint was to be copied over the one that is being written")
        await self._compute("the copy for a checkpoint", self._copy_s)

    async def save(self, path: Path, driver_state: Mapping[str, Any]) -> None:
        started, self._saving = now(), True
        try:
            await asyncio.sleep(self._save_s)
        finally:
            self._saving = False
        self.writes.append((started, now()))
        if self.fails_to_save and self.fails_to_save.pop(0):
            raise RunError(f"could not write the checkpoint {path}: No space left on device; make room there")
        self.saved.append((path, dict(driver_state)))

    async def heartbeat(self) -> Heartbeat:
        return replace(await super().heartbeat(), quiet_s=0.0) if self._saving else await super().heartbeat()

    async def load(self, path: Path) -> dict[str, Any]:
        return next(dict(state) for saved, state in reversed(self.saved) if saved == path)


class FakeReference:
    """A reference policy with ranks of its own."""

    def __init__(self, seconds: float = 0.5) -> None:
        self._seconds = seconds
        self.batches: list[int] = []

    async def forward_logprobs(self, samples: Sequence[TrainSample]) -> list[Column]:
        self.batches.append(len(samples))
        await asyncio.sleep(self._seconds)
        return [Column(None, index) for index in range(len(samples))]


@dataclass(frozen=True, slots=True)
class Asked:
    """One call of `FakeLogProb.proximal_logprobs`."""

    version: int
    samples: int
    span: Time


class FakeLogProb:
    """Recomputes log π_prox on ranks of its own, which are ``receivers``: refuses what not all of them serve."""

    def __init__(self, receivers: Sequence[FakeReceiver], seconds: float = 0.5) -> None:
        self.seconds = seconds
        self.asked: list[Asked] = []
        self.answers: Callable[[], object] = lambda: None
        """Called with each request; may raise what the request raises."""
        self.hangs = False
        self._receivers = receivers
        self._computes = False

    async def proximal_logprobs(self, samples: Sequence[TrainSample], version: int) -> list[Column]:
        """Its columns have the version for their handle."""
        self.answers()
        if self.hangs:
            await asyncio.Event().wait()
        started = now()
        self._check(version)
        if self._computes:
            raise RunError("logp was asked for two things at once")
        self._computes = True
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self._computes = False
        self._check(version)
        self.asked.append(Asked(version, len(samples), (started, now())))
        return [Column(version, index) for index in range(len(samples))]

    def _check(self, version: int) -> None:
        if others := {one.name: one.version for one in self._receivers if one.version != version}:
            raise RunError(f"log-probs under version {version} were asked of {others}")


class Turn(NamedTuple):
    """What was done with a batch, by its number, and when."""

    what: str
    """``values``, ``advantages`` or ``train``."""
    fetch: int
    span: Time


class FakeCritic:
    """A critic, and the advantages that need it. Asked for two things at once, it raises; a real one would hang.

    Its columns have the number of their fetch for their handle.
    """

    def __init__(
        self,
        value_s: float = 0.5,
        step_s: float = 1.0,
        save_s: float = 0.25,
        copy_s: float = 0.125,
        skips: Callable[[int], bool] | None = None,
    ) -> None:
        self.turns: list[Turn] = []
        self.saved: list[tuple[Path, Time]] = []
        self.copied: list[Time] = []
        self.trained: list[list[TrainSample]] = []
        """The samples of every step."""
        self.ranks: Callable[[str, float], Any] = self._compute
        """Takes the time; the trainer's where it shares their ranks."""
        self._value_s = value_s
        self._step_s = step_s
        self._save_s, self._copy_s = save_s, copy_s
        self._skips = skips or (lambda _: False)
        self._valued = 0
        self._doing: str | None = None
        self.fetches: list[str] = []
        """What was said of fetches, in order: ``begin`` and ``end``."""

    async def begin_batch(self, mini_batches: Sequence[Sequence[TrainSample]]) -> None:
        self.fetches.append("begin")

    async def end_batch(self) -> None:
        self.fetches.append("end")

    async def forward_values(self, samples: Sequence[TrainSample]) -> list[Column]:
        fetch, started = self._valued, now()
        self._valued += 1
        await self.ranks("values", self._value_s)
        self.turns.append(Turn("values", fetch, (started, now())))
        return [Column(fetch, index) for index in range(len(samples))]

    async def advantages(self, samples: Sequence[TrainSample], outcomes: Outcomes) -> dict[str, list[Column]]:
        (fetch,) = {sample.columns["values"].handle for sample in samples}
        assert [sample.columns["values"].index for sample in samples] == list(range(len(samples)))
        assert len(outcomes.ids) == len(samples)
        self.turns.append(Turn("advantages", fetch, (now(), now())))
        columns = [Column(fetch, index) for index in range(len(samples))]
        return {"advantages": columns, "returns": columns}

    async def train_step(self, samples: Sequence[TrainSample]) -> StepReport:
        (fetch,) = {sample.columns[name].handle for sample in samples for name in ("values", "returns")}
        started, step = now(), len(self.trained)
        self.trained.append(list(samples))
        await self.ranks("a step of the critic", self._step_s)
        self.turns.append(Turn("train", fetch, (started, now())))
        return StepReport(skipped=self._skips(step), metrics={"critic/loss": float(step)})

    async def copy_state(self) -> None:
        started = now()
        await self.ranks("the copy of the critic for a checkpoint", self._copy_s)
        self.copied.append((started, now()))

    async def save(self, path: Path) -> None:
        started = now()
        await asyncio.sleep(self._save_s)
        self.saved.append((path, (started, now())))

    async def load(self, path: Path) -> None:
        raise RunError(f"{path}: nothing in these runs is resumed")

    async def _compute(self, doing: str, seconds: float) -> None:
        if self._doing is not None:
            raise RunError(f"the critic's ranks were asked for {doing} during {self._doing}")
        self._doing = doing
        try:
            await asyncio.sleep(seconds)
        finally:
            self._doing = None
