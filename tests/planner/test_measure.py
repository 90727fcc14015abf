"""What one row is measured to be: against hand-computed pipelines, and against streams of events with known figures."""

from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest

from headway.events import (
    BatchTaken,
    Event,
    OptimizerStepped,
    ReplicaActivity,
    RunStarted,
    TrainerBusy,
    TrajectoryFinished,
    UpdateFinished,
)
from headway.planner.measure import FEWEST_VERSIONS, MOST_VERSIONS, StepMeter, fill_versions, measure
from tests.planner.planning import profile_of, setting


class Stops:
    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


def never(versions: int) -> bool:
    return False


def meter_of(stop: Callable[[], None], *, eta: float = 0, out_of_time: Callable[[int], bool] = never) -> StepMeter:
    return StepMeter(eta=Fraction(str(eta)), steps_per_version=2, stop=stop, out_of_time=out_of_time)


def version(start: float, seconds: float, number: int, tokens: int = 5) -> list[Event]:
    """One version: the trainer waits for half of it, and trains for a quarter of it in each of two steps. Two replicas
    of four slots: one is busy for half of it with two slots, the other idle."""
    half, end = start + seconds / 2, start + seconds
    spans = [(half, half + seconds / 4), (half + seconds / 4, end)]
    steps: list[Event] = []
    for step, span in enumerate(spans):
        steps.append(TrainerBusy(time=span[1], what="step", version=number, span=span))
        steps.append(
            OptimizerStepped(
                time=span[1],
                step=step,
                fetch=0,
                version=number,
                skipped=False,
                tokens=1,
                trajectories=1,
                lags=[0, step],
            )
        )
    return [
        ReplicaActivity(
            time=half,
            replica="a",
            busy=[(start, half)],
            slot_seconds=2 * seconds / 2,
            generated_tokens=1,
            prefilled_tokens=0,
        ),
        finished(half, [[0, number]], tokens),
        finished(half, [[0, number - 1], [3, number]], tokens),
        BatchTaken(time=half, fetch=0, version=number, numbers=[0], waited=(start, half)),
        *steps,
        UpdateFinished(time=end, version=number + 1, trainer_stall_s=0.25, rollout_stall_s=0.0, interrupted=0),
    ]


def finished(time: float, version_spans: list[list[int]], tokens: int = 5) -> TrajectoryFinished:
    return TrajectoryFinished(
        time=time,
        number=0,
        k=0,
        replica="a",
        prompt_tokens=1,
        tokens=tokens,
        finish_reason="stop",
        version_spans=version_spans,
        started=0.0,
        finished=time,
    )


def started() -> RunStarted:
    return RunStarted(
        time=0.0,
        mode="",
        seed=0,
        groups_per_version=4,
        total_groups=None,
        lag_bound=1,
        order="fifo",
        slots={"a": 4, "b": 4},
    )


def feed(meter: StepMeter, seconds: list[float], tokens: Sequence[int] = ()) -> None:
    meter.on_event(started())
    time = 0.0
    for number, duration in enumerate(seconds):
        for event in version(time, duration, number, *tokens[number : number + 1]):
            meter.on_event(event)
        time += duration


def test_every_figure_is_of_the_window_after_the_fill():
    meter = meter_of(Stops())
    feed(meter, [100.0, 4.0, 4.0, 4.0, 4.0])
    measured = meter.measurement()
    assert measured is not None
    assert measured.step_s == pytest.approx(4.0)
    assert measured.half_width == pytest.approx(0.0)
    assert measured.versions == 4
    assert measured.trainer_idle_ratio == pytest.approx(0.5)
    assert measured.rollouter_idle_ratio == pytest.approx(0.75)  # one is idle for a half, one for the whole
    assert measured.slot_utilization == pytest.approx(0.125)
    assert measured.trainer_waited_s == pytest.approx(2.0)
    # An update belongs to the version that it delays, so the one after the last measured version does not count.
    assert measured.update_stall_s == pytest.approx(0.25)
    assert (measured.lag_mean, measured.lag_max, measured.lag_bound) == (0.25, 1, 1)
    assert measured.partial_ratio == 0.5
    assert measured.trajectories == 10


def test_a_run_stops_once_as_soon_as_the_step_time_is_known():
    stop = Stops()
    feed(meter := meter_of(stop), [9.0] + [4.0] * 20)
    assert stop.times == 1
    assert meter.measurement().versions == FEWEST_VERSIONS


