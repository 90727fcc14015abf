"""A batch's latency is what passes while the trainer neither computes nor waits."""

from __future__ import annotations

from headway.data.types import TrainSample, TrajectoryId
from headway.events import BatchTaken, Event, LeaseChanged, OptimizerStepped, Span, TrainerBusy
from headway.planner.profile_fitting.recording import TrainingRecord
from headway.planner.profiles.costs import Division


def fetch(at: float, asked: float, numbers: list[int]) -> Event:
    return BatchTaken(time=at, fetch=0, version=0, numbers=numbers, waited=(asked, at))


def busy(what: str, span: Span) -> Event:
    return TrainerBusy(time=span[1], what=what, version=0, span=span)


def stepped(at: float) -> Event:
    return OptimizerStepped(time=at, step=0, fetch=0, version=0, skipped=False, tokens=1, trajectories=1, lags=[0])


def step(start: float, end: float) -> list[Event]:
    return [busy("step", (start, end)), stepped(end)]


def recorded(*events: Event, mini_batch: int = 1, ranks: int = 1) -> TrainingRecord:
    def samples(number: int) -> list[TrainSample]:
        return [TrainSample(None, 0, prompt_length=4, length=10 * number + 6, episode=TrajectoryId(0, number, 0, 0))]

    record = TrainingRecord(mini_batch, samples, Division(ranks))
    for event in events:
        record.add(event)
    return record


def test_gaps_before_between_and_after_the_work_of_a_batch_add_up_to_its_latency() -> None:
    record = recorded(
        fetch(at=10, asked=5, numbers=[0, 1]),
        busy("forward", (11, 13)),
        *step(15, 20),
        *step(24, 30),
        busy("gather", (38, 40)),
    )
    (done,) = record.batches
    assert (done.began, done.latency_s) == (10, 1 + 2 + 4 + 8)
    assert [(work.seconds, work.tokens) for work in record.forwards] == [(2, 10 + 20)]
    assert [(work.seconds, work.tokens) for work in record.steps] == [(5, 10), (6, 20)]


def test_without_an_update_a_batch_ends_where_the_wait_for_the_next_one_begins() -> None:
    record = recorded(fetch(at=0, asked=0, numbers=[0]), *step(1, 2), fetch(at=9, asked=4, numbers=[1]), *step(9, 10))
    assert [done.latency_s for done in record.batches] == [1 + 2]


def test_the_wait_for_shared_devices_is_no_latency() -> None:
    record = recorded(
        fetch(at=0, asked=0, numbers=[0]),
        LeaseChanged(time=7, holder="train", asked=0),
        *step(8, 9),
        busy("gather", (9, 10)),
    )
    assert [done.latency_s for done in record.batches] == [1]


def test_a_batch_that_was_never_trained_is_not_among_them() -> None:
    assert not recorded(fetch(at=0, asked=0, numbers=[0]), fetch(at=5, asked=5, numbers=[0])).batches


def test_with_several_ranks_work_is_that_of_the_rank_with_most_on_all_of_them() -> None:
    record = recorded(
        fetch(at=0, asked=0, numbers=[0, 1, 2]), busy("forward", (0, 1)), *step(1, 2), mini_batch=3, ranks=2
    )
    # 10, 20 and 30 tokens: 30 on either rank.
    assert [work.tokens for work in record.forwards] == [60]
    assert [work.tokens for work in record.steps] == [60]
    uneven = recorded(fetch(at=0, asked=0, numbers=[0, 2]), *step(1, 2), mini_batch=2, ranks=2)
    assert [work.tokens for work in uneven.steps] == [2 * 30]
