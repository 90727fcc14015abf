"""The profile of a run: the costs that a plan needs, measured by the run itself.

RUN/config.yaml  ─▶ who did what, with which batch ─┐
RUN/events.jsonl ─▶ Recording ─▶ fits ──────────────┴─▶ Profile, with what it had to assume
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import ceil
from pathlib import Path
from statistics import median

from headway.config.loading import load
from headway.config.sizing.placement import (
    ACTOR,
    CRITIC,
    LOGP,
    REF,
    ROLLOUT,
    concurrent,
    needs_critic,
    needs_logp,
    needs_reference,
    resolve_placement,
)
from headway.errors import ConfigError
from headway.events import (
    Event,
    GroupAdmitted,
    GroupRewarded,
    GroupSettled,
    RunStarted,
    TrajectoryFinished,
    ValidationFinished,
    WorkerDescribed,
)
from headway.planner.measurement.cost_fitting import (
    DecodeFit,
    LinearCost,
    Overlap,
    evenly,
    fit_decode,
    fit_line,
    fit_prefill,
    rounded,
    service_seconds,
    usual_mean,
    without_outliers,
)
from headway.planner.measurement.recording import RecordedGroup, Recording, recording_of
from headway.planner.profiles.costs import decode_cost
from headway.planner.profiles.job_profile import (
    BatchProfile,
    ContentionProfile,
    EmpiricalLengths,
    LatencyProfile,
    PhaseProfile,
    Profile,
    ProgramProfile,
    RecordedNumber,
    RewardProfile,
    RolloutProfile,
    SharedProfile,
    TrainPoint,
    TrainProfile,
    UpdateProfile,
    ValidationProfile,
)
from headway.planner.profiles.profile_mesh import in_words
from headway.reports.record.events_file import EventReader, look_through, read_events
from headway.reports.report import DrawnVersions, newest_versions
from headway.reports.run_directory import RunDirectory

MAX_GROUPS = 4000
"""Largest number of recorded groups that a profile keeps."""
MOST_DENSE = 100_000
"""Most dense events of a large run's newest versions that are read; some seconds."""
FEWEST = 4
"""Fewest of these versions where answers are trained in the version that they began in; lag needs two more for each."""
FORWARD_SHARE = 1 / 3
"""The share of a training step's seconds per token that a forward pass takes, where none was measured: the backward
pass costs twice as much."""


def profile_run(run: Path) -> Profile:
    """Derive the costs of a job from ``run``, the directory of a run.

    Raises:
        ConfigError: it holds no run, or one that ended too early to say anything; the message tells what is missing.
        DataError: its events cannot be read.
    """
    return _Profiling(run).profile(replay=False)


def replay_profile(run: Path) -> Profile:
    """Derive a job's costs like `profile_run`, for a simulation that repeats recorded lengths in order of admission."""
    return _Profiling(run).profile(replay=True)


