import asyncio
import gc
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import strategies as st

from headway.config.presets import PRESETS
from headway.config.schema import Config
from headway.errors import ConfigError, StallError, UpdateFailed
from headway.events import (
    Event,
    GroupAdmitted,
    LeaseChanged,
    OptimizerStepped,
    ReplicaActivity,
    RunFinished,
    RunStarted,
    TrainerBusy,
    TrajectoryFinished,
    UpdateFinished,
    UpdatePhase,
    ValidationFinished,
)
from headway.pipeline.run import Status
from headway.planner.profiles.job_profile import Profile
from headway.planner.simulation.simulated_run import Simulation, config_for
from tests.pipeline.cases import for_each
from tests.tiers import a_share_and_all, mostly_slow

from .jobs import RICH, Recorder, profile

UPDATE = {
    "nbytes": 1000,
    "gather": {"latency_s": 0.5},
    "send": {"bytes_per_s": 1000},
    "recv": {"latency_s": 0.75},
    "register": {"latency_s": 0.25},
    "load": {"latency_s": 0.125},
}
"""gather takes 0.5 s, send 1, recv 0.75 beside it, register 0.25, load 0.125."""


def is_shared(mode: str) -> bool:
    return PRESETS[mode]["cluster.placement"] == "shared"


def config(job: Profile, mode: str, *, versions: int = 4, **settings: Any) -> Config:
    devices = {"train_devices": 1, "replicas": 1, **settings}
    return config_for(job, mode, versions=versions, **devices)


def simulated(job: Profile, mode: str, *, seed: int | None = None, **settings: Any) -> Recorder:
    recorder = Recorder()
    simulation = Simulation(job, config(job, mode, **settings), seed=seed, observers=[recorder])
    assert simulation.run() is Status.COMPLETED
    return recorder


def step_times(run: Recorder) -> list[float]:
    """Seconds between the last optimizer steps of consecutive versions."""
    ends = {step.version: step.time for step in run.of(OptimizerStepped)}
    times = [ends[version] for version in sorted(ends)]
    return [later - earlier for earlier, later in pairwise(times)]


# ---------------------------------------------------------------------------------------------- hand-computed times


def test_on_policy_generation_reward_training_and_update_add_up() -> None:
    job = profile(
        rollout={"prefill_s": 0.5, "prefill_token_s": 0.01},
        train={"points": [{"devices": 1, "step_s": 0.1, "token_s": 1e-3}]},
        reward={"seconds": 0.25},
        update=UPDATE,
    )
    run = simulated(job, "on_policy")
    prefill = 0.5 + 2 * 10 * 0.01  # each group's prompt once
    generation = 100 * 0.02
    reward = 2 * 0.25  # two groups, one worker
    training = 0.1 + 4 * 110 * 1e-3
    update = 0.5 + 1.0 + 0.25 + 0.125
    assert step_times(run) == pytest.approx([prefill + generation + reward + training + update] * 3, rel=1e-9)
    assert run.of(UpdateFinished)[0].trainer_stall_s == pytest.approx(1.0 + 0.25 + 0.125)


@pytest.mark.parametrize(("token_s", "expected"), [(1e-3, 2.0), (1e-2, 4.4)], ids=["generation", "training"])
def test_one_step_off_takes_the_longer_of_generation_and_training(token_s: float, expected: float) -> None:
    job = profile(train={"points": [{"devices": 1, "token_s": token_s}]})
    assert step_times(simulated(job, "one_step_off", versions=6))[1:] == pytest.approx([expected] * 4)


def test_with_eta_generation_never_waits_for_a_slower_trainer() -> None:
    # B = 2: with η = 2 four groups are ahead, so the trainer is never idle once the first two are there.
    job = profile(train={"points": [{"devices": 1, "token_s": 1e-2}]})
    run = simulated(job, "async_stale", versions=6, eta=2, trigger=1)
    assert step_times(run) == pytest.approx([4.4] * 5)


