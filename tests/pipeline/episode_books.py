"""Everything that must hold for every run whose episodes have several turns.

books       those of any run, with the groups' episodes in a second account
tokens      each sampled one trained at most once, with its version, and only if the episode's last try has it
machines    what replicas and the trainer saw
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from headway.algorithms.filters import has_variance
from headway.config.algorithm import min_episodes
from headway.data.types import RowTokens, TrajectoryId
from headway.errors import ScoringFailed
from headway.events import FetchTaken, GroupRewarded, GroupSettled, OptimizerStepped, TrajectoryFinished
from tests.pipeline.books import Books
from tests.pipeline.episodes import FIRST_SAID, EpisodeCase, TellingRollout, WatchedPrograms
from tests.pipeline.fakes import prompt
from tests.pipeline.invariants import check_however_it_ended
from tests.pipeline.machines import (
    check_activity,
    check_halts,
    check_lease,
    check_loads,
    check_superseding,
    check_trainer,
    check_updates,
    check_validations,
    died,
)
from tests.pipeline.scenario import Run


class EpisodeBooks(Books):
    """Books of a run of which episodes may fail."""

    def made(self, number: int) -> list[TrajectoryFinished]:
        """The group's episodes that have not failed, in order of k."""
        finished = sorted(self.trajectories[number], key=lambda t: t.k)
        return [t for t in finished if t.failure is None]

    def _finished(self, event: TrajectoryFinished) -> None:
        self.trajectories.setdefault(event.number, []).append(event)
        assert event.finished <= event.time
        limits = self.run.pipeline.config.rollout
        assert event.turns <= limits.max_turns or event.finish_reason == "aborted"
        assert (event.limit in (None, *limits.train_on_limit)) or event.failure is not None

    def _oldest(self, number: int) -> int:
        return min(version for t in self.made(number) for _, version in t.version_spans)

    def _expected(self, number: int) -> str:
        event, scenario = self.admissions[number], self.run.scenario
        made = len(self.made(number))
        if made < min_episodes(self.run.pipeline.config):
            return "failed"
        try:
            rewards = scenario.reward.rewards(prompt(event.epoch, event.row, event.attempt), made)
        except ScoringFailed:
            return "failed"
        return "filtered" if scenario.group_filter and not has_variance(rewards) else "kept"

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
        first = self.steps_of_fetch * rules.mini_batch % (-(-len(self.fetch) // rules.mini_batch) * rules.mini_batch)
        groups = self.fetch[first : first + rules.mini_batch]
        trajectories = [t for number in groups for t in self.made(number)]
        token_lag: Counter[int] = Counter()
        for t in trajectories:
            ends = [start for start, _ in t.version_spans[1:]] + [t.tokens] * bool(t.version_spans)
            for (start, version), end in zip(t.version_spans, ends, strict=True):
                token_lag[event.version - version] += end - start
        assert event.step == len(self.steps)
        assert event.version == self.version
        assert event.lags == [self._lag(number) for number in groups]
        assert event.tokens == sum(t.tokens for t in trajectories) == token_lag.total()
        assert event.trajectories == len(trajectories)
        assert event.token_lag == token_lag
        given = self.run.trainer.steps[event.step]
        ids = [self._id(number, t.k) for number in groups for t in self.made(number) if t.tokens]
        assert list(dict.fromkeys(sample.episode for sample in given)) == ids, "the trainer got other episodes"
        if not event.skipped:
            self.trained.update(groups)
        self.steps.append(event)
        self.steps_of_fetch += 1

    def _the_end(self) -> None:
        super()._the_end()
        self._second_ledger()

    def _second_ledger(self) -> None:
        """Each episode has the fate of its group, or failed before."""
        n, expected = self.rules.n, Counter[str]()
        for number, fate in self.fates.items():
            finished = self.trajectories.get(number, [])
            aborted = any(t.finish_reason == "aborted" for t in finished)
            failed = 0 if aborted else sum(t.failure is not None for t in finished)
            expected["failed"] += failed
            expected[fate] += n - failed
        counted = self.run.pipeline._wiring.state.ledger.episode_counts()
        assert counted.pop("admitted") == n * len(self.admissions) == sum(counted.values())
        assert {fate: many for fate, many in counted.items() if many} == {
            f: many for f, many in expected.items() if many
        }


def check_tokens_of_episodes(run: Run) -> Counter[str]:
    """Follow every sampled token into the rows that were trained. Returns what there was to see."""
    assert run.hosting is not None
    programs, sampled = run.hosting.programs, TellingRollout.sampled
    assert isinstance(programs, WatchedPrograms)
    seen: Counter[str] = Counter()
    at: dict[int, tuple[int, TrajectoryId, int]] = {}
    """Token → the fetch, episode and row in which it is trained."""
    trained: dict[TrajectoryId, list[int]] = {}
    bound = EpisodeBooks(run).rules.bound
    for event in run.of(OptimizerStepped):
        for sample in run.trainer.steps[event.step]:
            row: RowTokens = sample.tokens.rows[sample.index]
            assert (len(row.prompt_ids), len(row.ids)) == (sample.prompt_length, sample.length)
            place = event.fetch, sample.episode, sample.index
            again = at.get(int(row.ids[row.loss_mask][0])) == place
            for id, version in zip(row.ids[row.loss_mask].tolist(), row.versions[row.loss_mask].tolist(), strict=True):
                assert at.setdefault(id, place) == place, "a token was trained twice"
                token = sampled[id]
                assert (token.trajectory, token.version) == (sample.episode, version), "it has another one's version"
                assert bound is None or event.version - version <= bound
                assert bound != 0 or version == event.version, "a fetch on policy has tokens of another version"
            read = np.concatenate([row.prompt_ids, row.ids[~row.loss_mask]])
            assert all(sampled[id].trajectory == sample.episode for id in read[read < FIRST_SAID].tolist())
            if not again:
                trained.setdefault(sample.episode, []).extend(row.ids[row.loss_mask].tolist())
                seen["rows"] += 1
    for episode, ids in trained.items():
        tries = programs.answers[f"episode {tuple(episode)}"]
        assert sorted(ids) == sorted(tries[-1]), "what is trained is not what the last try was answered"
        seen["episodes"] += 1
        seen["tried again"] += len(tries) > 1
        seen["dropped tokens"] += len(set().union(*tries) - set(ids))
    seen["forks"] = seen["rows"] - seen["episodes"]
    return seen


def check_episodes(run: Run) -> Run:
    run.assert_clean()
    EpisodeBooks(run).check()
    check_tokens_of_episodes(run)
    for replica in run.rollouts:
        check_loads(run, replica)
        check_halts(run, replica)
        check_activity(run, replica)
    check_trainer(run)
    check_updates(run)
    check_superseding(run)
    check_validations(run)
    if run.scenario.config.placement.kind == "shared":
        check_lease(run)
    programs = run.hosting.programs if run.hosting is not None else None
    assert isinstance(programs, WatchedPrograms)
    assert programs.open == 0
    check_drains(run)
    return run


def check_drains(run: Run) -> None:
    """A drain by episodes lets none of them see an update, unless replicas come and go, or differ in their version."""
    values = run.scenario.config.async_training
    if values.on_update != "drain" or values.drain != "episode" or died(run):
        return
    if run.scenario.config.param_update.schedule == "overlapped" or len(run.rollouts) > run.scenario.replicas:
        return
    for t in run.of(TrajectoryFinished):
        assert len({version for _, version in t.version_spans}) <= 1, "an episode that was let finish has one version"


def run_and_check(case: EpisodeCase) -> Run:
    """Runs ``case``. It may fail only for what it was given."""
    return check_however_it_ended(case.scenario().run(), EpisodeBooks, check_episodes)


__all__ = ["EpisodeBooks", "FetchTaken", "GroupSettled", "check_episodes", "check_tokens_of_episodes", "run_and_check"]
