"""Random runs whose episodes have several turns: programs that fork, fail, are run again and lose their runners, with
updates between their turns, while replicas and episode workers are lost.

What must hold stands in episode_books.py. More than 2,000 schedules run in the slow tests, the first of them in the
quick ones.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import strategies as st

from headway.events import EpisodeWorkerLost, GroupSettled, ReplicaLost, TrajectoryFinished
from headway.pipeline.run import Status
from tests.pipeline.cases import for_each
from tests.pipeline.episode_books import programs_of, run_and_check
from tests.pipeline.episodes import MANY, SOME, EpisodeCase, TellingRollout, episode_cases
from tests.pipeline.test_random_runs import log
from tests.tiers import enough, mostly_slow

pytestmark = pytest.mark.timeout(900)
"""Quick as they are: a case that fails is run many times more, until it is as small as can be."""

a_few_and_all = pytest.mark.parametrize(
    "share", [pytest.param(1 / 50, id="a few"), pytest.param(1, id="all", marks=pytest.mark.slow)]
)


def lagging(max_lag: int) -> st.SearchStrategy[EpisodeCase]:
    """Runs that drop what is older than ``max_lag``, and have much that is."""
    drops: dict[str, Any] = {"order": "ready", "on_overdue": "drop", "max_lag": max_lag, "eta": Fraction(2)}
    return episode_cases(**drops, troubles=SOME)


def losing(replicas: int) -> st.SearchStrategy[EpisodeCase]:
    """Runs whose machines come and go while turns are under way."""
    machines = ("dies", "dies", "joins", "stop", "episode worker dies", "episode worker dies", "loses a runner")
    return episode_cases(*machines, most=5, replicas=replicas, longest=20)


@dataclass(frozen=True, slots=True)
class Search:
    """Random runs, and what is to be seen in all of them together: else they prove nothing about it."""

    cases: st.SearchStrategy[EpisodeCase]
    schedules: int
    seen: dict[str, int] = field(default_factory=dict)
    """At the least, of what `check` counts."""


SEARCHES = {
    "undisturbed": Search(
        episode_cases(),
        400,
        {Status.COMPLETED: 300, "forks": 500, "dropped tokens": 500, "failed episodes": 500, "several versions": 20},
    ),
    "troubled": Search(
        episode_cases(troubles=MANY, retries=5, min_episodes=1),
        300,
        {"tried again": 1000, "dropped tokens": 1000},
    ),
    "drained by turns": Search(
        episode_cases(on_update="drain", drain="turn", troubles=SOME), 200, {"several versions": 20}
    ),
    "drained by episodes": Search(
        episode_cases(on_update="drain", drain="episode", troubles=SOME), 150, {"tried again": 200}
    ),
    "on policy": Search(episode_cases(eta=Fraction(0)), 200, {"forks": 500, "tried again": 200}),
    "max_lag": Search(st.sampled_from([0, 0, 1]).flatmap(lagging), 200, {"overdue": 200, "aborted": 100}),
    "lost runners": Search(episode_cases("loses a runner", most=6), 300, {"lost with a runner": 300, "forks": 500}),
    "lost machines": Search(
        st.sampled_from([3, 2, 4, 1]).flatmap(losing),
        500,
        {
            "lost replicas": 100,
            "lost episode workers": 150,
            "calls of lost replicas": 60,
            "dropped tokens": 1000,
            Status.INTERRUPTED: 50,
        },
    ),
}


def check(case: EpisodeCase) -> Counter[str]:
    """Run ``case`` and check it. Returns what was to be seen."""
    run = run_and_check(case)
    finished, programs = run.of(TrajectoryFinished), programs_of(run)
    lost = [replica for replica in run.rollouts if isinstance(replica, TellingRollout) and replica.died_at is not None]
    again = [tries for tries in programs.tries.values() if len(tries) > 1]
    return Counter(
        {
            run.status or type(run.error).__name__: 1,
            "forks": sum(int(t.metrics.get("forks", 0)) for t in finished),
            "tried again": len(again),
            "dropped tokens": sum(len({id for one in tries for id in one.ids} - {*tries[-1].ids}) for tries in again),
            "failed episodes": sum(t.failure is not None for t in finished),
            "several versions": sum(len({version for _, version in t.version_spans}) > 1 for t in finished),
            "aborted": sum(t.finish_reason == "aborted" for t in finished),
            "overdue": sum(event.reason == "overdue" for event in run.of(GroupSettled)),
            "lost replicas": len(run.of(ReplicaLost)),
            "lost episode workers": len(run.of(EpisodeWorkerLost)),
            "lost with a runner": programs.lost,
            "calls of lost replicas": sum(replica.open_calls for replica in lost if run.error is None),
        }
    )


@a_few_and_all
@mostly_slow("name", SEARCHES, quick=["undisturbed", "troubled", "drained by episodes", "lost machines"])
def test_everything_holds_in_every_run_of_episodes(name: str, share: float):
    """Hundreds of whole runs: rare coincidences of moments are found by their number alone. All take two minutes."""
    search, seen = SEARCHES[name], Counter[str]()
    for_each(search.cases, share * search.schedules, lambda case: seen.update(check(case)))
    assert all(seen[what] >= int(enough(times, share)) for what, times in search.seen.items()), seen


def test_at_least_two_thousand_schedules_of_episodes_run():
    assert sum(search.schedules for search in SEARCHES.values()) >= 2_000


@a_few_and_all
def test_the_same_seed_gives_the_same_event_log_of_episodes_byte_for_byte(share: float):
    """Dozens of whole runs, twice each."""

    def same(case: EpisodeCase) -> None:
        assert log(case.scenario().run()) == log(case.scenario().run())

    for_each(SEARCHES["lost machines"].cases, share * 50, same)
