"""A whole run on the virtual clock: a configuration, fakes, and everything that can be seen of the run from outside."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from headway.agents.episodes.program_episode import Hosting
from headway.config.presets import PRESETS
from headway.config.schema import Config
from headway.config.sizing.placement import ACTOR, CRITIC, LOGP, REF, needs_logp
from headway.events import (
    Event,
    GroupAdmitted,
    GroupSettled,
    OptimizerStepped,
    RunFinished,
    TrajectoryFinished,
    ValidationFinished,
)
from headway.pipeline.admission.run_journal import RunJournal
from headway.pipeline.admission.sample_collector import SampleOutlet
from headway.pipeline.run import Pipeline, Status
from headway.pipeline.wiring import Machinery, Parts
from headway.planner.profiles.job_profile import UpdateProfile
from headway.planner.simulation.simulated_prompts import zero_advantages
from headway.planner.simulation.simulated_trainer import SimulatedTransport
from headway.planner.simulation.virtual_clock import run_virtual
from tests.pipeline.fake_policies import FakeCritic, FakeLogProb, FakeReceiver, FakeReference, FakeTrainer
from tests.pipeline.fakes import (
    UPDATE,
    Failing,
    FakeEpisodeWorker,
    FakeReward,
    FakeRollout,
    FakeSource,
    Lengths,
    Numbers,
    Recorder,
    seeded_lengths,
    validation_prompts,
)
from tests.pipeline.mortal_ranks import MortalCritic, MortalLogProb, MortalReference, MortalTrainer

E = TypeVar("E", bound=Event)

CONFIGS: dict[str, Config] = {}
"""Configurations by what they were made of: a check asks for its scenario's at every event."""
MODES = tuple(PRESETS)
"""Every mode there is, whether engines can do it for real or not."""


@dataclass(slots=True, repr=False)
class Run:
    """What a run left behind.

    Without ``repr``, which would tell every event, and which asyncio asks a task for whose result this is.
    """

    status: Status | None
    error: BaseException | None
    events: list[Event]
    pipeline: Pipeline
    source: FakeSource
    rollouts: list[FakeRollout]
    trainer: FakeTrainer
    ended: float
    """Virtual seconds."""
    tasks_left: list[str]
    transport: SimulatedTransport
    scenario: Scenario
    recorder: Recorder
    starts: list[Mapping[str, Any]] = field(default_factory=list)
    """The driver's state of version 0, where there is a journal."""
    others: list[FakeReceiver] = field(default_factory=list)
    """Receivers that generate nothing."""
    episode_workers: list[FakeEpisodeWorker] = field(default_factory=list)
    """With those that were started in the place of others."""
    logp: FakeLogProb | None = None
    """Whoever recomputes log π_prox on ranks of its own."""
    hosting: Hosting | None = None
    """What the episode worker makes episodes by."""
    stopped_at: float | None = None
    """When a stop was first asked for."""
    cancelled_at: float | None = None
    _task: asyncio.Task[Status] | None = None
    _by_kind: dict[type[Event], list[Any]] = field(default_factory=dict)
    _indexed: int = 0

    def cancel(self) -> None:
        """The pipeline's task, as by a second Ctrl-C."""
        assert self._task is not None
        if not self._task.done():
            if self.cancelled_at is None:
                self.cancelled_at = asyncio.get_running_loop().time()
            self._task.cancel()

    def request_stop(self) -> None:
        if self.stopped_at is None:
            self.stopped_at = asyncio.get_running_loop().time()
        self.pipeline.request_stop()

    def join(self, name: str) -> FakeRollout:
        """A late replica, like those that were there at the start."""
        late = self.scenario.replica(name, self.transport)
        self.pipeline._wiring.replica_supervision.join(late)
        self.rollouts.append(late)
        return late

    def of(self, kind: type[E]) -> list[E]:
        """In order. Checks ask this a hundred times of a run, so that events are sorted by their kinds once."""
        for event in self.events[self._indexed :]:
            self._by_kind.setdefault(type(event), []).append(event)
        self._indexed = len(self.events)
        return list(self._by_kind.get(kind, []))

    def fates(self) -> Counter[str]:
        return Counter(event.fate for event in self.of(GroupSettled))

    @property
    def groups(self) -> dict[str, int]:
        return self.of(RunFinished)[-1].groups

    @property
    def version(self) -> int:
        return self.of(RunFinished)[-1].version

    def lags_by_version(self) -> dict[int, set[int]]:
        lags: dict[int, set[int]] = {}
        for step in self.of(OptimizerStepped):
            lags.setdefault(step.version, set()).update(step.lags)
        return lags

    def validated(self) -> list[int]:
        return [event.version for event in self.of(ValidationFinished)]

    def launches(self) -> dict[int, float]:
        """Group → when it reached an engine."""
        return {
            number: time
            for rollout in self.rollouts
            for time, numbers, priority in rollout.submitted
            if priority == "training"
            for number in numbers
        }

    def remade(self, lost: str) -> set[int]:
        """Training groups that the episode worker ``lost`` was asked for, and another one later."""
        asked = {
            worker.name: {n for _, numbers, priority in worker.asked if priority == "training" for n in numbers}
            for worker in self.episode_workers
        }
        mine = asked.pop(lost)
        return mine.intersection(*[set().union(*asked.values())])

    def assert_clean(self) -> Run:
        """What holds for every run, however it ended."""
        assert self.tasks_left == []
        assert isinstance(self.events[-1], RunFinished), self.events[-1]
        assert len(self.of(RunFinished)) == 1
        assert_one_fate_each(self)
        assert_admission_kept_the_inequality(self)
        return self

    def assert_completed(self) -> Run:
        if self.error is not None:
            raise self.error
        assert self.status is Status.COMPLETED
        return self.assert_clean()


