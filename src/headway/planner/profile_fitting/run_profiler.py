"""The profile of a run: the costs that a plan needs, measured by the run itself.

RUN/config.yaml  ─▶ who did what, with which batch ─┐
RUN/events.jsonl ─▶ Recording ─▶ fits ──────────────┴─▶ Profile, with what it had to assume
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import ceil
from pathlib import Path
from statistics import median

from headway import events
from headway.config.loading import load
from headway.config.sizing.placement import ACTOR, CRITIC, LOGP, REF, ROLLOUT, concurrent, resolve_placement
from headway.errors import ConfigError
from headway.events import Event
from headway.planner.grid import in_words
from headway.planner.profile_fitting import cost_fitting
from headway.planner.profile_fitting.cost_fitting import (
    LinearCost,
    Overlap,
    evenly,
    rounded,
    usual_mean,
    without_outliers,
)
from headway.planner.profile_fitting.recording import KEPT_FATES, RecordedGroup, Recording, UpdateRecord, recording_of
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
from headway.reports.record.events_file import EventReader, look_through, read_events
from headway.reports.report import DrawnVersions, newest_versions
from headway.reports.run_directory import RunDirectory

MAX_GROUPS = 4000
"""Largest number of recorded groups that a profile keeps."""
MOST_BYTES = 32 * 2**20
"""Most bytes of a large run's newest versions that are read; some seconds."""
FEWEST = 4
"""Fewest of these versions where answers are trained in the version that they began in; lag needs two more for each."""
FORWARD_SHARE = 1 / 3
"""The share of a training step's seconds per token that a forward pass takes, where none was measured: the backward
pass costs twice as much."""


def profile_run(run: Path, *, replay: bool = False) -> Profile:
    """Derive the costs of a job from ``run``, the directory of a run.

    ``replay``: for a simulation that repeats recorded lengths in order of admission.

    Raises:
        ConfigError: it holds no run, or one that ended too early to say anything; the message tells what is missing.
        DataError: its events cannot be read.
    """
    return _Profiling(run).profile(replay=replay)


