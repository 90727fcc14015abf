"""From simulated runs, whose costs are known, back to these costs: the pipeline's own events, in its own order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest

from headway.config.schema import Config
from headway.events import Event, OptimizerStepped
from headway.planner.grid import splits
from headway.planner.profile_fitting.run_profiler import profile_run
from headway.planner.profiles.costs import decode_cost
from headway.planner.profiles.job_profile import Profile, TrainProfile
from headway.planner.profiles.profile_files import dump_profile, load_profile
from headway.planner.simulation.simulated_run import Simulation, config_for
from headway.reports.record.events_file import EventsFile
from headway.reports.run_directory import RunDirectory
from tests.tiers import mostly_slow

MODES = ("on_policy", "one_step_off", "stream_off_policy", "async_stale", "async_partial", "overlapped")
VERSIONS = 6

TRUE = Profile.model_validate(
    {
        "name": "known",
        "devices": 4,
        "batch": {"groups_per_version": 16, "ppo_mini_batch_size": 4, "n": 4},
        "prompt": {"kind": "lognormal", "mean": 40, "sigma": 0.5, "max": 200},
        "response": {"kind": "lognormal", "mean": 120, "sigma": 0.9, "max": 800, "within_group": 0.4},
        "rollout": {
            "slots": 16,
            "decode": [[1, 0.01], [4, 0.012], [16, 0.03]],
            "prefill_s": 0.02,
            "prefill_token_s": 1e-3,
        },
        "train": {
            "even": True,
            "points": [{"devices": 2, "step_s": 0.4, "token_s": 5e-4, "forward_token_s": 1e-4}],
            "recompute_old_log_probs": "always",
        },
        "update": {
            "nbytes": 1000,
            "gather": {"latency_s": 0.2},
            "send": {"latency_s": 0.3},
            "recv": {"latency_s": 0.5},
            "register": {"latency_s": 0.1},
            "load": {"latency_s": 0.05},
        },
        "reward": {"seconds": 0.25, "workers": 2, "filtered": 0.2},
        "validation": {"problems": 8, "n": 2, "test_freq": 3},
        "latency": {"group_s": 0.04, "update_s": 0.03},
    }
)


class Collector:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None: ...


def simulate(profile: Profile, config: Config) -> list[Event]:
    collector = Collector()
    Simulation(profile, config, observers=[collector]).run()
    return collector.events


def configured(
    profile: Profile, mode: str, report_every_s: float = 600.0, versions: int = VERSIONS, train_devices: int = 2
) -> Config:
    config = config_for(
        profile, mode, train_devices=train_devices, replicas=2, versions=versions, activity_interval_s=report_every_s
    )
    workers = config.reward.model_copy(update={"workers": profile.reward.workers})
    return config.model_copy(update={"reward": workers})


def seconds_per_version(events: Sequence[Event]) -> float:
    """Between the last optimizer steps of each version, the first version left out."""
    ends = {event.version: event.time for event in events if isinstance(event, OptimizerStepped)}
    return fmean(later - earlier for earlier, later in pairwise(ends.values()))


def record(
    directory: Path,
    mode: str,
    profile: Profile = TRUE,
    *,
    report_every_s: float = 600.0,
    versions: int = VERSIONS,
    train_devices: int = 2,
) -> list[Event]:
    config = configured(profile, mode, report_every_s, versions, train_devices)
    run = RunDirectory.create(directory, config)
    events = simulate(profile, config)
    file = EventsFile(run.events, pytest.fail)
    for event in events:
        file.on_event(event)
    file.close()
    return events


@mostly_slow("mode", MODES, quick=["async_stale"])
def test_the_costs_of_a_simulated_run_are_found_again(tmp_path: Path, mode: str) -> None:
    record(tmp_path / "run", mode)
    found = profile_run(tmp_path / "run")
    assert found.batch == TRUE.batch
    (point,), (true,) = found.train.points, TRUE.train.points
    assert (point.devices, point.step_s, point.token_s) == (
        2,
        pytest.approx(0.4, rel=0.01),
        pytest.approx(5e-4, rel=0.01),
    )
    assert point.forward_token_s == pytest.approx(true.forward_token_s, rel=0.01)
    assert found.train.recompute_old_log_probs == "always"
    assert found.update == TRUE.update
    assert found.reward.seconds == pytest.approx(0.25, rel=0.02) and found.reward.workers == 2
    assert found.validation == TRUE.validation
    assert found.latency == TRUE.latency
    assert found.rollout.prefill_s == pytest.approx(0.02, rel=0.01)
    assert found.rollout.prefill_token_s == pytest.approx(1e-3, rel=0.01)
    for active in (1, 2, 4, 10, 16):
        assert decode_cost(found.rollout).step_s(active) == pytest.approx(
            decode_cost(TRUE.rollout).step_s(active), 0.01
        )


@mostly_slow("mode", MODES, quick=["one_step_off"])
def test_a_replay_of_a_simulated_run_takes_as_long_as_it_did(tmp_path: Path, mode: str) -> None:
    # Without a validation, whose answers are not on record.
    true = seconds_per_version(record(tmp_path / "run", mode, TRUE.model_copy(update={"validation": None})))
    found = profile_run(tmp_path / "run", replay=True)
    assert seconds_per_version(simulate(found, configured(found, mode))) == pytest.approx(true, rel=0.02)


@mostly_slow(("parallel", "devices"), [({"tp": 2}, 4), ({"tp": 2}, 6), ({"cp": 2, "ep": 2}, 4)], quick=[({"tp": 2}, 6)])
def test_a_profile_of_a_run_on_a_mesh_says_which_and_costs_what_a_data_rank_cost(
    tmp_path: Path, parallel: dict[str, int], devices: int
) -> None:
    true = TRUE.model_copy(
        update={
            "devices": 8,
            "train": TrainProfile.model_validate({**TRUE.train.model_dump(), "parallel": parallel}),
        }
    )
    record(tmp_path / "run", "on_policy", true, train_devices=devices)
    found = profile_run(tmp_path / "run")
    assert found.train.parallel == true.train.parallel
    assert (found.train.even, found.devices, found.devices_per_node) == (True, devices + 2, None)
    (point,) = found.train.points
    assert (point.devices, point.step_s) == (devices, pytest.approx(0.4, rel=0.01))
    assert point.token_s == pytest.approx(5e-4 * 2 / devices, rel=0.01)
    assert point.forward_token_s == pytest.approx(1e-4 * 2 / devices, rel=0.01)
    assert f"training was measured with {devices} rank(s) in a mesh of " in " ".join(found.assumptions)
    (tmp_path / "profile.yaml").write_text(dump_profile(found))
    assert load_profile(tmp_path / "profile.yaml") == found
    assert {split.train_devices % 2 for split in splits(found.model_copy(update={"devices": 16}))} == {0}
