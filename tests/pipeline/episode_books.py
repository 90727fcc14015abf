"""Everything that must hold for every run whose episodes have several turns.

books       those of any run; what the trainer got is what the last tries of its episodes were answered, and no more
calls       each sampled token has a version that its replica had just then
tries       programs that are run again, and failures that are theirs
"""

from __future__ import annotations

from collections import Counter

from headway.algorithms.scores import has_variance
from headway.config.sizing.placement import min_episodes
from headway.data.types import RowTokens, TrajectoryId
from headway.errors import EpisodeOver, NothingToTrain, ScoringFailed, UpdateFailed, WorkerDied
from headway.events import EpisodeWorkerLost, GroupRewarded, OptimizerStepped, TrajectoryFinished
from headway.pipeline.admission.ledger import FAILED_AT_FIRST
from tests.pipeline.books import Books
from tests.pipeline.episodes import FIRST_SAID, EpisodeCase, TellingRollout, WatchedPrograms
from tests.pipeline.fakes import prompt
from tests.pipeline.machines import (
    FOREVER,
    check_activity,
    check_halts,
    check_lease,
    check_loads,
    check_spans,
    check_superseding,
    check_trainer,
    check_updates,
    check_validations,
    is_gone,
    is_late,
)
from tests.pipeline.scenario import Run