class _Profiling:
    """The profiling of one run. `_assumptions` fills as the parts of the profile are made."""

    def __init__(self, run: Path) -> None:
        directory = RunDirectory.existing(run)
        self._config = load(directory.config, environment=os.environ).config
        actor = self._config.actor
        self._placement = resolve_placement(self._config)
        fewest = FEWEST + 2 * ceil(self._config.async_training.staleness_threshold)
        newest = newest_versions(look_through(directory.events), MOST_BYTES, fewest)
        self._recording = recording_of(
            read_events(directory.events) if newest is None else _events_of(directory.events, newest),
            mini_batch=actor.ppo_mini_batch_size,
            ranks=len(self._placement.devices[ACTOR]) // actor.parallel.inner,
        )
        check_enough(run, self._recording)
        self._overlap = Overlap(self._recording)
        self._versions = self._recording.updates.versions if newest is None else newest.last
        part = "" if newest is None else f"the newest versions, {newest.first} to {newest.last}, of "
        mode = self._config.mode if self._recording.started is None else self._recording.started.mode
        self._assumptions = [f"costs were measured in {part}a run of mode {mode} with {self._versions} versions"]

    def profile(self, *, replay: bool) -> Profile:
        config, placement, recording = self._config, self._placement, self._recording
        groups = recording.recorded_groups()
        kept = [groups[index] for index in evenly(len(groups), MAX_GROUPS)]
        if len(kept) < len(groups):
            self._assume(f"lengths are those of {len(kept)} of {len(groups)} groups, evenly spread")
        self._assume("answers stay as long as they were in the run; they change as the policy learns")
        if lost := sum(group.fate not in (None, *KEPT_FATES) for group in recording.groups.values()):
            self._assume(f"{lost} groups that were dropped, failed or unfinished are not among the lengths")
        # Indices into what is kept, as `response.filtered` has them.
        filtered = [index for index, group in enumerate(kept) if group.fate == "filtered"]
        prompts, answers = [[max(1, group.prompt_tokens)] for group in kept], list(map(_answers, kept))
        others = [role for role in (REF, LOGP, CRITIC) if role in placement.devices]
        if apart := [role for role in others if not placement.shared(role, ACTOR)]:
            self._assume(f"the devices of {', '.join(apart)} are left out: what they compute delays nothing")
        if placement.shared(CRITIC, ACTOR):
            self._assume("what the critic costs is taken as the same for every batch, on any number of devices")
        if not placement.shared(ACTOR, ROLLOUT):
            self._assume(
                "training and generation did not share devices, or count as if they had not: sharing costs nothing"
            )
        scored = [(group.arrived, group.rewarded) for group in recording.groups.values() if group.rewarded is not None]
        reward_s = cost_fitting.service_seconds(scored, config.reward.workers)
        nodes = placement.on_nodes(ACTOR)
        return Profile(
            name=config.run.name,
            devices=len({*placement.devices[ACTOR], *placement.devices[ROLLOUT]}),
            batch=BatchProfile(
                groups_per_version=config.groups_per_version,
                ppo_mini_batch_size=config.actor.ppo_mini_batch_size,
                n=config.rollout.n,
                ppo_epochs=config.actor.ppo_epochs,
            ),
            prompt=EmpiricalLengths(kind="empirical", groups=prompts, replay=replay),
            response=EmpiricalLengths(kind="empirical", groups=answers, replay=replay, filtered=filtered or None),
            program=self._program(kept),
            rollout=self._rollout(),
            train=self._train(),
            update=self._update(),
            reward=RewardProfile(
                seconds=_median(reward_s),
                workers=config.reward.workers,
                filtered=rounded(len(filtered) / len(kept)),
            ),
            validation=self._validation(),
            latency=self._latency(),
            contention=self._contention(),
            shared=SharedProfile(
                to_train_s=_median(recording.updates.to_train_s),
                to_generate_s=_median(recording.updates.to_generate_s),
            ),
            devices_per_node=max(len(share.devices) for share in nodes) if len(nodes) > 1 else None,
            measured_on=measured_on(recording.workers),
            assumptions=self._assumptions,
        )

    def _assume(self, text: str) -> None:
        self._assumptions.append(text)

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
        forks = sum(episode.metrics.get("forks", 0.0) for episode in episodes)
        sample = [episodes[index] for index in evenly(len(episodes), MAX_GROUPS)]
        return ProgramProfile(
            turns=_recorded(episode.turns for episode in sample),
            step_s=_recorded(episode.metrics["environment_s"] / episode.turns for episode in sample),
            step_tokens=_recorded(
                episode.metrics.get("step_tokens", 0.0) / max(1, episode.turns - 1) for episode in sample
            ),
            forks=rounded(min(1.0, forks / further)) if further else 0.0,
        )

    def _rollout(self) -> RolloutProfile:
        config, started = self._config.rollout, self._recording.started
        slots = max(started.slots.values()) if started else concurrent(self._config)
        curve, kv_token_s = cost_fitting.fit_decode(self._overlap.decode_samples())
        profile = RolloutProfile(
            slots=slots,
            decode=[(active, rounded(seconds)) for active, seconds in curve],
            kv_token_s=rounded(kv_token_s),
            devices=config.tensor_model_parallel_size,
            threads=self._threads(ROLLOUT, config.threads),
        )
        prefill = cost_fitting.fit_prefill(self._overlap.prefill_steps(), decode_cost(profile))
        if curve[0][0] > 1 or curve[-1][0] < slots:
            self._assume(
                f"decode steps were seen with {curve[0][0]} to {curve[-1][0]} active sequences; other numbers, up to "
                f"{slots} slots, are extrapolated"
            )
        if not prefill.separated:
            self._assume("prefills hardly differed in size or in time: their cost is taken as proportional to tokens")
        return profile.model_copy(
            update={"prefill_token_s": rounded(prefill.unit_s), "prefill_s": rounded(prefill.fixed_s)}
        )

    def _threads(self, role: str, configured: int) -> int:
        """Number of torch threads in each of the role's workers."""
        described = [worker.threads for worker in self._recording.workers if worker.worker.startswith(f"{role}-")]
        return max(described, default=configured)

    def _train(self) -> TrainProfile:
        step, parallel, placement = self._step_cost(), self._config.actor.parallel, self._placement
        ranks = len(placement.devices[ACTOR])
        mesh = "" if parallel.is_plain else f" in a mesh of {in_words(parallel)}"
        self._assume(
            f"training was measured with {ranks} rank(s){mesh}; with more or fewer, seconds per token scale inversely"
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
            recompute_old_log_probs="always" if placement.shared(LOGP, ACTOR) else "never",
            reference=placement.shared(REF, ACTOR),
            threads=self._threads(ACTOR, self._config.trainer.threads),
        )

    def _step_cost(self) -> LinearCost:
        steps = without_outliers(
            (step for step in self._overlap.alone(self._recording.training.steps) if step.tokens > 0),
            lambda step: step.seconds / step.tokens,
        )
        line = cost_fitting.fit_line([step.tokens for step in steps], [step.seconds for step in steps])
        if not line.separated:
            self._assume(
                "optimizer steps hardly differed in tokens or in time: their cost is taken as proportional to tokens"
            )
        return line

    def _forward_cost(self, step: LinearCost) -> float:
        """Seconds per token of a forward pass."""
        forwards = [work for work in self._overlap.alone(self._recording.training.forwards) if work.tokens > 0]
        if not forwards:
            self._assume("no forward pass was measured; it is taken as a third of a training step per token")
            return step.unit_s * FORWARD_SHARE
        usual = without_outliers(forwards, lambda work: work.seconds / work.tokens)
        return sum(work.seconds for work in usual) / sum(work.tokens for work in usual)

    def _update(self) -> UpdateProfile:
        """Median seconds of each update phase. Updates of one size say nothing about the cost of another size."""
        updates, synchronous = self._recording.warm(self._recording.updates.updates.values()), self._synchronous

        def median_of(seconds: Callable[[UpdateRecord], float]) -> PhaseProfile:
            return PhaseProfile(latency_s=_median(map(seconds, updates)))

        return UpdateProfile(
            nbytes=max(update.nbytes for update in updates),
            gather=median_of(lambda update: update.phases.get("gather", 0.0)),
            send=median_of(lambda update: update.phases.get("send", 0.0)),
            recv=median_of(lambda update: update.recv_s(synchronous=synchronous)),
            register=median_of(lambda update: update.phases.get("register", 0.0)),
            load=median_of(lambda update: update.load_s),
        )

    @property
    def _synchronous(self) -> bool:
        return self._config.param_update.schedule == "synchronous"

    def _contention(self) -> ContentionProfile:
        overlap = self._overlap
        if overlap.training is None or overlap.generation is None:
            self._assume(
                "how much both sides slow down beside each other could not be told from a run in which the trainer "
                f"computed for {overlap.share():.0%} of the time that was spent on generating; it counts as nothing, "
                "and costs are as they were there (a run of mode stream_off_policy measures it)"
            )
        return ContentionProfile(train=rounded(overlap.training or 1.0), rollout=rounded(overlap.generation or 1.0))

    def _latency(self) -> LatencyProfile:
        """Mean seconds that pass between the parts of a run, outliers left out."""
        recording = self._recording
        groups = recording.warm(recording.recorded_groups())
        programs = any(group.episodes for group in groups)  # on the way of a group there are steps, too
        deliveries = [group.delivery_s for group in groups if not programs]
        updates = recording.warm(recording.updates.updates.values())
        in_updates = [u.latency_s(recording.busy, synchronous=self._synchronous) for u in updates]
        submission_s = 0.0 if programs else usual_mean(recording.submissions_s())
        if not submission_s and not programs:
            self._assume("no replica was seen idle and then given groups: what sending them takes counts as nothing")
        return LatencyProfile(
            group_s=rounded(usual_mean(deliveries) + submission_s),
            fetch_s=rounded(usual_mean(batch.latency_s for batch in recording.warm(recording.training.batches))),
            update_s=rounded(usual_mean(seconds for seconds in in_updates if seconds is not None)),
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
    reader = EventReader(path, kinds=(events.RunStarted, events.WorkerDescribed, events.ValidationFinished))
    for event in reader.read():
        if reader.at >= newest.begin:
            break
        yield event
    admitted: set[int] = set()
    for event in read_events(path, after=newest.begin):
        match event:
            case events.GroupAdmitted():
                admitted.add(event.number)
            # Of a group that was admitted before, only a part would be seen.
            case events.TrajectoryFinished() | events.GroupRewarded() | events.GroupSettled() if (
                event.number not in admitted
            ):
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


def _median(seconds: Iterable[float]) -> float:
    """The median, rounded; 0 of nothing."""
    found = list(seconds)
    return rounded(median(found)) if found else 0.0


def measured_on(workers: Sequence[events.WorkerDescribed]) -> str | None:
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
    if recording.updates.versions < MIN_VERSIONS:
        raise ConfigError(
            f"{run} ended after {recording.updates.versions} parameter update(s); a profile needs a run with at least "
            f"{MIN_VERSIONS} versions; train for longer, or give another run"
        )
    if recording.lost_ranks:
        raise ConfigError(
            f"{run} lost a machine, and went on with fewer ranks (event ranks.restarted): its times are of two numbers "
            "of ranks; give a run that kept all of them"
        )
    if not recording.warm_activity("decode_steps"):
        raise ConfigError(
            f"{run} does not say how long its decode steps took, so there is no decode curve; give a run of a rollout "
            "engine that measures them, such as rollout.name=native"
        )
