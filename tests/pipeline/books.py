"""A run's books, kept a second time from its events alone, and compared with the pipeline's own at every event.

    admission   the inequality, with every number in it counted here
    fates       one for each admitted group, the one that its reward and its fetch give it
    order       what is taken when, and how old it is
    steps       what the trainer was given, and what it said of it

Nothing here asks the pipeline's own counters, its staleness or its ledger.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from math import floor

from headway.algorithms.scores import has_variance
from headway.data.types import TrajectoryId
from headway.errors import ScoringFailed
from headway.events import (
    BatchTaken,
    Event,
    GroupAdmitted,
    GroupRewarded,
    GroupSettled,
    OptimizerStepped,
    ReplicaJoined,
    ReplicaLost,
    RunFinished,
    RunStarted,
    TrajectoryFinished,
    UpdatePhase,
)
from headway.pipeline.run import Status
from headway.pipeline.stages.reward import LEAST_PATIENCE_S
from tests.pipeline.fakes import prompt, seeded_lengths
from tests.pipeline.scenario import Run, Scenario


@dataclass(frozen=True, slots=True)
class Rules:
    """What the configuration promises, in numbers of the test's own."""

    eta: Fraction
    b: int
    mini_batch: int
    fetch: int
    ppo_epochs: int
    window: int | None
    """W; None for completion order."""
    max_lag: int | None
    drops: bool
    waves: bool
    total: int | None
    rows: int | None
    """Of all epochs together, where the data decide."""
    n: int

    @classmethod
    def of(cls, scenario: Scenario) -> Rules:
        config = scenario.config
        values = config.async_training
        fetch = values.require_batches * scenario.mini_batch
        b = values.trigger_parameter_sync_step * fetch
        windows = {"fifo": 1, "ready": None, "window": values.window if isinstance(values.window, int) else b}
        return cls(
            eta=values.staleness_threshold,
            b=b,
            mini_batch=scenario.mini_batch,
            fetch=fetch,
            ppo_epochs=config.actor.ppo_epochs,
            window=windows[values.order.value],
            max_lag=values.max_lag,
            drops=values.on_overdue == "drop",
            waves=values.admission.value == "batch",
            total=config.rollout.total_rollout_steps,
            rows=None if scenario.epochs is None else scenario.rows * scenario.epochs,
            n=scenario.n,
        )

    def limit(self, version: int) -> int:
        """⌊(v + 1 + η)·B⌋ in whole numbers."""
        p, q = self.eta.numerator, self.eta.denominator
        return ((version + 1) * q + p) * self.b // q

    @property
    def bound(self) -> int | None:
        """On the lag of a group that is trained on."""
        if self.limit(0) == self.b:
            return 0
        proved = None if self.window is None else floor(1 + self.eta + Fraction(self.window - 2, self.b))
        bounds = [bound for bound in (proved, self.max_lag) if bound is not None]
        return min(bounds, default=None)


