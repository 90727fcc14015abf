"""Episodes of programs in the reports: their metrics, their account, their environments on the time axis."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from statistics import fmean
from typing import Any

import pytest

from headway.events import (
    Event,
    GroupAdmitted,
    GroupSettled,
    ReplicaActivity,
    RunFinished,
    RunStarted,
    Span,
    StageChanged,
    TrajectoryFinished,
)
from headway.reports.metrics.group_tally import GroupTally
from headway.reports.metrics.summary import summary
from headway.reports.metrics.version_row import MOST_OWN, EpisodeSums
from headway.reports.timeline.lanes import Counters, SpanKind
from headway.reports.timeline.timeline import Timeline, build_timeline, idle_reasons
from tests.reports.scripted_run import REPLICA, ScriptedRun
from tests.reports.test_metrics import observe, of_type
from tests.reports.test_views import drawn, final_block, plain_lines, watched

N = 4


def episode(
    number: int = 0,
    k: int = 0,
    turns: int = 2,
    tokens: int = 20,
    failure: str | None = None,
    limit: str | None = None,
    steps: Sequence[Span] = (),
    waits: Sequence[Span] = (),
    **metrics: float,
) -> TrajectoryFinished:
    return TrajectoryFinished(
        time=50.0,
        number=number,
        k=k,
        replica=REPLICA,
        prompt_tokens=5,
        tokens=tokens,
        finish_reason="stop",
        version_spans=[[0, 0]],
        started=1.0,
        finished=2.0,
        turns=turns,
        failure=failure,
        limit=limit,
        steps=list(steps),
        waits=list(waits),
        metrics={"environment_s": sum(end - start for start, end in steps), **metrics},
    )


def agents_run() -> list[Event]:
    """A scripted run whose episodes have turns, of which some failed."""
    rng = random.Random(1)
    run: list[Event] = []
    for event in ScriptedRun(versions=3, n=N).build():
        match event:
            case RunStarted():
                run.append(replace(event, episodes=N))
            case TrajectoryFinished():
                failed = event.number % 6 == 1 and event.k == 2
                step = rng.random() * (event.finished - event.started)
                run.append(
                    replace(
                        event,
                        turns=rng.randint(1, 6),
                        failure="the step raised ValueError" if failed else None,
                        limit="turns" if event.k == 0 else None,
                        steps=[(event.started, event.started + step), (event.finished, event.finished)],
                        metrics={"environment_s": step, "forks": float(event.k == 3), "tool_errors": 1, "won": event.k},
                    )
                )
            case RunFinished(groups=groups):
                failures = sum(e.failure is not None for e in of_type(run, TrajectoryFinished))
                lost = Counts(run)
                run.append(
                    replace(
                        event,
                        episodes={
                            "admitted": N * groups["admitted"],
                            "trained": N * groups["trained"] - lost["trained"],
                            "filtered": N * groups["filtered"] - lost["filtered"],
                            "failed": failures,
                            "dropped": 0,
                            "in_flight": 0,
                        },
                    )
                )
            case _:
                run.append(event)
    return run


class Counts(dict[str, int]):
    """Fate → failed episodes of the groups with that fate."""

    def __init__(self, run: list[Event]) -> None:
        fates = {event.number: event.fate for event in of_type(run, GroupSettled)}
        lost = sorted(fates[e.number] for e in of_type(run, TrajectoryFinished) if e.failure is not None)
        super().__init__({"trained": 0, "filtered": 0} | {fate: len(list(those)) for fate, those in groupby(lost)})


# ------------------------------------------------------------------------------------------------ metrics


def test_a_versions_row_has_the_figures_of_the_episodes_that_finished_in_it() -> None:
    sums = EpisodeSums()
    for one in (
        episode(turns=1, steps=[(0, 1), (3, 4)], waits=[(-2, 0)], forks=0, tool_errors=1, tries=1, won=1),
        episode(turns=4, steps=[(0, 3), (7, 10)], forks=1, tool_call_problems=3, tries=3),
        episode(turns=7, tokens=90, failure="too slow", limit="step", steps=[(0, 2)], won=0),
    ):
        sums.add(one)
    assert sums.values() == {
        "num_turns/mean": 4.0,
        "num_turns/max": 7,
        "environment_s/mean": pytest.approx((2 + 6 + 2) / 3),
        "environment_s/max": 6.0,
        "environment_s/wait_mean": pytest.approx(2 / 3),
        "environment_s/share": pytest.approx(10 / (4 + 10 + 2)),
        "num_turns/fork_ratio": pytest.approx(1 / (0 + 3 + 6)),
        "tools/errors_mean": pytest.approx(1 / 3),
        "tools/unread_calls_mean": pytest.approx(1.0),
        "episodes/failed_ratio": pytest.approx(1 / 3),
        "episodes/retries": 2,
        "episodes/limit/step": pytest.approx(1 / 3),
        "episodes/failed_num_turns_mean": 7.0,
        "episodes/failed_length_mean": 90.0,
        "episode/won": 0.5,
    }


def test_rows_of_single_answers_have_nothing_of_episodes() -> None:
    _, rows = observe(ScriptedRun(versions=2).build())
    names = {name for row in rows for name in row}
    assert not [name for name in names if name.startswith(("num_turns", "environment", "tools", "episode"))]


def test_the_rows_of_a_run_cover_every_episode_once_and_count_their_fates() -> None:
    run = agents_run()
    _, rows = observe(run)
    finished = of_type(run, TrajectoryFinished)
    assert max(row["num_turns/max"] for row in rows if "num_turns/max" in row) == max(e.turns for e in finished)
    last = rows[-1]
    assert last["episodes/failed"] == sum(e.failure is not None for e in finished) > 0
    assert last["episodes/admitted"] == N * last["groups/admitted"]
    agents = summary(observe(run)[0])["agents"]
    assert agents["num_turns/mean"] == pytest.approx(fmean(e.turns for e in finished))
    assert agents["episode/won"] == pytest.approx(1.5)


def test_a_program_that_invents_names_without_end_gets_only_some_of_them_reported() -> None:
    sums = EpisodeSums()
    for k in range(2 * MOST_OWN):
        sums.add(episode(k=k, **{f"seed_{k}": 1.0}))
    assert sum(name.startswith("episode/") for name in sums.values()) == MOST_OWN


def test_the_share_of_contexts_that_needed_no_prefill_is_of_the_time_of_the_row() -> None:
    def cached(event: Event) -> Event:  # beside 200 that were prefilled
        if not isinstance(event, ReplicaActivity):
            return event
        return replace(event, cached_tokens=600 if event.time < 105 else 0, unpinned=2)

    metrics, rows = observe([cached(event) for event in ScriptedRun(versions=2).build()])
    assert [row.get("rollouter/prefix_hit_ratio") for row in rows] == [0.75, 0.0, None]
    result = summary(metrics)
    assert (result["tokens"]["cached"], result["unpinned"]) == (600, 4)


def test_failed_episodes_are_in_no_figure_of_what_was_trained_but_count_as_lost() -> None:
    metrics, rows = observe(
        [
            replace(event, tokens=1000 if event.failure else 10) if isinstance(event, TrajectoryFinished) else event
            for event in agents_run()
        ]
    )
    assert max(row["response_length/max"] for row in rows if "response_length/max" in row) == 10
    assert metrics.bias()["length_ratio"] < 0.7


# ------------------------------------------------------------------------------------------------ the account


def test_the_account_of_episodes_is_counted_again_from_events_and_has_to_agree() -> None:
    run = agents_run()
    result = summary(observe(run)[0])
    assert result["balanced"] is True
    assert result["episodes"] == run[-1].episodes
    assert result["episodes_failed"] == {"the step raised ValueError": result["episodes"]["failed"]}
    for name in ("failed", "trained", "admitted"):
        wrong = replace(run[-1], episodes=run[-1].episodes | {name: run[-1].episodes[name] + 1})
        assert summary(observe([*run[:-1], wrong])[0])["balanced"] is False, name


def test_a_group_that_was_trained_without_all_its_episodes_does_not_balance() -> None:
    run = agents_run()
    trained = next(e.number for e in run if isinstance(e, GroupSettled) and e.fate == "trained")
    missing = next(e for e in run if isinstance(e, TrajectoryFinished) and e.number == trained and e.failure is None)
    metrics = observe([event for event in run if event is not missing])[0]
    assert summary(metrics)["balanced"] is False
    assert f"group {trained} was trained, with 3 episodes of 4" in metrics.tally.problems[0]


def test_groups_keep_the_number_of_episodes_that_they_were_admitted_with() -> None:
    run = agents_run()
    (start,) = of_type(run, RunStarted)
    admitted = of_type(run, GroupAdmitted)
    tally = GroupTally()
    tally.on_event(start)
    tally.on_event(admitted[0])
    tally.on_event(replace(start, episodes=2))
    tally.on_event(admitted[1])
    tally.on_event(episode(number=admitted[0].number, failure="no"))
    tally.on_event(GroupSettled(time=1.0, number=admitted[0].number, fate="dropped", reason="resume"))
    counts = {"admitted": 6, "trained": 0, "filtered": 0, "dropped": 3, "failed": 1, "in_flight": 2}
    assert tally.episode_counts() == counts


def test_a_record_that_does_not_tell_of_episodes_has_none_to_balance() -> None:
    result = summary(observe(ScriptedRun(versions=2).build())[0])
    assert result["balanced"] is True
    assert set(result["episodes"].values()) == {0}


# ------------------------------------------------------------------------------------------------ views


def test_the_end_of_a_run_of_agents_is_told_in_one_line() -> None:
    run = agents_run()
    (line,) = [line for line in final_block(run, None).splitlines() if "episodes finished" in line]
    failed = run[-1].episodes["failed"]
    count = len(of_type(run, TrajectoryFinished))
    assert line.strip().startswith(f"{count} episodes finished, 3.")
    assert "turns on average (at most 6), " in line and "of their time in the environment" in line
    assert line.endswith(f"; {failed} failed ({failed} the step raised ValueError).")
    assert "episodes finished" not in final_block(ScriptedRun(versions=2).build(), None)


def test_a_line_of_the_log_and_of_the_panel_has_turns_and_what_failed() -> None:
    run = agents_run()
    (line, *_) = [line for line in plain_lines(run) if "  version 0  " in line]
    assert "  turns 3." in line and "  episodes failed " in line
    text = drawn(watched(run[: len(run) // 2]), 100)
    (row,) = [line for line in text.splitlines() if line.strip().startswith("episodes")]
    assert "turns 3." in row and "max 6" in row and "environment" in row and "failed" in row
    assert "episodes" not in drawn(watched(ScriptedRun(versions=3).build()), 100)


# ------------------------------------------------------------------------------------------------ the timeline


def lane(timeline: Timeline, name: str) -> Any:
    return next(lane for lane in timeline.lanes if lane.name == name)


def test_steps_of_episodes_are_a_lane_with_how_many_there_were_at_once() -> None:
    run = ScriptedRun(versions=1).build()
    run[-1:-1] = [
        episode(steps=[(101, 102), (102.5, 103)], waits=[(100.2, 101)]),
        episode(steps=[(101.5, 102.2)], waits=[(100.5, 101.5)]),
    ]
    timeline = build_timeline(run)
    steps = lane(timeline, "steps")
    assert steps.group == "Environments"
    working = [(s.start, s.end, s.label) for s in steps.spans if s.kind is SpanKind.ENVIRONMENT]
    assert working == [(101, 102.2, "up to 2 episodes in steps at once"), (102.5, 103, "1 episode in a step")]
    assert steps.seconds(timeline.window) == pytest.approx(timeline.window[1] - timeline.window[0]), "no gap"
    waits = lane(timeline, "steps: waited for")
    assert [(s.start, s.end) for s in waits.spans] == [(100.2, 101.5)]
    assert "up to 2 episodes wait at once for an environment" in waits.spans[0].label
    counter = next(c for c in timeline.counters if c.name == "episodes in environments")
    assert dict(counter.points)[101.5] == 2


def test_a_run_of_single_answers_has_no_lane_of_environments() -> None:
    timeline = build_timeline(ScriptedRun(versions=1).build())
    assert not [lane for lane in timeline.lanes if lane.group == "Environments"]
    assert not [counter for counter in timeline.counters if "environment" in counter.name]


def test_idle_time_says_where_episodes_are_in_their_environments() -> None:
    run = ScriptedRun(versions=2).build()
    started = run[0].time
    run[1:1] = [
        StageChanged(time=started, stage="PromptLoader", state="waiting_input", waiting_for="room"),
    ]
    # Replicas are busy for the first 80% of each version, which begins after 1 s; the trainer waits for 1 s.
    run[-1:-1] = [episode(steps=[(104.0, 104.6)])]
    reasons = {found.reason: found.seconds for found in idle_reasons(build_timeline(run))}
    assert reasons["no requests: the staleness limit is reached, and episodes are in their environments"] > 0.3


def test_a_trainer_that_waits_while_episodes_step_and_nothing_decodes_says_so() -> None:
    run = [e for e in ScriptedRun(versions=2).build() if not isinstance(e, ReplicaActivity)]
    run[-1:-1] = [episode(steps=[(101.2, 101.9)])]
    reasons = {found.reason: found.seconds for found in idle_reasons(build_timeline(run))}
    assert reasons["waits for groups: episodes are in their environments, and nothing decodes"] == pytest.approx(0.7)


def test_an_episode_is_counted_in_its_steps_and_between_them_where_it_waits_for_the_policy() -> None:
    counters = Counters()
    counters.on_event(episode(steps=[(1, 2), (4, 5)]))
    found = {counter.name: list(counter.points) for counter in counters.all()}
    assert found == {
        "episodes in environments": [(1, 1), (2, 0), (4, 1), (5, 0)],
        "episodes at the policy": [(2, 1), (4, 0)],
    }