def test_on_shared_devices_everything_takes_turns_and_changing_hands_takes_time() -> None:
    job = profile(shared={"to_train_s": 0.5, "to_generate_s": 0.25}, update=UPDATE)
    run = simulated(job, "colocate_sync", versions=5)
    generation, training, lease = 2.0, 0.44, 0.5 + 0.25
    update = 0.5 + 0.125  # gather and load: nothing is sent inside one process
    assert step_times(run) == pytest.approx([generation + lease + training + update] * 4, rel=1e-9)
    assert {phase.phase: phase.seconds for phase in run.of(UpdatePhase)} == {
        "gather": 0.5,
        "send": 0.0,
        "recv": 0.0,
        "register": 0.0,
        "load": 0.125,
    }
    assert [change.holder for change in run.of(LeaseChanged)][:2] == ["train", "generate"]


def test_more_training_devices_and_more_replicas_take_less_time() -> None:
    job = profile(batch={"groups_per_version": 4, "ppo_mini_batch_size": 4, "n": 2})
    # Eight answers on one replica: the curve goes on with its last slope, to 100 × (0.02 + 4 × 0.01/3).
    alone, spread = simulated(job, "on_policy"), simulated(job, "on_policy", train_devices=4, replicas=2)
    assert step_times(alone) == pytest.approx([100 * (0.02 + 0.04 / 3) + 0.88] * 3)
    assert step_times(spread) == pytest.approx([2.0 + 0.22] * 3)


@pytest.mark.parametrize(
    ("devices", "ranks_work"),
    [(2, 4 * 110), (4, 2 * 110), (6, 2 * 110), (8, 110)],
    ids=["one data rank", "a group each", "three ranks with four answers", "an answer each"],
)
@pytest.mark.parametrize("parallel", [{"tp": 2}, {"cp": 2}, {"tp": 2, "ep": 2}])
def test_with_inner_meshes_a_step_takes_as_long_as_the_data_rank_that_has_most(
    devices: int, ranks_work: int, parallel: dict[str, int]
) -> None:
    # A token takes a data rank, a mesh of two devices, 1 ms, so two devices together 1 ms of the whole trainer.
    train = {"parallel": parallel, "even": True, "points": [{"devices": 2, "step_s": 0.1, "token_s": 1e-3}]}
    run = simulated(profile(devices=9, train=train), "on_policy", train_devices=devices)
    assert step_times(run) == pytest.approx([2.0 + 0.1 + ranks_work * 1e-3] * 3, rel=1e-9)


def test_figures_that_contain_uneven_loads_are_divided_evenly() -> None:
    train = {"parallel": {"tp": 2}, "points": [{"devices": 2, "token_s": 1e-3}]}
    run = simulated(profile(devices=9, train=train), "on_policy", train_devices=6)
    assert step_times(run) == pytest.approx([2.0 + 4 * 110 * 1e-3 / 3] * 3, rel=1e-9)


def test_old_log_probs_and_a_reference_each_cost_a_forward_pass_over_the_batch() -> None:
    point = {"devices": 1, "token_s": 1e-3, "forward_token_s": 5e-4}
    job = profile(train={"points": [point], "recompute_old_log_probs": "always", "reference": True})
    run = simulated(job, "on_policy")
    assert step_times(run) == pytest.approx([2.0 + 2 * 0.22 + 0.44] * 3)
    assert [busy.what for busy in run.of(TrainerBusy)][:3] == ["forward", "forward", "step"]


@pytest.mark.parametrize(
    ("where", "modes"),
    [("never", []), ("shared", ["colocate_sync", "colocate_async"]), ("always", list(PRESETS))],
)
def test_a_profile_says_where_old_log_probs_are_recomputed(where: str, modes: list[str]) -> None:
    job = profile(batch={"groups_per_version": 8}, train={"recompute_old_log_probs": where})
    with_forwards = [m for m in PRESETS if any(busy.what == "forward" for busy in simulated(job, m).of(TrainerBusy))]
    assert with_forwards == modes


# ---------------------------------------------------------------------------------------------- whole runs


@mostly_slow("mode", PRESETS, quick=["one_step_off", "async_partial", "overlapped", "colocate_async"])
def test_every_preset_runs_a_job_with_everything_in_it(mode: str) -> None:
    devices = {"train_devices": 8, "replicas": 8} if is_shared(mode) else {"train_devices": 5, "replicas": 3}
    run = simulated(profile(RICH), mode, versions=6, **devices)
    finished = run.of(RunFinished)[-1]
    assert (finished.status, finished.version) == ("completed", 6)
    assert finished.groups["trained"] == 48
    assert finished.groups["admitted"] == 48 + finished.groups["filtered"]
    assert finished.groups["filtered"] > 0
    assert [event.version for event in run.of(ValidationFinished)] == [0, 2, 4, 6]
    assert {event.replica for event in run.of(TrajectoryFinished)} == set(run.of(RunStarted)[0].slots)