class _Profiling:
    """The profiling of one run. `_assumptions` fills as the parts of the profile are made."""

    def __init__(self, run: Path) -> None:
        directory = RunDirectory.existing(run)
        self._config = load(directory.config, environment=os.environ).config
        actor = self._config.actor
        self._placement = resolve_placement(self._config)
        fewest = FEWEST + 2 * ceil(self._config.async_training.staleness_threshold)
        self._newest = newest_versions(directory.events, look_through(directory.events), MOST_DENSE, fewest)
        self._recording = recording_of(
            read_events(directory.events) if self._newest is None else _events_of(directory.events, self._newest),
            mini_batch=actor.ppo_mini_batch_size,
            ranks=len(self._placement.devices[ACTOR]) // actor.parallel.inner,
        )
        check_enough(run, self._recording)
        self._overlap = Overlap(self._recording)
        self._assumptions: list[str] = []

    def profile(self, *, replay: bool) -> Profile:
        config, placement = self._config, self._placement
        self._say_what_was_measured()
        kept = self._kept_groups()
        prompt, response = self._lengths(kept, replay=replay)
        for role, needed in (
            (REF, needs_reference(config)),
            (LOGP, needs_logp(config)),
            (CRITIC, needs_critic(config)),
        ):
            if needed and not placement.shared(role, ACTOR):
                self._assume(f"the devices of {role} are left out: what it computes delays nothing")
        if needs_critic(config) and placement.shared(CRITIC, ACTOR):
            self._assume("what the critic costs is taken as the same for every batch, on any number of devices")
        if not placement.shared(ACTOR, ROLLOUT):
            if config.cluster.backend == "inline":
                had = "training and generation ran in one process, but count as if they had their own devices"
            else:
                had = "training and generation had their own devices"
            self._assume(f"{had}: what it takes to share some counts as nothing")
        return Profile(
            name=config.run.name,
            devices=len({*placement.devices[ACTOR], *placement.devices[ROLLOUT]}),
            batch=BatchProfile(
                groups_per_version=config.groups_per_version,
                ppo_mini_batch_size=config.actor.ppo_mini_batch_size,
                n=config.rollout.n,
                ppo_epochs=config.actor.ppo_epochs,
            ),
            prompt=prompt,
            response=response,
            program=self._program(kept),
            rollout=self._rollout(),
            train=self._train(
                len(placement.devices[ACTOR]),
                reference_inside=placement.shared(REF, ACTOR),
                recomputed_inside=placement.shared(LOGP, ACTOR),
            ),
            update=self._update(),
            reward=self._reward(response),
            validation=self._validation(),
            latency=self._latency(),
            contention=self._contention(),
            shared=self._shared(),
            devices_per_node=self._devices_per_node(),
            measured_on=measured_on(self._recording.workers),
            assumptions=self._assumptions,
        )

    def _assume(self, text: str) -> None:
        self._assumptions.append(text)

    def _say_what_was_measured(self) -> None:
        started = self._recording.started
        mode, newest = started.mode if started else self._config.mode, self._newest
        part = "" if newest is None else f"the newest versions, {newest.first} to {newest.last}, of "
        self._assume(f"costs were measured in {part}a run of mode {mode} with {self._versions} versions")

    @property
    def _versions(self) -> int:
        """Number of the run's versions."""
        return self._recording.versions if self._newest is None else self._newest.last

    # ------------------------------------------------------------------------------------------ lengths

    def _kept_groups(self) -> list[RecordedGroup]:
        groups = self._recording.recorded_groups()
        kept = [groups[index] for index in evenly(len(groups), MAX_GROUPS)]
        if len(kept) < len(groups):
            whose = "the run's" if self._newest is None else "their"
            self._assume(f"lengths are those of {len(kept)} of {whose} {len(groups)} groups, evenly spread")
        return kept

    def _lengths(self, kept: Sequence[RecordedGroup], *, replay: bool) -> tuple[EmpiricalLengths, EmpiricalLengths]:
        """Lengths of prompts (one per group) and answers, group by group in order of admission."""
        self._assume("answers stay as long as they were in the run; they change as the policy learns")
        filtered = [index for index, group in enumerate(kept) if group.fate == "filtered"]
        if lost := sum(group.fate not in (None, "trained", "filtered") for group in self._recording.groups.values()):
            self._assume(f"{lost} groups that were dropped, failed or unfinished are not among the lengths")
        return (
            EmpiricalLengths(kind="empirical", groups=[[max(1, g.prompt_tokens)] for g in kept], replay=replay),
            EmpiricalLengths(
                kind="empirical", groups=list(map(_answers, kept)), replay=replay, filtered=filtered or None
            ),
        )

    def _program(self, kept: Sequence[RecordedGroup]) -> ProgramProfile | None:
        """Turns and steps, one number for each recorded episode; None for single answers."""
        episodes = [episode for group in kept for _, episode in sorted(group.episodes.items())]
        if not episodes:
            return None
        self._assume(
            "each turn of an episode has as many tokens, and each of its steps takes as long, as they have on average; "
            "what a message takes between program and episode worker is a part of its steps"
        )
        self._assume("environments are never scarce; program.environments says how many there may be at once")
        if failed := sum(group.failed for group in self._recording.groups.values()):
            self._assume(f"{failed} episodes that failed are left out")
        further = sum(episode.turns - 1 for episode in episodes)
        sample = [episodes[index] for index in evenly(len(episodes), MAX_GROUPS)]
        return ProgramProfile(
            turns=_recorded(episode.turns for episode in sample),
            step_s=_recorded(episode.environment_s / episode.turns for episode in sample),
            step_tokens=_recorded(episode.step_tokens / max(1, episode.turns - 1) for episode in sample),
            forks=rounded(min(1.0, sum(episode.forks for episode in episodes) / further)) if further else 0.0,
        )

    # ------------------------------------------------------------------------------------------ rollout

    def _rollout(self) -> RolloutProfile:
        config, recording = self._config.rollout, self._recording
        slots = max(recording.started.slots.values()) if recording.started else concurrent(self._config)
        decode = fit_decode(self._overlap.decode_samples())
        profile = RolloutProfile(
            slots=slots,
            decode=[(active, rounded(seconds)) for active, seconds in decode.curve],
            kv_token_s=rounded(decode.kv_token_s),
            devices=config.tensor_model_parallel_size,
            threads=self._threads("rollout", ROLLOUT, config.threads),
        )
        prefill = fit_prefill(self._overlap.prefill_steps(), decode_cost(profile))
        self._assume_of_decoding(decode, prefill, slots)
        return profile.model_copy(
            update={"prefill_token_s": rounded(prefill.unit_s), "prefill_s": rounded(prefill.fixed_s)}
        )

    def _assume_of_decoding(self, decode: DecodeFit, prefill: LinearCost, slots: int) -> None:
        fewest, most = decode.curve[0][0], decode.curve[-1][0]
        if fewest > 1 or most < slots:
            self._assume(
                f"decode steps were seen with {fewest} to {most} active sequences; other numbers, up to {slots} slots, "
                "are extrapolated"
            )
        if not prefill.separated:
            self._assume("prefills hardly differed in size or in time: their cost is taken as proportional to tokens")

    def _threads(self, section: str, role: str, configured: int) -> int:
        """Number of torch threads in each of the role's workers."""
        described = [worker.threads for worker in self._recording.workers if worker.worker.startswith(f"{role}-")]
        if not described and not configured:
            self._assume(f"{section}.threads was 0: the threads that it was measured with are not on record")
        return max(described, default=configured)

    # ------------------------------------------------------------------------------------------ training

    def _train(self, ranks: int, *, reference_inside: bool, recomputed_inside: bool) -> TrainProfile:
        step = self._step_cost()
        parallel = self._config.actor.parallel
        mesh = "" if parallel.is_plain else f" in a mesh of {in_words(parallel)}"
        same = "" if parallel.is_plain else " of such meshes"
        self._assume(
            f"training was measured with {ranks} rank(s){mesh}; with more or fewer{same}, seconds per token scale "
            "inversely"
        )
        return TrainProfile(
            parallel=parallel,
            even=True,
            points=[
                TrainPoint(
                    devices=ranks,
                    step_s=rounded(step.fixed_s),
                    token_s=rounded(step.unit_s),
                    forward_token_s=rounded(self._forward_cost(step)),
                )
            ],
            recompute_old_log_probs="always" if recomputed_inside else "never",
            reference=needs_reference(self._config) and reference_inside,
            threads=self._threads("trainer", ACTOR, self._config.trainer.threads),
        )

    def _devices_per_node(self) -> int | None:
        """Number of devices that the trainer had on each of several machines; None where it had one."""
        shares = self._placement.on_nodes(ACTOR)
        return max(len(share.devices) for share in shares) if len(shares) > 1 else None

    def _step_cost(self) -> LinearCost:
        steps = without_outliers(
            (step for step in self._overlap.steps() if step.tokens > 0),
            lambda step: step.seconds / step.tokens,
        )
        line = fit_line([step.tokens for step in steps], [step.seconds for step in steps])
        if not line.separated:
            self._assume(
                "optimizer steps hardly differed in tokens or in time: their cost is taken as proportional to tokens"
            )
        return line

    def _forward_cost(self, step: LinearCost) -> float:
        """Seconds per token of a forward pass."""
        forwards = [work for work in self._overlap.forwards() if work.tokens > 0]
        if not forwards:
            self._assume("no forward pass was measured; it is taken as a third of a training step per token")
            return step.unit_s * FORWARD_SHARE
        usual = without_outliers(forwards, lambda work: work.seconds / work.tokens)
        return sum(work.seconds for work in usual) / sum(work.tokens for work in usual)

    # ------------------------------------------------------------------------------------------ update

    def _update(self) -> UpdateProfile:
        """Median seconds of each update phase. Updates of one size say nothing about the cost of another size."""
        updates = self._recording.warm(self._recording.updates.updates.values())
        synchronous = self._synchronous
        return UpdateProfile(
            nbytes=max(update.nbytes for update in updates),
            gather=_median_of(update.phases.get("gather", 0.0) for update in updates),
            send=_median_of(update.phases.get("send", 0.0) for update in updates),
            recv=_median_of(update.recv_s(synchronous=synchronous) for update in updates),
            register=_median_of(update.phases.get("register", 0.0) for update in updates),
            load=_median_of(update.load_s for update in updates),
        )

    @property
    def _synchronous(self) -> bool:
        return self._config.param_update.schedule == "synchronous"

    def _shared(self) -> SharedProfile:
        """Median time of each handover of shared devices: to training, and back to generation."""
        updates = self._recording.updates
        if not updates.to_train_s:
            return SharedProfile()
        return SharedProfile(
            to_train_s=rounded(median(updates.to_train_s)), to_generate_s=rounded(median(updates.to_generate_s))
        )

    def _contention(self) -> ContentionProfile:
        overlap = self._overlap
        unknown = [
            name
            for name, slowdown in (("training", overlap.training), ("generation", overlap.generation))
            if slowdown is None
        ]
        if unknown:
            self._assume(
                f"how much {' and '.join(unknown)} slow down beside the other side could not be told from a run in "
                f"which the trainer computed for {overlap.share():.0%} of the time that was spent on generating; it "
                "counts as nothing, and costs are as they were there (a run of mode stream_off_policy measures it)"
            )
        return ContentionProfile(train=rounded(overlap.training or 1.0), rollout=rounded(overlap.generation or 1.0))

    def _latency(self) -> LatencyProfile:
        """Mean seconds that pass between the parts of a run, outliers left out."""
        recording = self._recording
        groups = recording.warm(recording.recorded_groups())
        programs = any(group.episodes for group in groups)  # on the way of a group there are steps, too
        deliveries = [group.delivery_s for group in groups if not programs]
        updates = recording.warm(recording.updates.updates.values())
        in_updates = [u.latency_s(recording.busy_within, synchronous=self._synchronous) for u in updates]
        submission_s = 0.0 if programs else usual_mean(recording.submissions_s())
        if not submission_s and not programs:
            self._assume("no replica was seen idle and then given groups: what sending them takes counts as nothing")
        return LatencyProfile(
            group_s=rounded(usual_mean(deliveries) + submission_s),
            fetch_s=rounded(usual_mean(batch.latency_s for batch in recording.warm(recording.training.batches))),
            update_s=rounded(usual_mean(seconds for seconds in in_updates if seconds is not None)),
        )

    # ------------------------------------------------------------------------------------------ reward, validation

    def _reward(self, response: EmpiricalLengths) -> RewardProfile:
        scored = [group for group in self._recording.groups.values() if group.rewarded is not None]
        workers = self._config.reward.workers
        times = service_seconds(((g.arrived, g.rewarded) for g in scored if g.rewarded is not None), workers)
        return RewardProfile(
            seconds=rounded(median(times)) if times else 0.0,
            workers=workers,
            filtered=rounded(len(response.filtered or ()) / len(response.groups)),
        )

    def _validation(self) -> ValidationProfile | None:
        validations, config = self._recording.validations, self._config.rollout
        if not validations:
            return None
        self._assume("validation's answers are as long as those of training")
        return ValidationProfile(
            problems=max(validation.problems for validation in validations),
            n=config.val_n,
            test_freq=config.test_freq if config.test_freq > 0 else self._versions,
        )