class EpisodeBooks(Books):
    """Books of a run in which programs make the episodes. Tokens and versions are those that replicas told."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.programs = programs_of(run)
        self.told = self.programs.told

    def made(self, number: int) -> list[TrajectoryId]:
        """The group's episodes that have not failed, in order of k."""
        return [self._id(number, k) for k in sorted(t.k for t in self.trajectories[number] if t.failure is None)]

    def answered(self, number: int) -> list[int]:
        """Ids of all tokens that the group may be trained on."""
        return [id for episode in self.made(number) for id in self.programs.last(episode).ids]

    def _finished(self, event: TrajectoryFinished) -> None:
        told = self.trajectories.setdefault(event.number, [])
        assert event.k < self.rules.n and event.k not in {t.k for t in told}, "an episode was told twice"
        told.append(event)
        assert event.finished <= event.time
        if event.finish_reason == "aborted":
            return
        last, limits = self.programs.last(self._id(event.number, event.k)), self.run.pipeline.config.agent
        assert event.turns == len(last.answers) <= limits.max_turns
        spans, ids = event.version_spans, last.ids
        ends = [start for start, _ in spans[1:]] + [event.tokens] * bool(spans)
        versions = [v for (start, v), end in zip(spans, ends, strict=True) for _ in range(start, end)]
        assert versions == [self.told[id].version for id in ids] and event.tokens == len(ids)
        raised = event.limit is None and last.end not in (None, EpisodeOver)
        refused = event.limit is not None and (event.limit not in limits.train_on_limit or not ids)
        assert (event.failure is not None) == (raised or refused or not ids), (event, last)

    def _oldest(self, number: int) -> int:
        if any(t.finish_reason == "aborted" for t in self.trajectories[number]):
            # Perhaps for a token of the turn that was cut, which the event does not count.
            mine = {self._id(number, k) for k in range(self.rules.n)}
            return min(token.version for token in self.told if token.trajectory in mine)
        return min(self.told[id].version for id in self.answered(number))

    def _expected(self, number: int) -> str:
        event, scenario = self.admissions[number], self.run.scenario
        made = len(self.made(number))
        if made < min_episodes(self.run.pipeline.config):
            return "failed"
        try:
            rewards = scenario.reward.rewards(prompt(event.epoch, event.row, event.attempt), made)
        except ScoringFailed:
            return "failed"
        return "filtered" if scenario.filters and not has_variance(rewards) else "kept"

    def _rewarded(self, event: GroupRewarded) -> None:
        assert event.number in self.unrewarded
        assert len(event.rewards) == len(self.made(event.number)) > 0
        expected = self._expected(event.number)
        assert expected != "failed"
        if expected == "kept":
            self.unrewarded.remove(event.number)
            self.kept.append(event.number)
            self.in_a_row = 0

    def _stepped(self, event: OptimizerStepped) -> None:
        rules = self.rules
        first = self._steps_of_batch * rules.mini_batch % (-(-len(self.fetch) // rules.mini_batch) * rules.mini_batch)
        groups = self.fetch[first : first + rules.mini_batch]
        ids = [id for number in groups for id in self.answered(number)]
        assert event.step == len(self.steps)
        assert event.version == self.version
        assert event.lags == [self._lag(number) for number in groups]
        assert event.tokens == len(ids)
        assert event.trajectories == sum(len(self.made(number)) for number in groups)
        assert event.token_lag == Counter(event.version - self.told[id].version for id in ids)
        trained = []
        for sample in self.run.trainer.steps[event.step]:
            row: RowTokens = sample.tokens[sample.index]
            assert (len(row.prompt_ids), len(row.ids)) == (sample.prompt_length, sample.length)
            for id, version, sampled in zip(row.ids.tolist(), row.versions.tolist(), row.loss_mask, strict=True):
                if sampled:
                    assert self.told[id] == (sample.episode, version), "it has another one's version"
                    trained.append(id)
            read = [*row.prompt_ids.tolist(), *row.ids[~row.loss_mask].tolist()]
            assert all(self.told[id].trajectory == sample.episode for id in read if id < FIRST_SAID)
        assert sorted(trained) == sorted(ids), "each token that a last try was answered is trained once, and no other"
        if not event.skipped:
            self.trained.update(groups)
        self.steps.append(event)
        self._steps_of_batch += 1


def programs_of(run: Run) -> WatchedPrograms:
    assert run.hosting is not None and isinstance(run.hosting.programs, WatchedPrograms)
    return run.hosting.programs


def check_calls(run: Run, replica: TellingRollout) -> None:
    """Every token has a version that its replica had just then."""
    for call in replica.answered:
        check_spans(run, replica, call.version_spans, call.length, call.started, call.finished)


def check_tries(run: Run) -> None:
    """No program goes on without its run, and one that asks as before is answered as before."""
    for episode, tries in programs_of(run).tries.items():
        assert all(one.over for one in tries)
        if run.of(EpisodeWorkerLost) or "(-1" in episode:
            continue  # the log was lost with its episode worker; a held-out problem is tried under several versions
        known: dict[tuple[bytes, int], list[int]] = {}
        for one in tries:
            occurred: Counter[bytes] = Counter()
            for context, ids in one.answers:
                assert known.setdefault((context, occurred[context]), ids) == ids, "what was known was sampled again"
                occurred[context] += 1


def check_drains(run: Run) -> None:
    """Where a drain is one of episodes, none of them is on its way while a replica stands still, until a stop."""
    values = run.scenario.config.async_training
    if values.on_update != "drain" or values.drain != "episode":
        return
    until = FOREVER if run.stopped_at is None else run.stopped_at
    stood = [span for replica in run.rollouts if not is_late(replica) for span in replica.stood if span[0] < until]
    for t in run.of(TrajectoryFinished):
        assert not any(t.started < start < t.finished for start, _ in stood), "an episode that a drain did not finish"


def check_episodes(run: Run) -> EpisodeBooks:
    run.assert_clean()
    books = EpisodeBooks(run)
    books.check()
    for replica in run.rollouts:
        assert isinstance(replica, TellingRollout)
        check_calls(run, replica)
        check_loads(run, replica)
        check_halts(run, replica)
        check_activity(run, replica)
    check_trainer(run)
    check_updates(run)
    check_superseding(run)
    check_validations(run)
    if run.scenario.config.cluster.placement == "shared":
        check_lease(run)
    check_tries(run)
    check_drains(run)
    return books


def run_and_check(case: EpisodeCase) -> Run:
    """Runs ``case``. It may fail only for what it was given: programs that leave nothing, no replica, or no episode
    worker."""
    run = case.scenario().run()
    if not isinstance(run.error, None | NothingToTrain | WorkerDied | UpdateFailed):
        raise run.error
    books = check_episodes(run)
    match run.error:
        case NothingToTrain():
            fates = Counter(books.fates.values())
            never = not books.kept and not fates["filtered"] and fates["failed"] == FAILED_AT_FIRST
            assert never or books.in_a_row == 10 * books.rules.b
        case WorkerDied() | UpdateFailed():
            no_replica = all(is_gone(run, replica) for replica in run.rollouts if replica.submitted)
            assert no_replica or all(worker.is_dead for worker in run.episode_workers), run.error
    return run