class Books:
    """``Books(run).check()`` replays the run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.rules = Rules.of(run.scenario)
        self.lengths = run.scenario.lengths or seeded_lengths(run.scenario.seed)
        self.serves: dict[str, int] = {}
        """Serving replica → the version that it has loaded."""
        self.last_served = 0
        """Oldest version served when the last replica was lost."""
        self.arriving: dict[str, int] = {}
        """The same for those that do not serve yet."""
        self.admissions: list[GroupAdmitted] = []
        self.trajectories: dict[int, list[TrajectoryFinished]] = {}
        self.unrewarded: set[int] = set()
        self.kept: list[int] = []
        """Groups that the trainer may take, in the order in which they were rewarded."""
        self.taken: dict[int, int] = {}
        """Group → the trainer's version when it was taken; in order."""
        self.youngest = -1
        """The largest number that was taken."""
        self.fates: dict[int, str] = {}
        self.discarded = self.consumed = 0
        self.in_a_row = 0
        self.head = 0
        self.fetch: list[int] = []
        self.steps: list[OptimizerStepped] = []
        self._steps_of_batch = 0
        self.trained: set[int] = set()
        self._wave = False

    def check(self) -> Books:
        times = [event.time for event in self.run.events]
        assert times == sorted(times)
        for time, events in groupby(self.run.events, key=lambda event: event.time):
            for event in events:
                self._on(event)
                self._wave = isinstance(event, GroupAdmitted)
            if time < self.run.ended:
                self._nothing_waits_that_may_come_in(time)
        self._the_end()
        return self

    def _on(self, event: Event) -> None:
        match event:
            case RunStarted():
                assert event.lag_bound == self.rules.bound
                self.serves = dict.fromkeys(event.slots, 0)
            case GroupAdmitted():
                self._admitted(event)
            case TrajectoryFinished():
                self._finished(event)
            case GroupRewarded():
                self._rewarded(event)
            case BatchTaken():
                self._taken(event)
            case OptimizerStepped():
                self._stepped(event)
            case GroupSettled():
                self._settled(event)
            case UpdatePhase(phase="load"):
                self._loaded(event)
            case ReplicaJoined():
                assert self.arriving.pop(event.replica) == event.version >= self.served
                self.serves[event.replica] = event.version
            case ReplicaLost():
                self.last_served = self.served
                self.serves.pop(event.replica, None)
                self.arriving.pop(event.replica, None)
            case RunFinished():
                assert event is self.run.events[-1]

    # ------------------------------------------------------------------------------------------ admission

    @property
    def served(self) -> int:
        return min(self.serves.values(), default=self.last_served)

    @property
    def version(self) -> int:
        return self.consumed // self.rules.b

    @property
    def outstanding(self) -> int:
        """Admitted − discarded."""
        return len(self.admissions) - self.discarded

    @property
    def room(self) -> int:
        limit, total = self.rules.limit(self.served), self.rules.total
        return (limit if total is None else min(limit, total)) - self.outstanding

    def _admitted(self, event: GroupAdmitted) -> None:
        assert self.room > 0, f"group {event.number} came in beyond the limit"
        if self.rules.waves and not self._wave:
            assert not self.unrewarded, "a wave began before the last one was rewarded"
        assert event.number == len(self.admissions)
        self.admissions.append(event)
        self.unrewarded.add(event.number)
        counted = (self.served, self.rules.limit(self.served), len(self.admissions), self.discarded)
        assert (event.version, event.limit, event.admitted, event.discarded) == counted
        assert self.outstanding - self.version * self.rules.b <= self.rules.limit(0), "lemma 1"

    def _nothing_waits_that_may_come_in(self, time: float) -> None:
        """When nothing more happens at an instant, admission has made use of all the room that there is."""
        run, rules = self.run, self.rules
        first_attempts = sum(event.attempt == 0 for event in self.admissions)
        exhausted = rules.rows is not None and first_attempts == rules.rows
        stops = run.stopped_at is not None and time >= run.stopped_at
        waits_for_wave = rules.waves and (self.unrewarded or (rules.eta == 0 and run.scenario.problems))
        if self.serves and not (exhausted or stops or waits_for_wave):
            assert self.room <= 0, f"at {time} s there is room for {self.room} groups that nobody admits"

    def _loaded(self, event: UpdatePhase) -> None:
        ended = self.rules.rows is not None and self.consumed % self.rules.b > 0
        assert event.version <= self.version + ended, "a version was loaded before it was trained"
        known = self.serves if event.where in self.serves else self.arriving
        assert event.version > known.get(event.where, -1), "versions only grow"
        known[event.where] = event.version
        apart = floor(1 + self.rules.eta)
        # One that the end of the data cut short is not counted: `version` is the last whole one.
        assert min(max(self.serves.values(), default=0), self.version) - self.served <= apart, "theorem 5"
        assert self.version - self.served <= apart

    # ------------------------------------------------------------------------------------------ groups

    def _id(self, number: int, k: int) -> TrajectoryId:
        event = self.admissions[number]
        return TrajectoryId(event.epoch, event.row, event.attempt, k)

    def _finished(self, event: TrajectoryFinished) -> None:
        self.trajectories.setdefault(event.number, []).append(event)
        assert event.finished <= event.time
        length = self.lengths(self._id(event.number, event.k))
        if event.finish_reason == "aborted":
            assert event.tokens <= length
        else:
            assert event.tokens == length, "nothing is cut short, and nothing lost on the way"

    def _expected(self, number: int) -> str:
        """What the reward makes of a group: ``failed``, ``filtered`` or ``kept``."""
        event, scenario = self.admissions[number], self.run.scenario
        try:
            rewards = scenario.reward.rewards(prompt(event.epoch, event.row, event.attempt), self.rules.n)
        except ScoringFailed:
            return "failed"
        return "filtered" if scenario.filters and not has_variance(rewards) else "kept"

    def _rewarded(self, event: GroupRewarded) -> None:
        assert event.number in self.unrewarded
        assert len(event.rewards) == self.rules.n
        expected = self._expected(event.number)
        assert expected != "failed"
        if expected == "kept":
            self.unrewarded.remove(event.number)
            self.kept.append(event.number)
            self.in_a_row = 0

    def _taken(self, event: BatchTaken) -> None:
        rules = self.rules
        assert event.version == self.version
        assert event.waited[0] <= event.waited[1] == event.time
        assert len(event.numbers) == rules.fetch or (rules.rows is not None and 0 < len(event.numbers) < rules.fetch)
        for number in event.numbers:
            assert number not in self.taken and number not in self.fates
            assert number in self.kept
            if rules.window is not None:
                assert number < self._head() + rules.window, "beyond the window"
                assert self.youngest < number + rules.window, "lemma 3: overtaken by more than W − 1"
            self.taken[number] = event.version
            self.youngest = max(self.youngest, number)
        self.fetch, self._steps_of_batch = event.numbers, 0

    def _head(self) -> int:
        while self.head in self.taken or self.head in self.fates:
            self.head += 1
        return self.head

    def _oldest(self, number: int) -> int:
        return min(version for t in self.trajectories[number] for _, version in t.version_spans)

    def _lag(self, number: int) -> int:
        return self.taken[number] - self._oldest(number)

    def _settled(self, event: GroupSettled) -> None:
        number, taken = event.number, event.number in self.taken
        assert number < len(self.admissions) and number not in self.fates
        self.fates[number] = event.fate
        assert (event.reason is None) == (event.fate in ("trained", "in_flight"))
        assert (event.lag is not None) == (event.fate == "trained")
        if event.fate == "in_flight":
            return
        if taken:
            assert event.fate == "trained" or (event.fate, event.reason) == ("dropped", "nonfinite")
            assert (event.fate == "trained") == (number in self.trained)
            self.consumed += 1
        else:
            assert event.fate in ("filtered", "failed", "dropped")
            self.discarded += 1
            self.unrewarded.discard(number)
            self._discarded(event)
        if event.lag is not None:
            bound = self.rules.bound
            assert event.lag == self._lag(number) >= 0
            assert bound is None or event.lag <= bound, f"lag {event.lag} of group {number}, proved is {bound}"
            assert sorted(t.k for t in self.trajectories[number]) == list(range(self.rules.n))

    def _discarded(self, event: GroupSettled) -> None:
        if event.fate != "dropped":
            assert event.fate == self._expected(event.number)
        elif event.reason == "overdue":
            assert self.rules.drops and self.rules.max_lag is not None
            assert self.version - self._oldest(event.number) > self.rules.max_lag
        elif event.reason == "interrupted":
            stopped_at = self.run.stopped_at
            assert stopped_at is not None and event.time >= stopped_at + LEAST_PATIENCE_S
            return  # nobody waited for its scores
        else:
            assert event.reason is not None and event.reason.endswith((" died", " was fenced off"))
            return  # through no fault of its own
        self.in_a_row += 1

    # ------------------------------------------------------------------------------------------ steps

    def _stepped(self, event: OptimizerStepped) -> None:
        rules = self.rules
        first = self._steps_of_batch * rules.mini_batch % (-(-len(self.fetch) // rules.mini_batch) * rules.mini_batch)
        groups = self.fetch[first : first + rules.mini_batch]
        trajectories = [t for number in groups for t in sorted(self.trajectories[number], key=lambda t: t.k)]
        token_lag: Counter[int] = Counter()
        for t in trajectories:
            for place, (start, version) in enumerate(t.version_spans):
                end = t.version_spans[place + 1][0] if place + 1 < len(t.version_spans) else t.tokens
                token_lag[event.version - version] += end - start
        stale = sum(any(version < event.version for _, version in t.version_spans) for t in trajectories)
        assert event.step == len(self.steps)
        assert event.version == self.version
        assert event.lags == [self._lag(number) for number in groups]
        assert event.tokens == sum(t.tokens for t in trajectories)
        assert event.trajectories == len(trajectories) == len(groups) * rules.n
        assert event.token_lag == token_lag
        assert event.stale_trajectories == stale
        given = self.run.trainer.steps[event.step]
        assert [sample.length for sample in given] == [t.tokens for t in trajectories], "the trainer got something else"
        if not event.skipped:
            self.trained.update(groups)
        self.steps.append(event)
        self._steps_of_batch += 1

    # ------------------------------------------------------------------------------------------ the end

    def _the_end(self) -> None:
        run, rules = self.run, self.rules
        finished = run.of(RunFinished)[0]
        assert sorted(self.fates) == list(range(len(self.admissions)))
        counts = Counter(self.fates.values())
        assert finished.groups == {
            "admitted": len(self.admissions),
            **{f: counts[f] for f in finished.groups if f != "admitted"},
        }
        assert sum(counts.values()) == len(self.admissions)
        self._each_prompt_once_and_again_only_if_it_was_lost()
        if rules.window is None and rules.max_lag is None:
            gone = self.taken.keys()
            assert [number for number in self.kept if number in gone] == list(self.taken), "not in order of completion"
        if run.status is None:
            return
        short = self.consumed % rules.b > 0 and not run.pipeline.unfinished
        assert finished.version == self.version + short
        assert set(self.serves.values()) <= {finished.version}, "a replica was left behind"
        if run.status is Status.COMPLETED:
            assert counts["in_flight"] == 0
            assert self.consumed == rules.total or rules.total is None
            assert rules.rows is None or sum(event.attempt == 0 for event in self.admissions) == rules.rows
        elif rules.total is not None:
            assert not short, "a stop ends at a version's boundary"

    def _each_prompt_once_and_again_only_if_it_was_lost(self) -> None:
        rows = self.run.scenario.rows
        first = [(event.epoch, event.row) for event in self.admissions if event.attempt == 0]
        assert first == [divmod(i, rows) for i in range(len(first))]
        lost = {
            self._id(event.number, 0)[:3]
            for event in self.run.of(GroupSettled)
            if event.fate == "dropped" and (event.reason or "").endswith((" died", " was fenced off"))
        }
        again = {self._id(event.number, 0)[:3] for event in self.admissions if event.attempt > 0}
        assert again <= {(epoch, row, attempt + 1) for epoch, row, attempt in lost}
        if self.run.status is Status.COMPLETED and self.rules.rows is not None:
            assert len(again) == len(lost), "a prompt that was lost never came back"
        assert len({self._id(event.number, 0) for event in self.admissions}) == len(self.admissions)
