"""Warnings of programs' episodes: many that fail, long ones that fail, turns that fork."""

from __future__ import annotations

import random
from collections.abc import Sequence

from headway.data.types import FinishReason, Trajectory, TrajectoryId
from headway.pipeline.admission.group_warnings import LEAST_WINDOW, EpisodeTroubles


def episode(
    turns: int = 3,
    failure: str | None = None,
    limit: str | None = None,
    forks: float = 0,
    reason: FinishReason = FinishReason.STOP,
    again: str | None = None,
) -> Trajectory:
    return Trajectory(
        id=TrajectoryId(0, 0, 0, 0),
        replica="a",
        text="",
        prompt_length=5,
        length=10 * turns,
        finish_reason=reason,
        version_spans=[[0, 0]],
        started=0.0,
        finished=1.0,
        rows=(),
        turns=turns,
        failure=failure,
        again=again,
        limit=limit,
        metrics={"environment_s": 1.0, "forks": forks},
    )


def told(episodes: Sequence[Trajectory], troubles: EpisodeTroubles | None = None) -> list[str]:
    troubles = troubles or EpisodeTroubles(1)
    return [text for one in episodes for text in troubles.look([one])]


def some(every: int, bad: Trajectory, count: int = 4 * LEAST_WINDOW) -> list[Trajectory]:
    """One of ``every`` is ``bad``."""
    return [bad if place % every == 0 else episode() for place in range(count)]


def test_many_failed_episodes_are_a_warning_with_reasons_and_what_to_do():
    (text,) = told(some(4, episode(failure="a step took too long", limit="step")))
    assert text.startswith("of the last 64 episodes 16 (25%) failed (16× a step took too long): ")
    assert "Raise agent.step_timeout_s" in text
    (text,) = told(some(3, episode(failure="ValueError: no")))
    assert "logs/*-programs.log" in text


def test_failures_that_quote_different_answers_are_counted_as_one_in_the_warning():
    faults = [f"program p.py:run raised KeyError: '{n}' (p.py:4, in run)" for n in range(64)]
    mixed = [episode(failure=why) if n % 4 == 0 else episode() for n, why in enumerate(faults)]
    (text,) = told(mixed)
    assert "failed (16× program p.py:run raised KeyError: '0' (p.py:4, in run) and alike): " in text


def test_limits_that_end_half_of_the_episodes_are_told_once():
    cut = episode(limit="tokens", reason=FinishReason.LENGTH)
    (text,) = told(some(2, cut))
    assert text.startswith("of the last 64 episodes 32 were ended by a limit (32 by tokens). ")
    assert text.endswith("Raise data.max_response_length, which all turns share"), "the limit is trained on by default"
    assert told(some(3, cut)) == []


def test_few_failed_episodes_and_those_that_were_aborted_are_none():
    assert told(some(8, episode(failure="no"))) == []
    assert told(some(2, episode(reason=FinishReason.ABORTED))) == []


def test_the_warning_of_failures_comes_again_when_twice_as_many_fail():
    troubles, bad = EpisodeTroubles(1), episode(failure="no")
    assert len(told(some(4, bad), troubles)) == 1
    assert told(some(3, bad), troubles) == []
    (text,) = told(some(1, bad), troubles)
    assert "(100%)" in text or "(75%)" in text or "(6" in text


def test_a_large_run_looks_at_two_versions_and_never_at_more_than_some_thousands():
    assert EpisodeTroubles(100).window == 200
    assert EpisodeTroubles(10**6).window == 2**12


def test_time_outs_that_take_out_long_episodes_are_told_once():
    late = episode(turns=9, failure="it took too long", limit="time")
    (text,) = told(some(6, late))
    assert "time-outs and limits take out long episodes" in text
    assert "34% of the longer half failed at one, and 0% of the shorter half" in text
    assert "Raise agent.episode_timeout_s" in text


def test_failures_that_do_not_depend_on_length_select_nothing():
    dice = random.Random(0)
    lost = [
        episode(dice.randint(1, 9), *(("no", "time") if dice.random() < 0.15 else (None, None))) for _ in range(6400)
    ]
    assert [text for text in told(lost, EpisodeTroubles(64)) if "long episodes" in text] == []
    raised = some(6, episode(turns=9, failure="ValueError: no"))
    assert told(raised) == [], "no limit ended them"


def test_many_forked_turns_are_told_once_with_what_to_do():
    (text,) = told(some(2, episode(turns=3, forks=1)))
    assert "of the last 128 turns that went on with an episode 32 (25%) forked" in text
    assert "only appends" in text
    assert told(some(4, episode(turns=3, forks=1))) == []
    assert told([episode(turns=1)] * 500) == []


def test_a_program_that_is_run_again_is_told_at_once_and_then_when_it_were_ten_times_as_many():
    lost = episode(again="its runner of episode-worker-0 ended with SIGKILL")
    texts = told([episode(), *[lost] * 30])
    assert [text.split(", the last one")[0] for text in texts] == [
        "episodes begun again: 1 so far",
        "episodes begun again: 10 so far",
    ]
    assert "since its runner of episode-worker-0 ended with SIGKILL. What programs raised" in texts[0]
