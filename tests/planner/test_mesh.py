"""Plans and simulations of a trainer whose ranks make meshes: what a profile was measured with is what is planned."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st

from headway.config.sections.learning import ParallelConfig
from headway.errors import ConfigError
from headway.planner.grid import full, splits
from headway.planner.planner import plan, to_json
from headway.planner.profiles.job_profile import Profile
from headway.planner.simulation.simulated_run import config_for
from tests.planner.planning import profile_of
from tests.tiers import searched

MESHES = st.builds(
    lambda replicate, tp, cp, experts: {"replicate": replicate, "tp": tp, "cp": cp, "ep": experts and experts * tp},
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 6),
)


def meshed(parallel: dict[str, int], *, devices: int = 8, **changes: Any) -> Profile:
    """Measured on one mesh of the least size."""
    unit = ParallelConfig.model_validate(parallel).least_ranks
    train = {"parallel": parallel, "points": [{"devices": unit, "token_s": 1e-3}], **changes.pop("train", {})}
    return profile_of(devices=devices, train=train, **changes)


@pytest.mark.parametrize(
    ("parallel", "unit"),
    [
        ({}, 1),
        ({"tp": 2}, 2),
        ({"tp": 2, "cp": 2}, 4),
        ({"replicate": 2, "tp": 2}, 4),
        ({"ep": 4}, 4),
        ({"tp": 2, "ep": 4}, 4),
        ({"replicate": 3, "cp": 2, "ep": 3}, 18),
    ],
)
def test_a_mesh_needs_so_many_devices(parallel: dict[str, int], unit: int) -> None:
    assert ParallelConfig.model_validate(parallel).least_ranks == unit


@searched(100, parallel=MESHES, ranks=st.integers(1, 200))
def test_multiples_of_the_least_number_of_ranks_and_no_others_make_a_mesh(parallel: dict[str, int], ranks: int) -> None:
    mesh = ParallelConfig.model_validate(parallel)
    one_machine = [problem for problem in mesh.problems(1, ranks, "here") if "no multiple of tp" not in problem]
    assert (not one_machine) == (ranks % mesh.least_ranks == 0)


def test_devices_are_split_in_whole_inner_meshes() -> None:
    assert [str(split) for split in splits(meshed({"tp": 2}))] == ["2:6", "4:4", "6:2"]
    assert [str(split) for split in splits(meshed({"tp": 2}, devices=7))] == ["2:5", "4:3", "6:1"]
    assert [str(split) for split in splits(meshed({"cp": 4}, devices=7))] == ["4:3"]
    assert [str(split) for split in splits(meshed({"tp": 2}, devices=7), shared=True)] == ["6 shared"]


def test_more_meshes_train_where_the_devices_would_hold_no_replica_more() -> None:
    found = splits(meshed({"tp": 2}, devices=12, rollout={"devices": 3}))
    assert [str(split) for split in found] == ["2:9", "6:6", "8:3"]


def test_a_replica_has_its_devices_on_one_machine() -> None:
    def found(per_node: int | None) -> list[str]:
        return [str(split) for split in splits(meshed({"tp": 2}, rollout={"devices": 3}, devices_per_node=per_node))]

    assert found(None) == ["2:6", "4:3"]
    assert found(4) == ["4:3"]


@searched(
    100,
    parallel=MESHES,
    devices=st.integers(1, 300),
    per_replica=st.integers(1, 9),
    least=st.integers(1, 40),
    inner_meshes=st.none() | st.integers(1, 4),
    shared=st.booleans(),
)
def test_a_plan_never_proposes_a_part_of_a_mesh_or_of_a_replica(
    parallel: dict[str, int], devices: int, per_replica: int, least: int, inner_meshes: int | None, shared: bool
) -> None:
    mesh = ParallelConfig.model_validate(parallel)
    per_node = None if inner_meshes is None else max(inner_meshes, -(-per_replica // mesh.inner)) * mesh.inner
    job = meshed(
        parallel,
        devices=devices,
        rollout={"devices": per_replica},
        train={"min_devices": least},
        devices_per_node=per_node,
    )
    try:
        found = splits(job, shared=shared)
    except ConfigError as refused:
        enough = int(str(refused).split("expected ")[1].split()[0])
        assert enough > devices
        assert splits(job.model_copy(update={"devices": enough}), shared=shared)
        with pytest.raises(ConfigError):
            splits(job.model_copy(update={"devices": enough - 1}), shared=shared)
        return
    assert len(set(found)) == len(found) <= 7
    machines = [set(range(first, first + (per_node or devices))) for first in range(0, devices, per_node or devices)]
    for split in found:
        assert split.train_devices % mesh.least_ranks == 0 and split.train_devices >= least
        free = set(range(split.train_devices)) if shared else set(range(split.train_devices, devices))
        assert 0 < split.replicas == sum(len(machine & free) // per_replica for machine in machines)
        assert split.rollout_devices == split.replicas * per_replica
        for first in range(0, split.train_devices, mesh.inner):
            assert any(set(range(first, first + mesh.inner)) <= machine for machine in machines)


@searched(100, parallel=MESHES, meshes=st.integers(1, 4))
def test_what_a_plan_simulates_is_a_configuration_that_trains(parallel: dict[str, int], meshes: int) -> None:
    mesh = ParallelConfig.model_validate(parallel)
    job = meshed(parallel, devices=meshes * mesh.least_ranks + 1)
    split = splits(job)[-1]
    config = config_for(job, "on_policy", train_devices=split.train_devices, replicas=split.replicas, versions=1)
    assert config.actor.parallel == mesh
    assert not [*mesh.problems(config.trainer.nnodes, config.trainer.n_gpus_per_node, "trainer")]


def test_a_plan_says_with_which_mesh_training_was_measured() -> None:
    job = meshed({"tp": 2}, devices=4)
    found = plan(job, settings=full(job)[:1])
    assert to_json(found)["parallel"] == {"replicate": 1, "tp": 2, "cp": 1, "ep": 1}
    assert {row.setting.split.train_devices % 2 for row in found.rows} == {0}


def test_too_few_devices_for_one_mesh_and_a_replica_are_counted_in_whole_meshes() -> None:
    job = meshed({"tp": 4}, devices=4, train={"min_devices": 5})
    with pytest.raises(ConfigError, match=r"at least 8 \(train\.min_devices, .*tp=4\): expected 9\b"):
        splits(job)