@mostly_slow("mode", PRESETS, quick=["overlapped", "colocate_async"])
def test_the_same_seed_gives_the_same_events(mode: str) -> None:
    devices = {"train_devices": 4, "replicas": 4}

    def events(seed: int) -> list[Event]:
        return simulated(profile(RICH), mode, seed=seed, versions=3, **devices).events

    assert events(3) == events(3)
    assert events(3)[1:] != events(4)[1:]


def test_the_seed_is_the_configurations_unless_another_is_given() -> None:
    job = profile()
    settings = config(job, "on_policy")
    for seed, expected in ((None, 0), (5, 5)):
        recorder = Recorder()
        Simulation(job, settings, seed=seed, observers=[recorder]).run()
        assert recorder.of(RunStarted)[0].seed == expected


def test_its_seconds_are_the_virtual_time_of_its_last_event() -> None:
    recorder = Recorder()
    simulation = Simulation(profile(), config(profile(), "on_policy"), observers=[recorder])
    simulation.run()
    assert simulation.seconds == recorder.events[-1].time == pytest.approx(4 * 2.44)


def test_an_observer_may_ask_for_a_stop() -> None:
    class StopAtVersionTwo(Recorder):
        def on_event(self, event: Event) -> None:
            super().on_event(event)
            if isinstance(event, UpdateFinished) and event.version == 2:
                simulation.pipeline.request_stop()

    observer = StopAtVersionTwo()
    job = profile(RICH)
    settings = config(job, "async_partial", versions=50, train_devices=4, replicas=4)
    simulation = Simulation(job, settings, observers=[observer])
    assert simulation.run() is Status.INTERRUPTED
    assert observer.of(RunFinished)[-1].version in (2, 3)


def test_recorded_lengths_are_replayed_group_by_group() -> None:
    prompts, answers = [[11], [12], [13]], [[50, 60], [70], [80, 90]]
    job = profile(
        prompt={"kind": "empirical", "groups": prompts, "replay": True},
        response={"kind": "empirical", "groups": answers, "replay": True},
    )
    run = simulated(job, "async_partial", versions=3, trigger=1)
    lengths = {(event.number, event.k): (event.prompt_tokens, event.tokens) for event in run.of(TrajectoryFinished)}
    for number in range(6):
        prompt, recorded = prompts[number % 3][0], answers[number % 3]
        assert [lengths[number, k] for k in range(2)] == [(prompt, recorded[k % len(recorded)]) for k in range(2)]


def test_recorded_prompts_stay_with_the_answers_to_them() -> None:
    job = profile(
        prompt={"kind": "empirical", "groups": [[n] for n in range(1, 10)]},
        response={"kind": "empirical", "groups": [[10 * n] for n in range(1, 10)]},
    )
    run = simulated(job, "on_policy", versions=10)
    pairs = {(event.prompt_tokens, event.tokens) for event in run.of(TrajectoryFinished)}
    assert len(pairs) > 3
    assert all(tokens == 10 * prompt for prompt, tokens in pairs)


def test_prompts_and_answers_that_are_drawn_are_independent() -> None:
    drawn = {"kind": "lognormal", "mean": 100, "sigma": 1, "max": 1000}
    job = profile(prompt=drawn, response=drawn)
    run = simulated(job, "on_policy", versions=4)
    assert all(event.prompt_tokens != event.tokens for event in run.of(TrajectoryFinished))


def test_replicas_report_what_they_did_as_often_as_asked() -> None:
    job = profile(RICH)
    often = simulated(job, "on_policy", versions=2, activity_interval_s=1.0)
    seldom = simulated(job, "on_policy", versions=2)
    assert len(often.of(ReplicaActivity)) > 5
    assert len(seldom.of(ReplicaActivity)) == 1

    def totals(run: Recorder) -> tuple[int, float]:
        reports = run.of(ReplicaActivity)
        return sum(report.generated_tokens for report in reports), sum(report.slot_seconds for report in reports)

    assert totals(often) == pytest.approx(totals(seldom))


