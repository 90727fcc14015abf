"""A whole run as a list of events, made from a script instead of engines: what the reports are tested with.

Its times are those of a schedule in which generation and training overlap; every number follows from the arguments.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from headway.events import (
    BatchTaken,
    Event,
    GroupAdmitted,
    GroupRewarded,
    GroupSettled,
    Note,
    OptimizerStepped,
    ReplicaActivity,
    RunFinished,
    RunStarted,
    StageChanged,
    TrainerBusy,
    TrajectoryFinished,
    UpdateFinished,
    UpdatePhase,
    ValidationFinished,
)

REPLICA = "rollout-0"

STAGES = ["Generate", "Rollout", "Reward", "ActorTrain", "ParamUpdate", "Validate"]


@dataclass(slots=True)
class ScriptedRun:
    """``versions`` versions of ``per_version`` groups of ``n``; each one waits ``wait_s`` and then trains."""

    versions: int = 4
    per_version: int = 8
    n: int = 4
    wait_s: float = 1.0
    forward_s: float = 0.5
    step_s: float = 2.0
    update_s: float = 0.5
    discard_every: int = 5
    seed: int = 0
    start: float = 100.0
    events: list[Event] = field(default_factory=list)

    def build(self) -> list[Event]:
        """All events, by time."""
        rng = random.Random(self.seed)
        self._start()
        now, number, admitted, discarded = self.start + 1.0, 0, 0, 0
        self._validate(0, now)
        for version in range(self.versions):
            numbers: list[int] = []
            wait_from = now
            now += self.wait_s
            while len(numbers) < self.per_version:
                admitted += 1
                at = wait_from + self.wait_s * len(numbers) / self.per_version
                fate = "filtered" if self.discard_every and number % self.discard_every == 3 else "trained"
                self._group(number, version, at, now, rng, admitted, discarded, fate)
                if fate == "trained":
                    numbers.append(number)
                else:
                    discarded += 1
                number += 1
            self._train(version, numbers, (wait_from, now), rng)
            now += self.forward_s + self.step_s
            self._decode(wait_from, now)
            self._update(version + 1, now)
            now += self.update_s
            self._validate(version + 1, now)
        groups = {"admitted": admitted, "trained": self.versions * self.per_version, "filtered": discarded}
        self._add(
            RunFinished(
                time=now + 0.2,
                status="completed",
                reason=None,
                version=self.versions,
                groups=groups | {"dropped": 0, "failed": 0, "in_flight": 0},
            )
        )
        return sorted(self.events, key=lambda event: event.time)

    def _add(self, event: Event) -> None:
        self.events.append(event)

    def _start(self) -> None:
        self._add(
            RunStarted(
                time=self.start,
                mode="async_partial",
                seed=self.seed,
                groups_per_version=self.per_version,
                total_groups=self.versions * self.per_version,
                lag_bound=2,
                order="window",
                slots={REPLICA: 16},
                stages=STAGES,
            )
        )
        for stage in reversed(STAGES):
            self._add(StageChanged(time=self.start, stage=stage, state="waiting_input", waiting_for="its input"))

    def _group(
        self,
        number: int,
        version: int,
        at: float,
        done: float,
        rng: random.Random,
        admitted: int,
        discarded: int,
        fate: str,
    ) -> None:
        limit = (version + 2) * self.per_version
        self._add(
            GroupAdmitted(
                time=at,
                number=number,
                epoch=0,
                row=number,
                attempt=0,
                version=version,
                admitted=admitted,
                discarded=discarded,
                limit=limit,
            )
        )
        old = max(version - 1, 0)
        for k in range(self.n):
            tokens = rng.randint(4, 60)
            cut = number % 3 == 0 and k == 0 and old < version
            self._add(
                TrajectoryFinished(
                    time=done,
                    number=number,
                    k=k,
                    replica=REPLICA,
                    prompt_tokens=10,
                    tokens=tokens,
                    finish_reason="length" if tokens > 56 else "stop",
                    version_spans=[[0, old], [2, version]] if cut else [[0, version]],
                    started=at,
                    finished=done,
                )
            )
        level = 0.3 + 0.65 * (1 - 0.8**version)
        rewards = [float(rng.random() < level) for _ in range(self.n)] if fate == "trained" else [0.0] * self.n
        self._add(GroupRewarded(time=done, number=number, rewards=rewards))
        if fate != "trained":
            self._add(GroupSettled(time=done, number=number, fate=fate, reason="no variance"))

    def _train(self, version: int, numbers: list[int], waited: tuple[float, float], rng: random.Random) -> None:
        begun = waited[1]
        stepped = begun + self.forward_s + self.step_s
        self._add(
            StageChanged(
                time=waited[0], stage="ActorTrain", state="waiting_input", waiting_for="groups from the message queue"
            )
        )
        self._add(BatchTaken(time=begun, fetch=version, version=version, numbers=numbers, waited=waited))
        self._add(StageChanged(time=begun, stage="ActorTrain", state="processing", active=1))
        forward = (begun, begun + self.forward_s)
        self._add(TrainerBusy(time=forward[1], what="forward", version=version, span=forward))
        self._add(TrainerBusy(time=stepped, what="step", version=version, span=(forward[1], stepped)))
        lags = [1 if number % 3 == 0 and version > 0 else 0 for number in numbers]
        self._add(
            OptimizerStepped(
                time=stepped,
                step=version,
                fetch=version,
                version=version,
                skipped=False,
                tokens=1000,
                trajectories=len(numbers) * self.n,
                lags=lags,
                token_lag={0: 900, 1: 100},
                stale_trajectories=sum(lags),
                metrics={
                    "pg_loss": rng.gauss(0, 0.02),
                    "grad_norm": 0.4 + 0.1 * rng.random(),
                    "clip_fraction": 0.02 * rng.random(),
                    "entropy": 0.8 * 0.97**version,
                    "lr": 1e-4,
                },
            )
        )
        for number, lag in zip(numbers, lags, strict=True):
            self._add(GroupSettled(time=stepped, number=number, fate="trained", lag=lag))

    def _decode(self, start: float, end: float) -> None:
        active = max((end - start) * 0.8, 0.0)
        self._add(
            ReplicaActivity(
                time=end,
                replica=REPLICA,
                busy=[(start, start + active)],
                slot_seconds=active * 12,
                generated_tokens=1000,
                prefilled_tokens=200,
                preempted=3,
            )
        )
        self._add(StageChanged(time=start, stage="Generate", state="processing", active=12))
        self._add(
            StageChanged(time=start + active, stage="Generate", state="waiting_input", waiting_for="PromptLoader")
        )

    def _update(self, version: int, at: float) -> None:
        phases = {"gather": 0.1, "send": 0.2, "recv": 0.25, "register": 0.02, "load": 0.05}
        self._add(StageChanged(time=at, stage="ParamUpdate", state="processing", active=1))
        self._add(StageChanged(time=at, stage="ActorTrain", state="waiting_output", waiting_for="ParamUpdate"))
        for phase, seconds in phases.items():
            where = "actor" if phase in ("gather", "send") else REPLICA
            self._add(UpdatePhase(time=at, version=version, phase=phase, where=where, seconds=seconds * self.update_s))
        done = at + self.update_s
        self._add(StageChanged(time=done, stage="ParamUpdate", state="waiting_input", waiting_for="ActorTrain"))
        self._add(
            UpdateFinished(
                time=done,
                version=version,
                trainer_stall_s=self.update_s,
                rollout_stall_s=self.update_s / 2,
                interrupted=3,
            )
        )

    def _validate(self, version: int, at: float) -> None:
        accuracy = 0.52 + 0.45 * (1 - 0.8**version)
        self._add(
            ValidationFinished(
                time=at,
                version=version,
                accuracy=accuracy,
                problems=512,
                mean_tokens=21.5,
                failed=0,
                span=(at - 0.4, at),
            )
        )
        if version == 2:
            self._add(Note(time=at, level="warning", text="the reward raised ValueError for 1 of 64 trajectories"))
