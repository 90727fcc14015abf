"""A run's directory made from known costs: token by token, by a loop that shares no code with what reads it.

One replica, one training rank, synchronous: a wave is generated, rewarded, trained and published, then the next.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.config.layers import nest
from headway.config.presets import preset
from headway.config.schema import Config
from headway.events import (
    BatchTaken,
    DecodeSteps,
    Event,
    GroupAdmitted,
    GroupRewarded,
    GroupSettled,
    OptimizerStepped,
    PrefillSteps,
    ReplicaActivity,
    RunFinished,
    RunStarted,
    Span,
    TrainerBusy,
    TrajectoryFinished,
    UpdateFinished,
    UpdatePhase,
    ValidationFinished,
    add_prefill,
)
from headway.reports.record.events_file import EventsFile
from headway.reports.run_directory import RunDirectory

REPLICA = "rollout-0"


def two_slopes(active: int) -> float:
    """Seconds of a step: 10 ms, and 1 ms for each sequence up to 4, then 3 ms for each further one."""
    return 0.010 + 0.001 * min(active, 4) + 0.003 * max(active - 4, 0)


@dataclass(slots=True)
class Decoding:
    number: int
    k: int
    prompt: int
    length: int
    tokens: int = 0
    started: float = 0.0


@dataclass(slots=True)
class RecordedRun:
    """Its costs are the arguments; `write` makes the directory."""

    versions: int = 5
    per_version: int = 8
    mini_batch: int = 4
    epochs: int = 1
    n: int = 4
    slots: int = 8
    filtered: int = 2
    """Groups per version that are filtered, beside those that are trained."""
    step_curve: Callable[[int], float] = two_slopes
    kv_token_s: float = 2e-6
    prefill_s: float = 0.004
    prefill_token_s: float = 1e-4
    train_s: float = 0.3
    train_token_s: float = 2e-4
    forward_token_s: float = 5e-5
    phases: dict[str, float] = field(
        default_factory=lambda: {"gather": 0.03, "send": 0.05, "recv": 0.08, "register": 0.01, "load": 0.02}
    )
    reward_s: float = 0.005
    warm_up: float = 1.0
    """Everything takes so many times longer before the first update."""
    noise: float = 0.0
    """Relative, of each duration."""
    overrides: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    ends: list[float] = field(default_factory=list)
    """When each version was served, from version 1 on."""
    _events: list[Event] = field(default_factory=list)
    _rng: random.Random = field(default_factory=random.Random)
    _now: float = 100.0
    _number: int = 0
    _version: int = 0

    @property
    def config(self) -> Config:
        return Config.model_validate(
            nest(
                {
                    "mode": "on_policy",
                    **preset("on_policy"),
                    "run.name": "recorded",
                    "rollout.n": self.n,
                    "rollout.max_concurrent": self.slots,
                    "rollout.total_rollout_steps": self.versions * self.per_version,
                    "rollout.threads": 3,
                    "trainer.threads": 5,
                    "actor.ppo_mini_batch_size": self.mini_batch,
                    "actor.ppo_epochs": self.epochs,
                    "async_training.require_batches": self.per_version // self.mini_batch,
                    "async_training.use_rollout_log_probs": False,
                    **self.overrides,
                }
            )
        )

    def events(self) -> list[Event]:
        """By time, from the run's start to its end."""
        self._rng.seed(self.seed)
        self._events, self._now, self._number, self._version, self.ends = [], 100.0, 0, 0, []
        self._emit(
            RunStarted,
            mode="on_policy",
            seed=0,
            groups_per_version=self.per_version,
            total_groups=self.versions * self.per_version,
            lag_bound=0,
            order="fifo",
            slots={REPLICA: self.slots},
        )
        self._emit(
            ValidationFinished, version=0, accuracy=0.5, problems=64, mean_tokens=9.0, failed=0, span=(99.0, 100.0)
        )
        while self._version < self.versions:
            self._train(self._generate())
            self._update(self._version + 1)
            self._version += 1
        self._emit(RunFinished, status="completed", reason=None, version=self.versions, groups={})
        return self._events

    def write(self, path: Path) -> Path:
        directory = RunDirectory.create(path, self.config)
        file = EventsFile(directory.events, print)
        for event in self.events():
            file.on_event(event)
        file.close()
        return path

    # ------------------------------------------------------------------------------------------ parts of a version

    def _generate(self) -> list[tuple[int, int]]:
        """One wave; (number, tokens of a training step over it) of the groups to train, in order of admission."""
        waiting = list(self._admit())
        admitted = sorted({run.number for run in waiting})
        dropped = set(self._rng.sample(admitted, self.filtered))
        tokens: dict[int, int] = dict.fromkeys(admitted, 0)
        for run in waiting:
            tokens[run.number] += run.prompt + run.length
        decoding: list[Decoding] = []
        decode: dict[int, DecodeSteps] = {}
        prefills: dict[int, PrefillSteps] = {}
        began, rewards_free, slot_seconds = self._now, self._now, 0.0
        left = dict.fromkeys(admitted, self.n)
        kept: set[int] = set()
        while waiting or decoding:
            free = self.slots - len(decoding)
            starting, waiting = waiting[:free], waiting[free:]
            decoding += starting
            cached = sum(run.prompt + run.tokens for run in decoding)
            seconds = self.step_curve(len(decoding)) + self.kv_token_s * cached
            prefilled = sum({run.number: run.prompt for run in starting if run.number not in kept}.values())
            kept.update(run.number for run in starting)
            if prefilled:
                seconds = self._spend(seconds + self.prefill_s + self.prefill_token_s * prefilled)
                add_prefill(prefills, len(decoding), prefilled, seconds, cached)
            else:
                seconds = self._spend(seconds)
                steps, total, before = decode.get(len(decoding), (0, 0.0, 0))
                decode[len(decoding)] = (steps + 1, total + seconds, before + cached)
            slot_seconds += seconds * len(decoding)
            for run in starting:
                run.started = self._now
            for run in decoding:
                run.tokens += 1
            for run in [run for run in decoding if run.tokens == run.length]:
                decoding.remove(run)
                left[run.number] -= 1
                self._finished(run)
                if not left[run.number]:
                    rewards_free = max(rewards_free, self._now) + self.reward_s
                    self._emit(GroupRewarded, at=rewards_free, number=run.number, rewards=[0.0] * self.n)
                    if run.number in dropped:
                        self._emit(GroupSettled, at=rewards_free, number=run.number, fate="filtered", reason="equal")
        self._report(decode, prefills, (began, self._now), slot_seconds)
        self._now = rewards_free
        return [(number, tokens[number]) for number in admitted if number not in dropped]

    def _admit(self) -> Iterator[Decoding]:
        for _ in range(self.per_version + self.filtered):
            number, prompt = self._number, self._rng.randint(5, 40)
            self._number += 1
            self._emit(
                GroupAdmitted,
                number=number,
                epoch=0,
                row=number,
                attempt=0,
                version=self._version,
                admitted=self._number,
                discarded=0,
                limit=10**6,
            )
            for k in range(self.n):
                yield Decoding(number, k, prompt, min(200, 1 + int(self._rng.lognormvariate(3.0, 0.8))))

    def _finished(self, run: Decoding) -> None:
        self._emit(
            TrajectoryFinished,
            number=run.number,
            k=run.k,
            replica=REPLICA,
            prompt_tokens=run.prompt,
            tokens=run.length,
            finish_reason="stop",
            version_spans=[[0, self._version]],
            started=run.started,
            finished=self._now,
        )

    def _report(
        self, decode: dict[int, DecodeSteps], prefills: dict[int, PrefillSteps], busy: Span, slot_seconds: float
    ) -> None:
        self._emit(
            ReplicaActivity,
            replica=REPLICA,
            busy=[busy],
            slot_seconds=slot_seconds,
            generated_tokens=1000,
            prefilled_tokens=100,
            decode_steps=decode,
            prefill_steps=prefills,
        )

    def _train(self, groups: list[tuple[int, int]]) -> None:
        numbers = [number for number, _ in groups]
        self._emit(
            BatchTaken, fetch=self._version, version=self._version, numbers=numbers, waited=(self._now, self._now)
        )
        self._work("forward", self.forward_token_s * sum(tokens for _, tokens in groups))
        for first in [*range(0, len(groups), self.mini_batch)] * self.epochs:
            batch = groups[first : first + self.mini_batch]
            self._work("step", self.train_s + self.train_token_s * sum(tokens for _, tokens in batch))
            self._emit(
                OptimizerStepped,
                step=0,
                fetch=self._version,
                version=self._version,
                skipped=False,
                tokens=1,
                trajectories=len(batch) * self.n,
                lags=[0] * len(batch),
            )
        for number in numbers:
            self._emit(GroupSettled, number=number, fate="trained", lag=0)

    def _work(self, what: str, seconds: float) -> None:
        start = self._now
        self._spend(seconds)
        self._emit(TrainerBusy, what=what, version=self._version, span=(start, self._now))

    def _update(self, version: int) -> None:
        start = self._now
        gather = self._spend(self.phases["gather"])
        transfer = self._spend(max(self.phases["send"], self.phases["recv"]))
        register = self._spend(self.phases["register"])
        self._emit(TrainerBusy, what="gather", version=version, span=(start, start + gather))
        # A replica waits for gather, too, and counts it.
        reported = {"gather": gather, "send": self.phases["send"], "recv": gather + transfer, "register": register}
        for phase, seconds in reported.items():
            self._phase(version, phase, seconds)
        load = self._spend(self.phases["load"])
        self._phase(version, "load", load)
        self._emit(
            UpdateFinished,
            version=version,
            trainer_stall_s=self._now - start - gather,
            rollout_stall_s=load,
            interrupted=0,
        )
        self.ends.append(self._now)

    def _phase(self, version: int, phase: str, seconds: float) -> None:
        where = "actor" if phase in ("gather", "send") else REPLICA
        self._emit(UpdatePhase, version=version, phase=phase, where=where, seconds=seconds, nbytes=1000)

    def _spend(self, seconds: float) -> float:
        slower = self.warm_up if self._version == 0 else 1.0
        seconds *= slower * (1 + self._rng.gauss(0, self.noise) if self.noise else 1.0)
        self._now += seconds
        return seconds

    def _emit(self, kind: type[Event], *, at: float | None = None, **values: Any) -> None:
        self._events.append(kind(time=self._now if at is None else at, **values))