@pytest.mark.parametrize("mode", ["on_policy", "overlapped"])
def test_a_wrong_checksum_ends_the_run(mode: str) -> None:
    recorder = Recorder()
    job = profile(update=UPDATE)
    settings = config(job, mode)
    simulation = Simulation(job, settings, observers=[recorder])
    simulation.transport.corrupted.add(("rollout-0", 2))
    with pytest.raises(UpdateFailed, match=r"rollout-0 .*version 2 with checksum"):
        simulation.run()
    assert recorder.of(RunFinished)[-1].status == "failed"


def test_a_run_that_cannot_go_on_says_who_waits_for_whom() -> None:
    job = profile()
    simulation = Simulation(job, config(job, "on_policy", activity_interval_s=1e6))  # few reports until it stalls

    async def never(version: int, receivers: Sequence[str]) -> float:
        await asyncio.Event().wait()
        return 0.0

    simulation.transport.send = never  # type: ignore[method-assign]
    with pytest.raises((StallError, UpdateFailed), match=r"rollout-0 did not answer .*version 1\b"):
        simulation.run()


def test_simulating_leaves_the_garbage_collector_as_it_was() -> None:
    usual = gc.get_threshold()
    simulated(profile(), "on_policy")
    assert gc.get_threshold() == usual


jobs = st.builds(
    lambda n, mini_batches, filtered, sigma, slots, kv, seconds: profile(
        RICH,
        batch={"groups_per_version": 2 * mini_batches, "ppo_mini_batch_size": 2, "n": n},
        response={"kind": "lognormal", "mean": 60, "sigma": sigma, "max": 200},
        rollout={"slots": slots, "kv_tokens": kv},
        reward={"seconds": seconds, "workers": 2, "filtered": filtered},
    ),
    n=st.integers(2, 4),
    mini_batches=st.integers(1, 4),
    filtered=st.sampled_from([0.0, 0.5]),
    sigma=st.sampled_from([0.0, 1.5]),
    slots=st.integers(1, 5),
    kv=st.sampled_from([None, 300]),
    seconds=st.sampled_from([0.0, 1.0]),
)


runs = st.tuples(
    jobs, st.sampled_from(list(PRESETS)), st.integers(1, 3), st.integers(0, 10), st.sampled_from([None, "1/2", 2])
)


@a_share_and_all
def test_whatever_the_job_the_trained_groups_are_those_that_were_asked_for(share: float) -> None:
    """Simulates many random runs."""

    def check(drawn: tuple[Profile, str, int, int, Any]) -> None:
        job, mode, replicas, seed, eta = drawn
        eta = eta if PRESETS[mode]["async_training.staleness_threshold"] else None
        run = simulated(job, mode, seed=seed, replicas=replicas, versions=3, eta=eta, trigger=1)
        groups = run.of(RunFinished)[-1].groups
        assert groups["trained"] == 3 * job.batch.groups_per_version
        assert groups["in_flight"] == groups["failed"] == groups["dropped"] == 0
        assert groups["admitted"] == len(run.of(GroupAdmitted)) == groups["trained"] + groups["filtered"]

    for_each(runs, share * 60, check)


# ---------------------------------------------------------------------------------------------- configurations


def test_a_configuration_is_the_presets_with_the_jobs_numbers() -> None:
    job = profile(RICH)
    c = config(job, "async_partial", versions=5, train_devices=3, replicas=2, eta="0.3", trigger=2)
    assert c.mode == "async_partial"
    assert (c.groups_per_version, c.async_training.require_batches, c.async_training.on_update) == (8, 2, "interrupt")
    assert c.async_training.staleness_threshold * 10 == 3
    assert (c.rollout.total_rollout_steps, c.rollout.n, c.rollout.max_concurrent) == (40, 4, 6)
    assert (c.actor.ppo_epochs, c.data.max_response_length, c.rollout.val_n, c.rollout.test_freq) == (2, 1500, 2, 2)
    assert not c.async_training.use_rollout_log_probs


Change = Callable[[], Config]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: config(profile(), "asink"), "no mode 'asink'"),
        (
            lambda: config(
                profile(batch={"groups_per_version": 2, "ppo_mini_batch_size": 2, "n": 1}, reward={"filtered": 0.5}),
                "on_policy",
            ),
            "reward.filtered: got 0.5 with batch.n=1",
        ),
    ],
)
def test_a_setting_that_does_not_fit_the_job_is_refused(change: Change, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        change()