def assert_one_fate_each(run: Run) -> None:
    admitted = [event.number for event in run.of(GroupAdmitted)]
    assert admitted == list(range(len(admitted)))
    assert sorted(event.number for event in run.of(GroupSettled)) == admitted
    groups = run.groups
    assert groups == {"admitted": len(admitted), **{fate: run.fates()[fate] for fate in groups if fate != "admitted"}}
    assert_episodes_have_one_fate_each(run)


def assert_episodes_have_one_fate_each(run: Run) -> None:
    """Each episode has its group's fate, or failed, as the events tell; and what the run says of it is that."""
    size = run.scenario.n + run.scenario.greedy_baseline
    failed = Counter(event.number for event in run.of(TrajectoryFinished) if event.failure is not None)
    fates: Counter[str] = Counter({"failed": failed.total()})
    for event in run.of(GroupSettled):
        fates[event.fate] += size - failed[event.number]
    episodes = run.of(RunFinished)[-1].episodes
    assert episodes == {
        "admitted": size * run.groups["admitted"],
        **{fate: fates[fate] for fate in run.groups if fate != "admitted"},
    }


def assert_admission_kept_the_inequality(run: Run) -> None:
    for event in run.of(GroupAdmitted):
        assert event.admitted - event.discarded <= event.limit, event


