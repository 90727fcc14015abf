"""From a run's directory to a profile: the costs that the run was made from come out again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest

from headway.errors import ConfigError, DataError
from headway.events import (
    Event,
    GroupRewarded,
    GroupSettled,
    ReplicaActivity,
    RunFinished,
    TrajectoryFinished,
    UpdateFinished,
    WorkerDescribed,
)
from headway.planner.profile_fitting import run_profiler
from headway.planner.profile_fitting.recording import recording_of
from headway.planner.profile_fitting.run_profiler import profile_run
from headway.planner.profiles.costs import decode_cost
from headway.planner.profiles.job_profile import EmpiricalLengths, Profile
from headway.planner.profiles.profile_files import dump_profile, load_profile
from headway.planner.simulation.simulated_run import Simulation, config_for
from headway.reports.record.events_file import EventsFile, read_events, to_json_line
from headway.reports.run_directory import RunDirectory
from tests.planner.jobs import RICH
from tests.planner.jobs import profile as build_profile
from tests.planner.recorded_run import RecordedRun, two_slopes
from tests.tiers import mostly_slow

CLOSE = 2e-3
"""Relative: what rounding to four digits and a curve of few knots may cost."""


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return profile_run(RecordedRun().write(tmp_path_factory.mktemp("run")))


def test_the_job_is_the_configs(profile: Profile) -> None:
    assert (profile.name, profile.devices) == ("recorded", 2)
    assert profile.batch.model_dump() == {
        "groups_per_version": 8,
        "ppo_mini_batch_size": 4,
        "n": 4,
        "ppo_epochs": 1,
    }
    assert (profile.rollout.slots, profile.rollout.threads, profile.train.threads) == (8, 3, 5)


def test_a_trainer_on_several_machines_says_how_many_devices_it_had_on_each(tmp_path: Path) -> None:
    spread = {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 4, "actor.parallel.tp": 2, "actor.parallel.replicate": 2}
    found = profile_run(RecordedRun(overrides=spread).write(tmp_path / "run"))
    assert found.train.parallel.model_dump() == {"replicate": 2, "tp": 2, "cp": 1, "ep": 1}
    assert ([point.devices for point in found.train.points], found.devices_per_node) == ([8], 4)


def test_a_decode_step_costs_what_it_cost(profile: Profile) -> None:
    cost = decode_cost(profile.rollout)
    for active in (1, 2, 4, 6, 8):
        assert cost.step_s(active) == pytest.approx(two_slopes(active), rel=0.01)
    assert profile.rollout.kv_token_s == pytest.approx(2e-6, rel=CLOSE)
    assert len(profile.rollout.decode) < 8


def test_a_prefill_costs_what_it_cost(profile: Profile) -> None:
    assert profile.rollout.prefill_s == pytest.approx(0.004, rel=0.03)
    assert profile.rollout.prefill_token_s == pytest.approx(1e-4, rel=0.03)


def test_an_optimizer_step_costs_what_it_cost_prompts_included(profile: Profile) -> None:
    (point,) = profile.train.points
    assert (point.devices, point.step_s) == (1, pytest.approx(0.3, rel=CLOSE))
    assert point.token_s == pytest.approx(2e-4, rel=CLOSE)
    assert point.forward_token_s == pytest.approx(5e-5, rel=CLOSE)
    assert profile.train.recompute_old_log_probs == "always" and not profile.train.reference


def test_the_phases_of_an_update_add_up_to_its_time(profile: Profile) -> None:
    update = profile.update
    seconds = [p.latency_s for p in (update.gather, update.send, update.recv, update.register_, update.load)]
    assert seconds == [pytest.approx(s, rel=CLOSE) for s in (0.03, 0.05, 0.08, 0.01, 0.02)]
    assert update.nbytes == 1000


def test_rewards_are_measured_without_their_waiting_for_a_worker(profile: Profile) -> None:
    assert profile.reward.seconds == pytest.approx(0.005, rel=CLOSE)
    assert profile.reward.filtered == pytest.approx(2 / 10)


def test_lengths_are_the_recorded_ones_group_by_group_in_order_of_admission(tmp_path: Path) -> None:
    run = RecordedRun(versions=2, filtered=1)
    profile = profile_run(run.write(tmp_path / "run"))
    recorded: dict[int, dict[int, int]] = {}
    prompts: dict[int, int] = {}
    for event in run.events():
        if event.kind == "trajectory.finished":
            recorded.setdefault(event.number, {})[event.k] = event.tokens
            prompts[event.number] = event.prompt_tokens
    expected = [[recorded[number][k] for k in range(run.n)] for number in sorted(recorded)]
    assert isinstance(profile.response, EmpiricalLengths) and isinstance(profile.prompt, EmpiricalLengths)
    assert profile.response.groups == expected and len(expected) == 2 * (8 + 1)
    assert profile.prompt.groups == [[prompts[number]] for number in sorted(prompts)]
    assert not profile.response.replay


def test_a_replay_repeats_the_lengths_and_is_the_same_otherwise(tmp_path: Path) -> None:
    run = RecordedRun(versions=2).write(tmp_path / "run")
    drawn, replayed = profile_run(run), profile_run(run, replay=True)
    assert isinstance(replayed.response, EmpiricalLengths) and isinstance(replayed.prompt, EmpiricalLengths)
    assert replayed.response.replay and replayed.prompt.replay
    assert replayed.model_copy(update={"prompt": drawn.prompt, "response": drawn.response}) == drawn


def test_many_groups_are_thinned_evenly_and_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_profiler, "MAX_GROUPS", 10)
    run = RecordedRun(versions=2).write(tmp_path / "run")
    few = profile_run(run)
    monkeypatch.undo()
    all_ = profile_run(run)
    assert isinstance(few.response, EmpiricalLengths) and isinstance(all_.response, EmpiricalLengths)
    assert few.response.groups == all_.response.groups[::2]
    assert any("10 of 20 groups" in text for text in few.assumptions)


@pytest.mark.slow
def test_a_large_run_is_profiled_by_its_newest_versions_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = build_profile(RICH)
    config = config_for(job, "async_partial", train_devices=4, replicas=4, versions=16, activity_interval_s=3.0)
    directory = RunDirectory.create(tmp_path / "run", config)
    file = EventsFile(directory.events, print)
    Simulation(job, config, observers=[file]).run()
    file.close()
    whole = profile_run(directory.path)
    recording = recording_of(read_events(directory.events), mini_batch=job.batch.ppo_mini_batch_size, ranks=4)
    usual = fmean(step.tokens for step in recording.training.steps)
    monkeypatch.setattr(run_profiler, "MOST_BYTES", 1)
    newest = profile_run(directory.path)
    assert any("in the newest versions, " in text and "a run of mode" in text for text in newest.assumptions)
    assert isinstance(newest.response, EmpiricalLengths) and isinstance(whole.response, EmpiricalLengths)
    assert newest.response.groups == whole.response.groups[-len(newest.response.groups) :]
    assert 0 < len(newest.response.groups) < len(whole.response.groups)
    steps = [point.step_s + point.token_s * usual for found in (newest, whole) for point in found.train.points]
    assert steps[0] == pytest.approx(steps[1], rel=0.05)
    for active in (1, 4):
        assert decode_cost(newest.rollout).step_s(active) == pytest.approx(
            decode_cost(whole.rollout).step_s(active), rel=0.02
        )
    assert (newest.update, newest.validation) == (whole.update, whole.validation)


def test_a_slow_first_version_is_warm_up_and_does_not_count(tmp_path: Path) -> None:
    cold = profile_run(RecordedRun(warm_up=7.0).write(tmp_path / "cold"))
    warm = profile_run(RecordedRun(warm_up=1.0).write(tmp_path / "warm"))
    assert cold.train.points[0].token_s == pytest.approx(warm.train.points[0].token_s, rel=CLOSE)
    assert cold.update == warm.update
    for active in (1, 4, 8):
        assert decode_cost(cold.rollout).step_s(active) == pytest.approx(
            decode_cost(warm.rollout).step_s(active), rel=0.01
        )


def test_under_noise_the_costs_still_add_up_to_the_time_that_was_spent(tmp_path: Path) -> None:
    run = RecordedRun(versions=12, noise=0.2)
    profile = profile_run(run.write(tmp_path / "run"))
    (point,) = profile.train.points
    steps = recording_of(run.events(), mini_batch=run.mini_batch).training.steps[2:]
    predicted = [point.step_s + point.token_s * step.tokens for step in steps]
    assert sum(predicted) == pytest.approx(sum(step.seconds for step in steps), rel=CLOSE)
    assert decode_cost(profile.rollout).step_s(8, 300) == pytest.approx(two_slopes(8) + 2e-6 * 300, rel=0.02)


def test_each_epoch_goes_through_the_mini_batches_of_the_batch_again() -> None:
    run = RecordedRun(versions=1, epochs=2)
    steps = recording_of(run.events(), mini_batch=run.mini_batch).training.steps
    assert [step.tokens for step in steps[:2]] == [step.tokens for step in steps[2:]]
    assert all(step.seconds == pytest.approx(0.3 + 2e-4 * step.tokens) for step in steps)


@mostly_slow("noise", [0.0, 0.1], quick=[0.1])
def test_a_simulation_of_the_profile_takes_as_long_as_the_run(tmp_path: Path, noise: float) -> None:
    run = RecordedRun(versions=8, filtered=0, noise=noise, overrides={"rollout.test_freq": -1})
    profile = profile_run(run.write(tmp_path / "run"), replay=True).model_copy(update={"validation": None})
    served = Served()
    config = config_for(profile, "on_policy", train_devices=1, replicas=1, versions=run.versions)
    Simulation(profile, config, observers=[served]).run()
    assert per_version(served.ends) == pytest.approx(per_version(run.ends), rel=0.02)


def test_a_profile_survives_its_file(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text(dump_profile(profile), encoding="utf-8")
    assert load_profile(path) == profile


# ---------------------------------------------------------------------------------------------- what is not measured


def test_what_was_not_measured_is_said(tmp_path: Path) -> None:
    def no_forward(event: Event) -> Event | None:
        return None if getattr(event, "what", "") == "forward" else event

    run = RecordedRun(versions=3, overrides={"rollout.threads": 0, "trainer.threads": 0})
    profile = profile_run(rewrite(run.write(tmp_path / "run"), no_forward))
    said = "\n".join(profile.assumptions)
    assert "mode on_policy with 3 versions" in said
    assert "no forward pass was measured" in said
    assert "1 rank(s)" in said
    assert "how much both sides slow down beside each other could not be told" in said
    assert "computed for 0% of the time" in said
    assert "no replica was seen idle and then given groups" in said
    assert profile.train.points[0].forward_token_s == pytest.approx(2e-4 / 3, rel=CLOSE)


def test_what_sharing_devices_costs_is_assumed_where_they_were_not_shared(profile: Profile) -> None:
    assert any("sharing costs nothing" in text for text in profile.assumptions)


def test_workers_that_were_described_say_how_many_threads_they_had_and_on_what(tmp_path: Path) -> None:
    overrides = {"rollout.threads": 0, "trainer.threads": 0}
    run = RecordedRun(versions=2, overrides=overrides).write(tmp_path / "run")
    assert profile_run(run).measured_on is None
    described = {"actor-0": ("a", None, 6), "rollout-0": ("b", "Big GPU", 2), "rollout-1": ("b", "Big GPU", 2)}
    describe(run, described)
    profile = profile_run(run)
    assert (profile.train.threads, profile.rollout.threads) == (6, 2)
    assert profile.measured_on == "2 worker(s) with a Big GPU each; 2 machine(s) with 8 cores of Some CPU"
    assert not any("threads" in text for text in profile.assumptions)


def test_the_way_of_a_group_is_measured_in_both_directions(tmp_path: Path) -> None:
    def late(event: Event) -> Event:
        match event:
            case TrajectoryFinished() | GroupRewarded():
                return replace(event, time=event.time + 0.03)
            case ReplicaActivity(busy=[(start, end)]):
                return replace(event, busy=[(start + 0.02, end)])
        return event

    run = RecordedRun(versions=3)
    profile = profile_run(rewrite(run.write(tmp_path / "run"), late))
    assert profile.latency.group_s == pytest.approx(0.03 + 0.02, rel=CLOSE)
    assert (profile.latency.fetch_s, profile.latency.update_s) == (0.0, 0.0)


def test_which_groups_were_filtered_goes_with_the_lengths(profile: Profile) -> None:
    assert isinstance(profile.response, EmpiricalLengths) and profile.response.filtered is not None
    fates = {e.number: e.fate for e in RecordedRun().events() if isinstance(e, GroupSettled)}
    assert profile.response.filtered == sorted(number for number, fate in fates.items() if fate == "filtered")
    assert profile.reward.filtered == pytest.approx(len(profile.response.filtered) / len(fates), abs=1e-4)


def test_a_replay_filters_the_very_groups_that_the_run_has_filtered(tmp_path: Path) -> None:
    run = RecordedRun(versions=4, overrides={"rollout.test_freq": -1})
    profile = profile_run(run.write(tmp_path / "run"), replay=True)
    fates = Fates()
    config = config_for(profile, "on_policy", train_devices=1, replicas=1, versions=run.versions)
    Simulation(profile, config, observers=[fates]).run()
    assert isinstance(profile.response, EmpiricalLengths)
    filtered = {number for number, fate in fates.of.items() if fate == "filtered"}
    assert filtered and filtered <= set(profile.response.filtered or ())
    assert set(fates.of) - filtered == set(fates.of) - set(profile.response.filtered or ())


def test_optimizer_steps_of_one_size_are_taken_as_proportional_and_that_is_said(tmp_path: Path) -> None:
    def same_tokens(event: Event) -> Event:
        return replace(event, prompt_tokens=10, tokens=20) if isinstance(event, TrajectoryFinished) else event

    profile = profile_run(rewrite(RecordedRun(train_token_s=1e-9).write(tmp_path / "run"), same_tokens))
    (point,) = profile.train.points
    assert point.step_s == 0 and point.token_s == pytest.approx(0.3 / (4 * 4 * 30), rel=CLOSE)
    assert any("hardly differed in tokens" in text for text in profile.assumptions)


def test_groups_without_an_end_are_left_out_of_the_lengths_and_counted(tmp_path: Path) -> None:
    def fails(event: Event) -> Event:
        if isinstance(event, GroupSettled) and event.number % 5 == 0 and event.fate == "filtered":
            return GroupSettled(time=event.time, number=event.number, fate="failed", reason="exception")
        return event

    run = RecordedRun(versions=4)
    failed = sum(fails(e) != e for e in run.events())
    profile = profile_run(rewrite(run.write(tmp_path / "run"), fails))
    assert isinstance(profile.response, EmpiricalLengths)
    assert failed and len(profile.response.groups) == 40 - failed
    assert any(text.startswith(f"{failed} groups that were dropped, failed") for text in profile.assumptions)


def test_a_run_without_validation_has_none_to_simulate(tmp_path: Path) -> None:
    run = RecordedRun(versions=2).write(tmp_path / "run")
    assert profile_run(run).validation is not None
    assert profile_run(rewrite(run, lambda e: None if e.kind == "validation.finished" else e)).validation is None


def test_a_validation_of_the_last_version_only_comes_once_in_a_run(tmp_path: Path) -> None:
    run = RecordedRun(versions=3, overrides={"rollout.test_freq": -1, "rollout.val_n": 2}).write(tmp_path / "run")
    validation = profile_run(run).validation
    assert validation is not None
    assert (validation.problems, validation.n, validation.test_freq) == (64, 2, 3)


# ---------------------------------------------------------------------------------------------- not enough


def test_a_run_that_was_killed_is_profiled_as_far_as_it_got(tmp_path: Path) -> None:
    run = RecordedRun(versions=3).write(tmp_path / "run")
    killed = rewrite(run, lambda e: None if isinstance(e, RunFinished) else e)
    events = killed / "events.jsonl"
    events.write_text(events.read_text()[:-30])
    assert profile_run(killed).train.points[0].token_s == pytest.approx(2e-4, rel=CLOSE)


def test_one_version_is_too_few(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ended after 1 parameter update\(s\).*at least 2 versions"):
        profile_run(RecordedRun(versions=1).write(tmp_path / "run"))


def test_a_run_that_failed_before_training_says_so(tmp_path: Path) -> None:
    run = RecordedRun(versions=2).write(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"ended after 0 parameter update\(s\)"):
        profile_run(rewrite(run, lambda e: e if isinstance(e, RunFinished) else None))


def test_an_engine_that_does_not_measure_its_steps_is_told_from_one_that_was_silent(tmp_path: Path) -> None:
    def unmeasured(event: Event) -> Event:
        if not isinstance(event, ReplicaActivity):
            return event
        return replace(event, decode_steps={}, prefill_steps={})

    run = RecordedRun(versions=2).write(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"no decode curve.*rollout\.name=native"):
        profile_run(rewrite(run, unmeasured))


@pytest.mark.parametrize("missing", ["config.yaml", "events.jsonl"])
def test_a_directory_without_a_run_is_named_with_what_it_lacks(tmp_path: Path, missing: str) -> None:
    run = RecordedRun(versions=2).write(tmp_path / "run")
    (run / missing).unlink()
    with pytest.raises(ConfigError, match=f"has no {missing}"):
        profile_run(run)


def test_a_path_that_is_no_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere, which does not exist"):
        profile_run(tmp_path / "nowhere")


def test_a_line_that_is_no_event_is_named(tmp_path: Path) -> None:
    run = RecordedRun(versions=2).write(tmp_path / "run")
    with (run / "events.jsonl").open("a") as file:
        file.write("nonsense\n")
    with pytest.raises(DataError, match=r"events\.jsonl:\d+ is damaged"):
        profile_run(run)


class Served:
    """Observer: when each version was served."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_event(self, event: Event) -> None:
        if isinstance(event, UpdateFinished):
            self.ends.append(event.time)

    def close(self) -> None: ...


