"""What drawn groups and problems leave behind, whatever becomes of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headway.data.interfaces.episode_groups import Group, Scores
from headway.data.interfaces.rollout import SamplingParams
from headway.data.interfaces.training import StepContext, StepReport, TrainedRow
from headway.data.mixing import drawn_problems, place_of_group, share_of
from headway.data.types import Conversation, TrainSample, TrajectoryId
from headway.events import BatchTaken, GroupAdmitted, GroupRewarded, GroupSettled, RunFinished, ValidationFinished
from headway.pipeline.admission.ledger import Fate
from headway.pipeline.admission.sample_collector import (
    DrawnGroup,
    SampleOutlet,
    Samples,
    plain,
    rounded,
    storable,
)
from tests.pipeline.fakes import FakeReward, fails, prompt, validation_prompts
from tests.pipeline.scenario import Run, Scenario
from tests.pipeline.test_episode_rewards import episode


class Spelled:
    """Token ids as words."""

    def text(self, ids: Sequence[int]) -> str:
        return " ".join(self.pieces(ids))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [f"t{id}" for id in ids]


def trained(
    trajectory: TrajectoryId, columns: dict[str, Any] | None = None, first: int = 0, **others: Any
) -> TrainedRow:
    values = np.array([-0.25, -1.0, -2.0], np.float32)
    return TrainedRow(
        **{
            "episode": trajectory,
            "prompt_ids": np.arange(3, dtype=np.int32),
            "ids": np.arange(first, first + 3, dtype=np.int32),
            "mask": np.array([True, True, False]),
            "versions": np.array([3, 3, -1], np.int32),
            "behaviour": values - 1 / 3,
            "logprobs": values,
            "entropy": -values,
            "columns": columns or {},
            **others,
        }
    )


def shows(run: Run) -> None:
    """Have the trainer of a run show a row of each episode that it is asked to."""
    step = run.trainer.train_step

    async def train_step(samples: Sequence[TrainSample], context: StepContext) -> StepReport:
        report = await step(samples, context)
        rows = [trained(s.episode) for s in samples if s.episode[:3] in context.shown]
        return replace(report, shown=tuple(rows))

    run.trainer.train_step = train_step  # type: ignore[method-assign]


def ran(scenario: Scenario, samples: int = 2) -> tuple[Run, list[dict[str, Any]]]:
    kept: list[dict[str, Any]] = []
    scenario = replace(scenario, samples=SampleOutlet(kept.append, Spelled()), script=scenario.script or shows)
    scenario.sections = {**scenario.sections, "reports": {"samples": samples}}
    run = scenario.run()
    json.dumps(kept)
    return run, kept


def is_drawn(run: Run, number: int, samples: int = 2) -> bool:
    return place_of_group(0, number) < share_of(samples, run.pipeline.config.groups_per_version)


FATES = Scenario(
    "async_partial",
    n=4,
    reward=FakeReward(lambda p: fails("no") if p.row % 4 == 1 else [1.0, 1.0] if p.row % 4 == 2 else [0.0, 1.0]),
    filters=True,
    failing=lambda number, k: "broke" if number % 8 == 3 else None,
)


def test_each_drawn_group_leaves_one_record_of_its_fate_and_no_other_does():
    run, kept = ran(FATES)
    run.assert_completed()
    settled = {event.number: event for event in run.of(GroupSettled)}
    drawn = [number for number in settled if is_drawn(run, number)]
    assert [record["group"] for record in kept] == drawn
    assert {record["fate"] for record in kept} == {"trained", "filtered", "failed"}
    taken = {number: event.version for event in run.of(BatchTaken) for number in event.numbers}
    admitted = {event.number: event for event in run.of(GroupAdmitted)}
    for record in kept:
        event = settled[record["group"]]
        assert (record["fate"], record["reason"], record["lag"]) == (event.fate, event.reason, event.lag)
        assert record["times"]["settled"] == pytest.approx(event.time, abs=1e-4)
        assert record["times"]["admitted"] == pytest.approx(admitted[event.number].time, abs=1e-4)
        if event.fate == "trained":
            assert record["version"] == taken[event.number]
            assert [e["rows"][0]["ids"] for e in record["episodes"]] == [[0, 1, 2]] * 4
        else:
            assert all(e["rows"] == [] for e in record["episodes"])
        if event.fate in ("trained", "filtered"):
            (rewarded,) = [e for e in run.of(GroupRewarded) if e.number == event.number]
            assert [e["reward"] for e in record["episodes"]] == rewarded.rewards
        elif event.reason is not None and "broke" in event.reason:
            assert [e["failure"] for e in record["episodes"]] == ["broke"] * 4


def test_the_trainer_is_asked_for_drawn_groups_alone_and_in_the_first_epoch():
    scenario = Scenario(
        "async_partial",
        sections={"actor": {"ppo_mini_batch_size": 2, "ppo_epochs": 2}},
        async_training={"require_batches": 2},
    )
    run, kept = ran(scenario)
    steps = list(zip(run.trainer.steps, run.trainer.contexts, strict=True))
    numbers = {(e.epoch, e.row, e.attempt): e.number for e in run.of(GroupAdmitted)}
    for index, (samples, context) in enumerate(steps):
        of_step = {sample.episode[:3] for sample in samples}
        first = index % 4 < 2
        assert context.shown == {one for one in of_step if first and is_drawn(run, numbers[one])}
    assert any(context.shown for _, context in steps)
    assert all(len(e["rows"]) == 1 for record in kept for e in record["episodes"] if record["fate"] == "trained")


@pytest.mark.slow
def test_without_samples_nothing_is_drawn_and_the_run_is_the_same():
    run, kept = ran(FATES, samples=0)
    other, more = ran(FATES, samples=1000)
    assert kept == []
    assert all(context.shown == frozenset() for context in run.trainer.contexts)
    assert {record["group"] for record in more} == {event.number for event in other.of(GroupSettled)}
    assert run.events == other.events


def test_the_same_problems_are_shown_at_each_validation():
    run, kept = ran(Scenario("async_partial", problems=7, reward=FakeReward(parts={"exact": [1.0], "style": [None]})))
    rows = [problem.row for problem in validation_prompts(7)]
    problems = sorted(drawn_problems(0, rows, 2))
    shown = [record for record in kept if "validation" in record]
    versions = [event.version for event in run.of(ValidationFinished)]
    assert [(r["validation"], r["problem"]) for r in shown] == [(v, p) for v in versions for p in problems]
    one = shown[-1]
    assert (one["prompt"], one["answer"]) == (prompt(-1, one["problem"]).text, one["problem"])
    assert [(e["k"], e["reward"], e["parts"]) for e in one["episodes"]] == [(0, 0.0, {"exact": 1.0, "style": None})]


def test_problems_that_cannot_be_scored_and_answers_that_failed_are_shown_so():
    reward = FakeReward(lambda p: fails("cannot") if p.epoch == -1 else [0.0, 1.0])
    _, kept = ran(Scenario("async_partial", problems=3, reward=reward))
    shown = [record for record in kept if "validation" in record]
    assert shown
    assert {(e["reward"], e["failure"]) for record in shown for e in record["episodes"]} == {(None, None)}


def test_a_run_that_fails_shows_what_was_in_flight():
    def script(run: Run) -> None:
        run.trainer.raises_at[1] = RuntimeError("out of memory")

    run, kept = ran(Scenario("async_partial", script=script), samples=1000)
    assert run.of(RunFinished)[0].status == "failed"
    assert [record["fate"] for record in kept].count("in_flight") == run.groups["in_flight"] > 0


# ---------------------------------------------------------------------------------------------- one group by hand


def test_a_groups_record_has_what_was_asked_said_scored_and_trained():
    kept: list[dict[str, Any]] = []
    samples = Samples(SampleOutlet(kept.append, Spelled()), seed=0, share=1.0, problems=0)
    asked = replace(prompt(0, 5), answer={"of": np.float32(0.5)}, messages=[{"role": "user", "content": "5?"}])
    told = Conversation([{"role": "user", "content": "5?"}], [{"role": "assistant", "content": "6"}])
    episodes = [
        replace(
            episode(0, of_turns=(0.5, 0.25)), text="6", conversation=told, steps=((1.0, 2.5),), waits=((0.0, 1.0),)
        ),
        replace(episode(1), failure="broke", text=""),
        replace(episode(2, limit="turns"), text="7"),
        replace(episode(3), text="greedy"),
    ]
    episodes = [replace(one, id=asked.trajectory_id(k)) for k, one in enumerate(episodes)]
    drawn = DrawnGroup(10.0, 12.0, 13.0, tuple(episodes[:3]), baseline=0.25)
    scores = Scores(np.array([1 / 3, 0, 0.25], np.float32), {"exact": [1.0, 0.0, 0.25], "format": [None, 1.0, 0.0]})
    drawn.scores = scores
    columns = {"advantages": np.array([1 / 3, -123456.7, 0.0], np.float32)}
    fork = trained(asked.trajectory_id(0), first=7, prompt_ids=np.arange(5, dtype=np.int32), cut=9)
    drawn.rows += [trained(asked.trajectory_id(2)), trained(asked.trajectory_id(0), columns), fork]
    samples.settled(17, asked, drawn, fate=Fate.TRAINED.value, reason=None, lag=1, version=3, time=20.0)
    (record,) = kept
    assert {name: value for name, value in record.items() if name != "episodes"} == {
        "group": 17,
        "version": 3,
        "fate": "trained",
        "reason": None,
        "lag": 1,
        "source": "fake",
        "prompt": "problem 0/5/0",
        "question": "5?",
        "messages": [{"role": "user", "content": "5?"}],
        "answer": {"of": 0.5},
        "baseline": 0.25,
        "times": {"admitted": 10.0, "generated": 12.0, "rewarded": 13.0, "settled": 20.0},
    }
    first, second, third = record["episodes"]
    row, forked = first.pop("rows")
    assert first == {
        "k": 0,
        "replica": "a",
        "reward": 0.33333,
        "parts": {"exact": 1.0, "format": None},
        "turns": 2,
        "turn_rewards": [0.5, 0.25],
        "length": 2,
        "finish": "stop",
        "limit": None,
        "failure": None,
        "notes": {},
        "started": 0.0,
        "finished": 1.0,
        "waited_s": 1.0,
        "worked_s": 1.5,
        "text": "6",
        "conversation": {"prompt": told.prompt, "completion": told.completion},
    }
    assert row == {
        "context": None,
        "prompt_length": 3,
        "cut": 0,
        "ids": [0, 1, 2],
        "pieces": ["t0", "t1", "t2"],
        "mask": [1, 1, 0],
        "versions": [3, 3, -1],
        "behaviour": [-0.58333, -1.3333, -2.3333],
        "logprobs": [-0.25, -1.0, -2.0],
        "entropy": [0.25, 1.0, 2.0],
        "columns": {"advantages": [0.33333, -123460.0, 0.0]},
    }
    assert (forked["context"], forked["prompt_length"], forked["cut"]) == ("t0 t1 t2 t3 t4", 5, 9)
    assert (second["failure"], second["reward"], second["rows"]) == ("broke", None, [])
    assert (third["reward"], third["limit"], len(third["rows"])) == (0.0, "turns", 1)


def test_a_shown_group_is_made_with_its_conversations_and_others_are_not():
    run, _ = ran(Scenario("on_policy"))
    assert run.error is None
    asked: dict[int, bool] = {}

    def script(one: Run) -> None:
        generate = one.episode_workers[0].generate

        def look(requests: Any, **others: Any) -> Any:
            asked.update((request.number, request.shown) for request in requests)
            return generate(requests, **others)

        one.episode_workers[0].generate = look  # type: ignore[method-assign]

    run, _ = ran(Scenario("on_policy", script=script))
    assert asked == {event.number: is_drawn(run, event.number) for event in run.of(GroupAdmitted)}


def test_numbers_are_rounded_to_five_digits_whatever_their_size():
    values = [0.0, -0.123456789, 123456789.0, 1.5e-9, 99999.96, np.inf, -np.inf]
    assert rounded(np.array(values)) == [0.0, -0.12346, 123460000.0, 1.5e-9, 100000.0, np.inf, -np.inf]
    assert np.isnan(rounded(np.array([np.nan]))[0])
    assert rounded(np.array([-0.1], np.float32)) == [-0.1]


def test_what_json_cannot_hold_is_text():
    loop: list[Any] = []
    loop.append(loop)
    assert plain({(1, 2): 3}) == "{(1, 2): 3}"
    assert plain(loop) == "[[...]]"
    assert plain({"a": np.arange(2), "b": {1, 2}}) == {"a": [0, 1], "b": "{1, 2}"}
    assert plain(None) is None


def test_a_lone_surrogate_is_spelled_wherever_a_record_has_it():
    kept: list[dict[str, Any]] = []
    samples = Samples(SampleOutlet(kept.append, Spelled()), seed=0, share=1.0, problems=1)
    asked = replace(prompt(0, 5), source="half \ud83d", answer={"\udc00": ["\ud83d"]})
    answer = replace(episode(0), id=asked.trajectory_id(0), text="😀 \ud83d")
    drawn = DrawnGroup(1.0, 2.0, episodes=(answer,))
    samples.settled(1, asked, drawn, fate=Fate.FILTERED.value, reason="said \udfff", lag=None, version=0, time=3.0)
    samples.validated(0, Group(0, asked, 1, SamplingParams(1), trajectories=(answer,)), None, 4.0)
    for record in kept:
        json.dumps(record, ensure_ascii=False).encode()
        assert (record["source"], record["answer"]) == ("half \\ud83d", {"\\udc00": ["\\ud83d"]})
        assert record["episodes"][0]["text"] == "😀 \\ud83d"
    assert kept[0]["reason"] == "said \\udfff"


def test_a_record_that_is_too_large_keeps_what_comes_first_and_says_so():
    def size(record: dict[str, Any]) -> int:
        return len(json.dumps(record, ensure_ascii=False).encode())

    def of(rows: int, text: str, answer: Any = "42") -> dict[str, Any]:
        episodes = [{"k": k, "text": text, "rows": [{"ids": list(range(rows))}]} for k in range(4)]
        return {"group": 1, "prompt": "2+2", "answer": answer, "messages": None, "episodes": episodes}

    small = of(10, "x")
    assert storable(small, 2_000) is small
    fewer = storable(of(1_000, "said"), 12_000)
    assert (size(fewer) <= 12_000, fewer["shortened"]) == (True, True)
    assert [(one["text"], one["rows"]) for one in fewer["episodes"]] == [("said", [])] * 4
    texts = storable(of(10, "é" * 10_000), 50_000)
    assert [len(one["text"]) for one in texts["episodes"]] == [2**10] * 4
    for endless in (of(1, "x", list(range(10_000))), {**of(1, "x"), "messages": [{"role": "user"}] * 10_000}):
        assert size(storable(endless, 2_000)) <= 2_000