def test_a_run_whose_step_time_stays_uncertain_stops_after_thirty_versions():
    stop = Stops()
    feed(meter := meter_of(stop), [4.0 + 3 * (i % 3 == 0) for i in range(60)])
    assert stop.times == 1
    assert meter.measurement().versions == MOST_VERSIONS


def test_nothing_that_happens_after_the_stop_is_measured():
    stop = Stops()
    feed(meter := meter_of(stop), [9.0] + [4.0] * 4)
    before = meter.measurement()
    for event in version(25.0, 50.0, 5)[3:]:
        meter.on_event(event)
    assert meter.measurement() == before


def test_a_run_that_is_out_of_time_stops_at_the_end_of_the_version():
    stop = Stops()
    feed(meter := meter_of(stop, out_of_time=lambda versions: True), [4.0] * 3)
    assert stop.times == 1
    assert meter.measurement() is None
    feed(meter := meter_of(stop, out_of_time=lambda versions: versions == 2), [9.0, 4.0, 6.0, 4.0, 6.0])
    assert meter.measurement().versions == 2


def test_times_that_alternate_are_measured_in_pairs_when_groups_run_ahead():
    stop = Stops()
    feed(meter := meter_of(stop, eta=1), [4.0] * fill_versions(Fraction(1)) + [2.0, 6.0] * 10)
    measured = meter.measurement()
    assert (measured.versions, measured.step_s, measured.half_width) == (4, 4.0, 0.0)


def test_more_versions_are_left_out_when_more_run_ahead():
    assert [fill_versions(Fraction(eta)) for eta in ("0", "0.5", "1", "2")] == [1, 3, 3, 4]


# B = 8 groups of 2 answers, 10 tokens at 0.1 s: 1 s of generation when all have slots. Four optimizer steps of 1 s.


def test_a_synchronous_step_is_generation_and_training_and_the_update():
    profile = profile_of(update={"load": {"latency_s": 0.5}})
    measured = measure(profile, setting("on_policy"))
    assert measured is not None
    assert measured.step_s == pytest.approx(1.0 + 4.0 + 0.5)
    assert measured.half_width == pytest.approx(0.0)
    assert measured.versions == FEWEST_VERSIONS
    assert measured.trainer_idle_ratio == pytest.approx(1.5 / 5.5)
    assert measured.rollouter_idle_ratio == pytest.approx(4.5 / 5.5)
    assert measured.slot_utilization == pytest.approx(16 / 64 * 1.0 / 5.5)
    assert measured.trainer_waited_s == pytest.approx(1.0)
    assert measured.update_stall_s == pytest.approx(0.5)
    assert (measured.lag_mean, measured.lag_max, measured.lag_bound) == (0, 0, 0)


def test_a_step_that_is_one_ahead_takes_as_long_as_the_slower_side():
    measured = measure(profile_of(), setting("one_step_off"))
    assert measured is not None
    assert measured.step_s == pytest.approx(4.0)
    assert measured.trainer_idle_ratio == pytest.approx(0.0)
    assert measured.rollouter_idle_ratio == pytest.approx(0.75)
    assert (measured.lag_mean, measured.lag_max) == (1, 1)


def test_on_shared_devices_changing_hands_costs_its_time():
    profile = profile_of(shared={"to_train_s": 0.3, "to_generate_s": 0.2})
    measured = measure(profile, setting("colocate_sync", 8, 8))
    assert measured is not None
    assert measured.step_s == pytest.approx(1.0 + 4.0 + 0.5)


def test_the_same_seed_measures_the_same(monkeypatch):
    monkeypatch.setattr("headway.planner.measure.MOST_VERSIONS", 5)
    profile = profile_of(response={"kind": "lognormal", "mean": 50, "sigma": 1, "max": 500})
    assert measure(profile, setting("async_partial")) == measure(profile, setting("async_partial"))
    assert measure(profile, setting("async_partial")) != measure(profile, setting("async_partial"), seed=1)


def test_several_epochs_are_one_version():
    measured = measure(profile_of(batch={"ppo_epochs": 2}), setting("one_step_off"))
    assert measured is not None
    assert measured.step_s == pytest.approx(8.0)