class Fates:
    """Observer: what became of each group."""

    def __init__(self) -> None:
        self.of: dict[int, str] = {}

    def on_event(self, event: Event) -> None:
        if isinstance(event, GroupSettled):
            self.of[event.number] = event.fate

    def close(self) -> None: ...


def describe(run: Path, workers: dict[str, tuple[str, str | None, int]]) -> None:
    """Put (host, GPU, threads) of the workers on record, as a start does."""
    events = run / "events.jsonl"
    lines = [
        to_json_line(
            WorkerDescribed(
                time=0.0, worker=name, host=host, cpu="Some CPU", cores=8, gpu=gpu, threads=threads
            ).to_json()
        )
        for name, (host, gpu, threads) in workers.items()
    ]
    events.write_text("\n".join([*lines, events.read_text()]))


def per_version(ends: list[float]) -> float:
    """Mean seconds from one version to the next, the first left out."""
    return fmean(later - earlier for earlier, later in pairwise(ends))


def rewrite(run: Path, change: Callable[[Event], Event | None]) -> Path:
    """The run with its events changed, or left out."""
    changed = [change(event) for event in read_events(run / "events.jsonl")]
    lines = [f"{to_json_line(event.to_json())}\n" for event in changed if event is not None]
    (run / "events.jsonl").write_text("".join(lines))
    return run