@dataclass(slots=True)
class Scenario:
    """Defaults: one replica, B = 4 per batch, two answers each, twelve groups, no validation."""

    mode: str = "async_partial"
    async_training: dict[str, Any] = field(default_factory=dict)
    """Values over the mode's."""
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Values of further sections of the configuration."""
    mini_batch: int = 4
    n: int = 2
    total: int | None = None
    """Groups to train; without ``epochs`` the default is six versions' worth."""
    rows: int = 1000
    epochs: int | None = None
    replicas: int = 1
    slots: int = 8
    seed: int = 0
    lengths: Lengths | None = None
    problems: int = 0
    """Held-out problems; 0 is a run without validation."""
    test_freq: int = 1
    reward: FakeReward = field(default_factory=FakeReward)
    filters: bool = False
    """Groups whose rewards are equal are filtered."""
    greedy_baseline: bool = False
    trainer: dict[str, Any] = field(default_factory=dict)
    """Arguments of `FakeTrainer`."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Arguments of `FakeRollout`."""
    update: UpdateProfile = UPDATE
    """What the phases of an update take, but for load."""
    reference: FakeReference | None = None
    """On ranks of its own."""
    reference_on_trainer_ranks: bool = False
    logp_ranks: int = 0
    """Ranks of their own that recompute log π_prox; 0 without ``use_rollout_log_probs`` is the trainer's."""
    logp_s: float = 0.5
    """What they take for a batch."""
    critic: FakeCritic | None = None
    critic_on_trainer_ranks: bool = False
    script: Callable[[Run], None] | None = None
    """Called before the run starts, to arrange what will happen."""
    beside: Callable[[Run], Coroutine[Any, Any, None]] | None = None
    """Runs beside the pipeline until it ends."""
    receivers: tuple[str, ...] = ()
    """Names of roles that hold a copy of the policy and generate nothing."""
    supervised: bool = False
    """The pipeline is told at once when a replica dies, whether anybody asks it for anything or not."""
    replica_start_s: float | None = None
    """What it takes to start a replica in the place of one that is gone; None where none can be started."""
    episode_workers: int = 1
    episode_worker_start_s: float | None = 2.0
    """What it takes to start an episode worker in the place of one that is gone; None where none can be started."""
    resume_from: Mapping[str, Any] | None = None
    """The driver's state of a checkpoint, of another run of the same scenario."""
    validated: int | None = None
    """Version of ``resume_from``, where its validation had ended."""
    journal: Path | None = None
    """The directory of the run's journal; None for a run without any."""
    numbers: Numbers = field(default_factory=dict)
    """Which group each prompt was asked for."""
    failing: Failing | None = None
    """Which episodes fail."""
    rollout: type[FakeRollout] = FakeRollout
    hosting: Callable[[Config], Hosting] | None = None
    """Makes what episodes are made by; None for single answers."""
    samples: SampleOutlet | None = None
    """Where samples go; None for a run without any."""
    trainer_start_s: float | None = None
    """What it takes to start ranks in the place of lost ones; None where none can be started."""
    in_one_process: bool = False
    """Replicas are in the processes of the training ranks, and live and die with them."""
    watched: bool = False
    """`beside` is given to the pipeline as its watch, so that what it raises is the pipeline's affair."""

    @property
    def config(self) -> Config:
        of_mode: dict[str, dict[str, Any]] = {}
        for key, value in PRESETS[self.mode].items():
            section, name = key.split(".")
            of_mode.setdefault(section, {})[name] = value
        logp = {"use_rollout_log_probs": False} if self.logp_ranks else {}
        values = {**of_mode["async_training"], **logp, **self.async_training}
        per_version = values["trigger_parameter_sync_step"] * values.get("require_batches", 1) * self.mini_batch
        total = self.total
        if total is None and self.epochs is None:
            total = 6 * per_version
        sections: dict[str, dict[str, Any]] = {
            "run": {"seed": self.seed},
            "rollout": {
                "n": self.n,
                "total_rollout_steps": total,
                "test_freq": self.test_freq,
                "greedy_baseline": self.greedy_baseline,
            },
            "algorithm": {"filter_groups": {"enable": self.filters}},
            "data": {"epochs": self.epochs, "max_response_length": 100_000},
            "actor": {"ppo_mini_batch_size": self.mini_batch},
            **of_mode,
            "async_training": values,
        }
        for name, further in self.sections.items():
            sections[name] = {**sections.get(name, {}), **further}
        values = {"mode": self.mode, **sections}
        config = CONFIGS.get(repr(values))
        if config is None:
            config = CONFIGS[repr(values)] = Config.model_validate(values)
        return config

    def run(self, cancelled_at: float | None = None) -> Run:
        """``cancelled_at``: the pipeline's task is cancelled at that time, as by a second Ctrl-C."""
        return run_virtual(self.running(cancelled_at))

    def replica(self, name: str, transport: SimulatedTransport) -> FakeRollout:
        lengths = self.lengths or seeded_lengths(self.seed)
        rollout = self.rollout(name, transport=transport, lengths=lengths, slots=self.slots, **self.engine)
        rollout.numbers = self.numbers
        return rollout

    async def running(self, cancelled_at: float | None = None) -> Run:
        """`run`, on whatever loop there is."""
        transport = SimulatedTransport(self.update)
        rollouts = [self.replica(f"rollout-{i}", transport) for i in range(self.replicas)]
        made = FakeTrainer if self.trainer_start_s is None else MortalTrainer
        trainer = made(transport, update=self.update, **self.trainer)
        if self.in_one_process:
            assert isinstance(trainer, MortalTrainer)
            trainer.life.replicas = rollouts[:]
            trainer.life.start_replicas = lambda restart: self._replicas_again(run, restart)
        recorder = Recorder()
        hosting = None if self.hosting is None else self.hosting(self.config)
        run: Run
        episode_workers = [
            FakeEpisodeWorker(self.numbers, f"episode-worker-{i}", self.failing, hosting)
            for i in range(self.episode_workers)
        ]
        source = FakeSource(self.rows, self.epochs)
        others = [FakeReceiver(name, transport) for name in self.receivers]
        ranks = [FakeReceiver(f"logp-{rank}", transport) for rank in range(self.logp_ranks)]
        made_logp = FakeLogProb if self.trainer_start_s is None else MortalLogProb
        logp = made_logp(ranks, self.logp_s) if ranks else None
        if self.critic is not None and self.critic_on_trainer_ranks:
            self.critic.ranks = trainer._compute
            if isinstance(self.critic, MortalCritic) and isinstance(trainer, MortalTrainer):
                self.critic.share(trainer)
        shared = {REF: self.reference_on_trainer_ranks, LOGP: logp is None, CRITIC: self.critic_on_trainer_ranks}
        starts: list[Mapping[str, Any]] = []
        machinery = Machinery(
            rollouts=list(rollouts),
            episode_workers=list(episode_workers),
            trainer=trainer,
            reference=trainer if self.reference_on_trainer_ranks else self.reference,
            proximal=(logp or trainer) if needs_logp(self.config) else None,
            critic=self.critic,
            on_trainer_ranks=[role for role, shares in shared.items() if shares],
            receivers=[*others, *ranks],
            replace_replica=None if self.replica_start_s is None else lambda lost: self._replace_replica(run, lost),
            replace_episode_worker=None
            if self.episode_worker_start_s is None
            else lambda lost: self._replace_episode_worker(run, lost),
            restartable={
                role: ranks.life.restartable(self.trainer_start_s or 0.0)
                for role, ranks in (
                    (ACTOR, trainer),
                    (REF, self.reference),
                    (LOGP, logp),
                    (CRITIC, None if self.critic_on_trainer_ranks else self.critic),
                )
                if isinstance(ranks, MortalTrainer | MortalReference | MortalLogProb | MortalCritic)
            },
            snapshots=trainer.snapshots
            if isinstance(trainer, MortalTrainer) and self.config.trainer.snapshot is not None
            else None,
        )
        parts = Parts(
            source=source,
            validation=validation_prompts(self.problems),
            machinery=machinery,
            reward=self.reward,
            advantages=zero_advantages if self.critic is None else self.critic.advantages,
            watch=(lambda: self._watch(run)) if self.watched else None,
            watch_replaceable=(lambda one: one.died()) if self.supervised else None,
            workers=lambda: [trainer],
            journal=None if self.journal is None else RunJournal(self.journal, self.config),
            keep_start=None if self.journal is None else lambda taken: starts.append(taken) is None,
            samples=self.samples,
            validated=self.validated,
        )
        observers = [recorder] if parts.journal is None else [recorder, parts.journal]
        pipeline = Pipeline(self.config, parts, observers, Path("checkpoints"), self.resume_from)
        run = Run(None, None, recorder.events, pipeline, source, rollouts, trainer, 0.0, [], transport, self, recorder)
        run.starts = starts
        run.others, run.logp, run.episode_workers, run.hosting = [*others, *ranks], logp, episode_workers, hosting
        if self.script is not None:
            self.script(run)
        beside = asyncio.ensure_future(self.beside(run)) if self.beside and not self.watched else None
        running = run._task = asyncio.ensure_future(pipeline.run())
        if cancelled_at is not None:
            asyncio.get_running_loop().call_at(cancelled_at, run.cancel)
        await asyncio.wait([running])
        if not running.cancelled():
            run.error = running.exception()
            run.status = None if run.error else running.result()
        run.ended = asyncio.get_running_loop().time()
        for worker in run.episode_workers:
            await worker.bury()
        if parts.journal is not None:
            parts.journal.close()
        if beside is not None:
            beside.cancel()
            await asyncio.wait([beside])
        run.tasks_left = [t.get_name() for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        return run

    def _replicas_again(self, run: Run, restart: int) -> list[FakeRollout]:
        made = [self.replica(f"rollout-{i}+{restart}", run.transport) for i in range(self.replicas)]
        run.rollouts += made
        return made

    async def _replace_replica(self, run: Run, lost: str) -> FakeRollout:
        assert self.replica_start_s is not None
        await asyncio.sleep(self.replica_start_s)
        run.rollouts.append(self.replica(f"{lost}+1", run.transport))
        return run.rollouts[-1]

    async def _replace_episode_worker(self, run: Run, lost: str) -> FakeEpisodeWorker:
        assert self.episode_worker_start_s is not None
        await asyncio.sleep(self.episode_worker_start_s)
        run.episode_workers.append(FakeEpisodeWorker(self.numbers, f"{lost}+1", self.failing, run.hosting))
        return run.episode_workers[-1]

    async def _watch(self, run: Run) -> None:
        assert self.beside is not None
        await self.beside(run)