def _events_of(path: Path, newest: DrawnVersions) -> Iterator[Event]:
    """Yield the events of a large run's ``newest`` versions, and of earlier ones who took part, and validations.

    Groups that were admitted before are left out: not all of their answers are among them.
    """
    reader = EventReader(path, kinds=(RunStarted, WorkerDescribed, ValidationFinished))
    for event in reader.read():
        if reader.line >= newest.line:
            break
        yield event
    admitted: set[int] = set()
    for event in read_events(path, after=newest.line):
        match event:
            case GroupAdmitted():
                admitted.add(event.number)
            case TrajectoryFinished() | GroupRewarded() | GroupSettled() if event.number not in admitted:
                continue
        yield event


def _answers(group: RecordedGroup) -> list[int]:
    """Number of tokens of each answer, or of each turn of an episode on average; at least 1: an answer that ended at
    once still took its step.
    """
    turns = {k: episode.turns for k, episode in group.episodes.items()}
    return [max(1, round(tokens / turns.get(k, 1))) for k, tokens in sorted(group.answer_tokens.items())]


def _recorded(values: Iterable[float]) -> RecordedNumber:
    return RecordedNumber(kind="recorded", values=[rounded(value) for value in values])


def _median_of(seconds: Iterable[float]) -> PhaseProfile:
    return PhaseProfile(latency_s=rounded(median(seconds)))


