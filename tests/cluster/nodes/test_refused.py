"""What cannot work between machines is refused before anything is trained, with one message that says why."""

from __future__ import annotations

import pytest

from benchmarks.nodes.machines import Machines
from tests.cluster.nodes.runs import refused

pytestmark = pytest.mark.nodes


def test_a_directory_that_the_ranks_do_not_share(one_each: Machines) -> None:
    """Takes long: the workers of two machines must start before they can look at the directory."""
    said = refused(one_each, "trainer.nnodes=2", "run.dir=/tmp/alone")
    assert "run.dir=/tmp/alone is not one directory for all that need it" in said
    assert "the driver, on nodeA (10.77.0.1), sees it" in said
    assert any(f"but not {rank} on node" in said for rank in ("actor-0", "actor-1"))


def test_a_model_that_only_the_driver_has(one_each: Machines) -> None:
    """Takes long: the workers of two machines must start before they can look for the model."""
    one_each["A"].run("cp", "-r", "/tmp/shared/model", "/tmp/mine")
    said = refused(one_each, "trainer.nnodes=2", "model.path=/tmp/mine", "run.dir=/tmp/shared/mine")
    assert "/tmp/mine: no such folder for " in said
    lacking, found, _ = said.partition("; the driver, on nodeA")
    assert found and "on nodeB (10.77.0.2)" in lacking and "on nodeC (10.77.0.3)" in lacking


@pytest.mark.parametrize(
    ("transport", "expected"),
    [
        ("shared_memory", "param_update.transport=shared_memory works within one machine, and this run is on several"),
        ("disk", "Set param_update.directory to a path on a file system that these machines share"),
    ],
)
def test_a_transport_that_does_not_reach(one_each: Machines, transport: str, expected: str) -> None:
    """Takes long: the workers of two machines must start before they can try to meet."""
    files = ["param_update.directory=/tmp/weights"] if transport == "disk" else []
    update = [f"param_update.transport={transport}", *files]
    assert expected in refused(one_each, "rollout.nnodes=2", f"run.dir=/tmp/shared/{transport}", *update)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["param_update.transport=local"], "param_update.transport=local does not work with cluster.backend=ray"),
        (["trainer.nnodes=2", "actor.parallel.tp=2"], "is 2 ranks, which have to be on one machine"),
        (["trainer.nnodes=2", "actor.parallel.cp=2"], "is 2 ranks, which have to be on one machine"),
    ],
)
def test_what_no_machine_has_to_be_asked_for(one_each: Machines, settings: list[str], expected: str) -> None:
    assert expected in refused(one_each, "run.dir=/tmp/shared/at-once", *settings)


def test_a_driver_without_the_clusters_token(one_each: Machines) -> None:
    """Takes long: Ray tries again for half a minute before it gives up."""
    said = refused(one_each, "run.dir=/tmp/shared/stranger", RAY_AUTH_MODE="disabled", RAY_AUTH_TOKEN="")
    assert "cannot join the Ray cluster there" in said and "It wants an authentication token" in said
