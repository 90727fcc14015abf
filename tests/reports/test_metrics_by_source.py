"""Figures of metrics by part of the reward, by source, and by who is to blame."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway.events import (
    BatchTaken,
    CheckpointCopied,
    Event,
    GroupRewarded,
    GroupSettled,
    PromptsLeftOut,
    ReplicaActivity,
    TrainerBusy,
    ValidationFinished,
    WorkerDescribed,
)
from headway.reports.metrics.summary import summary, time_shares
from tests.reports.scripted_run import REPLICA
from tests.reports.test_metrics import admitted, finished, observe, started, stepped


def trained(number: int, rewards: list[float], source: str = "", **parts: list[float | None]) -> list[Event]:
    return [
        replace(admitted(number, 1.0), source=source),
        finished(number, [[0, 0]]),
        GroupRewarded(time=1.0, number=number, rewards=rewards, parts=parts),
        BatchTaken(time=2.0, fetch=0, version=0, numbers=[number], waited=(0.0, 2.0)),
        stepped(3.0, 0),
        GroupSettled(time=3.0, number=number, fate="trained", lag=0),
    ]


def test_each_part_of_the_reward_has_its_mean_over_answers_that_it_applies_to() -> None:
    filtered = GroupRewarded(time=1.0, number=2, rewards=[9.0, 9.0], parts={"right": [9.0, 9.0]})
    _, rows = observe(
        [
            started(),
            *trained(0, [1.0, 0.0], right=[1.0, 0.0], short=[None, 0.5], code=[None, None]),
            *trained(1, [1.0, 1.0], right=[1.0, 1.0], short=[0.25, None], code=[None, None]),
            admitted(2, 1.0),
            filtered,
            GroupSettled(time=3.0, number=2, fate="filtered"),
        ]
    )
    assert (rows[0]["reward/right/mean"], rows[0]["reward/short/mean"]) == (0.75, 0.375)
    assert not any(name.startswith("reward/code") for row in rows for name in row)


def test_each_source_has_its_mean_and_its_groups_once_there_are_several() -> None:
    _, rows = observe(
        [
            started(),
            *trained(0, [1.0, 0.0], "math"),
            *trained(1, [1.0, 1.0], "math"),
            *trained(2, [0.0, 0.5], "org/code"),
        ]
    )
    assert (rows[0]["reward/source/math/mean"], rows[0]["reward/source/org/code/mean"]) == (0.75, 0.25)
    assert (rows[0]["groups/source/math"], rows[0]["groups/source/org/code"]) == (2, 1)


def test_one_source_has_no_figures_of_its_own() -> None:
    _, rows = observe([started(), *trained(0, [1.0, 0.0], "math"), *trained(1, [1.0, 1.0], "math")])
    assert not any("source" in name for row in rows for name in row)


def test_a_validation_has_an_accuracy_for_each_of_several_sources() -> None:
    event = ValidationFinished(
        time=7.0, version=0, accuracy=0.5, problems=2, mean_tokens=1, failed=0, span=(6.0, 7.0), by_source={"a": 1.0}
    )
    metrics, rows = observe([started(), admitted(0, 1.0), stepped(3.0, 0), event])
    assert rows[0]["validation/source/a/accuracy"] == 1.0
    assert summary(metrics)["eval"] == [{"version": 0, "accuracy": 0.5, "by_source": {"a": 1.0}}]


def test_the_summary_counts_prompts_that_were_left_out_as_they_were_told_last() -> None:
    def left_out(part: str, source: str, count: int, reason: str = "too_long") -> PromptsLeftOut:
        return PromptsLeftOut(time=9.0, part=part, source=source, count=count, max_tokens=16, reason=reason)

    told = [left_out("held-out", "a", 1), left_out("training", "a", 2), left_out("training", "a", 5)]
    told.append(left_out("training", "a", 2, "empty"))
    metrics, _ = observe([started(), *told, left_out("training", "b", 3)])
    assert summary(metrics)["left_out"] == {
        "held-out": {"a": {"too_long": 1}},
        "training": {"a": {"too_long": 5, "empty": 2}, "b": {"too_long": 3}},
    }


def test_a_run_that_saves_for_longer_than_it_trains_blames_the_saving() -> None:
    """Ten seconds: two of waiting, three of training, then five of saving, in the last two of which nothing decodes."""
    metrics, _ = observe(
        [
            started(),
            admitted(0, 0.0),
            BatchTaken(time=2.0, fetch=0, version=0, numbers=[0], waited=(0.0, 2.0)),
            TrainerBusy(time=4.0, what="step", version=0, span=(2.0, 4.0)),
            CheckpointCopied(time=9.0, version=1, span=(4.0, 9.0)),
            ReplicaActivity(
                time=7.0, replica=REPLICA, busy=[(0.0, 7.0)], slot_seconds=7.0, generated_tokens=1, prefilled_tokens=1
            ),
            TrainerBusy(time=10.0, what="step", version=1, span=(9.0, 10.0)),
            stepped(10.0, 1),
            CheckpointCopied(time=19.0, version=2, span=(10.0, 19.0)),
        ]
    )
    shares = time_shares(metrics)
    assert shares is not None
    assert (shares.trained, shares.saving) == (pytest.approx(0.3), pytest.approx(0.5))
    assert (shares.rollout_idle, shares.idle_while_saving) == (pytest.approx(0.3), pytest.approx(0.2))
    assert summary(metrics)["bottleneck"].startswith("Saving checkpoints was the bottleneck: the trainer did that 50%")


@pytest.mark.parametrize(
    ("workers", "one_process"),
    [
        ({"actor-0": ("a", 2), "rollout-0": ("a", 2), "rollout-1": ("a", 2)}, True),
        ({"actor-0": ("a", 2), "rollout-0": ("b", 2)}, False),
        ({"actor-0": ("a", 2), "rollout-0": ("a", 3)}, False),
        ({"actor-0": ("a", None), "rollout-0": ("a", None)}, False),
        ({}, False),
    ],
)
def test_workers_in_one_process_are_told_from_others(
    workers: dict[str, tuple[str, int | None]], one_process: bool
) -> None:
    described = [
        WorkerDescribed(time=0.0, worker=name, host=host, cpu="c", cores=4, gpu=None, threads=2, pid=pid)
        for name, (host, pid) in workers.items()
    ]
    metrics, _ = observe([*described, started(), admitted(0, 1.0), stepped(3.0, 0)])
    shares = time_shares(metrics)
    assert shares is not None
    assert shares.one_process == one_process
