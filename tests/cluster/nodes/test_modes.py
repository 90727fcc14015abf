"""Every mode, and every way of the weights that works between machines, each in one short run over several of them."""

from __future__ import annotations

import pytest

from benchmarks.nodes.machines import Machines
from tests.cluster.nodes.runs import check, hosts, train

pytestmark = pytest.mark.nodes
MACHINES = {"nodeA", "nodeB", "nodeC"}
EXPERTS = ["model.path=/tmp/shared/experts", "trainer.nnodes=2", "actor.parallel.ep=2"]
"""A mixture of experts, half of which are on each of two machines."""


def test_on_policy_with_ranks_on_two_machines_which_save_in_a_directory_that_both_see(one_each: Machines) -> None:
    """Takes long: a whole run, with workers started on three machines, each importing torch on two shared cores."""
    run = train(one_each, "both", "mode=on_policy", "trainer.nnodes=2", "trainer.save_freq=1")
    check(run)
    assert set(hosts(run).values()) == MACHINES
    newest = max(run.glob("checkpoints/version_*"), key=lambda path: int(path.name.removeprefix("version_")))
    assert len(list(newest.glob("*.distcp"))) == 2
    assert (run / "model" / "config.json").is_file()


@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("one_step_off", ["rollout.nnodes=2", "param_update.transport=object_store"]),
        ("stream_off_policy", ["rollout.nnodes=2", "param_update.transport=disk"]),
        ("async_partial", ["rollout.nnodes=2", "param_update.encoding=delta"]),
        ("overlapped", [*EXPERTS, "param_update.transport=object_store"]),
    ],
)
def test_a_mode_over_three_machines(one_each: Machines, mode: str, settings: list[str]) -> None:
    """Takes long: a whole run, with workers started on three machines, each importing torch on two shared cores."""
    run = train(one_each, mode, f"mode={mode}", *settings)
    check(run)
    assert set(hosts(run).values()) == MACHINES


def test_devices_shared_by_training_and_generation_on_two_machines(one_each: Machines) -> None:
    """Takes long: a whole run, with workers started on two machines."""
    run = train(one_each, "shared", "mode=colocate_async", "trainer.nnodes=2", "rollout.nnodes=2")
    check(run)
    assert len(set(hosts(run).values())) == 2