def measured_on(workers: Sequence[WorkerDescribed]) -> str | None:
    """The machines of a run, in a line: GPUs if it had any, then cores. None where they are not on record."""
    if not workers:
        return None
    gpus = Counter(worker.gpu for worker in workers if worker.gpu is not None)
    hosts = Counter((worker.cores, worker.cpu) for worker in {worker.host: worker for worker in workers}.values())
    parts = [f"{count} worker(s) with a {gpu} each" for gpu, count in sorted(gpus.items())]
    parts += [f"{count} machine(s) with {cores} cores of {cpu}" for (cores, cpu), count in sorted(hosts.items())]
    return "; ".join(parts)


MIN_VERSIONS = 2


def check_enough(run: Path, recording: Recording) -> None:
    """Raise `ConfigError` unless everything that a profile must have was measured at least once."""
    if recording.started is None:
        raise ConfigError(f"{run} never began to train, so it measured nothing; give a run that did")
    needed = f"a profile needs a run with at least {MIN_VERSIONS} versions; train for longer, or give another run"
    if recording.versions < MIN_VERSIONS:
        raise ConfigError(f"{run} ended after {recording.versions} parameter update(s); {needed}")
    if not any(step.tokens for step in recording.training.steps):
        raise ConfigError(f"{run} made no optimizer step; {needed}")
    active = {report.replica for report in recording.activity if report.generated_tokens}
    if silent := sorted(set(recording.started.slots) - active):
        raise ConfigError(
            f"{run} says nothing about what {', '.join(silent)} did; a profile needs a run in which every replica "
            "generated"
        )
    if not recording.warm_activity("decode_steps"):
        raise ConfigError(
            f"{run} does not say how long its decode steps took, so there is no decode curve; give a run of a rollout "
            "engine that measures them, such as rollout.name=native"
        )
