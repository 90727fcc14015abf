"""Validate: measures the held-out accuracy of a version, beside training.

    consumes        validations that are due, and the last version's, which nobody orders: which one is the last
                    is known only when no more updates come
    waits for       its replica, which loads nothing newer until it is done, or all of them; the scores of its answers
    is unblocked by ParamUpdate; by a replica, or by another where it is lost; by the reward's processes
    produces        nothing but the event, in order of versions

Validation is not counted in the inequality: it generates with first priority and trains nothing. `Validators` defines
which replicas answer: programs run on all replicas, and at η > 0 their answers may be of several versions, which are
reported. Answers of one version are scored while those of the next are being generated. If the first validation has
many problems and none can be scored, the run ends, whatever was trained meanwhile. If its first problems all time out,
the run ends with those. A stop does not wait for missing scores: the validation is left unfinished.

Replicas that answer a validation's held-out problems, and whether they finish before they load newer weights:

single answers            one replica, which finishes before it loads the next version
programs, η = 0           all replicas, each of which finishes before it loads the next version
programs, η > 0           all replicas, under whatever version they have: training waits for no held-out episode
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from headway.config.schema import Config
from headway.data.interfaces.episode_groups import Group, Scores, means_of_parts
from headway.data.interfaces.rollout import Priority
from headway.data.types import Prompt, Trajectory
from headway.errors import NothingToTrain, ScoringFailed, WorkerDied
from headway.events import ValidationFinished
from headway.pipeline.admission.ledger import (
    EPISODE_FAILED,
    FAILED_AT_VALIDATION,
    cannot_be_scored,
    timed_out,
)
from headway.pipeline.admission.pipeline_state import RunState, now
from headway.pipeline.remote_workers import Replica
from headway.pipeline.stage import Signal, Stage
from headway.pipeline.stages.prompt_loader import sampling
from headway.pipeline.stages.reward import Scoring, ScoringAbandoned
from headway.pipeline.update.replica_pool import ReplicaPool
from headway.runtime.task_groups import Tasks, concurrently, failing_as_one


@dataclass(frozen=True, slots=True)
class Validation:
    """Validation of ``version``, which is due."""

    version: int
    replica: Replica | None
    """Replica that answers; None for all replicas."""


class Validators:
    """The replicas of a run that answer its validations."""

    def __init__(self, config: Config, state: RunState, pool: ReplicaPool, prompts: Sequence[Prompt]) -> None:
        self.prompts = prompts
        self.everywhere = config.agent.has_program
        """True if all replicas answer, False if one does."""
        self.newest = 0
        """Newest version whose validation was ordered."""
        self.answered: int | None = None
        """Newest version with complete answers; None before the first."""
        self.under_way: set[int] = set()
        """Versions whose validations were ordered and lack answers."""
        self._state = state
        self.pool = pool
        self._test_freq = config.rollout.test_freq if prompts else -1
        """Number of versions from one validation to the next; -1 for no validation."""
        self._finishes = not self.everywhere or state.staleness.eta == 0
        """True if a replica finishes its answers before it loads a newer version."""

    def is_due(self, version: int) -> bool:
        """Return True if a validation fell due at ``version``, or at an earlier version that was skipped."""
        if self._state.hurried:
            return False
        return self._test_freq > 0 and version // self._test_freq > self.newest // self._test_freq

    def order_no_more(self) -> None:
        """Order no more validations."""
        self._test_freq = -1

    async def order_when_served(self, version: int) -> Validation:
        """Return the validation of ``version`` once some replica serves."""
        await self.pool.served()
        return self.order(version)

    def order(self, version: int) -> Validation:
        """Return the validation of ``version``. All replicas that will answer must have loaded it."""
        self.newest = max(self.newest, version)
        self.under_way.add(version)
        if self.everywhere:
            for replica in self.pool.serving:
                self.keep(replica)
            return Validation(version, None)
        replica = self.pool.validator
        self.keep(replica)
        return Validation(version, replica)

    def keep(self, replica: Replica) -> None:
        """Keep ``replica`` from loading newer versions if it has to finish a validation first."""
        if self._finishes:
            self._state.validation(replica.name, running=True)

    def let_go(self, validation: Validation) -> None:
        """Let replicas load newer versions: nothing is generated for ``validation`` any more."""
        self.under_way.discard(validation.version)
        # All replicas: if some were lost meanwhile, more than one may have been kept for it.
        for name in list(self._state.validating):
            self._state.validation(name, running=False)


Answer = tuple[Group, Scores | ScoringFailed]
"""Answers to a held-out problem, with their scores or the error of scoring, which counts as 0."""


@dataclass(eq=False)
class Validate(Stage[Validation, None]):
    concurrency = None

    config: Config
    run_state: RunState
    validators: Validators
    scoring: Scoring
    stop_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        self._prompts = prompts = self.validators.prompts
        self._sampling = sampling(self.config, self.stop_token_ids, self.config.rollout.val_temperature)
        self._shown = frozenset[int]() if self.run_state.samples is None else self.run_state.samples.held_out(prompts)
        """Indices of the problems that leave a sample of each validation."""
        self._reported = asyncio.Event()
        """Event that is set once the most recent validation is reported."""
        self._reported.set()  # nothing comes before the first validation
        self._open = 0
        """Number of validations received and not reported."""
        self._finished = Signal()
        self._input_ended_before = False

    async def get_input_data(self) -> Validation | None:
        if (validation := await super().get_input_data()) is not None:
            self._open += 1
            return validation
        if self._input_ended_before:  # the last version's validation was returned below
            return None
        self._input_ended_before = True
        with self._waiting_within("the validations before the last one"):
            await self._finished.until(lambda: self._open == 0)
        known = not self._prompts or self.validators.answered == self.run_state.version
        if known or self.scoring.closed or self.run_state.hurried:
            return None
        self._open += 1
        return await self.validators.order_when_served(self.run_state.version)

    async def process_data(self, validation: Validation) -> AsyncGenerator[None, None]:
        # Validations report in order: each waits for the one before.
        before, self._reported = self._reported, asyncio.Event()
        reported = self._reported
        try:
            await self._validate(validation, before)
        except ScoringAbandoned:
            text = f"version {validation.version} was not validated: the run ends, and the scores did not come"
            self.run_state.note(text, "info")
        finally:
            reported.set()
            self._open -= 1
            self._finished.changed()
        return
        yield  # never reached: makes this an asynchronous generator, as `Stage` expects

    async def _validate(self, validation: Validation, before: asyncio.Event) -> None:
        started, due, first = now(), validation.version, validation.version == 0
        while (answers := await failing_as_one(partial(self._answers_to, validation, first))) is None:
            validation = await self.validators.order_when_served(due)
        trajectories = [t for finished, _ in answers for t in finished.trajectories]
        failures = [scores for _, scores in answers if isinstance(scores, ScoringFailed)]
        by_source = {
            name: _accuracy([answer for answer in answers if answer[0].prompt.source == name])
            for name in sorted({prompt.source for prompt in self._prompts})
        }
        # Only now: answers and scores are made while those of the version before are still open.
        await before.wait()
        version = due if validation.replica is None else _version_of(trajectories, due)
        if failures and len(failures) == len(answers):
            self._none_scored(failures, version, first=first)
        self.emit(
            ValidationFinished(
                time=now(),
                version=version,
                accuracy=_accuracy(answers),
                problems=len(answers),
                mean_tokens=sum(t.length for t in trajectories) / max(1, len(trajectories)),
                failed=len(failures),
                span=(started, now()),
                failed_episodes=sum(t.failure is not None for t in trajectories),
                versions=sorted({version for t in trajectories for _, version in t.version_spans}),
                by_source=by_source if len(by_source) > 1 else {},
                parts=means_of_parts(scores.parts for _, scores in answers if isinstance(scores, Scores)),
            )
        )
        if (samples := self.run_state.samples) is not None:
            for finished, scores in sorted(answers, key=lambda answer: answer[0].number):
                if finished.shown:
                    samples.validated(version, finished, scores if isinstance(scores, Scores) else None, now())

    def _none_scored(self, failures: Sequence[ScoringFailed], version: int, *, first: bool) -> None:
        """Warn that all problems failed. Raises `NothingToTrain` for the ``first`` validation if it has many."""
        reasons = [str(failure) for failure in failures]
        problems = f"the {len(reasons)} held-out problems at version {version}"
        if len(reasons) >= FAILED_AT_VALIDATION and first:
            raise NothingToTrain(cannot_be_scored(problems, reasons))
        self.run_state.note(cannot_be_scored(problems, reasons))

    async def _answers_to(self, validation: Validation, first: bool, tasks: Tasks) -> list[Answer] | None:
        """Return the answers to all problems, with scores; None if the answering replica is lost and others remain."""
        requests = [
            Group(i, prompt, self.config.rollout.val_n, self._sampling, Priority.VALIDATION, shown=i in self._shown)
            for i, prompt in enumerate(self._prompts)
        ]
        answers: list[Group] = []
        scoring: list[asyncio.Task[Scores | ScoringFailed]] = []
        reasons: list[str] | None = [] if first else None
        replica = validation.replica
        workers = self.validators.pool.episode_workers

        async def take(made: AsyncGenerator[Group, None]) -> None:
            async with aclosing(made) as groups:
                async for finished in groups:
                    answers.append(finished)
                    # In the order of `answers`: both are zipped below.
                    scoring.append(tasks.start(self._score(finished, reasons)))

        try:
            with self._waiting_within("all replicas" if replica is None else replica.name):
                if replica is not None:
                    await take(workers.generate((None, requests), on=replica.name))
                else:
                    await concurrently(take(workers.generate(share)) for share in workers.assign(requests))
        except WorkerDied:  # the pool has told the episode workers of the loss
            if replica is None:
                raise
            for task in scoring:
                task.cancel()
            return None
        except asyncio.CancelledError:  # a score was given up or failed for good during generation
            self.validators.let_go(validation)
            raise
        trajectories = [t for answer in answers for t in answer.trajectories]
        version = validation.version
        if replica is not None:
            staleness = self.run_state.staleness  # the replica may be lost meanwhile
            version = _version_of(trajectories, staleness.loaded.get(replica.name, staleness.served_version))
        # With programs an earlier validation may take longer than a later one.
        self.validators.answered = max(version, self.validators.answered or 0)
        self.validators.let_go(validation)  # it may load again while scores come in
        return [(answer, await score) for answer, score in zip(answers, scoring, strict=True)]

    async def _score(self, finished: Group, reasons: list[str] | None) -> Scores | ScoringFailed:
        """Return the scores of a problem, or the error of scoring. ``reasons``: reasons for failure in the first
        validation so far, in the order of scoring, "" for a success; None in later validations. Raises `NothingToTrain`
        if the first problems of the first validation all time out.
        """
        made = [t for t in finished.trajectories if t.failure is None]
        scores: Scores | ScoringFailed
        try:
            if not made:
                raise ScoringFailed(f"{EPISODE_FAILED}: {finished.trajectories[0].failure}")
            scores = await self.scoring.score(finished.prompt, made)
        except ScoringAbandoned:  # a `ScoringFailed`, too, but not a failure of the reward: the run ends
            raise
        except ScoringFailed as failure:
            scores = failure
        if reasons is not None:
            reasons.append("" if isinstance(scores, Scores) else str(scores))
            if len(reasons) == FAILED_AT_VALIDATION and all(map(timed_out, reasons)):
                count, problems = len(reasons), len(self._prompts)
                which = f"the {count}" if count == problems else f"the first {count} of {problems}"
                raise NothingToTrain(cannot_be_scored(f"{which} held-out problems at version 0", reasons))
        return scores


def _accuracy(answers: Sequence[Answer]) -> float:
    """Return the mean over problems of the mean reward of their answers."""
    means = (float(scores.rewards.mean()) if isinstance(scores, Scores) else 0.0 for _, scores in answers)
    return sum(means) / max(1, len(answers))


def _version_of(trajectories: Sequence[Trajectory], otherwise: int) -> int:
    """Return the version that sampled the answers; ``otherwise`` if they have no tokens."""
    return max((version for t in trajectories for _, version in t.version_spans), default=otherwise)
